"""vLLM's speculative_config: the supported fields, and the engine's settings that they become (`Speculation`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.ipc.failure import OptionError

CPU_STEP_TOKENS, GPU_STEP_TOKENS = 32, 256
"""Most tokens of a step with drafts: computing so many costs little compared with reading the weights once."""
FORCED_CPU_STEP_TOKENS = 8
"""Most tokens of a CPU's step with drafts that grammars force. Every running request may have some in one step, and on
a CPU each token beyond these costs as much as in its own step. Drafting more would end some requests sooner, but only
leave smaller steps to the others."""
LOOKUP_TOKENS = 5
"""vLLM's default of both prompt_lookup_min and prompt_lookup_max."""
MOST_SPECULATIVE_TOKENS = CPU_STEP_TOKENS - 1
SUFFIX_DEPTH = 24
"""vLLM's default of suffix_decoding_max_tree_depth."""
NGRAM_NAMES = ("ngram", "[ngram]")
_METHODS = (
    'the methods are {"method": "ngram", "num_speculative_tokens": 5} (prompt lookup) and {"method": "suffix"} (the '
    "same, and past outputs); those with a draft model, or heads trained for one, are not supported yet"
)


class _Drafted(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of every method."""

    num_speculative_tokens: int
    """Most draft tokens of a request in one step."""
    disable_by_batch_size: int | None = None
    """With more running requests than this, nothing is drafted."""
    most_step_tokens: int = CPU_STEP_TOKENS
    """Drafts are added until a step has so many tokens in all."""

    @property
    def most_running(self) -> int:
        """With more running requests than this, no step has room for drafts, or nothing is to be drafted."""
        most = self.most_step_tokens if self.disable_by_batch_size is None else self.disable_by_batch_size
        return min(self.most_step_tokens - 1, most)


class NgramSpeculation(_Drafted, frozen=True, kw_only=True, tag="ngram"):
    """Draft tokens by prompt lookup; see core/schedule/drafters/ngram.py."""

    prompt_lookup_max: int
    """Longest match that is searched for, in tokens."""
    prompt_lookup_min: int
    """Shortest match that is used, in tokens."""

    @property
    def described(self) -> tuple[str, str]:
        """The decision and its reason, as texts."""
        return (
            f"ngram, at most {self.num_speculative_tokens} draft tokens",
            f"asked for; they follow an earlier run of the last {self.prompt_lookup_min} to {self.prompt_lookup_max} "
            f"tokens, in steps of up to {self.most_step_tokens} tokens",
        )


class SuffixSpeculation(_Drafted, frozen=True, kw_only=True, tag="suffix"):
    """Draft tokens by suffix decoding; see core/schedule/drafters/suffix.py. The fields are vLLM's, without
    `suffix_decoding_`."""

    max_tree_depth: int = SUFFIX_DEPTH
    """A match counts as at most so many tokens long."""
    max_cached_requests: int = 10_000
    """Past outputs that are searched besides a row's own text; 0: none."""
    max_spec_factor: float = 1.0
    """A draft is at most so many times as long as its match."""
    min_token_prob: float = 0.1
    """A draft ends where the estimated probability that all its tokens so far are right is less than this."""

    @property
    def described(self) -> tuple[str, str]:
        return (
            f"suffix, at most {self.num_speculative_tokens} draft tokens",
            f"asked for; they follow earlier runs of the same tokens in the request and in past outputs, in steps of "
            f"up to {self.most_step_tokens} tokens",
        )


Speculation = NgramSpeculation | SuffixSpeculation


def speculation_of(config: Mapping[str, Any], *, on_gpu: bool) -> Speculation | None:
    """Reads `speculative_config`. None if it is empty. Raises OptionError, naming the field."""
    if not config:
        return None
    values = {name: value for name, value in config.items() if value is not None}
    method, model = values.pop("method", None), values.pop("model", None)
    asked = method if method is not None else model
    if asked is None:
        raise OptionError(f"speculative_config names no method; {_METHODS}")
    if asked not in (*NGRAM_NAMES, "suffix"):
        raise OptionError(f"speculative_config has {'model' if method is None else 'method'}={asked!r}; {_METHODS}")
    if model not in (None, asked, *(NGRAM_NAMES if asked in NGRAM_NAMES else ())):
        raise OptionError(f"speculative_config has model={model!r} with method {asked}, which uses no model")
    most_step_tokens = GPU_STEP_TOKENS if on_gpu else CPU_STEP_TOKENS
    read = _suffix if asked == "suffix" else _ngram
    return read(values, most_step_tokens)


def _ngram(values: dict[str, Any], most_step_tokens: int) -> NgramSpeculation:
    known = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size")
    _check_known("ngram", values, known)
    numbers = {name: _number(name, values[name], most) for name, most in _bounds(known) if name in values}
    if "num_speculative_tokens" not in numbers:
        raise OptionError(
            "speculative_config needs num_speculative_tokens, the most tokens to guess at once, such as 5"
        )
    most = numbers.get("prompt_lookup_max", numbers.get("prompt_lookup_min", LOOKUP_TOKENS))
    fewest = numbers.get("prompt_lookup_min", most)
    if fewest > most:
        raise OptionError(f"speculative_config has prompt_lookup_min {fewest}, more than prompt_lookup_max, {most}")
    return NgramSpeculation(
        num_speculative_tokens=numbers["num_speculative_tokens"],
        prompt_lookup_max=most,
        prompt_lookup_min=fewest,
        disable_by_batch_size=numbers.get("disable_by_batch_size"),
        most_step_tokens=most_step_tokens,
    )


def _suffix(values: dict[str, Any], most_step_tokens: int) -> SuffixSpeculation:
    prefix = "suffix_decoding_"
    whole = ("num_speculative_tokens", "disable_by_batch_size", f"{prefix}max_tree_depth")
    known = (*whole, *(prefix + name for name in ("max_cached_requests", "max_spec_factor", "min_token_prob")))
    _check_known("suffix", values, known)
    found: dict[str, Any] = {name: _number(name, values[name], most) for name, most in _bounds(whole) if name in values}
    if (name := f"{prefix}max_cached_requests") in values:
        found[name] = _number(name, values[name], None, fewest=0)
    for name, most in ((f"{prefix}max_spec_factor", None), (f"{prefix}min_token_prob", 1.0)):
        if name in values:
            found[name] = _share(name, values[name], most)
    depth = found.get(f"{prefix}max_tree_depth", SUFFIX_DEPTH)
    found.setdefault("num_speculative_tokens", min(depth, MOST_SPECULATIVE_TOKENS))
    fields = {name.removeprefix(prefix): value for name, value in found.items()}
    return SuffixSpeculation(**fields, most_step_tokens=most_step_tokens)


def _check_known(method: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := sorted(str(each) for each in set(values) - set(known)):
        raise OptionError(
            f"speculative_config has {', '.join(unknown)}, which method {method} does not read; it reads method, "
            f"{', '.join(known[:-1])} and {known[-1]}"
        )


def _bounds(names: Sequence[str]) -> list[tuple[str, int | None]]:
    """The names of whole numbers of at least 1, and the most that each may be."""
    return [(name, MOST_SPECULATIVE_TOKENS if name == "num_speculative_tokens" else None) for name in names]


def _number(name: str, value: Any, most: int | None, fewest: int = 1) -> int:
    try:
        number = None if isinstance(value, bool | float) else int(value)
    except (TypeError, ValueError):
        number = None
    if number is None or number < fewest or (most is not None and number > most):
        bound = f"at least {fewest}" if most is None else f"{fewest} to {most}"
        raise OptionError(f"speculative_config has {name}={value!r}; it must be a whole number, {bound}")
    return number


def _share(name: str, value: Any, most: float | None) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):  # the last: a whole number beyond any float
        number = math.nan
    if not 0 <= number < math.inf or (most is not None and number > most):
        bound = "at least 0" if most is None else f"0 to {most:g}"
        raise OptionError(f"speculative_config has {name}={value!r}; it must be a number, {bound}")
    return number
