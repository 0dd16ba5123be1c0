"""Reads a checkpoint's scales for an fp8 KV cache: per layer one for keys and one for values, or one for each head of
both (llm-compressor's `attn_head`)."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.executor.checkpoints.weights import Weights, WeightSource
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.kv_cache import LayerScales
from headrace.ipc.failure import ModelError

logger = logging.getLogger(__name__)

OF_CACHE = re.compile(r"\.(q|k|v|kv|prob|attn)_(scale|zero_point)$|_proj\.output_scale$")
"""Tensors of a quantised cache and its attention."""
KEYS = re.compile(r"\.(k|kv)_scale$|\bk_proj\.output_scale$")
VALUES = re.compile(r"\.(v|kv)_scale$|\bv_proj\.output_scale$")


def without_cache_scales(source: WeightSource) -> Weights:
    """Float weights without the tensors of a quantised cache."""
    weights = Weights.of(source)
    gone = frozenset(name for name in weights.names() if OF_CACHE.search(name))
    return weights.then("scales of a quantised cache left aside", frozenset(), weights.stored, gone)


def cache_scales(source: WeightSource, spec: ArchSpec, quantization: Mapping[str, Any]) -> tuple[LayerScales, ...]:
    """The scales of each layer. Empty if the checkpoint has none, or lacks those of some layer's keys or values, which
    is logged, or if they are of another type of cache. quantization: the quantization_config.

    Raises ModelError for a scale that is not a positive number.
    """
    held = sorted(name for name in source.names() if OF_CACHE.search(name))
    if not held or spec.has_states:
        return ()
    inner = quantization.get("quantization")
    given = [each.get("kv_cache_quant_algo") for each in (quantization, inner) if isinstance(each, Mapping)]
    if others := [each for each in given if each not in (None, "FP8")]:
        logger.warning("the checkpoint's scales of a %s cache have no effect: only an fp8 cache has some", others[0])
        return ()
    prefix = spec.names.prefix_in(source.names())
    starts = [spec.names.layer(prefix, index) for index in range(spec.num_layers)]
    found: list[LayerScales] = []
    for index, layer in enumerate(spec.layers):
        if (cache := layer.mixer.cache) is None:  # neither keys nor values
            found.append(((1.0,), (1.0,)))
            continue
        start, heads = starts[index if layer.cache_of is None else layer.cache_of], cache.num_heads
        own = [name for name in held if name.startswith(start)]
        pair = _scale(source, own, KEYS, heads), _scale(source, own, VALUES, heads)
        if pair[0] is None or pair[1] is None:
            logger.warning(
                "the checkpoint's scales of a quantised cache (%s ...) have no effect, as there is not one number or "
                "one for each of %d heads for the keys and for the values of %s: scales are taken from what is written",
                held[0],
                heads,
                start.rstrip("."),
            )
            return ()
        found.append((pair[0], pair[1]))
    return tuple(found)


def _scale(source: WeightSource, names: Sequence[str], kind: re.Pattern[str], heads: int) -> tuple[float, ...] | None:
    name = next((name for name in names if kind.search(name)), None)
    if name is None:
        return None
    found = source.get(name).float().flatten()
    if len(found) not in (1, heads):
        return None
    if not bool((found.isfinite() & (found > 0)).all()):
        said = ", ".join(f"{scale}" for scale in found.tolist())
        raise ModelError(f"the scale of a quantised cache {name} is {said}; a number above 0 is expected")
    return tuple(found.tolist())
