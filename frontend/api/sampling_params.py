"""`SamplingParams`: how to sample, under vLLM's field names and defaults, checked by name, value and range."""

from __future__ import annotations

import copy
import difflib
import enum
import functools
import math
import numbers
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from headrace.frontend.api.token_rules import openai_bias, verify_token_ids, verify_token_rules
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Sampling

T = TypeVar("T")

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would only overflow."""

MOST_FLOAT32 = 3.4e38
"""What an engine computes with has no larger numbers than this."""

NOT_SUPPORTED = frozenset(
    {
        *("beam_width", "best_of", "early_stopping", "extra_args", "flat_logprobs", "guided_decoding"),
        *("length_penalty", "logits_processors", "structured_outputs", "truncate_prompt_tokens", "use_beam_search"),
    }
)
"""vLLM's fields that this version refuses by name. What asks for nothing, None and NEUTRAL, is accepted."""
NEUTRAL: Mapping[str, tuple[object, ...]] = types.MappingProxyType(
    {
        "best_of": (1,),
        "early_stopping": (False,),
        "length_penalty": (1,),
        "use_beam_search": (False,),
    }
)


class RequestOutputKind(enum.Enum):
    """What each output of a streamed request carries."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """What is new since the output before."""
    FINAL_ONLY = 2
    """One output, at the end."""


def _refuse_unknown_fields(cls: type[T]) -> type[T]:
    """Makes the generated __init__ fail on a name it does not know with the nearest one that it does."""
    generated = cls.__init__
    known = [each.name for each in fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(generated)
    def __init__(self: T, **given: Any) -> None:
        unknown = [name for name in given if name not in known]
        for name in unknown:
            if name not in NOT_SUPPORTED:
                raise InvalidRequestError(f"SamplingParams has no field {name!r}{nearest(name, known)}")
            if given.pop(name) not in (None, *NEUTRAL.get(name, ())):
                raise InvalidRequestError(f"SamplingParams.{name} is not supported by this version; leave it out")
        generated(self, **given)

    cls.__init__ = __init__  # type: ignore[assignment, method-assign]
    return cls


@_refuse_unknown_fields
@dataclass(kw_only=True)
class SamplingParams:
    """How to choose a request's tokens and when to stop.

    Raises InvalidRequestError, which names the field, its value and the range, when it is made, and again at
    submission in case it was changed since.
    """

    n: int = 1
    """How many outputs to sample for the prompt; output i of a seeded request is sampled with seed + i."""
    presence_penalty: float = 0.0
    """-2 to 2: taken off the logit of every token generated already."""
    frequency_penalty: float = 0.0
    """-2 to 2: the same, times how often it was generated."""
    repetition_penalty: float = 1.0
    """Over 0: divides (when positive, else multiplies) the logits of tokens of the prompt and output."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Over 0 to 1: keep the likeliest tokens that make up this share."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """0 to 1: keep tokens at least this likely, relative to the likeliest."""
    seed: int | None = None
    """Any 64-bit integer makes the output reproducible; None (or -1) is random."""
    logit_bias: dict[int, float] | None = None
    """Token id -> what is added to its logit: 100 all but forces it, -100 all but forbids it, and -inf forbids it."""
    allowed_token_ids: list[int] | None = None
    """The only tokens to choose from; None allows all."""
    bad_words: list[str] | None = None
    """Words that are not to be generated, alone or after a space. Their tokens are looked for in the output alone."""
    stop: str | list[str] | None = None
    """Texts that end the output, which does not contain them."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the output, besides the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    max_tokens: int | None = 16
    """Most tokens to generate; None generates until max_model_len."""
    min_tokens: int = 0
    """Tokens to generate before any stop condition counts."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report at each position, besides the sampled one; -1 is all."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    logprob_token_ids: list[int] | None = None
    """Tokens to report at each position besides the sampled one, in the place of the likeliest ones; without a rank."""
    detokenize: bool = True
    """False leaves the output's text empty."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Only True is supported: fast tokenisers have never done otherwise."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the stop token's text, in the output."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        if self.seed == -1:
            self.seed = None
        if self.top_k == -1:
            self.top_k = 0
        self.verify()
        if self.logprob_token_ids and self.logprobs is None:
            self.logprobs = 0

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """From values of which None means the default, and a logit_bias as OpenAI's API has it (`openai_bias`)."""
        values["logit_bias"] = openai_bias(values.get("logit_bias"))
        return cls(**{name: value for name, value in values.items() if value is not None or name == "max_tokens"})

    def clone(self) -> SamplingParams:
        """An independent copy."""
        twin = copy.copy(self)
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logit_bias", "logprob_token_ids"):
            value = getattr(self, name)
            if isinstance(value, list | dict):
                setattr(twin, name, value.copy())
        return twin

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def verify(self) -> None:
        """Raises InvalidRequestError for the first field whose value cannot be."""
        for name, (low, high, open_low) in _NUMBERS.items():
            _check_number(name, getattr(self, name), low, high, open_low=open_low)
        for name, (low, high, optional) in _INTEGERS.items():
            value = getattr(self, name)
            if not (optional and value is None):
                _check_integer(name, value, low, high)
        for name in _BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "must be True or False")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _bad("output_kind", self.output_kind, "must be a RequestOutputKind")
        if not self.spaces_between_special_tokens:
            raise _bad("spaces_between_special_tokens", False, "is not supported; leave it True")
        self._verify_stops()
        verify_token_rules(self)
        if self.logprob_token_ids is not None:
            verify_token_ids("logprob_token_ids", self.logprob_token_ids)
            if self.logprobs:
                raise _bad("logprobs", self.logprobs, "must be left out with logprob_token_ids, which names the tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", self.min_tokens, f"must not exceed max_tokens, {self.max_tokens}")
        if self.n > 1 and self.temperature < GREEDY_BELOW:
            raise _bad("n", self.n, "must be 1 with greedy sampling (temperature 0): all outputs would be the same")

    def _verify_stops(self) -> None:
        if not isinstance(self.stop, str | list | tuple | None):
            raise _bad("stop", self.stop, "must be a string or a list of strings")
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise _bad("stop", self.stop, "must contain only strings that are not empty")
        if self.stop_strings and not self.detokenize:
            raise _bad("stop", self.stop, "needs detokenize=True: stop strings are found in the text")
        if self.stop_token_ids is not None:
            if not isinstance(self.stop_token_ids, list | tuple):
                raise _bad("stop_token_ids", self.stop_token_ids, "must be a list of token ids")
            for token_id in self.stop_token_ids:
                if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < 2**31:
                    raise _bad(
                        "stop_token_ids", self.stop_token_ids, f"must contain token ids, which {token_id!r} is not"
                    )

    def to_wire(self, max_tokens: int, child: int = 0, bad_words: tuple[tuple[int, ...], ...] = ()) -> Sampling:
        """What the core needs for output `child` of n; `max_tokens` is at most what the model's length allows.

        bad_words: as `token_rules.tokenize_bad_words` gives them.
        """
        seed = self.seed
        if seed is not None:
            seed = (int(seed) + child + 2**63) % 2**64 - 2**63
        return Sampling(
            max_tokens=max_tokens if self.max_tokens is None else min(int(self.max_tokens), max_tokens),
            min_tokens=min(int(self.min_tokens), max_tokens),
            temperature=0.0 if self.temperature < GREEDY_BELOW else min(float(self.temperature), MOST_FLOAT32),
            top_p=float(self.top_p),
            top_k=max(int(self.top_k), 0),
            min_p=float(self.min_p),
            seed=seed,
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
            repetition_penalty=min(float(self.repetition_penalty), MOST_FLOAT32),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logprobs=None if self.logprobs is None else int(self.logprobs),
            prompt_logprobs=None
            if self.prompt_logprobs is None or child
            else int(self.prompt_logprobs),  # the same for every child
            allowed_token_ids=tuple(map(int, self.allowed_token_ids or ())),
            bad_words=bad_words,
            logprob_token_ids=tuple(map(int, self.logprob_token_ids or ())),
            logit_bias={int(token_id): float(bias) for token_id, bias in (self.logit_bias or {}).items()},
        )


_MAX_INT = 2**31 - 1
# field -> (lowest, highest, whether the lowest itself is excluded)
_NUMBERS: Mapping[str, tuple[float, float, bool]] = {
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "repetition_penalty": (0.0, math.inf, True),
    "temperature": (0.0, math.inf, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
}
# field -> (lowest, highest, whether None is allowed)
_INTEGERS: Mapping[str, tuple[int, int, bool]] = {
    "n": (1, 16384, False),
    "top_k": (-1, _MAX_INT, False),
    "seed": (-(2**63), 2**63 - 1, True),
    "max_tokens": (1, _MAX_INT, True),
    "min_tokens": (0, _MAX_INT, False),
    "logprobs": (-1, _MAX_INT, True),
    "prompt_logprobs": (-1, _MAX_INT, True),
}
_BOOLEANS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean ...?`, or a list of what there is when nothing comes near."""
    match = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {match[0]!r}?" if match else f"; the fields are {', '.join(known)}"


def _bad(name: str, value: Any, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"SamplingParams.{name} = {value!r}: {why}")


def _check_number(name: str, value: Any, low: float, high: float, *, open_low: bool) -> None:
    allowed = f"over {low:g}" if open_low else f"at least {low:g}"
    if high != math.inf:
        allowed += f" and at most {high:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _bad(name, value, f"must be a number, {allowed}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond any float
        number = math.inf
    # A NaN fails every comparison, so it is caught here too.
    if not (low < number if open_low else low <= number) or not number <= high or number == math.inf:
        raise _bad(name, value, f"must be {allowed}" + ("" if math.isfinite(number) else ", and finite"))


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _bad(name, value, f"must be an integer of at least {low}")
    if not low <= int(value) <= high:
        raise _bad(name, value, f"must be at least {low} and at most {high}")
