"""adapter_config.json, as peft writes it: https://huggingface.co/docs/peft/package_reference/lora."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.executor.checkpoints.expressions import Expressions, check_expression
from headrace.ipc.adapters import CONFIG_NAME, MOST_CONFIG_BYTES
from headrace.ipc.failure import MissingAdapterError, ModelError
from headrace.ipc.process.log import printable
from headrace.ipc.process.regular_files import read_file

MOST_INVOCATION_TOKENS = 128
MOST = 1 << 32
"""Of ranks and factors."""
IDLE = frozenset(
    (
        *("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern"),  # of names
        *("base_model_name_or_path", "revision", "task_type", "auto_mapping", "inference_mode"),
        *("lora_dropout", "fan_in_fan_out", "megatron_config", "megatron_core", "runtime_config", "merge_weights"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),  # of training
        *("qalora_group_size", "ensure_weight_tying", "bias", "lora_bias", "target_parameters"),  # the tensors show it
    )
)
"""Keys that do not matter beside the tensors."""
UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "use_qalora": "QALoRA pools the inputs of groups",
        "use_bdlora": "its factors are block-diagonal",
        "layer_replication": "it repeats layers of the model",
        "arrow_config": "it routes between adapters",
        "kasa_config": "it has a third factor",
        "monteclora_config": "its factors are random",
        "trainable_token_indices": "it replaces single rows of the embedding",
        "enable_lora": "it leaves out parts of fused matrices, as peft did before 0.3",
    }
)
"""Keys that change the computation in a way that is not implemented, unless they are unset."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of init_lora_weights (or their beginnings) with which training starts from a changed base model."""


_NOT_COMPUTED_WITH = ("peft_version", "expressions")
_UNSET: tuple[object, ...] = (None, False, [], {}, "")
"""Values with which a key of another version of peft changes nothing."""


@dataclass(frozen=True)
class AdapterConfig:
    rank: int
    alpha: float
    rslora: bool
    dora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    invocation_tokens: tuple[int, ...]
    peft_version: tuple[int, ...] = ()
    """Empty: the file does not say."""
    expressions: Expressions = field(default_factory=lambda: Expressions("the adapter"), compare=False, repr=False)

    def scaling(self, module: str, rank: int) -> float:
        """By which the product with both factors is multiplied. rank: of the module's factors."""
        alpha = self.alpha_pattern.get(self._pattern_of(self.alpha_pattern, module), self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def rank_of(self, module: str) -> int:
        return self.rank_pattern.get(self._pattern_of(self.rank_pattern, module), self.rank)

    def _pattern_of(self, patterns: Mapping[str, Any], module: str) -> str:
        """The pattern that peft would use for a module: the first that its name ends with."""
        return next((each for each in patterns if self.expressions.matches(_ending(each), module)), "")

    @property
    def canonical(self) -> bytes:
        """What the computation depends on, the same for the same content."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _NOT_COMPUTED_WITH}
        for name in ("rank_pattern", "alpha_pattern"):  # the first that matches applies
            values[name] = list(values[name].items())
        return json.dumps(values, sort_keys=True).encode()


def read_config(folder: Path) -> AdapterConfig:
    """Raises ModelError for a file that is missing or malformed, and for what is not implemented."""
    path = folder / CONFIG_NAME
    try:
        content = json.loads(read_file(path, MOST_CONFIG_BYTES))
    except OSError as error:
        kind, hint = ModelError, ""
        if isinstance(error, FileNotFoundError):
            kind = MissingAdapterError
            below = sorted(each.parent.name for each in folder.glob(f"*/{CONFIG_NAME}"))  # peft's for named adapters
            hint = (
                f"give one of the folders in it that are adapters: {printable(', '.join(below))[:200]}" if below else ""
            )
        raise kind(
            f"the adapter {folder} has no readable {CONFIG_NAME}: {error.strerror or error}", hint=hint
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not an object of keys")
    return config_of(content, path)


def config_of(content: Mapping[str, Any], path: Path) -> AdapterConfig:
    """Raises ModelError for a key or value that is unknown or not implemented."""
    rest = {key: value for key, value in content.items() if key not in IDLE}
    kind = rest.pop("peft_type", None)
    if kind != "LORA":
        raise ModelError(f"{path}: peft_type is {printable(repr(kind))}, and LORA is supported")
    for key, reason in UNSUPPORTED.items():
        if rest.pop(key, None):
            raise ModelError(f"{path}: {key} is not supported: {reason}")
    init = rest.pop("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(CHANGES_BASE):
        raise ModelError(
            f"{path}: init_lora_weights={init!r:.80} is for a base model whose weights were changed",
            hint="peft's save_pretrained(path_initial_model_for_weight_conversion=...) makes it one of the original's",
        )
    rank = _number(path, "r", rest.pop("r", 8), whole=True)
    alpha = _number(path, "lora_alpha", rest.pop("lora_alpha", 8))
    flags = {key: _flag(path, key, rest.pop(key, False)) for key in ("use_rslora", "use_dora")}
    ranks = _patterns(path, "rank_pattern", rest.pop("rank_pattern", None), whole=True)
    alphas = _patterns(path, "alpha_pattern", rest.pop("alpha_pattern", None))
    version = re.match(r"\d+(\.\d+){0,3}", str(rest.pop("peft_version", None)))
    tokens = rest.pop("alora_invocation_tokens", None) or []
    if not isinstance(tokens, list) or not all(type(each) is int and 0 <= each < 1 << 31 for each in tokens):
        raise ModelError(f"{path}: alora_invocation_tokens is a list of token ids, not {printable(repr(tokens))[:80]}")
    if len(tokens) > MOST_INVOCATION_TOKENS:
        raise ModelError(
            f"{path}: alora_invocation_tokens has {len(tokens)} tokens, and at most {MOST_INVOCATION_TOKENS} are "
            "looked for in every prompt"
        )
    if unknown := sorted(str(key) for key, value in rest.items() if value not in _UNSET):
        raise ModelError(f"{path}: unknown keys {printable(', '.join(unknown))[:200]}")
    return AdapterConfig(
        rank=int(rank),
        alpha=alpha,
        rslora=flags["use_rslora"],
        dora=flags["use_dora"],
        rank_pattern={key: int(value) for key, value in ranks.items()},
        alpha_pattern=alphas,
        invocation_tokens=tuple(tokens),
        peft_version=() if version is None else tuple(int(each) for each in version[0].split(".")),
        expressions=Expressions(f"the adapter {path.parent}"),
    )


def _ending(pattern: str) -> str:
    """How peft uses a pattern: for names that end with it."""
    return rf"(.*\.)?({pattern})$"


def _number(path: Path, key: str, value: object, *, whole: bool = False) -> float:
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value <= MOST:
        raise ModelError(
            f"{path}: {key} is {printable(repr(value))[:80]}; a positive number of at most {MOST} is expected"
        )
    return value


def _flag(path: Path, key: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{path}: {key} is {printable(repr(value))[:80]}; true or false is expected")
    return bool(value)


def _patterns(path: Path, key: str, value: object, *, whole: bool = False) -> dict[str, float]:
    if value is not None and not isinstance(value, dict):
        raise ModelError(f"{path}: {key} is {printable(repr(value))[:80]}; an object of patterns is expected")
    found = {}
    for pattern, number in (value or {}).items():
        check_expression(_ending(pattern), pattern, f"{path}: {key}")
        found[pattern] = _number(path, f"{key}[{pattern!r:.80}]", number, whole=whole)
    return found
