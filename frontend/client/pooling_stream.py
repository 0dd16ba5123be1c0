"""A request that pools, on the client's side: one output, at the end."""

from __future__ import annotations

from typing import Any

from headrace.frontend.client.request_stream import RequestStream, SequenceState
from headrace.frontend.request.checks import CheckedRequest
from headrace.frontend.request.outputs import RequestOutput
from headrace.frontend.request.pooling_outputs import PoolingOutput, PoolingRequestOutput, SeveralOutputs
from headrace.ipc.messages import Pooling, Task


class PoolingStream(RequestStream):
    """A `RequestStream` whose one sequence gets no tokens, but vectors."""

    def __init__(self, request: CheckedRequest, pooling: Pooling | None = None) -> None:
        super().__init__(request, None)
        self._flat = ("embed", "classify", *(() if pooling is None else pooling.flat))
        """Kinds whose results are no lists of vectors."""
        assert request.pooling_task is not None, "it is a request that pools"
        self._task = request.pooling_task
        self.parts: list[PoolingOutput] = []
        """One for each kind, in the order of the task's, once they have come."""

    @property
    def kinds(self) -> tuple[str, ...]:
        return self._task.kinds

    @property
    def vectors(self) -> memoryview[Any] | None:
        """[num_vectors * width] float32, of the first kind, once they have come."""
        return self.parts[0].values if self.parts else None

    def take(self, values: memoryview[Any], width: int) -> None:
        """Adds the part of the next kind."""
        is_flat = self.kinds[len(self.parts)] in self._flat
        self.parts.append(PoolingOutput(values, None if is_flat else width))

    def task_of(self, sequence: SequenceState) -> Task:
        return self._task

    def _read(self) -> RequestOutput | PoolingRequestOutput[PoolingOutput]:  # type: ignore[override]
        self._news = False
        self._final_given = self.done
        return PoolingRequestOutput(
            request_id=self.request_id,
            outputs=self.outputs(),
            prompt_token_ids=list(self.prompt.token_ids or ()),
            num_cached_tokens=self.num_cached_tokens or 0,
            finished=self.done,
        )

    def outputs(self) -> PoolingOutput:
        if len(self.kinds) > 1:
            return SeveralOutputs(dict(zip(self.kinds, self.parts, strict=False)))
        return self.parts[0] if self.parts else PoolingOutput(memoryview(b"").cast("f"))
