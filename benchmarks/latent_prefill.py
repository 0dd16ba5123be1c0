"""Latent attention of long prompts on the CPU: the absorbed form, the expanded form and op by op.

A model with DeepSeek-V2-Lite's sizes (a few layers, random bf16 weights) reads prompts in chunks on one thread. Figures
are processor seconds of a whole prefill, which other work on the machine affects less than wall time.

    python benchmarks/latent_prefill.py --output benchmarks/results/latent_prefill.json
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import Report

from headrace.executor.checkpoints.sources.dummy_weights import DummyWeights
from headrace.executor.cpu.decoder import CpuDecoder
from headrace.executor.cpu.program import StepLimits
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.kv_cache import KVCache, allocate
from headrace.executor.models.sizes import weight_shapes
from headrace.executor.step.batch import StepArrays
from headrace.kernels.cpu.linear.linear import runtime

BLOCK_SIZE = 16
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 1024, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 16, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
    "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": None, "topk_method": "greedy",
    "max_position_embeddings": 1 << 15, "hidden_act": "silu",
}  # fmt: skip
"""With a small vocabulary, on which a prompt's time does not depend."""


def steps_of(length: int, chunk: int) -> Iterator[StepArrays]:
    """The steps of one prompt, whose blocks are in random order."""
    table = np.random.default_rng(0).permutation(-(-length // BLOCK_SIZE)).astype(np.int32)
    for start in range(0, length, chunk):
        positions = np.arange(start, min(start + chunk, length), dtype=np.int32)
        slots = table[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        count = len(positions)
        yield StepArrays(
            token_ids=positions * 7 % V2_LITE["vocab_size"],
            positions=positions,
            slot_mapping=slots[None],
            query_start=np.array([0, count], np.int32),
            seq_lens=np.array([start + count], np.int32),
            block_tables=table[None, None],
            logits_indices=np.array([count - 1], np.int32),
            prompt_lens=np.array([length], np.int32),
            block_size=BLOCK_SIZE,
        )


def prefill_s(decoder: Decoder | CpuDecoder, cache: KVCache, length: int, chunk: int) -> float:
    """Processor seconds of all threads."""
    begin = time.process_time()
    for step in steps_of(length, chunk):
        decoder.step(step, cache, None)
    return time.process_time() - begin


def measure(spec: ArchSpec, args: argparse.Namespace, report: Report) -> None:
    source = DummyWeights(weight_shapes(spec))
    longest = max(args.lengths)
    limits = StepLimits(max_tokens=max(args.chunks), max_seqs=1, max_positions=longest)
    cache = allocate(spec, longest // BLOCK_SIZE, BLOCK_SIZE, torch.bfloat16)
    decoders: dict[str, Decoder | CpuDecoder] = {}
    program = CpuDecoder(spec, source, torch.bfloat16, limits, used=runtime(num_threads=1))
    decoders["expanded"] = program
    absorbed = copy.copy(program)  # writes another program over the same weights
    absorbed.limits = replace(limits, batch_invariant=True)
    decoders["absorbed"] = absorbed
    if args.op_by_op:
        decoders["op by op"] = Decoder(spec, source, torch.bfloat16)
    for chunk in args.chunks:
        for length in args.lengths:
            for run in range(args.runs):
                for name, decoder in decoders.items():
                    seconds = prefill_s(decoder, cache, length, chunk)
                    case = {"form": name, "length": length, "chunk": chunk, "run": run, "processor_s": seconds}
                    print(case, flush=True)
                    report.add_case(case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--chunks", type=int, nargs="+", default=[2048])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--op-by-op", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = spec_from_config(V2_LITE | {"num_hidden_layers": args.layers})
    report = Report(args.output, "latent_prefill", {"config": V2_LITE, "num_layers": args.layers})
    measure(spec, args, report)


if __name__ == "__main__":
    main()
