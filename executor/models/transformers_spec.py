"""Derives the `ArchSpec` of a model that transformers computes: its sizes, and what its attention caches per token.

Only the model's code describes it. So the model is built on the meta device, where weights take no memory, and computes
two tokens there; the arguments of its attention calls give the number and size of heads, and what it requires besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.executor.models.arch import ArchSpec, LayerSpec, NormSpec, RopeSpec, TokenCache
from headrace.executor.models.blocks import Declared, Ffn, Mixer, Weight
from headrace.ipc.failure import ModelError, OptionError
from headrace.ipc.process.deferred_imports import import_deferred

ATTENTION = "headrace"
"""The name of Headrace's attention in transformers' table of attention functions."""
BINDING = "_headrace_attention"
"""The attribute of an attention module that holds the function that its attention calls."""


class ForeignError(ModelError):
    """Transformers' code cannot compute a model in this engine; the message gives the reason."""


@dataclass(frozen=True)
class ForeignAttention(Mixer):
    """An attention layer of transformers' code."""

    module: str
    """The attention module's name in the model."""
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    sliding_window: int | None
    rope: RopeSpec | None = None

    @property
    def head_dim(self) -> int:
        """Head size in the cache: keys and values are padded to the larger of their sizes."""
        return max(self.key_size, self.value_size)

    @property
    def cache(self) -> TokenCache:
        return TokenCache(self.num_kv_heads, self.head_dim, self.head_dim)

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        return {}

    def for_ranks(self, tp_size: int, inner_block: int) -> ForeignAttention:
        if tp_size > 1:
            raise OptionError(
                f"tensor_parallel_size={tp_size} does not apply to a model that transformers computes, which runs on "
                "one rank"
            )
        return self

    def values_per_token(self, tp_size: int) -> int:
        return 4 * (self.num_heads + self.num_kv_heads) * self.head_dim

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return "it is transformers' code that computes it."


@dataclass(frozen=True)
class ForeignFfn(Ffn):
    inner: int

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        return {}

    def values_per_token(self, tp_size: int) -> int:
        return 4 * self.inner


def foreign_spec(config: Any, trust_remote_code: bool, *, has_head: bool = True) -> ArchSpec:
    """The spec of a transformers configuration's model. has_head: it generates; else its states are pooled alone.
    Raises ForeignError, with the reason, if it cannot run here."""
    _check_config(config)
    model = _on_meta(config, trust_remote_code, has_head=has_head)
    recorder = _Recorder({id(module): name for name, module in model.named_modules()}, config)
    for module in model.modules():
        setattr(module, BINDING, recorder)
    try:
        with torch.inference_mode(), torch.device("meta"):
            ids = torch.zeros(1, 2, dtype=torch.long)
            output = model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False)
            vocab_size = output.logits.shape[-1] if has_head else config.vocab_size
    except ForeignError:
        raise
    except Exception as error:  # whatever the model's code does
        raise ForeignError(f"its code cannot be followed: {type(error).__name__}: {_first_line(error)}") from error
    if not recorder.layers:
        raise ForeignError("its attention does not go through transformers' table of attention functions")
    if (expected := getattr(config, "num_hidden_layers", None)) and len(recorder.layers) != expected:
        raise ForeignError(f"attention is called {len(recorder.layers)} times for {expected} layers")
    inner = getattr(config, "intermediate_size", None)
    ffn = ForeignFfn(inner if isinstance(inner, int) and inner > 0 else 4 * config.hidden_size)
    parameters = {id(each): (name, each) for name, each in reversed(list(model.named_parameters()))}
    return ArchSpec(
        architecture=type(model).__name__,
        hidden_size=config.hidden_size,
        vocab_size=vocab_size,
        has_head=has_head,
        max_positions=getattr(config, "max_position_embeddings", None) or 2048,
        layers=tuple(LayerSpec(mixer, ffn) for mixer in recorder.layers),
        norm=NormSpec("rms", 1e-6),
        foreign=tuple(Weight(name, tuple(each.shape), "matrix") for name, each in reversed(parameters.values())),
    )


def _check_config(config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ForeignError("it has an encoder")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ForeignError(f"it has layers of type {', '.join(sorted(map(str, kinds)))}")
    if getattr(config, "quantization_config", None):
        raise ForeignError("its weights are quantised")
    if named := {"dynamic", "longrope"} & set(_rope_types(getattr(config, "rope_parameters", None) or {})):
        raise ForeignError(f"its {named.pop()} rotation depends on what else is in a batch")


def _rope_types(parameters: Mapping[str, Any]) -> list[str]:
    found = [str(parameters.get("rope_type") or parameters.get("type") or "default")]
    for nested in parameters.values():
        if isinstance(nested, Mapping):
            found += _rope_types(nested)
    return found


def auto_class(*, has_head: bool) -> Any:
    """transformers' class that makes a model of its configuration."""
    from transformers import AutoModel, AutoModelForCausalLM

    return AutoModelForCausalLM if has_head else AutoModel


def _on_meta(config: Any, trust_remote_code: bool, *, has_head: bool) -> Any:
    register()
    try:
        with torch.device("meta"):
            model = auto_class(has_head=has_head).from_config(
                config, attn_implementation=ATTENTION, trust_remote_code=trust_remote_code
            )
        model.eval()
        if model._is_stateful:
            raise ForeignError("it keeps a state that is no attention's")
        if model._can_set_experts_implementation():
            model.set_experts_implementation("batched_mm")  # the only one whose shapes do not depend on values
    except ForeignError:
        raise
    except Exception as error:  # whatever the model's code does
        raise ForeignError(f"{type(error).__name__}: {_first_line(error)}") from error
    return model


def _first_line(error: Exception) -> str:
    """transformers goes on with lists of all that it knows."""
    return str(error).partition("\n")[0][:300]


def register() -> None:
    """Adds `ATTENTION` to transformers' table of attention functions. It calls the module's `BINDING`.

    Call before a model of transformers is made."""
    import_deferred()
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, size], key and value [1, kv heads, tokens, size] -> [1, tokens, heads, size of value]"""
    binding = getattr(module, BINDING, None)
    if binding is None:
        raise ForeignError(f"{type(module).__name__} calls attention that two tokens did not call")
    return binding(module, query, key, value, attention_mask, **kwargs), None


class _Recorder:
    """Replaces attention on the meta device and records each call as a `ForeignAttention`."""

    def __init__(self, names: Mapping[int, str], config: Any) -> None:
        self.layers: list[ForeignAttention] = []
        self._names, self._config = names, config

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Tensor:
        name = self._names[id(module)]
        if mask is not None:  # transformers makes none for an attention function that it does not know
            raise ForeignError(f"{name} makes a mask of its own")
        if name in {layer.module for layer in self.layers}:
            raise ForeignError(f"{name} attends more than once")
        if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
            raise ForeignError(f"{name} is not causal")
        if key.shape[2] != query.shape[2]:
            raise ForeignError(f"{name} attends to other tokens than its own sequence's")
        for known in ("s_aux", "position_bias", "head_mask", "alibi", "block_mask"):
            if kwargs.get(known) is not None:
                raise ForeignError(f"{name} asks attention for {known}")
        index = len(self.layers)
        types = getattr(self._config, "layer_types", None) or ()
        window = kwargs.get("sliding_window")
        if window is None and index < len(types) and types[index] == "sliding_attention":
            window = self._config.sliding_window
        self.layers.append(
            ForeignAttention(name, query.shape[1], key.shape[1], query.shape[3], value.shape[3], window or None)
        )
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
