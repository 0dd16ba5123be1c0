"""What a client and an engine core say to each other: one tagged union per direction.

The conversation is linear. A client says `Hello` and hears `Welcome` (or a `Failure`); then it adds and aborts
requests and sends commands, and says `Goodbye`. The core answers a step at a time with `StepOutputs`, and each
command with one `Reply`. Every request gets exactly one `Finish`.

A request is named on the wire by its `slot`, an integer the client chooses and does not use twice in one
session. The message layouts are hashed into SCHEMA_HASH, so peers of different versions never guess.
"""

from __future__ import annotations

import enum
import hashlib
import math
from typing import Annotated, Any, Literal

import msgspec

from headrace.ipc.codec import Tensor
from headrace.ipc.control import Commands, ControlResult
from headrace.ipc.failure import Failure
from headrace.ipc.ranges import FLOAT32, INT32, INT64, VOCABULARY, Longest, ModelDefault, Range

WIRE_VERSION = 1

TokenId = Annotated[int, Range(0, INT32), VOCABULARY]
Bias = Annotated[float, Range(-math.inf, 1e9)]
"""What would become +inf in float32 would spoil the row."""
Name = Annotated[str, Longest(4096)]
MOST_GRAMMAR_CHARACTERS = 1 << 20
"""Of a request's schema, regular expression or grammar."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Base of everything on a wire: positional, tagged by class name, immutable."""


class StructuredOutput(msgspec.Struct, frozen=True, array_like=True, kw_only=True, omit_defaults=True):
    """The form that an answer has to have. What engines may refuse is in `text` alone."""

    kind: Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
    text: Annotated[str, Longest(MOST_GRAMMAR_CHARACTERS)]
    """A JSON schema, nothing, a regular expression, a JSON list of texts, a grammar (Lark or GBNF), a tag's JSON."""
    disable_any_whitespace: bool = False
    """JSON comes without the spaces that a schema leaves open."""
    disable_additional_properties: bool = False
    """Objects of a JSON schema have no properties that it does not name."""
    disable_fallback: bool = False
    """What the first backend cannot do is refused."""
    whitespace_pattern: Annotated[str, Longest(4096)] = ""
    """A regular expression of the white space between the parts of JSON; empty: what the backend has."""
    backend: Annotated[str, Longest(64)] = ""
    """That follows it, by an option's name for it; empty: the engine's own."""


class Thinking(msgspec.Struct, frozen=True, array_like=True, kw_only=True, omit_defaults=True):
    """How an answer's reasoning is set off, for what depends on its end: a budget, or a form that begins there."""

    end: Annotated[tuple[TokenId, ...], Longest(64)]
    begin: Annotated[tuple[TokenId, ...], Longest(64)] = ()
    """Empty where only a prompt can open it."""
    is_open: bool = False
    """The prompt leaves it open."""
    budget: Annotated[int, Range(0, INT32)] | None = None
    """After so many tokens the end is forced."""
    forced: Annotated[tuple[TokenId, ...], Longest(64)] = ()
    """What is forced then, where that is more than `end`."""


class Sampling(msgspec.Struct, frozen=True, array_like=True, kw_only=True, omit_defaults=True):
    """How to choose tokens, fully resolved by the frontend: no text, no None that means a default.

    The ranges are what the core can compute with (see ranges.py); what the model allows is checked on admission. A
    field's range, and whether a model may set its default, are declared here alone: SamplingParams and all that is made
    from it (frontend/api/parameters/sampling_fields.py) read them.
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
    """None lets the core draw one."""
    presence_penalty: Annotated[float, Range(-2, 2), ModelDefault(None)] = 0.0
    frequency_penalty: Annotated[float, Range(-2, 2), ModelDefault(None)] = 0.0
    repetition_penalty: Annotated[float, Range(0, FLOAT32, open_low=True), ModelDefault("repetition_penalty")] = 1.0
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Range(-1, INT32)] | None = None
    """How many most likely tokens to report per output token, besides the sampled one; -1 is the vocabulary."""
    prompt_logprobs: Annotated[int, Range(-1, INT32)] | None = None
    allowed_token_ids: tuple[TokenId, ...] = ()
    """Empty allows every token."""
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    """Runs of tokens, whose last is forbidden where the output ends in the others."""
    logit_bias: dict[TokenId, Bias] = {}
    """Token id -> what is added to its logit; -inf forbids it."""
    logprob_token_ids: Annotated[tuple[TokenId, ...], Longest(1024)] = ()
    """Tokens whose log-probabilities are reported per output token, in this order, in the place of the most likely
    ones; `logprobs` is 0 then."""
    structured_output: StructuredOutput | None = None
    """The form of the answer; None: any."""
    thinking: Thinking | None = None
    """Where reasoning is no part of the form, or has a budget."""

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
    """The first prompt token that prompt_logprobs reports of; those before may come from the prefix cache."""
    skip_reading_prefix_cache: bool = False
    """Compute the whole prompt. What it computes may be found by others."""
    extra_args: Annotated[dict[str, Any], Longest(256)] | None = None
    """What logits processors of others read; None where nothing was given, as they know it from vLLM."""
    mirostat: Annotated[int, Range(0, 2), ModelDefault(None)] = 0
    mirostat_tau: Annotated[float, Range(0, FLOAT32), ModelDefault(None)] = 5.0
    mirostat_eta: Annotated[float, Range(0, FLOAT32), ModelDefault(None)] = 0.1


class Generate(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """The task of a request that samples tokens."""

    sampling: Sampling


class Pool(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """The task of a request that wants hidden states pooled: one vector, and no tokens. No model offers it yet."""


# --- client -> core ---------------------------------------------------------------------------------------------


class Hello(Message):
    """The first message of a session. Its leading fields keep their place in every version."""

    schema_hash: str
    version: str
    pid: int


class AddRequest(Message):
    slot: Annotated[int, Range(0, INT32)]
    request_id: Name
    """The user's name for the request, for logs."""
    prompt_token_ids: Tensor
    """[num_prompt_tokens + num_resumed_tokens] int32, of the prompt at least one."""
    task: Generate | Pool
    priority: Annotated[int, Range(-INT64 - 1, INT64)] = 0
    """Smaller is served earlier under the `priority` policy."""
    cache_salt: Name = ""
    """Prefix-cache blocks are shared only among requests with the same salt."""
    output_interval: Annotated[int, Range(1, 1 << 20)] = 1
    """How many new tokens may wait for each other before they are told. The first is told at once, and the end with all
    that is left. With log-probabilities each is told at once."""
    num_resumed_tokens: Annotated[int, Range(0, INT32)] = 0
    """The last so many of prompt_token_ids are the output so far: the request goes on where another engine left it."""


class Abort(Message):
    """The client no longer wants these; each still gets its `Finish`, unless it already had one."""

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
    """From now on the client is told which beginnings of prompts the cache holds (PrefixEvents), all at first."""


class Control(Message):
    """Answered by a Reply with what the command's own page says (see control.py)."""

    call: int
    command: Commands


class Goodbye(Message):
    """The client leaves; its unfinished requests are freed without an answer."""


ClientMessage = (
    Hello | AddRequest | Abort | FetchTokenizer | GetStats | ResetPrefixCache | FollowPrefixes | Control | Goodbye
)


# --- core -> client ---------------------------------------------------------------------------------------------


class FinishReason(enum.IntEnum):
    STOP = 0
    """An end-of-sequence or stop token."""
    LENGTH = 1
    """max_tokens or max_model_len."""
    ABORT = 2
    """The client asked, or the engine is shutting down."""
    REJECTED = 3
    """Never started; `Finish.failure` says why."""
    FAILED = 4
    """Started and could not go on; `Finish.failure` says why."""


class Finish(msgspec.Struct, frozen=True, array_like=True, kw_only=True, omit_defaults=True):
    """The one terminal answer of a request."""

    slot: int
    reason: FinishReason
    stop_token: int | None = None
    """The stop_token_ids entry that ended it; None for an end-of-sequence token."""
    with_last_token: bool = False
    """The last token is no mark of the end but part of the answer: with it, the form that was asked for is complete."""
    failure: Failure | None = None
    queued_s: float = 0.0
    """From arrival at the core to its first scheduling."""
    prefill_s: float = 0.0
    """From first scheduling to the first token."""
    decode_s: float = 0.0
    """From the first token to the last."""
    num_preemptions: int = 0


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
        """Those that a numpy mask, indices or a slice choose."""
        return LogprobRows(
            token_ids=Tensor.from_numpy(self.token_ids.numpy()[chosen]),
            logprobs=Tensor.from_numpy(self.logprobs.numpy()[chosen]),
            ranks=Tensor.from_numpy(self.ranks.numpy()[chosen]),
        )


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A run of one request's prompt positions, complete over its messages and in order."""

    slot: int
    start: int
    """Index of the first prompt token covered (position 0 has no prediction and is never covered)."""
    rows: LogprobRows


class Admitted(msgspec.Struct, frozen=True, array_like=True, kw_only=True, omit_defaults=True):
    """A request's first scheduling."""

    slot: int
    num_cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    seed: int | None = None
    """The one that the core drew for a request that brought none: with it another engine can go on."""


class StepOutputs(Message):
    """One step's news for one client. A request with several new tokens has them adjacent and in order."""

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


class TokenizerInfo(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Enough to know whether a cached copy of the tokeniser is the right one."""

    content_hash: str
    """sha256 of the encoded TokenizerBundle, in hexadecimal."""
    size_bytes: int


class TokenizerBundle(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """A tokeniser in the `tokenizers` library's JSON, with what chat templates need besides."""

    tokenizer_json: bytes
    chat_templates: dict[str, str] = {}
    """By name; the usual one is `default`. Empty for a base model."""
    special_tokens: dict[str, str] = {}
    """bos_token, eos_token, unk_token, pad_token, ... as the template sees them."""


STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class EngineTimes(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Sums and counts from the engine's start. The difference of two, divided, is the mean of the time between."""

    num_first_tokens: int = 0
    first_token_s: float = 0.0
    """From requests' arrivals at the loop, which takes them up between steps, to their first tokens."""
    num_later_tokens: int = 0
    later_token_s: float = 0.0
    """From each token of a request to its next."""
    request_s: float = 0.0
    """From arrivals to ends, of the `num_finished` requests."""
    num_gc_pauses: int = 0
    gc_pause_s: float = 0.0
    """Garbage collections of the process that the core runs in."""
    step_tokens: tuple[int, ...] = ()
    """Steps by their tokens: up to each of STEP_TOKEN_BOUNDS, and above."""
    step_tokens_sum: int = 0


class ExpertBalance(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How evenly the ranks of a stage shared the work of the experts when it was last measured.

    A layer's balancedness is the mean of what its ranks computed by the most that one did: 1 where all did as much.
    """

    min: float
    """Of all layers."""
    p50: float
    p90: float
    """What 90% of the layers have at least."""
    avg: float
    rearrangements: int
    """Times that experts have changed ranks, since the weights were read."""
    rearrangement_s: float
    """How long the last time took, in which no step ran."""


class EngineStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """A snapshot of the core. Counters run from its start."""

    num_running: int
    num_waiting: int
    """In the queue, or held back by a gate."""
    num_clients: int
    num_blocks: int
    num_free_blocks: int
    """Free or reclaimable: cached blocks that no request holds count as free."""
    num_cached_blocks: int
    steps: int
    num_finished: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_generated_tokens: int
    num_step_gaps: int = 0
    """Steps that had work to follow on: whose forward pass could have begun when the one before ended."""
    step_gap_s: float = 0.0
    """Sum of the times between those passes, in which the model stood still."""
    forward_s: float = 0.0
    """Sum of the times of all forward passes, sampling within them included."""
    paused: bool = False
    sleep_level: int = 0
    """Sleep's, while weights or cache have given their memory back; 0 once WakeUp has taken all of it again."""
    times: EngineTimes = EngineTimes()
    num_drafts: int = 0
    """Times that a request got draft tokens in a step."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Draft tokens that were right."""
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    """The same by their place in the draft, up to num_speculative_tokens; empty without speculation."""
    num_waiting_by_reason: dict[str, int] = {}
    """`capacity` for the queue, and the reason of each gate that is waited for (core/engine/gates.py)."""
    expert_balance: ExpertBalance | None = None
    """Of the last stage, with enable_eplb, once it was measured."""


class Welcome(Message):
    """Everything a frontend needs: attaching takes an address and nothing else."""

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
    """None when the core runs without a tokeniser: prompts must be token ids."""
    generation_defaults: dict[str, float | int | list[int]]
    """Sampling fields that the model's generation_config sets, under SamplingParams' names."""
    startup_s: dict[str, float]
    """Seconds of each start-up phase, in order."""
    most_new_tokens: int | None = None
    """A server gives no output more, whatever max_tokens a request asks for."""
    stream_interval: int = 1
    """Tokens of an output that its reader gets together; the first comes at once, and the end with all that is left."""
    reasoning_parser: str = ""
    """The format of reasoning where neither a request nor a server names one."""
    reasoning_begin: str = ""
    """Begins reasoning in the place of what the format has."""
    reasoning_end: str = ""
    """Forced when a budget is spent, in the place of the format's end, which it holds."""
    max_waiting_requests: int = 1 << 30
    """Requests that may wait besides those that run."""
    grammars_hold_in_reasoning: bool = False
    """Grammars of answers hold from the first token on."""
    enable_prefix_caching: bool = False
    max_num_batched_tokens: int = 0
    model_version: str = ""
    """Engines of the same give the same tokens for the same request. When it changes, with weights that were read anew,
    a Welcome comes again."""


class Reply(Message):
    call: int
    result: TokenizerBundle | EngineStats | ControlResult | None = None
    failure: Failure | None = None


class Load(Message):
    """Sent about once a second to a client that has requests here: soft state, and proof that the core lives."""

    num_running: int
    num_waiting: int
    is_paused: bool = False
    """No tokens come because somebody asked for that."""


class PrefixEvents(Message):
    """Sent at most a few times a second to clients that follow them: soft state, of which some may be left out.

    The names are those of ipc/prefix_names.py.
    """

    stored: Tensor
    """[n] int64: the cache has come to hold these"""
    evicted: Tensor
    """[n] int64: it holds these no more"""


class Refused(Message):
    """What the client last sent could not be taken: a wrong version, garbage, a message out of order.

    The client's other requests are not affected. Its leading field keeps its place in every version.
    """

    failure: Failure
    schema_hash: str
    version: str


class Dismissed(Message):
    """This client is served no more: its requests ended, with this cause, and nothing follows. It may attach anew."""

    failure: Failure


class Draining(Message):
    """The core takes no new requests and ends within `deadline_s`; running ones go on until then."""

    deadline_s: float


class EngineFailed(Message):
    """The core is ending because of this; nothing follows."""

    failure: Failure


CoreMessage = Welcome | StepOutputs | Reply | Load | PrefixEvents | Refused | Dismissed | Draining | EngineFailed


# --- parent -> child program and back, on an inherited socket (see channel.py) -----------------------------------


class Start(Message):
    """The first message to a child: everything it is told. Options travel as the user gave them."""

    schema_hash: str
    options: dict[str, Any]
    bind: str
    """Address to listen on; empty lets the child choose an ipc:// path in the runtime directory."""


class Progress(Message):
    """The child entered a phase; `seconds` is what the phase before it took."""

    phase: str
    seconds: float
    read_bytes: int = 0
    """Of the weights, while they are read: the phase is the same then."""
    total_bytes: int = 0


class Ready(Message):
    """The child serves at `address`."""

    address: str
    startup_s: dict[str, float]
    ranks_startup_s: tuple[dict[str, float], ...] = ()
    """Of each worker process of an engine; see Facts."""
    peer_timeout_s: float | None = None
    """How long it and its clients may be silent; None for what is usual."""


class ChildFailed(Message):
    """The child cannot go on; it exits after this."""

    failure: Failure


class Stop(Message):
    """Finish what runs within `deadline_s`, then exit."""

    deadline_s: float


ParentMessage = Start | Stop
ChildMessage = Progress | Ready | ChildFailed


def hash_of(*unions: Any) -> str:
    """Of every field's name and type in these unions, so that any change of layout changes it."""
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
