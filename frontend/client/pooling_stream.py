"""A request that pools, on the client's side: one output, at the end."""

from __future__ import annotations

from typing import Any

from headrace.frontend.client.request import RequestStream, SequenceState
from headrace.frontend.request.checks import CheckedRequest
from headrace.frontend.request.outputs import RequestOutput
from headrace.frontend.request.pooling_outputs import PoolingOutput, PoolingRequestOutput
from headrace.ipc.messages import Task


class PoolingStream(RequestStream):
    """A `RequestStream` whose one sequence gets no tokens, but vectors."""

    def __init__(self, request: CheckedRequest) -> None:
        super().__init__(request, None)
        assert request.pool is not None, "it is a request that pools"
        self._task = request.pool
        self.vectors: memoryview[Any] | None = None
        """[num_vectors * width] float32, once they have come."""
        self.width = 0

    def task_of(self, sequence: SequenceState) -> Task:
        return self._task

    def _read(self) -> RequestOutput | PoolingRequestOutput[PoolingOutput]:  # type: ignore[override]
        self._news = False
        self._final_given = self._ended
        vectors: memoryview[Any] = self.vectors if self.vectors is not None else memoryview(b"").cast("f")
        return PoolingRequestOutput(
            request_id=self.request_id,
            outputs=PoolingOutput(vectors, self.width if self._task.kind.startswith("token_") else None),
            prompt_token_ids=list(self.prompt.token_ids or ()),
            num_cached_tokens=self.num_cached_tokens or 0,
            finished=self._ended,
        )
