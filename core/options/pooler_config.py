"""`pooler_config`: how a model pools, under vLLM's keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from headrace.ipc.failure import OptionError
from headrace.ipc.struct_types import threadsafe

RETIRED = ("normalize", "softmax", "activation")
"""vLLM's former names of use_activation."""


class PoolerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None means what the model's folder says, and else vLLM's default."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    pooling_type: Literal["LAST", "CLS", "MEAN", "ALL", "STEP"] | None = None
    """seq_pooling_type or tok_pooling_type, whichever has the value."""
    seq_pooling_type: Literal["LAST", "CLS", "MEAN"] | None = None
    tok_pooling_type: Literal["ALL", "STEP"] | None = None
    use_activation: bool | None = None
    """Whether vectors are scaled to length 1."""
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """To how many values vectors are cut if a request does not say."""
    enable_flash_late_interaction: bool = True
    enable_chunked_processing: bool = False
    """Whether a text of more than max_model_len tokens is embedded in chunks, whose vectors are averaged."""
    max_embed_len: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """The most tokens of such a text; None: max_model_len."""
    logit_mean: float | None = None
    """Of a classifier: taken from its logits, before its activation."""
    logit_sigma: float | None = None
    """By which its logits are then divided."""
    step_tag_id: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Of process rewards: the token at whose positions a step ends. Only its values are returned."""
    returned_token_ids: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None
    """Which of each token's values are returned."""

    def __post_init__(self) -> None:
        if self.max_embed_len is not None and not self.enable_chunked_processing:
            raise ValueError("max_embed_len is of enable_chunked_processing, which is not set")
        for name, value in (("logit_mean", self.logit_mean), ("logit_sigma", self.logit_sigma or 1.0)):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} is {value}; a finite number is expected")
        if self.logit_sigma == 0:
            raise ValueError("logit_sigma is 0; logits are divided by it")

    @property
    def tokens(self) -> str | None:
        """The type of pooling for one vector of a prompt."""
        return self.seq_pooling_type or self.pooling_type


def pooler_config_of(given: Mapping[str, Any]) -> PoolerConfig:
    """Raises OptionError that names a wrong key or value and what is allowed."""
    values = dict(given)
    for name in RETIRED:
        if name in values:
            value = values.pop(name)
            if values.setdefault("use_activation", value) != value:
                raise OptionError(f"pooler_config: {name} is the former name of use_activation, and both are given")
    try:
        config = msgspec.convert(values, threadsafe(PoolerConfig))
    except msgspec.ValidationError as error:
        known = ", ".join(PoolerConfig.__struct_fields__)
        raise OptionError(f"pooler_config: {error}; known keys are {known}") from None
    if config.pooling_type is not None and (config.seq_pooling_type or config.tok_pooling_type):
        raise OptionError("pooler_config: pooling_type is given beside seq_pooling_type or tok_pooling_type; give one")
    return config
