"""The messages between a client and an engine core: one tagged union per direction.

A session is linear. The client sends `Hello` and receives `Welcome` (or a `Failure`); then it adds and aborts requests
and sends commands, and finally sends `Goodbye`. The core sends `StepOutputs` for each step, and one `Reply` to each
command. Every request gets exactly one `Finish`.

On the wire a request is identified by its `slot`, an integer that the client chooses and uses once in a session. The
layouts of all messages are hashed into SCHEMA_HASH, so peers of different versions refuse each other.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from headrace.ipc.adapters import MOST_USED, AdapterInfo, Adapters, AdapterStats, AdapterUse
from headrace.ipc.codec import Tensor
from headrace.ipc.control import Commands, ControlResult
from headrace.ipc.failure import Failure
from headrace.ipc.ranges import FLOAT32, INT32, INT64, VOCABULARY, Longest, ModelDefault, Range, out_of_range
from headrace.ipc.row_inputs import RowInput

WIRE_VERSION = 1

TokenId = Annotated[int, Range(0, INT32), VOCABULARY]
Bias = Annotated[float, Range(-math.inf, 1e9)]
"""The upper bound keeps a bias finite in float32: +inf would make the row's probabilities NaN."""
Name = Annotated[str, Longest(4096)]
MOST_GRAMMAR_CHARACTERS = 1 << 20
"""Limit of a request's schema, regular expression or grammar."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Base of all messages: encoded by position, tagged by class name, immutable."""


class StructuredOutput(msgspec.Struct, frozen=True, array_like=True, kw_only=True, omit_defaults=True):
    """The form that an answer must have."""

    kind: Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
    text: Annotated[str, Longest(MOST_GRAMMAR_CHARACTERS)]
    """A JSON schema, nothing, a regular expression, a JSON list of texts, a grammar (Lark or GBNF), a tag's JSON."""
    disable_any_whitespace: bool = False
    """JSON is generated without the whitespace that a schema leaves open."""
    disable_additional_properties: bool = False
    """Objects of a JSON schema may have only the properties that it names."""
    disable_fallback: bool = False
    """A form that the first backend does not support is refused, rather than compiled by another backend."""
    whitespace_pattern: Annotated[str, Longest(4096)] = ""
    """A regular expression of the whitespace between the parts of JSON; empty for the backend's default."""
    backend: Annotated[str, Longest(64)] = ""
    """The backend that compiles the form, by its name in the options; empty for the engine's default."""


class Thinking(msgspec.Struct, frozen=True, array_like=True, kw_only=True, omit_defaults=True):
    """The markers of an answer's reasoning, for features that start at its end: a token budget, or a required form."""

    end: Annotated[tuple[TokenId, ...], Longest(64)]
    begin: Annotated[tuple[TokenId, ...], Longest(64)] = ()
    """Empty if only the prompt can begin the reasoning."""
    is_open: bool = False
    """The prompt ends inside the reasoning."""
    budget: Annotated[int, Range(0, INT32)] | None = None
    """After this many tokens the end is forced."""
    forced: Annotated[tuple[TokenId, ...], Longest(64)] = ()
    """The tokens that are then forced, if they are more than `end`."""
    end_text: Annotated[bytes, Longest(256)] = b""
    """The text of a marker, which the model may write in other tokens, together with what stands beside it. Empty:
    only the marker's own tokens are found."""
    begin_text: Annotated[bytes, Longest(256)] = b""
    near: Annotated[tuple[TokenId, ...], Longest(1 << 15)] = ()
    """All tokens that may write a part of such a text."""
    near_texts: Annotated[tuple[bytes, ...], Longest(1 << 15)] = ()
    """Their bytes."""


class Sampling(msgspec.Struct, frozen=True, array_like=True, kw_only=True, omit_defaults=True):
    """Sampling parameters, fully resolved by the frontend: no text, and no None that means a default.

    The ranges are those that the core can compute with (see ranges.py); the model's own limits are checked on
    admission. A field's range, and whether a model may set its default, are declared only here: SamplingParams and
    what is derived from it read them (frontend/request/parameters/sampling_fields.py).
    """

    max_tokens: Annotated[int, Range(1, INT32), ModelDefault("max_new_tokens")]
    min_tokens: Annotated[int, Range(0, INT32), ModelDefault(None)] = 0
    temperature: Annotated[float, Range(0, FLOAT32), ModelDefault("temperature")] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Range(0, 1, open_low=True), ModelDefault("top_p")] = 1.0
    top_k: Annotated[int, Range(-1, INT32), ModelDefault("top_k")] = 0
    """0 and -1 keep the whole vocabulary."""
    min_p: Annotated[float, Range(0, 1), ModelDefault("min_p")] = 0.0
    seed: Annotated[int, Range(-INT64 - 1, INT64)] | None = None
    """None: the core draws one."""
    presence_penalty: Annotated[float, Range(-2, 2), ModelDefault(None)] = 0.0
    frequency_penalty: Annotated[float, Range(-2, 2), ModelDefault(None)] = 0.0
    repetition_penalty: Annotated[float, Range(0, FLOAT32, open_low=True), ModelDefault("repetition_penalty")] = 1.0
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Range(-1, INT32)] | None = None
    """How many of the most likely tokens to report per output token, besides the sampled one; -1: all."""
    prompt_logprobs: Annotated[int, Range(-1, INT32)] | None = None
    allowed_token_ids: tuple[TokenId, ...] = ()
    """Empty allows every token."""
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    """Token sequences: the last token of each is forbidden wherever the output ends in the tokens before it."""
    logit_bias: dict[TokenId, Bias] = {}
    """Token id -> value added to its logit; -inf forbids it."""
    logprob_token_ids: Annotated[tuple[TokenId, ...], Longest(1024)] = ()
    """Tokens whose log-probabilities are reported per output token, in this order, instead of the most likely ones;
    `logprobs` is 0 then."""
    structured_output: StructuredOutput | None = None
    """The required form of the answer; None for any."""
    thinking: Thinking | None = None
    """Set if the form does not cover the reasoning, or if the reasoning has a budget."""

    typical_p: Annotated[float, Range(0, 1, open_low=True), ModelDefault(None)] = 1.0
    top_n_sigma: Annotated[float, Range(-1, FLOAT32), ModelDefault(None)] = 0.0
    xtc_probability: Annotated[float, Range(0, 1), ModelDefault(None)] = 0.0
    xtc_threshold: Annotated[float, Range(0, 1), ModelDefault(None)] = 0.1
    dry_multiplier: Annotated[float, Range(0, FLOAT32), ModelDefault(None)] = 0.0
    dry_base: Annotated[float, Range(1, 100), ModelDefault(None)] = 1.75
    dry_allowed_length: Annotated[int, Range(1, INT32), ModelDefault(None)] = 2
    dry_penalty_last_n: Annotated[int, Range(-1, INT32), ModelDefault(None)] = -1
    dry_breaker_token_ids: Annotated[tuple[TokenId, ...], Longest(1024)] = ()
    prompt_logprob_start: Annotated[int, Range(0, INT32)] = 0
    """The first prompt token with prompt_logprobs; those before it may come from the prefix cache."""
    skip_reading_prefix_cache: bool = False
    """Compute the whole prompt. Its blocks are still cached for other requests."""
    extra_args: Annotated[dict[str, Any], Longest(256)] | None = None
    """Arguments of custom logits processors; None if none were given, as such processors expect from vLLM."""
    mirostat: Annotated[int, Range(0, 2), ModelDefault(None)] = 0
    mirostat_tau: Annotated[float, Range(0, FLOAT32), ModelDefault(None)] = 5.0
    mirostat_eta: Annotated[float, Range(0, FLOAT32), ModelDefault(None)] = 0.1


class Generate(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """The task of a request that samples tokens."""

    sampling: Sampling

    def most_cached(self, num_tokens: int) -> int:
        """How many of a request's num_tokens first tokens may come from the prefix cache. The last one is always
        computed, since its logits choose the next one; prompt log-probabilities need the logits of every prompt
        position from prompt_logprob_start - 1 on."""
        sampling = self.sampling
        if sampling.skip_reading_prefix_cache:
            return 0
        if sampling.prompt_logprobs is None:
            return num_tokens - 1
        return min(num_tokens - 1, max(0, sampling.prompt_logprob_start - 1))


PoolKind = Literal["embed", "classify", "token_embed", "token_classify", "embed_sparse"]


class Pool(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """The task of a request for vectors that are made of its prompt's hidden states. It samples no tokens, and ends
    with the prompt."""

    kinds: Annotated[tuple[PoolKind, ...], Longest(8)]
    """What the vectors are, under vLLM's names of pooling tasks, and `embed_sparse`: pairs of a token id and its
    weight. The result has a part for each kind, in this order."""
    dimensions: Annotated[int, Range(1, INT32)] | None = None
    """How many of a vector's values are kept; None: all."""
    activate: bool = True
    """Whether the kind's activation is applied; that of `embed` scales a vector to length 1."""
    skip_reading_prefix_cache: bool = False
    """As in `Sampling`."""
    second_text: Annotated[int, Range(0, INT32)] | None = None
    """Position of the first token of the second text of a pair, for models with token types; None: there is one."""
    num_keys: Annotated[int, Range(1, INT32)] | None = None
    """To how many of the first tokens all tokens attend, in models that attend to both sides: queries of late
    interaction end with tokens that none attends to. None: to all."""
    skipped: Annotated[tuple[TokenId, ...], Longest(1 << 16)] = ()
    """Tokens without a vector of their own, of kinds with a vector for each token."""
    steps_end_at: TokenId | None = None
    """Of token_classify, only the vectors of this token; None: of all."""
    columns: Annotated[tuple[Annotated[int, Range(0, INT32)], ...], Longest(1 << 16)] = ()
    """Of token_classify, the values of each vector that are returned; none: all."""
    compared_with: Tensor | None = None
    """[num_vectors, width] float32, of token_embed: the result is one value, the sum of each of these vectors' largest
    product with one of the prompt's (MaxSim, Khattab and Zaharia 2020, section 3.2)."""

    @property
    def of_tokens(self) -> bool:
        """Whether a result needs the states of all of the prompt's tokens, so that none may come from the cache."""
        return any(kind not in ("embed", "classify") for kind in self.kinds)

    def most_cached(self, num_tokens: int) -> int:
        """As in `Generate`."""
        return 0 if self.skip_reading_prefix_cache else num_tokens - 1


Task = Generate | Pool


# --- client -> core ---------------------------------------------------------------------------------------------


class Hello(Message):
    """The first message of a session. Its first fields have the same position in every version."""

    schema_hash: str
    version: str
    pid: int


class AddRequest(Message):
    slot: Annotated[int, Range(0, INT32)]
    request_id: Name
    """The user's name for the request, for logs."""
    prompt_token_ids: Tensor
    """[num_prompt_tokens + num_resumed_tokens] int32; the prompt has at least one token."""
    task: Task
    priority: Annotated[int, Range(-INT64 - 1, INT64)] = 0
    """A smaller value is scheduled earlier under the `priority` policy."""
    cache_salt: Name = ""
    """Prefix-cache blocks are shared only among requests with the same salt."""
    output_interval: Annotated[int, Range(1, 1 << 20)] = 1
    """How many new tokens to collect before they are sent. The first is sent at once, and the last ones with the end
    of the request. With log-probabilities each is sent at once."""
    num_resumed_tokens: Annotated[int, Range(0, INT32)] = 0
    """How many of the last prompt_token_ids are output of another engine, from which the request continues."""
    inputs: Annotated[tuple[RowInput, ...], Longest(1 << 16)] = ()
    """What stands in the place of prompt tokens, in the order of positions."""
    adapters: Annotated[tuple[AdapterUse, ...], Longest(MOST_USED)] = ()
    """What is added to the model's weights for this request; each adapter once."""
    notes_steps: bool = False
    """The Finish is to tell the times of each step."""

    @property
    def is_plain(self) -> bool:
        """Whether it may be part of AddPrompts."""
        return isinstance(self.task, Pool) and not (self.inputs or self.notes_steps or self.num_resumed_tokens)

    def goes_on(self, before: AddRequest) -> bool:
        """Whether it may be the next one in AddPrompts: both are plain."""
        return (
            self.slot == before.slot + 1
            and (self.task is before.task or self.task == before.task)
            and (self.priority, self.cache_salt, self.adapters) == (before.priority, before.cache_salt, before.adapters)
        )


MOST_PROMPTS = 1024
"""Of one message: taking it apart delays the steps of others by a few milliseconds at most."""


class AddPrompts(Message):
    """As an AddRequest for each of several prompts that pool and differ in their tokens alone."""

    first_slot: Annotated[int, Range(0, INT32)]
    count: Annotated[int, Range(1, MOST_PROMPTS)]
    """Their slots follow one another."""
    request_ids: tuple[Name, ...]
    prompt_token_ids: Tensor
    """[num_tokens of all] int32: one prompt after another"""
    num_tokens: Tensor
    """[count] int32: of each prompt"""
    task: Pool
    priority: int = 0
    cache_salt: Name = ""
    adapters: Annotated[tuple[AdapterUse, ...], Longest(MOST_USED)] = ()

    @classmethod
    def of(cls, requests: Sequence[AddRequest]) -> AddPrompts:
        """requests: alike (`AddRequest.goes_on`), each the next of the one before."""
        first, parts = requests[0], [each.prompt_token_ids for each in requests]
        assert isinstance(first.task, Pool), "they are alike"
        tokens = b"".join(each.data for each in parts)
        return cls(
            first_slot=first.slot,
            count=len(requests),
            request_ids=tuple(each.request_id for each in requests),
            prompt_token_ids=Tensor("int32", (len(tokens) // 4,), memoryview(tokens)),
            num_tokens=Tensor.of("int32", [len(each) for each in parts]),
            task=first.task,
            priority=first.priority,
            cache_salt=first.cache_salt,
            adapters=first.adapters,
        )

    def requests(self) -> list[AddRequest]:
        """Raises ValueError where the parts do not belong together."""
        if (problem := out_of_range(self)) is not None:
            raise ValueError(problem)
        tokens, sizes = self.prompt_token_ids, self.num_tokens
        if any(each.dtype != "int32" or len(each.shape) != 1 for each in (tokens, sizes)):
            raise ValueError(
                f"prompt_token_ids and num_tokens must be flat int32 tensors, not {tokens!r} and {sizes!r}"
            )
        counts = sizes.tolist()
        if not self.count == len(counts) == len(self.request_ids) or min(counts) < 0 or sum(counts) != len(tokens):
            raise ValueError(
                f"{self.count} prompts have {len(self.request_ids)} ids, {len(counts)} lengths and {len(tokens)} tokens"
            )
        found, begin = list[AddRequest](), 0
        for index, (request_id, count) in enumerate(zip(self.request_ids, counts, strict=True)):
            end = begin + 4 * count
            own = Tensor("int32", (count,), tokens.data[begin:end])
            found.append(
                AddRequest(
                    slot=self.first_slot + index,
                    request_id=request_id,
                    prompt_token_ids=own,
                    task=self.task,
                    priority=self.priority,
                    cache_salt=self.cache_salt,
                    adapters=self.adapters,
                )
            )
            begin = end
        return found


class Abort(Message):
    """The client no longer wants these requests; each still gets its `Finish`, unless it already had one."""

    slots: tuple[int, ...]


class FetchTokenizer(Message):
    """Answered by a Reply with a TokenizerBundle."""

    call: int


class GetStats(Message):
    """Answered by a Reply with EngineStats."""

    call: int


class ResetPrefixCache(Message):
    """Forgets every cached block that no request is using. Answered by an empty Reply."""

    call: int


class FollowPrefixes(Message):
    """Subscribes to the prefixes of prompts that the cache holds (PrefixEvents); the first event lists all of them."""


class Control(Message):
    """A control command. The reply is described at the command's class in control.py."""

    call: int
    command: Commands


class Goodbye(Message):
    """The client leaves; its unfinished requests are freed without a reply."""


ClientMessage = (
    Hello
    | AddRequest
    | AddPrompts
    | Abort
    | FetchTokenizer
    | GetStats
    | ResetPrefixCache
    | FollowPrefixes
    | Control
    | Goodbye
)


# --- core -> client ---------------------------------------------------------------------------------------------


class FinishReason(enum.IntEnum):
    STOP = 0
    """An end-of-sequence or stop token."""
    LENGTH = 1
    """max_tokens or max_model_len."""
    ABORT = 2
    """The client aborted it, or the engine is shutting down."""
    REJECTED = 3
    """Never started; `Finish.failure` says why."""
    FAILED = 4
    """Started and could not go on; `Finish.failure` says why."""


NUM_STEP_TIMES = 6


class Finish(msgspec.Struct, frozen=True, array_like=True, kw_only=True, omit_defaults=True):
    """The final message about a request."""

    slot: int
    reason: FinishReason
    stop_token: int | None = None
    """The entry of stop_token_ids that ended it; None for an end-of-sequence token."""
    with_last_token: bool = False
    """The last token belongs to the answer, unlike an end-of-sequence token: it completes the required form."""
    failure: Failure | None = None
    gated_s: float = 0.0
    """From arrival at the core until no gate (core/engine/gates.py) held it; 0 if none did."""
    queued_s: float = 0.0
    """From arrival at the core to its first scheduling."""
    prefill_s: float = 0.0
    """From first scheduling to the first token."""
    decode_s: float = 0.0
    """From the first token to the last."""
    num_preemptions: int = 0
    steps: Tensor | None = None
    """[num_steps, NUM_STEP_TIMES] float64, if they were asked for: in seconds since arrival at the core, when a step's
    planning began and ended, when its result came, when its forward pass began and ended (0 if that is not known); and
    its number of tokens of this request."""


class LogprobRows(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Log-probabilities of some positions. Column 0 is the token itself, then the most likely ones, best first.

    Rows that asked for fewer are padded at the end with token id -1.
    """

    token_ids: Tensor
    """[num_rows, width] int32"""
    logprobs: Tensor
    """[num_rows, width] float32, natural logarithm"""
    ranks: Tensor
    """[num_rows] int32: 1 + how many tokens are likelier than the one in column 0"""

    def select(self, chosen: Any) -> LogprobRows:
        """The rows that a numpy mask, index array or slice selects."""
        return LogprobRows(
            token_ids=Tensor.from_numpy(self.token_ids.numpy()[chosen]),
            logprobs=Tensor.from_numpy(self.logprobs.numpy()[chosen]),
            ranks=Tensor.from_numpy(self.ranks.numpy()[chosen]),
        )


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Log-probabilities of a run of one request's prompt positions. Its messages cover all positions, in order."""

    slot: int
    start: int
    """Index of the first prompt token covered (position 0 has no prediction and is never covered)."""
    rows: LogprobRows


class Admitted(msgspec.Struct, frozen=True, array_like=True, kw_only=True, omit_defaults=True):
    """A request was scheduled for the first time."""

    slot: int
    num_cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    seed: int | None = None
    """The seed that the core drew, if the request had none: another engine can continue with it."""
    adapters: tuple[str, ...] = ()
    """The identity of each of AddRequest.adapters: another engine must continue with the same; "" for one with scale 0.
    """


class Vectors(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The vectors of requests that pool: of each all at once, and together with its Finish. A request has a part for
    each of its kinds, in their order."""

    slots: Tensor
    """[num_parts] int32: the request of each part; those of one request are adjacent"""
    counts: Tensor
    """[num_parts] int32: how many vectors each has"""
    widths: Tensor
    """[num_parts] int32: the number of values in each of its vectors"""
    values: Tensor
    """[sum of counts * widths] float32, part after part, vector after vector"""


class StepOutputs(Message):
    """Everything one step produced for one client. Several new tokens of a request are adjacent and in order."""

    step: int
    slots: Tensor
    """[num_tokens] int32: the request of each new token"""
    token_ids: Tensor
    """[num_tokens] int32"""
    logprob_indices: Tensor | None = None
    """[num_rows] int32, ascending: which of the tokens above the rows of `logprobs` belong to"""
    logprobs: LogprobRows | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    admitted: tuple[Admitted, ...] = ()
    finished: tuple[Finish, ...] = ()
    vectors: Vectors | None = None


class TokenizerInfo(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Identifies the engine's tokeniser, so that a client can tell whether its cached copy is the same."""

    content_hash: str
    """sha256 of the encoded TokenizerBundle, in hexadecimal."""
    size_bytes: int


class TokenizerBundle(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """A tokeniser in the JSON of the `tokenizers` library, and what chat templates need in addition."""

    tokenizer_json: bytes
    chat_templates: dict[str, str] = {}
    """By name; the standard one is `default`. Empty for a base model."""
    special_tokens: dict[str, str] = {}
    """bos_token, eos_token, unk_token, pad_token, ... as chat templates refer to them."""
    split_special_tokens: bool = False
    """Whether special tokens in a text are read as text."""
    truncation_side: str = "right"
    """left or right: the end at which texts that are pooled are cut, if a request does not say."""


class PairFormat(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How a pair of texts is written for a model that reads it as one prompt."""

    segments: tuple[str, ...]
    """Tokenised apart, with {instruction}, {query} and {document} in them."""
    cut: int
    """The segment that is cut if the prompt is too long."""
    instruction: str
    """If the request has none; empty: there is none."""
    instructed: str = "{instruction}"
    """What stands for {instruction} where there is one."""


class PairChat(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How the tokenizer's chat template writes a pair of texts, of messages of the roles query and document."""

    variables: dict[str, Any] = {}
    are_parts: bool = False
    """A message's content is a list of parts; else a text."""


class LateInteraction(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How a model writes the texts whose tokens' vectors are compared (ColBERT, Khattab and Zaharia 2020)."""

    query_prefix: str = ""
    """The token behind the first one of a query, as the vocabulary spells it; empty: none."""
    document_prefix: str = ""
    query_length: int | None = None
    """Most tokens of a query; None: as many as the model takes."""
    document_length: int | None = None
    filled_length: int | None = None
    """Queries are filled up to so many tokens, and the fillers' vectors count; None: they are not."""
    filler: str = ""
    """The token that they are filled up with; empty: the mask token, or else the end token."""
    fillers_are_seen: bool = False
    """Whether tokens attend to what queries are filled up with."""
    skipped: tuple[str, ...] = ()
    """Tokens of documents whose vectors are left out."""
    skipped_of_queries: tuple[str, ...] = ()


class Pooling(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How an engine makes vectors of hidden states."""

    kinds: tuple[str, ...]
    """The kinds of `Pool` that it computes."""
    tokens: str
    """Of which of a prompt's tokens a vector is made, under vLLM's names of pooling types where it has one."""
    width: int
    """Number of values in a whole vector of the first kind; of a classifier, of labels."""
    dimensions: tuple[int, ...] | None = None
    """To how many first values a vector may be cut: these numbers, or any if there are none. None: it may not be cut
    (the model was not trained for it: matryoshka)."""
    default_dimensions: int | None = None
    """To how many it is cut if a request does not say; None: it is not."""
    activate: bool = True
    """Whether the kind's activation is applied if a request does not say."""
    reads_all: bool = False
    """It needs the states of all tokens, so that none may come from the prefix cache."""
    lower_case: bool = False
    """Whether texts are put in lower case before they are tokenised."""
    labels: tuple[str, ...] = ()
    """The names of a classifier's classes."""
    has_token_types: bool = False
    """Whether the model distinguishes the second text of a pair."""
    prompts: dict[str, str] = {}
    """What is put before a text, by name."""
    default_prompt: str | None = None
    """The name of the prompt of a text for which none is named."""
    pair_format: PairFormat | None = None
    """None: the tokenizer joins pairs."""
    pair_chat: PairChat | None = None
    """None: the tokenizer's chat template writes no pairs."""
    similarity: str = "cosine"
    """How vectors are compared: cosine, dot, euclidean or manhattan."""
    late_interaction: LateInteraction | None = None
    """How texts are written whose tokens' vectors are compared; None: as others."""
    step_tag_id: int | None = None
    """`Pool.steps_end_at` if a request does not say."""
    returned_token_ids: tuple[int, ...] = ()
    """`Pool.columns` if a request does not say."""
    widths: tuple[int, ...] = ()
    """As `width`, of each of `kinds`; none: all are the same."""
    flat: tuple[str, ...] = ()
    """Those of `kinds` that have one number for each token, which clients give as such, and not as vectors of one."""
    longest: int | None = None
    """The most tokens of a text that clients have embedded in chunks; None: max_model_len, and there are no chunks."""

    def width_of(self, kind: str) -> int:
        return dict(zip(self.kinds, self.widths, strict=False)).get(kind, self.width)

    @property
    def largest_width(self) -> int:
        return max(self.width, *self.widths) if self.widths else self.width


STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class EngineTimes(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Sums and counts since the engine's start. Differences between two snapshots give the mean over that interval."""

    num_first_tokens: int = 0
    first_token_s: float = 0.0
    """Sum of times from a request's arrival at the loop, which receives messages between steps, to its first token."""
    num_later_tokens: int = 0
    later_token_s: float = 0.0
    """Sum of times from each token of a request to its next."""
    request_s: float = 0.0
    """Sum of times from arrival to end, over the `num_finished` requests."""
    num_gc_pauses: int = 0
    gc_pause_s: float = 0.0
    """Total time of garbage collections in the core's process."""
    step_tokens: tuple[int, ...] = ()
    """Histogram of steps by their number of tokens: one bucket up to each of STEP_TOKEN_BOUNDS, and one above."""
    step_tokens_sum: int = 0


class ExpertBalance(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How evenly the experts' work was spread over the ranks of a stage when it was last measured.

    A layer's balancedness is the mean work of its ranks divided by the maximum: 1 if all did the same.
    """

    min: float
    """Lowest balancedness of any layer."""
    p50: float
    p90: float
    """90% of the layers have at least this balancedness."""
    avg: float
    rearrangements: int
    """How often experts were moved between ranks since the weights were loaded."""
    rearrangement_s: float
    """Duration of the last move, during which no step ran."""


class Counted(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A histogram: how many values each bucket has, one up to each bound and one above, and their sum."""

    counts: tuple[int, ...]
    sum: float


BLOCK_TIME_BOUNDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)
"""Upper bounds of the buckets of BlockTimes, in seconds."""


class BlockTimes(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Of a sample of the blocks that were evicted from the prefix cache, in seconds."""

    lifetime: Counted
    """From allocation to eviction."""
    idle_before_evict: Counted
    """From the last use to eviction."""
    reuse_gap: Counted
    """Between two uses, of the last few of each block."""


class Work(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What one rank has computed and moved: sums of estimates from the model's config (core/engine/step_work.py)."""

    flops: float
    read_bytes: float
    write_bytes: float


class EngineStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """A snapshot of the core. Counters start at zero when it starts."""

    num_running: int
    num_waiting: int
    """In the queue, or held by a gate."""
    num_clients: int
    num_blocks: int
    num_free_blocks: int
    """Free or reclaimable: cached blocks that no request uses count as free."""
    num_cached_blocks: int
    steps: int
    num_finished: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_generated_tokens: int
    num_step_gaps: int = 0
    """Steps that had work ready when the step before ended, so that their forward pass could have begun at once."""
    step_gap_s: float = 0.0
    """Sum of the idle times between those forward passes."""
    forward_s: float = 0.0
    """Sum of the durations of all forward passes, including sampling that is part of them."""
    paused: bool = False
    sleep_level: int = 0
    """The level of Sleep while weights or cache are released; 0 once WakeUp has restored all of them."""
    times: EngineTimes = EngineTimes()
    num_drafts: int = 0
    """How often a request got draft tokens in a step."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Draft tokens that were accepted."""
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    """Accepted tokens by position in the draft, up to num_speculative_tokens; empty without speculation."""
    num_waiting_by_reason: dict[str, int] = {}
    """`capacity` for requests in the queue, and the reason of each gate that holds some (core/engine/gates.py)."""
    expert_balance: ExpertBalance | None = None
    """Of the last pipeline stage, with enable_eplb, once it has been measured."""
    adapters: AdapterStats | None = None
    """None without enable_lora."""
    block_times: BlockTimes | None = None
    """With kv_cache_metrics."""
    work: Work | None = None
    """With enable_mfu_metrics."""


class Welcome(Message):
    """Everything that a frontend needs to know about the engine: to attach, it needs only an address."""

    version: str
    pid: int
    model: str
    served_model_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    dtype: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_logprobs: int
    eos_token_ids: tuple[int, ...]
    tokenizer: TokenizerInfo | None
    """None if the core runs without a tokeniser: prompts must be token ids."""
    generation_defaults: dict[str, float | int | list[int]]
    """Sampling fields that the model's generation_config sets, by their names in SamplingParams."""
    startup_s: dict[str, float]
    """Seconds of each start-up phase, in order."""
    most_new_tokens: int | None = None
    """Upper limit of max_tokens for requests over HTTP; None for no limit."""
    stream_interval: int = 1
    """How many tokens of an output are sent together; the first is sent at once, and the last ones with the end."""
    reasoning_parser: str = ""
    """The format of reasoning to use when neither the request nor the server names one."""
    reasoning_begin: str = ""
    """Replaces the format's marker that begins reasoning."""
    reasoning_end: str = ""
    """The text that is forced when a budget is spent, instead of the format's end marker, which it contains."""
    max_waiting_requests: int = 1 << 30
    """Limit of waiting requests, in addition to the running ones."""
    grammars_hold_in_reasoning: bool = False
    """Grammars apply to the reasoning too, from the first token on."""
    enable_prefix_caching: bool = False
    max_num_batched_tokens: int = 0
    reads_priority: bool = True
    """Whether the order of requests depends on their priority."""
    kv_cache_tokens: int = 0
    """How many tokens the cache holds."""
    kv_cache_requests: float = 0.0
    """How many requests of max_model_len it holds."""
    generates: bool = True
    """Whether the engine takes `Generate` tasks."""
    pooling: Pooling | None = None
    """How it carries out `Pool` tasks; None: it refuses them."""
    row_inputs: tuple[str, ...] = ()
    """The kinds of `AddRequest.inputs` that the engine reads."""
    input_width: int = 0
    """The number of values that take the place of a token's embedding."""
    model_version: str = ""
    """Engines with the same version generate the same tokens for the same request. It changes when weights are
    reloaded; the core then sends Welcome again."""
    max_loras: int = 0
    """Most distinct adapters of a step, and of a request; 0: requests may have none (enable_lora)."""
    adapters: tuple[AdapterInfo, ...] = ()
    """All registered ones; the core sends Adapters on each change."""


class Reply(Message):
    call: int
    result: TokenizerBundle | EngineStats | ControlResult | None = None
    failure: Failure | None = None


class Load(Message):
    """Sent about once a second to a client with requests at this core: soft state, and proof that the core lives."""

    num_running: int
    num_waiting: int
    is_paused: bool = False
    """The engine was paused on request, so no tokens arrive."""


class PrefixEvents(Message):
    """Changes of the prefix cache, sent a few times a second at most to the clients that subscribed (FollowPrefixes).

    Soft state: some may be left out. Prefixes are named as in ipc/prefix_names.py.
    """

    stored: Tensor
    """[n] int64: prefixes that the cache now holds"""
    evicted: Tensor
    """[n] int64: prefixes that it no longer holds"""


class Refused(Message):
    """The client's last message could not be accepted: a wrong version, garbage, or a message out of order. A request
    or call that the message still names gets its Finish or Reply instead, as something waits for that.

    The client's other requests are not affected. The first field has the same position in every version.
    """

    failure: Failure
    schema_hash: str
    version: str


class Dismissed(Message):
    """The core ends this client's session: its requests end with this cause, and nothing follows. It may reconnect."""

    failure: Failure


class Draining(Message):
    """The core accepts no new requests and exits within `deadline_s`; running requests continue until then."""

    deadline_s: float


class EngineFailed(Message):
    """The core is ending because of this failure; nothing follows."""

    failure: Failure


CoreMessage = (
    Welcome | StepOutputs | Reply | Load | PrefixEvents | Adapters | Refused | Dismissed | Draining | EngineFailed
)


# --- parent -> child program and back, on an inherited socket (see channel.py) -----------------------------------


class Start(Message):
    """The first message to a child, with everything it needs. Options are sent as the user gave them."""

    schema_hash: str
    options: dict[str, Any]
    bind: str
    """Address to listen on; empty: the child chooses an ipc:// path in the runtime directory."""
    weights_path: str = ""
    """Where an engine is to read weights after those of its model, as by ReloadWeights; empty: nowhere."""


class Progress(Message):
    """The child entered a phase; `seconds` is the duration of the phase before it."""

    phase: str
    seconds: float
    read_bytes: int = 0
    """Bytes of the weights loaded so far; reported repeatedly within the same phase."""
    total_bytes: int = 0


class Ready(Message):
    """The child accepts connections at `address`."""

    address: str
    startup_s: dict[str, float]
    ranks_startup_s: tuple[dict[str, float], ...] = ()
    """One dict per worker process of an engine; see Facts."""
    peer_timeout_s: float | None = None
    """How long the child and its clients may be silent; None for the default."""


class TokenizerKnown(Message):
    """The engine has its tokenizer, of which its Welcome will tell: its clients can read a copy while it loads."""

    info: TokenizerInfo


class WeightsRead(Message):
    """The engine uses the weights of this path from now on, on a client's order; empty: its own model's."""

    path: str


class ChildFailed(Message):
    """The child cannot go on; it exits after this."""

    failure: Failure


class Stop(Message):
    """Finish what runs within `deadline_s`, then exit."""

    deadline_s: float


ParentMessage = Start | Stop
ChildMessage = Progress | TokenizerKnown | Ready | WeightsRead | ChildFailed


def hash_of(*unions: Any) -> str:
    """A hash of the names and types of all fields in these unions, so that it changes with any change of layout."""
    seen: dict[str, list[str]] = {}

    def visit(info: Any) -> None:
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls.__name__ in seen:
                return
            seen[info.cls.__name__] = [f"{f.encode_name}:{f.type!r}" for f in info.fields]
            for field in info.fields:
                visit(field.type)
        for part in (*getattr(info, "types", ()), getattr(info, "item_type", None)):
            if part is not None:
                visit(part)

    for union in unions:
        visit(msgspec.inspect.type_info(union))
    text = f"{WIRE_VERSION}\n" + "\n".join(f"{name} {' '.join(fields)}" for name, fields in sorted(seen.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _schema_hash() -> str:
    return hash_of(ClientMessage, CoreMessage, ParentMessage, ChildMessage)


SCHEMA_HASH = _schema_hash()
