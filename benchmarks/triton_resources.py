"""Registers, spills and shared memory of every Triton kernel on sm_80 and sm_90, without a GPU.

`python benchmarks/triton_resources.py` compiles the launches of the entry points for the shapes of real models and
writes `results/triton_resources.json`. A launch whose digest (`triton_compile.digest_of`) is already recorded there, by
the same version of Triton, is not compiled again. `--all` compiles everything. `--only WORD` prints the launches whose
case contains the word, and writes nothing. `--out FILE` uses another record: `results/triton_resources_3_6.json` is
that of the oldest supported Triton, which spills sooner.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import triton
from report import write_report
from torch import Tensor
from triton_compile import LaunchRecord, Resources, compile_launch, digest_of, record

from headrace.kernels.low_rank import SlotLimits, SlottedTokens
from headrace.kernels.reference.attention import AttentionParams, CacheScales, PagedBatch
from headrace.kernels.reference.decode import RowsState
from headrace.kernels.reference.latent import LatentUp
from headrace.kernels.reference.linear_attention import LinearAttentionParams
from headrace.kernels.reference.moe import QuantisedStack
from headrace.kernels.reference.rotary_cache import LayerCache, Rotation
from headrace.kernels.reference.sampling import DeviceDraws, LogitChanges, Penalties
from headrace.kernels.reference.states import ConvolveParams, KeptUnits, LayerState, ScanParams, StateBatch
from headrace.kernels.triton import (
    activation,
    attention,
    convolve,
    decode,
    embedding,
    latent,
    linear,
    linear_attention,
    logits,
    logprobs,
    low_rank,
    moe,
    norms,
    rotary_cache,
    sampling,
    scan,
)

RESULTS = Path(__file__).parent / "results" / "triton_resources.json"
ARCHITECTURES = (80, 90)
VOCABULARY = 128_256
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT32, INT64 = torch.int32, torch.int64
Run = Callable[[], Any]


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor of this shape without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def batch_of(num_tokens: int, num_seqs: int) -> PagedBatch:
    """A batch of decodes if there are as many tokens as sequences."""
    return PagedBatch(
        query_start=meta(num_seqs + 1, dtype=INT32),
        seq_lens=meta(num_seqs, dtype=INT32),
        block_tables=meta(num_seqs, 512, dtype=INT32),
        slot_mapping=meta(num_tokens, dtype=INT64),
        block_size=16,
        max_query_len=1 if num_tokens == num_seqs else None,
    )


def attend(
    heads: tuple[int, int, int],
    num_tokens: int,
    num_seqs: int,
    stored: torch.dtype = BF16,
    dtype: torch.dtype = BF16,
    **options: Any,
) -> Run:
    """heads: query heads, key/value heads, values of each."""
    num_heads, num_kv_heads, head_dim = heads
    cache = meta(1000, num_kv_heads, 16, head_dim, dtype=stored)
    if options.pop("row_scales", False):
        rows = meta(1000, num_kv_heads, 16, dtype=FP32)
        scales = CacheScales(keys=rows, values=rows)
    elif options.pop("head_scales", False):
        each = meta(num_kv_heads, dtype=FP32)
        scales = CacheScales(each, each)
    else:
        scales = CacheScales()
    params = AttentionParams(head_dim**-0.5, **options)
    query = meta(num_tokens, num_heads, head_dim, dtype=dtype)
    return lambda: attention.paged_attention(query, cache, cache, batch_of(num_tokens, num_seqs), params, scales)


LLAMA, GEMMA, QWEN = (32, 8, 128), (16, 8, 256), (14, 2, 64)
"""Heads of Llama-3.1-8B, Gemma-2-9B and Qwen2.5-0.5B."""


def attention_cases() -> dict[str, Run]:
    return {
        "attention Llama decode": attend(LLAMA, 256, 256),
        "attention Llama decode of one": attend(LLAMA, 1, 1),
        "attention Llama mixed": attend(LLAMA, 8192, 64),
        "attention Llama fp8 cache": attend(LLAMA, 8192, 64, torch.float8_e4m3fn),
        "attention Llama int8 cache, a scale per row": attend(LLAMA, 8192, 64, torch.int8, row_scales=True),
        "attention Llama e5m2 cache, a scale per head": attend(LLAMA, 8192, 64, torch.float8_e5m2, head_scales=True),
        "attention Llama decode, e5m2 cache, a scale per head": attend(
            LLAMA, 256, 256, torch.float8_e5m2, head_scales=True
        ),
        "attention Llama float16": attend(LLAMA, 8192, 64, torch.float16, torch.float16),
        "attention Llama float32": attend(LLAMA, 8192, 64, FP32, FP32),
        "attention Llama invariant": attend(LLAMA, 8192, 64, batch_invariant=True),
        "attention Gemma window and cap": attend(GEMMA, 8192, 64, sliding_window=4096, soft_cap=50.0),
        "attention Gemma invariant": attend(GEMMA, 8192, 64, batch_invariant=True),
        "attention Qwen mixed": attend(QWEN, 8192, 64),
        "attention 512 wide heads": attend((8, 4, 512), 8192, 64),
        "attention gpt-oss mixed": attend((64, 8, 64), 8192, 64, sinks=meta(64, dtype=FP32), sliding_window=128),
        "attention gpt-oss decode of one": attend((64, 8, 64), 1, 1, sinks=meta(64, dtype=FP32)),
    }


def attend_latent(
    num_heads: int, num_tokens: int, num_seqs: int, stored: torch.dtype = BF16, dtype: torch.dtype = BF16
) -> Run:
    """With DeepSeek's sizes: vectors of 512 and 64 values."""
    up = LatentUp(meta(num_heads, 128, 512, dtype=dtype), meta(num_heads, 512, 128, dtype=dtype))
    query, cache = meta(num_tokens, num_heads, 192, dtype=dtype), meta(1000, 1, 16, 576, dtype=stored)
    rows = meta(1000, 1, 16, dtype=FP32) if stored.itemsize == 1 else None
    batch, params = batch_of(num_tokens, num_seqs), AttentionParams(192**-0.5)
    return lambda: latent.latent_attention(query, up, cache, batch, params, CacheScales(keys=rows, values=rows))


def latent_cases() -> dict[str, Run]:
    return {
        "latent V3 decode": attend_latent(128, 256, 256),
        "latent V2 Lite decode of one": attend_latent(16, 1, 1),
        "latent V3 mixed": attend_latent(128, 8192, 64),
        "latent V2 Lite fp8 cache": attend_latent(16, 8192, 64, torch.float8_e4m3fn),
        "latent V2 Lite e5m2 cache": attend_latent(16, 8192, 64, torch.float8_e5m2),
        "latent V2 Lite int8 cache": attend_latent(16, 8192, 64, torch.int8),
        "latent V2 Lite float32": attend_latent(16, 8192, 64, FP32, FP32),
    }


def row_cases() -> dict[str, Run]:
    query, key, value = meta(64, 48, 128).split((32, 8, 8), dim=1)
    rotation = Rotation(meta(64, 64, dtype=FP32), meta(64, 64, dtype=FP32))
    normed = Rotation(
        rotation.cos, rotation.sin, query_norm=meta(128, dtype=FP32), key_norm=meta(128, dtype=FP32), eps=1e-6
    )
    cache, fp8 = meta(1000, 8, 16, 128), meta(1000, 8, 16, 128, dtype=torch.float8_e4m3fn)
    e5m2, heads = meta(1000, 8, 16, 128, dtype=torch.float8_e5m2), meta(8, dtype=FP32)
    batch = batch_of(64, 64)
    return {
        "rms_norm 4096": lambda: norms.rms_norm(meta(64, 4096), meta(64, 4096), meta(4096, dtype=FP32), 1e-5),
        "layer_norm 8192": lambda: norms.layer_norm(
            meta(64, 8192), None, meta(8192, dtype=FP32), meta(8192, dtype=FP32), 1e-5
        ),
        "rotary": lambda: rotary_cache.rotary(query, key, meta(64, 64, dtype=FP32), meta(64, 64, dtype=FP32)),
        "rotary_and_write": lambda: rotary_cache.rotary_and_write(
            query, key, value, rotation, LayerCache(cache, cache), batch
        ),
        "rotary_and_write with q/k norm, fp8": lambda: rotary_cache.rotary_and_write(
            query, key, value, normed, LayerCache(fp8, fp8), batch
        ),
        "rotary_and_write, e5m2, a scale per head": lambda: rotary_cache.rotary_and_write(
            query, key, value, rotation, LayerCache(e5m2, e5m2, CacheScales(heads, heads)), batch
        ),
        "activate_and_multiply silu": lambda: activation.activate_and_multiply(meta(64, 2 * 14336), "silu"),
        "activate_and_multiply gelu_tanh": lambda: activation.activate_and_multiply(meta(64, 2 * 14336), "gelu_tanh"),
        "activate gelu": lambda: activation.activate(meta(64, 4096), "gelu"),
        "activate relu": lambda: activation.activate(meta(64, 4096), "relu"),
        "decode_inputs": lambda: decode.decode_inputs(
            meta(64, dtype=INT32), RowsState(meta(1, 257, 8192, dtype=INT32), *[meta(257, dtype=INT32)] * 3), 16, 8192
        ),
        "embed": lambda: embedding.embed(meta(64, dtype=INT64), meta(VOCABULARY // 2, 4096), VOCABULARY // 2, 1.5),
    }


def sampling_cases() -> dict[str, Run]:
    rows = meta(64, VOCABULARY, dtype=FP32)
    one, whole = meta(64, dtype=FP32), meta(64, dtype=INT32)
    wide = meta(64, dtype=torch.float64)
    bits = meta(64, -(-VOCABULARY // 32), dtype=INT32)
    counts = meta(64, VOCABULARY, dtype=INT32)
    uncounted, counted = (Penalties(bits, bits, found, one, one, one) for found in (None, counts))
    seeds = meta(64, dtype=INT64)
    return {
        "choose_tokens greedy": lambda: sampling.choose_tokens(
            rows, DeviceDraws(one, whole, wide, wide, seeds, whole, may_draw=False)
        ),
        "choose_tokens random": lambda: sampling.choose_tokens(
            rows, DeviceDraws(one, whole, wide, wide, seeds, whole, may_truncate=False)
        ),
        "choose_tokens truncated": lambda: sampling.choose_tokens(
            rows, DeviceDraws(one, whole, wide, wide, seeds, whole)
        ),
        "adjust_logits, masks": lambda: logits.adjust_logits(rows, LogitChanges(seeds, bits)),
        "adjust_logits, penalties": lambda: logits.adjust_logits(rows, LogitChanges(seeds, bits, uncounted)),
        "adjust_logits, counts": lambda: logits.adjust_logits(rows, LogitChanges(seeds, bits, counted)),
        "token_logprobs of 5": lambda: logprobs.token_logprobs(rows, seeds, 5),
        "token_logprobs of 20": lambda: logprobs.token_logprobs(rows, seeds, 20),
        "token_logprobs alone": lambda: logprobs.token_logprobs(rows, seeds, 0),
    }


def multiply(pack: Callable[[], Any], num_rows: int) -> Run:
    """Packs within the run, where the device is known."""
    return lambda: pack().apply(meta(num_rows, 4096))


def multiply_fused(pack: Callable[[], Any], num_rows: int, **around: Any) -> Run:
    """around: the ops fused with the matrix, see `linear_small.Around`."""
    return lambda: pack().apply_fused(meta(num_rows, 4096), **around)


def linear_cases() -> dict[str, Run]:
    shape, int8, byte, one = (6144, 4096), torch.int8, torch.uint8, (6144, 1)
    small, large = (6144, 128), (6144, 32)
    kinds = {
        "linear_int8": lambda: linear.linear_int8(meta(*shape, dtype=int8), meta(*one, dtype=FP32), None),
        "linear_int8 in groups of 32": lambda: linear.linear_int8(
            meta(*shape, dtype=int8), meta(*small, dtype=FP16), None
        ),
        "linear_int8 in groups of 128": lambda: linear.linear_int8(
            meta(*shape, dtype=int8), meta(*large, dtype=FP16), None
        ),
        "linear_int4 in groups of 32": lambda: linear.linear_int4(
            meta(6144, 2048, dtype=byte), meta(*small, dtype=FP16), meta(6144, 128, dtype=FP32), None
        ),
        "linear_int4 in groups of 128": lambda: linear.linear_int4(
            meta(6144, 2048, dtype=byte), meta(*large, dtype=FP16), meta(6144, 32, dtype=FP32), None
        ),
        "linear_fp8": lambda: linear.linear_fp8(
            meta(*shape, dtype=torch.float8_e4m3fn), meta(*one, dtype=FP32), meta(6144)
        ),
    }

    def fp8_dynamic() -> Any:
        return linear.linear_fp8_dynamic(meta(*shape, dtype=torch.float8_e4m3fn), meta(*one, dtype=FP32), None)

    cases = {
        f"{name}, {rows} tokens": multiply(pack, rows) for name, pack in kinds.items() for rows in (1, 16, 64, 4096)
    }
    scaled = {f"linear_fp8_dynamic, {rows} tokens": multiply(fp8_dynamic, rows) for rows in (1, 16)}
    dense = {f"linear, {rows} tokens": multiply(lambda: linear.linear(meta(*shape), None), rows) for rows in (1, 2, 4)}
    norm = (meta(4096, dtype=FP32), 1e-5)

    def dense_weight() -> Any:
        return linear.linear(meta(*shape), None)

    fused = {
        "linear after a norm": multiply_fused(dense_weight, 1, norm=norm),
        "linear after a norm, 4 tokens": multiply_fused(dense_weight, 4, norm=norm),
        "linear before an activation": multiply_fused(dense_weight, 1, norm=norm, activation="silu"),
        "linear before an addition": multiply_fused(dense_weight, 1, residual=meta(1, 6144)),
        "linear_fp8_dynamic after a norm, before an activation": multiply_fused(
            fp8_dynamic, 1, norm=norm, activation="silu"
        ),
        "linear_int4 after a norm": multiply_fused(kinds["linear_int4 in groups of 32"], 1, norm=norm),
        "linear of few rows of weights": lambda: linear.linear(meta(1024, 4096), None).apply(meta(1, 4096)),
    }
    invariant = multiply(lambda: linear.linear(meta(*shape), None, batch_invariant=True), 64)
    return {
        **cases,
        **scaled,
        **dense,
        **fused,
        "linear, invariant": invariant,
        "round_tokens": lambda: linear.round_tokens(meta(64, 4096)),
    }


def moe_cases() -> dict[str, Run]:
    """With the sizes of Qwen3-30B-A3B: 128 experts, 8 of them per token."""

    def apply(num_rows: int, pack: Callable[[int, int], Any], **options: Any) -> Run:
        x, ids, weights = meta(num_rows, 2048), meta(num_rows, 8, dtype=INT32), meta(num_rows, 8, dtype=FP32)
        return lambda: moe.experts(pack(1536, 2048), pack(2048, 768), "silu", **options).apply(x, ids, weights)

    def dense(rows: int, columns: int) -> Tensor:
        return meta(128, rows, columns)

    def int8(rows: int, columns: int) -> QuantisedStack:
        return QuantisedStack(meta(128, rows, columns, dtype=torch.int8), meta(128, rows, columns // 32, dtype=FP16))

    def int4(rows: int, columns: int, group: int = 128) -> QuantisedStack:
        scales = meta(128, rows, columns // group, dtype=FP16)
        return QuantisedStack(meta(128, rows, columns // 2, dtype=torch.uint8), scales, scales.float())

    cases = {
        f"experts, {name}, {rows} tokens": apply(rows, pack)
        for name, pack in (("dense", dense), ("int8", int8), ("int4", int4))
        for rows in (1, 512)
    }
    cases["experts, int4 in groups of 32, 512 tokens"] = apply(512, functools.partial(int4, group=32))
    logits = meta(64, 128)

    def clamped(num_rows: int) -> Run:
        """With the sizes of gpt-oss 20B: 32 experts, 4 of them per token."""
        x, ids, weights = meta(num_rows, 2880), meta(num_rows, 4, dtype=INT32), meta(num_rows, 4, dtype=FP32)
        biases = meta(32, 5760, dtype=FP32), meta(32, 2880, dtype=FP32)
        return lambda: moe.experts(meta(32, 5760, 2880), meta(32, 2880, 2880), "clamped_silu", biases).apply(
            x, ids, weights
        )

    return {
        **cases,
        "experts, clamped with biases, 1 token": clamped(1),
        "experts, clamped with biases, 512 tokens": clamped(512),
        "experts, invariant": apply(64, dense, batch_invariant=True),
        "route_experts": lambda: moe.route_experts(logits, top_k=8, scoring="softmax", renormalise=True),
        "route_experts by sparsemixer": lambda: moe.route_experts(
            meta(256, 16), top_k=2, scoring="sparsemixer", renormalise=False, margin=0.02
        ),
        "route_experts with a bias": lambda: moe.route_experts(
            logits, top_k=8, scoring="sigmoid", renormalise=True, bias=meta(128, dtype=FP32)
        ),
    }


def adapter_cases() -> dict[str, Run]:
    """Of the joined projections of Llama-3.1-8B, with 8 adapters of rank 16."""
    limits = SlotLimits(BF16, 8, 2, 16)

    def added(num_tokens: int, most_used: int) -> Run:
        deltas = low_rank.TritonDeltas(limits, 6144, 4096, 3, None, torch.device("meta"))

        def run() -> Tensor:
            use = meta(num_tokens, dtype=INT32), meta(num_tokens, dtype=FP32)
            return deltas.added(meta(num_tokens, 4096), meta(num_tokens, 6144), SlottedTokens((use,) * most_used))

        return run

    return {"adapters, 8 tokens": added(8, 1), "adapters, 4096 tokens": added(4096, 1), "two adapters": added(64, 2)}


def states_of(
    units: int, shape: tuple[int, ...], num_tokens: int, num_seqs: int, stored: torch.dtype = FP32
) -> tuple[StateBatch, LayerState]:
    """A layer's states, and what a step of decodes needs of them if there are as many tokens as sequences."""
    kept = KeptUnits(meta(1000, 65536, dtype=stored), meta(units, dtype=INT64), meta(units, dtype=INT64), shape)
    state = LayerState({"history": kept, "state": kept}, meta(257, 4, 16384, dtype=FP32))
    starts, rows, pages = meta(num_seqs + 1, dtype=INT32), meta(num_seqs, dtype=INT32), meta(num_seqs, 3, dtype=INT32)
    longest = 1 if num_tokens == num_seqs else 512
    return StateBatch(starts, rows, pages, pages, rows, rows, rows, starts, rows, pages, longest), state


def convolve_of(channels: int, width: int, num_tokens: int, num_seqs: int, *, gated: bool, **options: Any) -> Run:
    """gated: as in LFM2; else as in Mamba."""
    weight = meta(channels, width, dtype=FP32)
    params = ConvolveParams(weight, None if gated else meta(channels, dtype=FP32), None if gated else "silu", gated)
    states = states_of(width - 1, (channels,), num_tokens, num_seqs, **options)
    x = meta(num_tokens, channels * (3 if gated else 1))
    return lambda: convolve.convolve(x, params, *states)


def scan_of(sizes: tuple[int, int, int, int], num_tokens: int, num_seqs: int, **options: Any) -> Run:
    """sizes: heads, their size, size of the state, groups."""
    heads, head_dim, size, groups = sizes
    each = meta(heads, dtype=FP32)
    params = ScanParams(each, each, each, (0.0, math.inf), heads, head_dim, size, groups, 0)
    states = states_of(heads, (head_dim, size), num_tokens, num_seqs, **options)
    inner = heads * head_dim
    mixed, steps, gate = (meta(num_tokens, columns) for columns in (inner + 2 * groups * size, heads, inner))
    return lambda: scan.scan(mixed, steps, gate, params, *states)


def linear_attention_of(
    num_heads: int, decays: int, num_tokens: int, num_seqs: int, *, is_delta: bool = True, **options: Any
) -> Run:
    """Heads of 128 values, half as many of keys; decays: columns of each head."""
    params = LinearAttentionParams(
        num_heads=num_heads,
        num_key_heads=num_heads // 2,
        key_of_head=meta(num_heads, dtype=INT64),
        key_dim=128,
        value_dim=128,
        decay=meta(num_heads, dtype=FP32),
        decay_bias=meta(num_heads * decays, dtype=FP32) if decays else None,
        correction=1.0 if is_delta else 0.0,
        unit_keys=is_delta,
        scale=128**-0.5,
        decay_floor=0.0,
        first_draft_element=0,
    )
    states = states_of(num_heads, (128, 128), num_tokens, num_seqs, **options)
    mixed, each, rates = (meta(num_tokens, n) for n in (sum(params.parts), num_heads * decays, num_heads))
    given = each if decays else None, rates if is_delta else None
    return lambda: linear_attention.linear_attention(mixed, *given, params, *states)


MAMBA2, NEMOTRON = (32, 64, 128, 1), (128, 64, 128, 8)
"""Of Mamba2-370M and Nemotron-H-8B."""


def state_cases() -> dict[str, Run]:
    return {
        "scan Mamba2 decode": scan_of(MAMBA2, 256, 256),
        "scan Mamba2 mixed": scan_of(MAMBA2, 8192, 64),
        "gated delta Qwen3-Next decode": linear_attention_of(32, 1, 256, 256),
        "gated delta Qwen3-Next mixed": linear_attention_of(32, 1, 8192, 64),
        "gated delta Qwen3-Next mixed, states of 16 bits": linear_attention_of(32, 1, 8192, 64, stored=BF16),
        "delta with decays of channels, mixed": linear_attention_of(32, 128, 8192, 64),
        "lightning attention mixed": linear_attention_of(64, 0, 8192, 64, is_delta=False),
        "scan Nemotron-H mixed, states of 16 bits": scan_of(NEMOTRON, 8192, 64, stored=BF16),
        "convolve LFM2 decode": convolve_of(2048, 3, 256, 256, gated=True),
        "convolve LFM2 mixed": convolve_of(2048, 3, 8192, 64, gated=True),
        "convolve LFM2 mixed, states of 16 bits": convolve_of(2048, 3, 8192, 64, gated=True, stored=BF16),
        "convolve Mamba decode": convolve_of(5376, 4, 256, 256, gated=False),
        "convolve Mamba mixed": convolve_of(5376, 4, 8192, 64, gated=False),
    }


def all_cases() -> Mapping[str, Run]:
    kinds = (
        attention_cases,
        latent_cases,
        row_cases,
        sampling_cases,
        linear_cases,
        moe_cases,
        adapter_cases,
        state_cases,
    )
    return MappingProxyType({name: run for cases in kinds for name, run in cases().items()})


def launches() -> Iterator[tuple[str, int, LaunchRecord]]:
    """The name, architecture and launches of every case on every architecture."""
    for name, run in all_cases().items():
        for architecture in ARCHITECTURES:
            for launch in record(run, architecture):
                yield name, architecture, launch


def recorded(path: Path) -> dict[str, dict[str, Any]]:
    """The recorded resources by digest; empty without a record, or if another version of Triton made it."""
    if not path.exists():
        return {}
    report = json.loads(path.read_text())
    if report["versions"]["triton"] != triton.__version__:
        return {}
    return {entry["digest"]: entry for entry in report["results"]["kernels"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="print the cases that hold this word, and write nothing")
    parser.add_argument("--all", action="store_true", help="compile also what is on record")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the record; default benchmarks/results")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)  # Triton announces that a default will change
    known: dict[str, dict[str, Any]] = {} if arguments.all or arguments.only else recorded(arguments.out)
    figures = [field.name for field in fields(Resources)]
    results = []
    num_compiled = 0
    for name, architecture, launch in launches():
        if arguments.only not in name:
            continue
        digest = digest_of(launch, architecture)
        entry = {"case": name, "architecture": architecture, "kernel": launch.function.__name__, "digest": digest}
        if digest not in known:
            known[digest] = asdict(compile_launch(launch, architecture))
            num_compiled += 1
            print(*entry.values(), *known[digest].values(), flush=True)
        results.append({**entry, **launch.options, **{figure: known[digest][figure] for figure in figures}})
    print(f"{num_compiled} compiled for {len(results)} launches")
    if not arguments.only:
        write_report(arguments.out, "triton_resources", {"kernels": results})


if __name__ == "__main__":
    main()
