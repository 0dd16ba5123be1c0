"""`SamplingParams`: how to sample, under vLLM's field names and defaults, checked by name, value and range."""

from __future__ import annotations

import copy
import difflib
import enum
import functools
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from headrace.frontend.request.lists import elements
from headrace.frontend.request.parameters.repetition import RepetitionDetectionParams, repetition_from
from headrace.frontend.request.parameters.sampling_fields import (
    Field,
    ParamsStruct,
    bad,
    check_of,
    declared_fields,
    plain_integer,
    sent_fields,
    verify_extra_args,
)
from headrace.frontend.request.parameters.structured_outputs import StructuredOutputsParams, structured_outputs_from
from headrace.frontend.request.parameters.token_rules import (
    check_model_limits,
    openai_bias,
    tokenize_bad_words,
    verify_token_ids,
    verify_token_rules,
)
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Sampling
from headrace.ipc.ranges import INT32, Range

if TYPE_CHECKING:
    from headrace.frontend.vllm.engine_config import ModelConfig

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy sampling: dividing logits by them would overflow."""

NOTHING: Mapping[str, Any] = types.MappingProxyType({})

_BEAMS = "LLM.beam_search takes BeamSearchParams, and an HTTP server use_beam_search; leave it out"
_UNSUPPORTED = "leave it out"
NOT_SUPPORTED: Mapping[str, str] = types.MappingProxyType(
    {
        **dict.fromkeys(("beam_width", "early_stopping", "length_penalty", "use_beam_search"), _BEAMS),
        "best_of": "ask for n outputs with logprobs=0, and take those of the highest cumulative_logprob",
        "logits_processors": "name a class when the engine starts (logits_processors), which reads extra_args",
        **dict.fromkeys(("prompt_logprob_token_ids", "routed_experts_prompt_start", "skip_clone"), _UNSUPPORTED),
        **dict.fromkeys(("trace_decode_token_ids", "watermarking"), _UNSUPPORTED),
    }
)
"""vLLM's fields that this version refuses by name, and what to do instead. None and the values in NEUTRAL are accepted,
since they have no effect."""
NEUTRAL: Mapping[str, tuple[object, ...]] = types.MappingProxyType(
    {
        "best_of": (1,),
        "early_stopping": (False,),
        "length_penalty": (1,),
        "routed_experts_prompt_start": (0,),
        "skip_clone": (False, True),
        "watermarking": (False,),
        "use_beam_search": (False,),
    }
)


class UnknownFieldError(InvalidRequestError, TypeError):
    """An unknown field name. Also a TypeError, which Python raises for an unknown keyword argument."""


class SamplingType(enum.IntEnum):
    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class RequestOutputKind(enum.Enum):
    """What each output of a streamed request carries."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """The part that is new since the previous output."""
    FINAL_ONLY = 2
    """One output, at the end."""


class _ChecksNames(type(msgspec.Struct)):  # type: ignore[misc]
    """Refuses an unknown field with a suggestion, and one of NOT_SUPPORTED with what to do instead."""

    if not TYPE_CHECKING:  # type checkers derive the constructor from the fields

        def __call__(cls, *args: Any, **given: Any) -> Any:
            if args:
                raise UnknownFieldError(
                    f"{cls.__name__} takes its fields by name, as in {cls.__name__}(temperature=0.5, max_tokens=64): "
                    f"which is {args[0]!r:.100}?"
                )
            try:
                return super().__call__(**given)
            except InvalidRequestError:
                raise
            except ValueError:  # numpy's arrays have no truth value
                for name, value in given.items():
                    if getattr(value, "ndim", 0):
                        raise bad(name, value, "must be one value, not an array") from None
                raise
            except TypeError:
                known = list(cls.__struct_fields__)
                unknown = [name for name in given if name not in known]
                if not unknown:
                    raise
            for name in unknown:
                if name not in NOT_SUPPORTED:
                    raise UnknownFieldError(f"SamplingParams has no field {name!r}{nearest(name, known)}")
                refuse_unless_neutral(name, given.pop(name))
            return super().__call__(**given)


def refuse_unless_neutral(name: str, value: Any) -> Any:
    """The value of a field of NOT_SUPPORTED. Raises InvalidRequestError if it asks for something."""
    if value is not None and not (isinstance(value, int | float) and value in NEUTRAL.get(name, ())):
        raise InvalidRequestError(f"SamplingParams.{name} is not supported by this version; {NOT_SUPPORTED[name]}")
    return value


class SamplingParams(
    ParamsStruct, metaclass=_ChecksNames, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """How to choose a request's tokens and when to stop.

    The constructor raises InvalidRequestError, which names the field, its value and the range. Submission checks again,
    since fields may have been changed. As in vLLM it is a struct of msgspec, whose functions work on it.
    """

    n: Annotated[
        int, Field("Number of outputs for each prompt; with a seed, output i is sampled with seed + i", Range(1, 16384))
    ] = 1
    presence_penalty: Annotated[
        float,
        Field(
            "Subtracted from the logits of tokens that appear in the output so far: above 0 "
            "encourages new tokens, below 0 repetition",
            flag=True,
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Field(
            "Subtracted from a token's logit once for each time it appears in the output so far: "
            "above 0 encourages new tokens, below 0 repetition",
            flag=True,
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Field(
            "Penalty for tokens that appear in the prompt or the output so far: their logits are "
            "divided by it, negative ones multiplied; above 1 encourages new tokens, below 1 "
            "repetition",
            flag=True,
        ),
    ] = 1.0
    temperature: Annotated[
        float, Field("Randomness of the sampling: lower values are more deterministic, 0 is greedy sampling", flag=True)
    ] = 1.0
    top_p: Annotated[
        float,
        Field(
            "Sample only from the most likely tokens whose cumulative probability reaches this; 1 considers all tokens",
            flag=True,
        ),
    ] = 1.0
    top_k: Annotated[
        int, Field("Sample only from this many most likely tokens; 0 or -1 considers all tokens", flag=True)
    ] = 0
    min_p: Annotated[
        float,
        Field(
            "Minimum probability of a token, relative to the probability of the most likely token; 0 is off", flag=True
        ),
    ] = 0.0
    typical_p: Annotated[
        float,
        Field(
            "Locally typical sampling: keep the tokens whose information content is closest to the "
            "expected one, up to this cumulative probability; 1 is off",
            flag=True,
        ),
    ] = 1.0
    top_n_sigma: Annotated[
        float,
        Field(
            "Keep only tokens whose logits are within this many standard deviations of the highest logit; 0 is off",
            flag=True,
        ),
    ] = 0.0
    xtc_probability: Annotated[
        float,
        Field(
            "XTC: probability that, in a step, all tokens above xtc_threshold but the least likely "
            "of them are removed; 0 is off",
            flag=True,
        ),
    ] = 0.0
    xtc_threshold: Annotated[float, Field("XTC: probability from which a token can be removed", flag=True)] = 0.1
    dry_multiplier: Annotated[
        float,
        Field(
            "DRY: strength of the penalty for tokens that would extend a repeated sequence; it grows "
            "with the sequence's length by the factor dry_base per token; 0 is off",
            flag=True,
        ),
    ] = 0.0
    dry_base: Annotated[
        float,
        Field(
            "DRY: base of the penalty, which grows exponentially with the length of the repeated sequence", flag=True
        ),
    ] = 1.75
    dry_allowed_length: Annotated[
        int, Field("DRY: sequences shorter than this may be repeated without a penalty", flag=True)
    ] = 2
    dry_penalty_last_n: Annotated[
        int, Field("DRY: number of last tokens that are searched for repeated sequences; -1 searches all", flag=True)
    ] = -1
    dry_sequence_breakers: Annotated[
        list[str] | None,
        Field(
            "DRY: strings at which a repeated sequence ends; None: line breaks, colons, quotes and asterisks",
            longest=64,
        ),
    ] = None
    mirostat: Annotated[
        int,
        Field(
            "Mirostat version, 1 or 2, which keeps the surprise of the output near mirostat_tau; 0 is off", flag=True
        ),
    ] = 0
    mirostat_tau: Annotated[float, Field("Mirostat: target surprise, in bits per token", flag=True)] = 5.0
    mirostat_eta: Annotated[float, Field("Mirostat: learning rate", flag=True)] = 0.1
    seed: Annotated[
        int | None, Field("Random seed, which makes the output reproducible; None or -1: a random one", flag=True)
    ] = None
    logit_bias: Annotated[
        dict[int, float] | None, Field("By token id, the value that is added to its logit; -inf forbids the token")
    ] = None
    allowed_token_ids: Annotated[list[int] | None, Field("Only these token ids can be generated; None allows all")] = (
        None
    )
    bad_words: Annotated[
        list[str] | None, Field("Words that are not allowed to be generated, alone or after a space", longest=1024)
    ] = None
    """Only the output is searched for them, not the prompt."""
    stop: Annotated[
        str | list[str] | None, Field("Strings that stop the generation; the output does not contain them", flag=True)
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        Field("Token ids that stop the generation, in addition to the model's end-of-sequence tokens", longest=1024),
    ] = None
    ignore_eos: Annotated[bool, Field("Continue generating after an end-of-sequence token", flag=True)] = False
    max_tokens: Annotated[
        int | None, Field("Maximum number of tokens to generate; None: as many as fit into the context", flag=True)
    ] = 16
    min_tokens: Annotated[
        int,
        Field(
            "Minimum number of tokens to generate before an end-of-sequence token or another stop "
            "condition can end the output",
            flag=True,
        ),
    ] = 0
    logprobs: Annotated[
        int | None,
        Field(
            "Number of most likely tokens whose log-probabilities are returned per output token, "
            "besides the sampled token's own; -1 returns all",
            in_body=False,
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Field("Number of most likely tokens whose log-probabilities are returned per prompt token; -1 returns all"),
    ] = None
    prompt_logprob_start: Annotated[
        int,
        Field("First prompt token that prompt_logprobs covers; the entries of earlier ones are None", in_body=False),
    ] = 0
    flat_logprobs: Annotated[
        bool,
        Field(
            "Return log-probabilities as a FlatLogprobs, which reads as a list but is stored in a few long lists",
            in_body=False,
        ),
    ] = False
    logprob_token_ids: Annotated[
        list[int] | None,
        Field(
            "Token ids whose log-probabilities are returned per output token, instead of those of the most likely ones",
            longest=1024,
        ),
    ] = None
    structured_outputs: StructuredOutputsParams | None = None
    """Constrains the output: to a JSON schema, a regular expression, one of several texts, or a grammar."""
    guided_decoding: StructuredOutputsParams | None = None
    """The name of `structured_outputs` in older versions of vLLM."""
    truncate_prompt_tokens: Annotated[
        int | None,
        Field("Maximum number of prompt tokens to keep; -1: as many as fit into the context", Range(-1, INT32)),
    ] = None
    truncation_side: Annotated[str, Field("Side on which truncate_prompt_tokens removes tokens: left or right")] = (
        "left"
    )
    skip_reading_prefix_cache: Annotated[
        bool | None, Field("Compute the whole prompt, without reusing blocks of the prefix cache")
    ] = None
    stream_interval: Annotated[
        int | None,
        Field(
            "Number of output tokens that are streamed together; None: the engine's stream_interval", Range(1, 1 << 20)
        ),
    ] = None
    repetition_detection: Annotated[
        RepetitionDetectionParams | None, Field("End the output when it repeats a sequence of tokens")
    ] = None
    thinking_token_budget: Annotated[
        int | None,
        Field(
            "Maximum number of reasoning tokens, where the model's reasoning format is known; -1: no limit",
            Range(0, INT32),
        ),
    ] = None
    extra_args: Annotated[
        dict[str, Any] | None,
        Field("Arguments for the engine's custom logits processors; called vllm_xargs in HTTP bodies", in_body=False),
    ] = None
    detokenize: Annotated[
        bool, Field("Convert the output's tokens to text; False leaves the text empty", in_body=False)
    ] = True
    skip_special_tokens: Annotated[bool, Field("Leave special tokens out of the output text")] = True
    spaces_between_special_tokens: Annotated[
        bool, Field("Put spaces between special tokens in the output text, as some tokenizers do")
    ] = True
    include_stop_str_in_output: Annotated[
        bool, Field("Keep the stop string, or the stop token's text, in the output text")
    ] = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    # vLLM's further fields, for those who read or copy all of its fields: NOT_SUPPORTED, but for neutral values.
    watermarking: bool | None = None
    prompt_logprob_token_ids: list[list[int]] | None = None
    skip_clone: bool = False
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None

    _tokenized_bad_words: tuple[list[str], tuple[tuple[int, ...], ...]] | None = None
    _is_frozen: bool = False

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_frozen:
            raise AttributeError(f"SamplingParams.{name}: these parameters belong to a request that was submitted")
        if name in NOT_SUPPORTED and name not in self.__struct_fields__:
            refuse_unless_neutral(name, value)
        super().__setattr__(name, value)

    def __post_init__(self) -> None:
        if self.seed == -1:
            self.seed = None
        if self.top_k == -1:
            self.top_k = 0
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        for name in ("logprobs", "prompt_logprobs"):  # OpenAI's API has them as flags
            if isinstance(asked := getattr(self, name), bool):
                setattr(self, name, 1 if asked else None)
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise bad("guided_decoding", self.guided_decoding, "is the older name of structured_outputs: give one")
            if not isinstance(self.guided_decoding, StructuredOutputsParams | dict):
                raise bad("guided_decoding", self.guided_decoding, "must be a GuidedDecodingParams")
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        if isinstance(self.structured_outputs, dict):
            self.structured_outputs = structured_outputs_from(self.structured_outputs)
        if isinstance(self.repetition_detection, dict):
            self.repetition_detection = repetition_from(self.repetition_detection)
        for name in _LISTS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, list | tuple) and (several := elements(value)) is not None:
                setattr(self, name, several)
        self._verify_values()
        # The checked stop, stop_token_ids and bad_words become lists without duplicates, which scripts may extend.
        lists = {"stop": self.stop_strings, "stop_token_ids": map(int, self.stop_token_ids or ())}
        for name, values in {**lists, "bad_words": self.bad_words or ()}.items():
            msgspec.structs.force_setattr(self, name, list(dict.fromkeys(values)))
        if self.logprob_token_ids and self.logprobs is None:
            self.logprobs = 0

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """From values of which None means the default (except max_tokens), and a logit_bias as in OpenAI's API
        (`openai_bias`)."""
        values["logit_bias"] = openai_bias(values.get("logit_bias"))
        return cls(**{name: value for name, value in values.items() if value is not None or name == "max_tokens"})

    def clone(self) -> SamplingParams:
        """An independent copy."""
        twin = copy.copy(self)
        msgspec.structs.force_setattr(twin, "_is_frozen", False)
        for name in _CONTAINERS:
            if isinstance(value := getattr(self, name), list | dict):
                msgspec.structs.force_setattr(twin, name, value.copy())
        vars(twin).update(vars(self))  # attributes that a caller set
        return twin

    def frozen(self, output_kind: RequestOutputKind | None = None) -> SamplingParams:
        """A verified copy for requests, by default with the same output kind, whose fields can no longer be set; itself
        if it is one. Raises as `verify` does."""
        if self._is_frozen:
            return self
        twin = self.clone()
        if output_kind is not None:
            msgspec.structs.force_setattr(twin, "output_kind", output_kind)
        twin._verify_values()
        msgspec.structs.force_setattr(twin, "_is_frozen", True)
        return twin

    def freeze(self) -> SamplingParams:
        """Itself, whose fields can no longer be set: parameters that nobody else has need no copy."""
        msgspec.structs.force_setattr(self, "_is_frozen", True)
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def verify(
        self,
        model_config: ModelConfig | None = None,
        speculative_config: object = None,
        structured_outputs_config: object = None,
        tokenizer: object = None,
    ) -> None:
        """Raises InvalidRequestError for the first invalid field. With model_config, checks the model's limits too.

        Replaces numbers of other types, such as numpy's, by Python's own, which messages can hold.

        The other arguments are vLLM's and unused: the engine makes those checks when it receives the request.
        """
        self._verify_values()
        if model_config is not None:
            vocab_size = model_config.get_vocab_size()
            check_model_limits(self, INT32 if vocab_size is None else vocab_size, model_config.max_logprobs)

    def update_from_tokenizer(self, tokenizer: Any) -> None:
        """Tokenises `bad_words` with this tokenizer (any with vLLM's `encode`), so that none is needed later."""
        if self.bad_words:
            self._tokenized_bad_words = list(self.bad_words), tokenize_bad_words(self.bad_words, tokenizer)

    @property
    def bad_words_token_ids(self) -> list[list[int]] | None:
        """The token sequences that `update_from_tokenizer` made of bad_words; None if the words have changed since."""
        words, runs = self._tokenized_bad_words or ([], ())
        return [list(run) for run in runs] if words and words == self.bad_words else None

    @property
    def all_stop_token_ids(self) -> set[int]:
        """`stop_token_ids` as a set. The model's end-of-sequence tokens are not in it: the engine adds them."""
        return set(self.stop_token_ids or ())

    @property
    def num_logprobs(self) -> int | None:
        """Number of candidates reported per token: the length of `logprob_token_ids` if given, else `logprobs`."""
        return len(self.logprob_token_ids) if self.logprob_token_ids else self.logprobs

    @property
    def sampling_type(self) -> SamplingType:
        if self.temperature < GREEDY_BELOW:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    def _verify_values(self) -> None:
        for name, default, is_optional, check in _CHECKS:
            value = getattr(self, name)
            is_plain = value is default or (value is None and is_optional)
            if not is_plain and (plain := check(value)) is not value:
                setattr(self, name, plain)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise bad("output_kind", self.output_kind, "must be a RequestOutputKind")
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputsParams):
                raise bad("structured_outputs", self.structured_outputs, "must be a StructuredOutputsParams")
            self.structured_outputs.verify()
        are_lists = isinstance(self.stop, list | None) and isinstance(self.stop_token_ids, list | None)
        if not are_lists or self.stop or self.stop_token_ids:
            self._verify_stops()
        verify_token_rules(self)
        if self.truncate_prompt_tokens == 0:
            raise bad("truncate_prompt_tokens", 0, "must be at least 1, or -1 for as many as fit")
        if self.truncation_side not in ("left", "right"):
            raise bad("truncation_side", self.truncation_side, "must be left or right")
        if self.prompt_logprob_start and self.prompt_logprobs is None:
            raise bad("prompt_logprob_start", self.prompt_logprob_start, "needs prompt_logprobs")
        if not isinstance(self.repetition_detection, RepetitionDetectionParams | None):
            raise bad("repetition_detection", self.repetition_detection, "must be a RepetitionDetectionParams")
        if self.repetition_detection is not None:
            self.repetition_detection.verify()
        if self.extra_args is not None:
            verify_extra_args(self.extra_args)
        if self.logprob_token_ids is not None:
            verify_token_ids("logprob_token_ids", self.logprob_token_ids)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise bad("min_tokens", self.min_tokens, f"must not exceed SamplingParams.max_tokens, {self.max_tokens}")
        if self.n > 1 and self.temperature < GREEDY_BELOW:
            raise bad("n", self.n, "must be 1 with greedy sampling (temperature 0): all outputs would be the same")

    def _verify_stops(self) -> None:
        if not isinstance(self.stop, str | list | tuple | None):
            raise bad("stop", self.stop, "must be a string or a list of strings")
        stop_strings = self.stop_strings
        for text in stop_strings:
            if not isinstance(text, str) or not text:
                raise bad("stop", self.stop, "must contain only strings that are not empty")
        if stop_strings and not self.detokenize:
            raise bad("stop", self.stop, "needs detokenize=True: stop strings are found in the text")
        if self.stop_token_ids is not None:
            if not isinstance(self.stop_token_ids, list | tuple):
                raise bad("stop_token_ids", self.stop_token_ids, "must be a list of token ids")
            for token_id in self.stop_token_ids:
                if plain_integer(token_id) is None or not 0 <= token_id < 2**31:
                    raise bad(
                        "stop_token_ids", self.stop_token_ids, f"must contain token ids, which {token_id!r} is not"
                    )

    def to_wire(self, max_tokens: int, child: int = 0, tokenized: Mapping[str, Any] = NOTHING) -> Sampling:
        """The message for output `child` of n. max_tokens: the most that max_model_len leaves room for.

        tokenized: the fields of Sampling that are made of texts with the tokenizer.
        """
        wire: dict[str, Any] = {}
        for name, default, converted in _SENT:
            value = getattr(self, name)
            if value is not default and value is not None and value != []:
                wire[name] = converted(value)
        wire["max_tokens"] = max_tokens if self.max_tokens is None else min(int(self.max_tokens), max_tokens)
        wire["min_tokens"] = min(int(self.min_tokens), max_tokens)
        if self.temperature < GREEDY_BELOW:
            wire["temperature"] = 0.0
        if self.seed is not None:
            wire["seed"] = (int(self.seed) + child + 2**63) % 2**64 - 2**63
        if child:
            wire.pop("prompt_logprobs", None)  # the same for every child
        if self.logprob_token_ids:
            wire["logprobs"] = 0  # logprob_token_ids are reported instead of the likeliest tokens
        if self.structured_outputs is not None:
            wire["structured_output"] = self.structured_outputs.to_wire()
        return Sampling(**wire, **tokenized)


FIELDS = declared_fields(SamplingParams)
"""Declarations of the fields, by name."""
_CHECKS: list[tuple[str, Any, bool, Callable[[Any], Any]]] = [
    *(
        (each.name, each.default, each.optional, check)
        for each in FIELDS.values()
        if (check := check_of(each)) is not None
    ),
    *(
        (name, default, False, functools.partial(refuse_unless_neutral, name))
        for name, default in zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True)
        if name in NOT_SUPPORTED
    ),
]
"""Of fields with another value than the default, which the check returns, or Python's own number for it."""
_SENT = sent_fields(FIELDS)
_LISTS = ("allowed_token_ids", "bad_words", "dry_sequence_breakers", "logprob_token_ids", "stop", "stop_token_ids")
_CONTAINERS = [name for name, hint in SamplingParams.__annotations__.items() if "list[" in hint or "dict[" in hint]


OTHER_NAMES: Mapping[str, str] = types.MappingProxyType({"mirostat_mode": "mirostat"})
"""Names in other engines for which `difflib` would suggest the wrong field."""


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean ...?`, or a list of the fields if no name is similar."""
    match = [OTHER_NAMES[name]] if OTHER_NAMES.get(name) in known else difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {match[0]!r}?" if match else f"; the fields are {', '.join(known)}"
