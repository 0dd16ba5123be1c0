"""The outputs of a request, under vLLM's names.

They are plain dataclasses, as vLLM's are: scripts use `vars` and `dataclasses.asdict` on them, and set attributes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, MutableSequence
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    from headrace.frontend.request.lora_request import LoRARequest


@dataclasses.dataclass
class Logprob:
    """One token's log-probability at one position."""

    logprob: float
    """Natural logarithm."""
    rank: int | None = None
    """1 is the likeliest token."""
    decoded_token: str | None = None


LogprobsOfPosition = dict[int, Logprob]
"""By token id: the sampled (or the prompt's own) token first, then the likeliest ones, best first."""


@dataclasses.dataclass
class FlatLogprobs(MutableSequence[Any]):
    """Log-probabilities of many positions in a few long lists, which cost Python's garbage collector less than an
    object per position. Indexing makes a LogprobsOfPosition; positions can only be appended."""

    start_indices: list[int] = dataclasses.field(default_factory=list)
    """For each position, the index of its first entry in the lists below; `end_indices` has the end, exclusive."""
    end_indices: list[int] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    ranks: list[int | None] = dataclasses.field(default_factory=list)
    decoded_tokens: list[str | None] = dataclasses.field(default_factory=list)

    def append(self, position: LogprobsOfPosition | None) -> None:
        """Appends a position. None is a prompt's first token, which has no log-probabilities."""
        self.start_indices.append(len(self.token_ids))
        for token_id, logprob in (position or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(logprob.logprob)
            self.ranks.append(logprob.rank)
            self.decoded_tokens.append(logprob.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def extend(self, values: Iterable[LogprobsOfPosition | None]) -> None:
        for position in values:
            self.append(position)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("FlatLogprobs takes positions at its end alone: what was told does not change")

    def __delitem__(self, index: Any) -> None:
        raise TypeError("FlatLogprobs gives nothing up: what was told stays")

    def insert(self, index: int, value: Any) -> None:
        raise TypeError("FlatLogprobs takes positions at its end alone, by append and extend")

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> Any:
        """A LogprobsOfPosition, empty for a prompt's first token as in vLLM; for a slice, a FlatLogprobs."""
        if isinstance(index, slice):
            part = FlatLogprobs()
            for place in range(*index.indices(len(self))):
                part.append(self[place])
            return part
        start, end = self.start_indices[index], self.end_indices[index]
        return {
            self.token_ids[place]: Logprob(self.logprobs[place], self.ranks[place], self.decoded_tokens[place])
            for place in range(start, end)
        }


SampleLogprobs = list[LogprobsOfPosition] | FlatLogprobs
"""One entry per output token."""
PromptLogprobs = list[LogprobsOfPosition | None] | FlatLogprobs
"""One entry per prompt token; the first is None, since no token precedes it."""


@dataclasses.dataclass
class RequestMetrics:
    """Durations of a request's phases in seconds; None until known. With several outputs (n > 1), the slowest one's."""

    arrival_time: float
    """When the request was submitted: seconds since the epoch."""
    first_token_latency: float | None = None
    """From submission until the client received the first token."""
    total_s: float | None = None
    """From submission until the client received the last token."""
    queued_s: float | None = None
    """In the core: from arrival to first scheduling."""
    gated_s: float = 0.0
    """The part of queued_s in which it waited for its grammar, or for what else it needs before it may be scheduled."""
    prefill_s: float | None = None
    """In the core: from first scheduling to the first token."""
    decode_s: float | None = None
    """In the core: from the first token to the last."""
    num_generation_tokens: int = 0
    num_preemptions: int = 0

    # vLLM's current and former names. All are seconds since the epoch, except time_in_queue, a duration. Until known,
    # the *_ts are 0 and the others None.
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    is_corrupted: bool = False
    """Always False: an output that is not finite ends its request with an error."""

    def __post_init__(self) -> None:
        if self.queued_s is not None or self.prefill_s is not None or self.decode_s is not None:
            self.set_timestamps()

    def set_timestamps(self) -> None:
        """Derives the *_ts from the durations that are known."""
        if self.queued_s is not None:
            self.queued_ts, self.scheduled_ts = self.arrival_time, self.arrival_time + self.queued_s
        if self.prefill_s is not None:
            self.first_token_ts = self.scheduled_ts + self.prefill_s
        if self.decode_s is not None:
            self.last_token_ts = self.first_token_ts + self.decode_s

    @property
    def time_in_queue(self) -> float | None:
        return self.queued_s

    @property
    def first_token_time(self) -> float | None:
        return None if self.first_token_latency is None else self.arrival_time + self.first_token_latency

    @property
    def finished_time(self) -> float | None:
        return None if self.total_s is None else self.arrival_time + self.total_s


@dataclasses.dataclass
class FunctionCall:
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


@dataclasses.dataclass
class ToolCall:
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


@dataclasses.dataclass
class AnswerMessage:
    """A parsed chat answer, in the form in which the next request repeats it as the assistant's message."""

    content: str | None
    """None when the answer has tool calls alone."""
    reasoning: str = ""
    tool_calls: list[ToolCall] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class CompletionOutput:
    """One of a request's `n` outputs."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum of the sampled tokens' log-probabilities; None unless `logprobs` was asked for."""
    logprobs: SampleLogprobs | None = None
    routed_experts: None = None
    """This field and the other ones that are always None are vLLM's: scripts construct and read outputs with them."""
    finish_reason: str | None = None
    """stop, length, repetition or abort; None while it runs."""
    stop_reason: int | str | None = None
    """The stop string or stop_token_ids entry that ended it; None for an end-of-sequence token."""
    lora_request: LoRARequest | None = None
    """The request's."""
    sampling_mask: None = None
    spec_decode_metrics: None = None
    weight_versions: None = None
    message: AnswerMessage | None = None
    """The parsed answer of `chat`, set when the output has finished, if tools or a parser were given."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass(eq=False)
class RequestOutput:
    """A request's outputs so far (CUMULATIVE, FINAL_ONLY), or their new part (DELTA).

    As vLLM's, it is equal to itself alone, and may be a key or in a set.
    """

    request_id: str
    prompt: str | None
    """The prompt's text; None when token ids were given."""
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None = None
    outputs: list[CompletionOutput] = dataclasses.field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    """Set on the request's last output."""
    lora_request: LoRARequest | None = None
    """The adapter that was asked for; None for the model alone."""
    encoder_prompt: None = None
    """This field and the other ones that are always None are vLLM's: encoder-decoder and multimodal models are not
    served, and KV caches are not transferred."""
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int | None = None
    """Prompt tokens that came from the prefix cache; None until the request is scheduled."""
    num_cache_creation_tokens: None = None
    multi_modal_placeholders: None = None
    prompt_token_id_logprobs: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
