"""What adapters (LoRA) cost: decoding, prompts, many adapters, and loading beside running streams.

    python benchmarks/adapters.py [--shape 135m 1.7b] [--case decode_8 ...] [--rank 16] [--out FILE.json]

`decode_8` and `prefill_1024`: 8 streams with 0, 1 and 8 distinct adapters, and a prompt of 1,024 tokens with none and
one; `ratio` is the median time with adapters over that without, of alternating runs. `mixed_64`: 64 requests over 32
adapters, 8 at once, compared with 64 of the base model. `loads`: 20 adapters are loaded beside 8 streams; the largest
gap between two tokens of a stream over the median gap, and the same without loads. `cold`: of 1,000 registered adapters
(64 in memory) one that was never used: the time to its first token over that of the base, less the time to read its
file. Weights are random, in bfloat16; adapters change all linear layers. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from report import Report
from safetensors.torch import save_file

from headrace import LLM, AsyncLLM, LoRARequest, SamplingParams

SHAPES: dict[str, dict[str, int]] = {
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
             "num_key_value_heads": 32},
}  # fmt: skip
"""SmolLM2's."""
VOCAB_SIZE = 49152
CASES = ("decode_8", "prefill_1024", "mixed_64", "loads", "cold")
Adapters = Sequence[LoRARequest | None]


def write_model(folder: Path, shape: dict[str, int]) -> Path:
    config = shape | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_adapter(folder: Path, shape: dict[str, int], rank: int, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, (rows, columns) in sizes.items():
            start = f"base_model.model.model.layers.{layer}.{name}"
            for factor, size in (("A", (rank, columns)), ("B", (rows, rank))):
                values = torch.randn(size, generator=generator) * 0.02
                tensors[f"{start}.lora_{factor}.weight"] = values.bfloat16()
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(sizes)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def copy_adapter(source: Path, folder: Path, alpha: int) -> Path:
    """The same tensors with another alpha, which makes it another adapter without the bytes of one."""
    folder.mkdir(parents=True)
    config = json.loads((source / "adapter_config.json").read_text()) | {"lora_alpha": alpha}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    os.link(source / "adapter_model.safetensors", folder / "adapter_model.safetensors")
    return folder


def prompts(count: int, tokens: int, seed: int) -> list[dict[str, Any]]:
    numbers = random.Random(seed)
    return [{"prompt_token_ids": [numbers.randrange(100, 40_000) for _ in range(tokens)]} for _ in range(count)]


def engine_options(model: Path, rank: int) -> dict[str, Any]:
    return {
        "model": str(model),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "enable_prefix_caching": False,
        "enable_lora": True,
        "max_loras": 8,
        "max_lora_rank": rank,
    }


def compare(
    llm: LLM, kinds: dict[str, Adapters], size: tuple[int, int], output_tokens: int, rounds: int
) -> dict[str, Any]:
    """Seconds by kind, runs alternating. size: number and tokens of prompts."""
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    raw: dict[str, list[float]] = {kind: [] for kind in kinds}
    for adapters in kinds.values():  # loads them
        llm.generate(prompts(*size, 0), SamplingParams(max_tokens=1), lora_request=list(adapters), use_tqdm=False)
    for seed in range(rounds):
        for kind, adapters in kinds.items():
            began = time.perf_counter()
            llm.generate(prompts(*size, seed), params, lora_request=list(adapters), use_tqdm=False)
            raw[kind].append(time.perf_counter() - began)
    base = statistics.median(raw["base"])
    return {kind: {"ratio": statistics.median(each) / base, "raw_s": each} for kind, each in raw.items()}


async def gaps(engine: AsyncLLM, tokens: int, adapter: LoRARequest | None) -> list[float]:
    """Seconds between the outputs of each of 8 streams, all together."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    found: list[float] = []

    async def one(number: int, prompt: dict[str, Any]) -> None:
        last = None
        name = f"stream {number} {time.monotonic_ns()}"
        async for _ in engine.generate(prompt, params, name, lora_request=adapter):
            now = time.perf_counter()
            if last is not None:
                found.append(now - last)
            last = now

    await asyncio.gather(*(one(*each) for each in enumerate(prompts(8, 16, 5))))
    return found


async def first_token_s(engine: AsyncLLM, adapter: LoRARequest | None) -> float:
    params = SamplingParams(temperature=0, max_tokens=1)
    began = time.perf_counter()
    async for _ in engine.generate(prompts(1, 16, 9)[0], params, f"first {time.monotonic_ns()}", lora_request=adapter):
        pass
    return time.perf_counter() - began


def read_s(adapter: LoRARequest) -> float:
    began = time.perf_counter()
    (Path(adapter.lora_path) / "adapter_model.safetensors").read_bytes()
    return time.perf_counter() - began


async def beside_streams(engine: AsyncLLM, loaded: Sequence[LoRARequest], tokens: int) -> dict[str, Any]:
    await gaps(engine, 8, None)
    quiet = await gaps(engine, tokens, None)
    streams = asyncio.ensure_future(gaps(engine, tokens, None))
    load_s = []
    for adapter in loaded:
        began = time.perf_counter()
        await engine.add_lora(adapter)
        load_s.append(time.perf_counter() - began)
    beside_done = streams.done()
    busy = await streams
    return {
        "largest_over_median": max(busy) / statistics.median(busy),
        "largest_over_median_without_loads": max(quiet) / statistics.median(quiet),
        "loads_outlasted_streams": beside_done,
        "load_s": load_s,
        "gaps_s": busy,
        "gaps_without_loads_s": quiet,
    }


async def cold_ones(engine: AsyncLLM, adapters: Sequence[LoRARequest], rounds: int) -> dict[str, Any]:
    """All but the last few are registered and used once before."""
    for adapter in adapters[:-rounds]:
        await engine.add_lora(adapter)
    base = [await first_token_s(engine, None) for _ in range(rounds)]
    cold, read = [], []
    for adapter in adapters[-rounds:]:
        read.append(read_s(adapter))
        cold.append(await first_token_s(engine, adapter))
    more = statistics.median(cold) - statistics.median(base) - statistics.median(read)
    return {"beyond_reading_ms": 1e3 * more, "cold_s": cold, "base_s": base, "read_s": read}


def measure(shape: str, arguments: argparse.Namespace, folder: Path, report: Report) -> None:
    sizes, rank, rounds = SHAPES[shape], arguments.rank, arguments.rounds
    options = engine_options(write_model(folder / "model", sizes), rank)
    paths = [write_adapter(folder / f"adapter {number}", sizes, rank, number) for number in range(8)]
    paths += [copy_adapter(paths[number % 8], folder / f"adapter {number}", 100 + number) for number in range(8, 1000)]
    adapters = [LoRARequest(path.name, number + 1, str(path)) for number, path in enumerate(paths)]
    one: Adapters = [adapters[0]]
    wanted = arguments.case or CASES

    def add(name: str, found: dict[str, Any]) -> None:
        report.add_case({"shape": shape, "rank": rank, "name": name, **found})
        print(shape, name, {key: value for key, value in found.items() if not isinstance(value, list)}, flush=True)

    if not {"decode_8", "prefill_1024", "mixed_64"}.isdisjoint(wanted):
        with LLM(**options) as llm:
            if "decode_8" in wanted:
                kinds: dict[str, Adapters] = {"base": [None] * 8, "1 adapter": [*one] * 8, "8 adapters": adapters[:8]}
                add("decode_8", compare(llm, kinds, (8, 16), 64, rounds))
            if "prefill_1024" in wanted:
                add("prefill_1024", compare(llm, {"base": [None], "1 adapter": one}, (1, 1024), 1, rounds))
            if "mixed_64" in wanted:
                kinds = {"base": [None] * 64, "32 adapters": [adapters[number % 32] for number in range(64)]}
                add("mixed_64", compare(llm, kinds, (64, 128), 64, max(1, rounds // 2)))
    if not {"loads", "cold"}.isdisjoint(wanted):
        asyncio.run(measure_loads(options, adapters, wanted, rounds, add))


async def measure_loads(
    options: dict[str, Any], adapters: Sequence[LoRARequest], wanted: Sequence[str], rounds: int, add: Any
) -> None:
    async with AsyncLLM(**options) as engine:
        if "loads" in wanted:
            add("loads", await beside_streams(engine, adapters[40:60], 512))
        if "cold" in wanted:
            add("cold", await cold_ones(engine, adapters, rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--case", nargs="+", choices=CASES)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    report = Report(arguments.out, "adapters", {})
    for shape in arguments.shape:
        with tempfile.TemporaryDirectory() as folder:
            measure(shape, arguments, Path(folder), report)


if __name__ == "__main__":
    main()
