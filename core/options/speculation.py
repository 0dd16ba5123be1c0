"""vLLM's speculative_config: the supported fields, and the engine's settings that they become (`Speculation`)."""

from __future__ import annotations

from collections.abc import Mapping
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
OTHER_METHODS = (
    "it needs a draft model, or heads trained for one, which is not supported yet; method ngram (prompt lookup) needs "
    'none: {"method": "ngram", "num_speculative_tokens": 5}'
)
NGRAM_NAMES = ("ngram", "[ngram]")


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Draft tokens by prompt lookup; see core/schedule/ngram_drafter.py."""

    num_speculative_tokens: int
    """Most draft tokens of a request in one step."""
    prompt_lookup_max: int
    """Longest match that is searched for, in tokens."""
    prompt_lookup_min: int
    """Shortest match that is used, in tokens."""
    disable_by_batch_size: int | None = None
    """With more running requests than this, nothing is drafted."""
    most_step_tokens: int = CPU_STEP_TOKENS
    """Drafts are added until a step has so many tokens in all."""

    @property
    def described(self) -> tuple[str, str]:
        """The decision and its reason, as texts."""
        return (
            f"ngram, at most {self.num_speculative_tokens} draft tokens",
            f"asked for; they follow an earlier run of the last {self.prompt_lookup_min} to {self.prompt_lookup_max} "
            f"tokens, in steps of up to {self.most_step_tokens} tokens",
        )


def speculation_of(config: Mapping[str, Any], *, on_gpu: bool) -> Speculation | None:
    """Reads `speculative_config`. None if it is empty. Raises OptionError, naming the field."""
    if not config:
        return None
    values = {name: value for name, value in config.items() if value is not None}
    method, model = values.pop("method", None), values.pop("model", None)
    asked = method if method is not None else model
    if asked not in NGRAM_NAMES or model not in (None, *NGRAM_NAMES):
        named = f"method={method!r}" if asked not in NGRAM_NAMES and method is not None else f"model={model!r}"
        if asked is None:
            raise OptionError('speculative_config names no method; there is {"method": "ngram"}')
        raise OptionError(f"speculative_config has {named}, and {OTHER_METHODS}")
    numbers = {
        name: _number(name, values.pop(name), most)
        for name, most in (
            ("num_speculative_tokens", MOST_SPECULATIVE_TOKENS),
            ("prompt_lookup_max", None),
            ("prompt_lookup_min", None),
            ("disable_by_batch_size", None),
        )
        if name in values
    }
    if values:
        raise OptionError(
            f"speculative_config has {', '.join(sorted(values))}, which method ngram does not read; it reads method, "
            "num_speculative_tokens, prompt_lookup_max, prompt_lookup_min and disable_by_batch_size"
        )
    if "num_speculative_tokens" not in numbers:
        raise OptionError(
            "speculative_config needs num_speculative_tokens, the most tokens to guess at once, such as 5"
        )
    most = numbers.get("prompt_lookup_max", numbers.get("prompt_lookup_min", LOOKUP_TOKENS))
    fewest = numbers.get("prompt_lookup_min", most)
    if fewest > most:
        raise OptionError(f"speculative_config has prompt_lookup_min {fewest}, more than prompt_lookup_max, {most}")
    return Speculation(
        num_speculative_tokens=numbers["num_speculative_tokens"],
        prompt_lookup_max=most,
        prompt_lookup_min=fewest,
        disable_by_batch_size=numbers.get("disable_by_batch_size"),
        most_step_tokens=GPU_STEP_TOKENS if on_gpu else CPU_STEP_TOKENS,
    )


def _number(name: str, value: Any, most: int | None) -> int:
    try:
        number = None if isinstance(value, bool | float) else int(value)
    except (TypeError, ValueError):
        number = None
    if number is None or number < 1 or (most is not None and number > most):
        bound = "at least 1" if most is None else f"1 to {most}"
        raise OptionError(f"speculative_config has {name}={value!r}; it must be a whole number, {bound}")
    return number
