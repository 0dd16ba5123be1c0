"""The outputs of requests that pool, under vLLM's names."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

O = TypeVar("O")  # noqa: E741 - vLLM's own name is _O


class PoolingOutput:
    """A prompt's vector or vectors."""

    def __init__(self, values: memoryview[Any], width: int | None = None) -> None:
        """values: float32; width: of each of several vectors, None for one vector."""
        self.values: memoryview[Any] = values
        self.width: int | None = width

    @property
    def data(self) -> Any:
        """A torch tensor as vLLM's, [width] float32 or [num_vectors, width]; without torch, lists of numbers."""
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            return self.tolist()
        found = torch.frombuffer(bytearray(self.values), dtype=torch.float32) if len(self.values) else torch.empty(0)
        return found if self.width is None else found.view(-1, self.width)

    def tolist(self) -> list[Any]:
        """The numbers, as one list or as one list per vector."""
        flat: list[Any] = self.values.tolist()
        if self.width is None:
            return flat
        return [flat[first : first + self.width] for first in range(0, len(flat), self.width)]

    def __repr__(self) -> str:
        return f"PoolingOutput(data={self.data!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and (self.values, self.width) == (other.values, other.width)

    __hash__: ClassVar[None] = None  # type: ignore[assignment]


class SeveralOutputs(PoolingOutput):
    """The results of a prompt by kind, where several were asked for at once."""

    def __init__(self, parts: dict[str, PoolingOutput]) -> None:
        super().__init__(memoryview(b"").cast("f"))
        self.parts = parts

    @property
    def data(self) -> Any:
        """As that of one kind, by its name."""
        return {kind: part.data for kind, part in self.parts.items()}

    def tolist(self) -> Any:
        return {kind: part.tolist() for kind, part in self.parts.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SeveralOutputs) and self.parts == other.parts

    __hash__ = None


class PoolingRequestOutput(Generic[O]):
    """A finished request that pools."""

    def __init__(
        self,
        request_id: str,
        outputs: O,
        prompt_token_ids: list[int],
        num_cached_tokens: int,
        finished: bool,
        *,
        error: None = None,
    ) -> None:
        """error: vLLM's field; a request that fails raises its error here."""
        self.request_id: str = request_id
        self.outputs: O = outputs
        self.prompt_token_ids: list[int] = prompt_token_ids
        self.num_cached_tokens: int = num_cached_tokens
        self.finished: bool = finished
        self.error: None = error

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(request_id={self.request_id!r}, outputs={self.outputs!r}, "
            f"prompt_token_ids={self.prompt_token_ids}, num_cached_tokens={self.num_cached_tokens}, "
            f"finished={self.finished})"
        )


@dataclass
class EmbeddingOutput:
    embedding: list[float]

    @staticmethod
    def from_base(pooling_output: PoolingOutput) -> EmbeddingOutput:
        if pooling_output.width is not None:
            raise ValueError("pooled_data should be a 1-D embedding vector")
        return EmbeddingOutput(pooling_output.tolist())

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


@dataclass
class ClassificationOutput:
    probs: list[float]

    @staticmethod
    def from_base(pooling_output: PoolingOutput) -> ClassificationOutput:
        if pooling_output.width is not None:
            raise ValueError("pooled_data should be a 1-D probability vector")
        return ClassificationOutput(pooling_output.tolist())

    @property
    def num_classes(self) -> int:
        return len(self.probs)

    def __repr__(self) -> str:
        return f"ClassificationOutput(num_classes={self.num_classes})"


@dataclass
class ScoringOutput:
    score: float

    @staticmethod
    def from_base(pooling_output: PoolingOutput) -> ScoringOutput:
        (score,) = pooling_output.values.tolist()
        return ScoringOutput(score)

    def __repr__(self) -> str:
        return f"ScoringOutput(score={self.score})"


class _Converted(PoolingRequestOutput[O]):
    """A request's outputs in the form of its task, which `_kind` makes."""

    _kind: ClassVar[Any]

    @classmethod
    def from_base(cls, request_output: PoolingRequestOutput[PoolingOutput]) -> Self:
        return cls(
            request_output.request_id,
            cls._kind.from_base(request_output.outputs),
            request_output.prompt_token_ids,
            request_output.num_cached_tokens,
            request_output.finished,
        )


class ClassificationRequestOutput(_Converted[ClassificationOutput]):
    _kind = ClassificationOutput


class ScoringRequestOutput(_Converted[ScoringOutput]):
    _kind = ScoringOutput


class EmbeddingRequestOutput(_Converted[EmbeddingOutput]):
    _kind = EmbeddingOutput
