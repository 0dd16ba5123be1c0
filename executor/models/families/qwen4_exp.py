"""Qwen4-Exp: Qwen 3.5's layers with experts, on a residual stream of several rows, with features of n-grams in some
layers and attention to pools of keys that an index chooses. Text only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any

from headrace.executor.models.arch import ArchSpec, LayerSpec
from headrace.executor.models.blocks.attention import Attention, as_kind
from headrace.executor.models.blocks.gated_residuals import GatedResiduals
from headrace.executor.models.blocks.linear_attention import DeltaRule
from headrace.executor.models.blocks.ngram_features import NGramDeltaRule, NGramRows
from headrace.executor.models.blocks.pooled_attention import PooledAttention
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import flag, integer, listed_layers, one_of
from headrace.executor.models.families.qwen3_5 import FAMILY as QWEN_3_5
from headrace.executor.models.families.qwen3_next import by_part, hybrid, mixture
from headrace.ipc.failure import ModelError

TABLE = "ple.ple_embedding"
NOT_READ = (r"\.hashstats_", r"\.token_lookup", r"hyper_connection_mixer\.block_inject_weight\.")
"""Of training, which vLLM passes over, too."""
MOST_HASHES = 4096
"""Of all layers together: a prime number is searched for each."""
INDEX = {"index_heads": "indexer_n_heads", "index_dim": "indexer_head_dim", "pool_size": "indexer_compress_ratio"}
"""Fields of `PooledAttention` by their keys."""


def build(config: Config) -> ArchSpec:
    config = {"partial_rotary_factor": 1.0} | config
    if isinstance(given := config.get("layer_types"), list):
        config = config | {"layer_types": ["full_attention" if each == "indexed_attention" else each for each in given]}
    spec = hybrid(config, mixture(config, renormalise=flag(config, "norm_topk_prob", True)), by_part)
    stream = GatedResiduals(spec.hidden_size, integer(config, "hc_count", 4), integer(config, "hc_lowrank", 320))
    gate = one_of(config, "output_gate_type", "silu", "swish", "sigmoid")
    tables, layers = _tables(config, spec), []
    for index, layer in enumerate(spec.layers):
        mixer: Any = layer.mixer
        if isinstance(mixer, Attention):
            mixer = _indexed(config, mixer)
        else:
            assert isinstance(mixer, DeltaRule), "as hybrid builds it"
            mixer = replace(mixer, gate="sigmoid" if gate == "sigmoid" else "silu")
        if (table := tables.get(index)) is not None:
            if not isinstance(mixer, DeltaRule):
                raise ModelError(f"the config's ple_layer_ids has {index + 1}, a layer of attention")
            mixer = NGramDeltaRule(
                **vars(mixer),
                ngrams=table,
                num_rows=stream.num_rows,
                hidden=spec.hidden_size,
                taps=integer(config, "ple_conv_kernel_size", 4),
            )
        layers.append(LayerSpec(mixer, layer.ffn, mixer_norm=False))
    return replace(
        spec,
        layers=tuple(layers),
        stream=stream,
        norm_placement=stream.placement,
        names=replace(spec.names, ignorable=(*spec.names.ignorable, *NOT_READ)),
        final_norm=False,
        sharded=(f"{TABLE}.ngram_embedding",) if tables else (),
    )


def _indexed(config: Config, mixer: Attention) -> Attention:
    """Attention by an index, if the config has one. Raises ModelError."""
    keys = (*INDEX.values(), "indexer_kv_heads", "indexer_budget")
    given = [key for key in keys if config.get(key) is not None]
    if not given:
        return mixer
    if missing := [key for key in keys if key not in given]:
        raise ModelError(f"the config has {given[0]} and no {', '.join(missing)}, which an index needs")
    if (key_heads := integer(config, "indexer_kv_heads")) != 1:
        raise ModelError(f"the config's indexer_kv_heads is {key_heads}; it must be 1")
    own = {name: integer(config, key) for name, key in INDEX.items()}
    budget, size = integer(config, "indexer_budget"), max(1, own["pool_size"])
    if budget % size:
        raise ModelError(f"the config's indexer_budget is {budget}, which pools of {size} tokens do not fill evenly")
    return as_kind(PooledAttention, mixer, num_pools=budget // size, **own)


def _tables(config: Config, spec: ArchSpec) -> dict[int, NGramRows]:
    """The tables of n-grams by layer index. Raises ModelError."""
    layers = sorted(listed_layers(config, "ple_layer_ids", ()))
    if not layers:
        config.pass_over("ple_", "ngram_", "heads_per_ngram", "make_ngram_", "seed", "split_ngram_parts")
        return {}
    if layers[0] < 1 or layers[-1] > spec.num_layers:
        raise ModelError(f"the config's ple_layer_ids must be from 1 to {spec.num_layers}, got {layers}")
    longest, hashes = integer(config, "ngram_size", 3), integer(config, "heads_per_ngram", 8)
    total = (longest - 1) * hashes
    if longest < 2 or hashes < 1 or total * len(layers) > MOST_HASHES:
        raise ModelError(
            f"the config's ngram_size {longest} and heads_per_ngram {hashes} make {total} hashes in each of "
            f"{len(layers)} layers; at least 1 and at most {MOST_HASHES} together can be computed with"
        )
    columns, step = integer(config, "ple_embed_dim", spec.hidden_size), _step(config)
    if columns < 1 or columns % total:
        raise ModelError(f"the config's ple_embed_dim is {columns}; a multiple of its {total} hashes is needed")
    primes = _primes_from(max(2, integer(config, "ngram_vocab_size_base", 20_000_000)))
    end, seed = _end(config), integer(config, "seed", 1234)
    found: dict[int, NGramRows] = {}
    for place, layer in enumerate(layers):
        rows = tuple(islice(primes, total))
        found[layer - 1] = NGramRows(
            at=TABLE,
            hashes=hashes,
            rows=rows,
            stored_rows=-(-sum(rows) // step) * step,
            width=columns // total,
            multipliers=_multipliers(spec.vocab_size, longest, seed + 10007 * place),
            end_id=end,
        )
    return found


def _step(config: Config) -> int:
    step = integer(config, "make_ngram_vocab_size_divisible_by", 128)
    if step < 1:
        raise ModelError(f"the config's make_ngram_vocab_size_divisible_by must be at least 1, got {step}")
    return step


def _end(config: Config) -> int:
    given = config.get("eos_token_id")
    if isinstance(given, list) and given:
        given = given[0]
    if type(given) is not int:
        raise ModelError(f"the config's eos_token_id must be a token, at which n-grams end, got {given!r:.80}")
    return given


def _primes_from(first: int) -> Iterator[int]:
    return (each for each in count(first) if _is_prime(each))


def _is_prime(number: int) -> bool:
    return number == 2 or (number % 2 == 1 and all(number % each for each in range(3, math.isqrt(number) + 1, 2)))


def _multipliers(vocab_size: int, longest: int, seed: int) -> tuple[int, ...]:
    """Odd numbers, by whose products no id leaves int64, drawn by SplitMix64 (Steele et al. 2014)."""
    bound = max(1, ((1 << 63) - 1) // vocab_size // 2)
    step = 0x9E3779B97F4A7C15
    return tuple(2 * (_splitmix64(seed + step * (index + 2)) % bound) + 1 for index in range(longest))


def _splitmix64(state: int) -> int:
    """The output for a state that has been advanced."""
    mask = (1 << 64) - 1
    state &= mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


FAMILY = Family(
    ("Qwen4ExpForCausalLM",),
    build,
    ignored={
        **QWEN_3_5.ignored,
        "split_ngram_parts": "in how many parts a checkpoint stores the tables, which their names show",
        "ple_embedding_dtype": "how a checkpoint stores the tables, which it shows",
        "mtp": "further layers, for multi-token prediction, which are not run",
        "number_of_conv_states": "of caches of transformers",
    },
    assumes={"attn_output_gate": (True,), "hc_per_branch_norm": (True,)},
)
