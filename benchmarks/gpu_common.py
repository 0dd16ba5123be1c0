"""What the GPU benchmarks share: models by shape, the machine's limits, and an executor fed without a core.

Each takes `--device cuda` (the default) or `--dry`, which runs a tiny model on the CPU to see that the script works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.core.memory import fit_cache
from headrace.core.options import Options
from headrace.core.resolve import resolve
from headrace.executor.device_state import HostDevice
from headrace.executor.gpu import GpuExecutor
from headrace.executor.gpu_collectives import GpuCollectives
from headrace.executor.gpu_device import GpuFacts, choose_device, gpu_facts
from headrace.executor.host import host_memory
from headrace.executor.meeting import Meeting
from headrace.executor.uniproc import make_executor
from headrace.ipc.messages import Sampling
from headrace.ipc.step import NewRow, StepPlan, StepResult

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128009,
}
QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
TINY: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rope_scaling": None,
    "eos_token_id": 1,
}
MODELS = {"llama-8b": LLAMA_8B, "qwen3-0.6b": QWEN3_06B, "tiny": TINY}
BLOCK_SIZE = 16


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda or cuda:INDEX")
    parser.add_argument("--dry", action="store_true", help="a tiny model on the CPU, to see that the script works")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    return parser


@contextmanager
def model_folder(name: str) -> Iterator[Path]:
    """A folder with the config of a model; its weights are made up (load_format dummy)."""
    with tempfile.TemporaryDirectory(prefix="headrace-shape-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
        yield Path(folder)


# --- limits -----------------------------------------------------------------------------------------------------


def device_of(dry: bool, asked: str) -> torch.device:
    return torch.device("cpu") if dry else choose_device(asked)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def times_s(device: torch.device, run: Callable[[], Any], count: int) -> list[float]:
    """Seconds of each of `count` runs, after two to warm up; waits for the device around each."""
    samples = []
    for index in range(count + 2):
        synchronize(device)
        began_s = time.perf_counter()
        run()
        synchronize(device)
        if index >= 2:
            samples.append(time.perf_counter() - began_s)
    return samples


def limits(device: torch.device, dry: bool) -> dict[str, Any]:
    """The rates that the machine reaches here and now: copying (bytes read and written), and bf16 products."""
    elements, side = (1 << 20, 256) if dry else (1 << 32, 8192)
    source = torch.empty(elements, dtype=torch.uint8, device=device).random_(0, 255)
    into = torch.empty_like(source)
    copies_s = times_s(device, partial(into.copy_, source), 10)
    del source, into
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    products_s = times_s(device, partial(torch.matmul, a, b), 10)
    return {
        "device": gpu_facts(device).name if device.type == "cuda" else "cpu (dry run)",
        "copy_bytes_s": 2 * elements / statistics.median(copies_s),
        "bf16_flop_s": 2 * side**3 / statistics.median(products_s),
        "copies_s": copies_s,
        "products_s": products_s,
    }


# --- an executor without a core -----------------------------------------------------------------------------------


class DryBackend:
    """The CPU in a GPU's place."""

    device = torch.device("cpu")

    def facts(self) -> GpuFacts:
        free_bytes, total_bytes = self.memory()
        return GpuFacts("cpu (dry run)", (9, 0), total_bytes, free_bytes)

    def here(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def host_side(self) -> HostDevice:
        return HostDevice()

    def capturer(self) -> None:
        return None

    def meter(self) -> DryBackend:
        return self

    def side_stream(self) -> DryBackend:
        return self

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        for into, source in pairs:
            into.copy_(source)
        return lambda: None

    def link(self, meeting: Meeting, options: Options) -> GpuCollectives:
        raise NotImplementedError("a dry run has one rank")

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        run()
        return 1 << 20

    def memory(self) -> tuple[int, int]:
        memory = host_memory()
        return memory.available_bytes, memory.total_bytes


class Feeder:
    """Rows of random tokens, planned as the core would, for an executor in this process."""

    def __init__(self, model: Path, *, dry: bool, device: str, max_num_seqs: int, context: int, **options: Any) -> None:
        settings = {"num_gpu_blocks_override": max_num_seqs * (-(-context // BLOCK_SIZE)) + 2, **options}
        asked = Options(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cpu" if dry else device,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_model_len=context,
            **settings,
        )
        made = GpuExecutor(asked, DryBackend.device, DryBackend()) if dry else make_executor(asked)
        assert isinstance(made, GpuExecutor), f"{device} is no GPU"
        self.executor = made
        plan = resolve(asked, made.describe(lambda phase: None))
        self.reading = made.load(plan, lambda phase: None)
        facts = fit_cache(plan, self.reading)
        made.allocate(facts.num_blocks, facts.max_model_len)
        self.plan, self._step, self._next_block = plan, 0, 1
        self._lengths: dict[int, int] = {}
        self._num_blocks: dict[int, int] = {}
        self._released: list[int] = []

    def capture(self) -> float:
        """Makes all graphs now; seconds."""
        began_s = time.perf_counter()
        while self.executor.idle():
            pass
        synchronize(torch.device(self.executor.steps.state.words.device))
        return time.perf_counter() - began_s

    def enter(self, num_rows: int, prompt_tokens: int, temperature: float = 0.0) -> None:
        """Computes the prompts, as many whole ones in a step as its budget holds, and long ones in pieces."""
        dice = np.random.default_rng(num_rows)
        waiting = list(range(num_rows))
        while waiting:
            budget, new, rows, counts, starts = self.plan.max_num_batched_tokens, [], [], [], []
            while waiting and budget:
                row = waiting[0]
                if row not in self._lengths:
                    self._lengths[row] = 0
                    self._num_blocks[row] = -(-(prompt_tokens + 1) // BLOCK_SIZE)
                    tokens = dice.integers(2, self.plan.model.vocab_size, prompt_tokens).astype(np.int32)
                    new.append(self._new_row(row, tokens, temperature))
                count = min(prompt_tokens - self._lengths[row], budget)
                rows.append(row)
                counts.append(count)
                starts.append(self._lengths[row])
                self._lengths[row] += count
                budget -= count
                if self._lengths[row] == prompt_tokens:
                    waiting.pop(0)
            self._submit(rows, counts, starts, prompt_tokens, new)
            self.collect()

    def decode(self) -> None:
        """Starts a step of one token for each row."""
        rows = list(self._lengths)
        starts = [self._lengths[row] for row in rows]
        for row in rows:
            self._lengths[row] += 1
        self._submit(rows, [1] * len(rows), starts, 0, [])

    def release(self) -> None:
        self._released = list(self._lengths)
        self._lengths, self._num_blocks, self._next_block = {}, {}, 1

    def _submit(
        self, rows: list[int], counts: list[int], starts: list[int], sampled_from: int, new: list[NewRow]
    ) -> None:
        """Rows that reach `sampled_from` tokens or more sample; a row that outgrows its blocks gets one more."""
        appended = []
        for row in rows:
            if self._lengths[row] > self._num_blocks[row] * BLOCK_SIZE:
                self._num_blocks[row] += 1
                appended.append((row, self._take(1)[0]))
        i32 = np.int32
        plan = StepPlan(
            step=self._step,
            released_rows=np.array(self._released, i32),
            new_rows=tuple(new),
            block_rows=np.array([row for row, _ in appended], i32),
            block_ids=np.array([block for _, block in appended], i32),
            rows=np.array(rows, i32),
            num_tokens=np.array(counts, i32),
            num_computed_tokens=np.array(starts, i32),
            sampled=np.array(starts) + np.array(counts) >= sampled_from,
        )
        self._step += 1
        self._released = []
        self.executor.submit(plan)

    def collect(self) -> StepResult:
        result = self.executor.collect()
        assert not result.failures, result.failures[0].failure.message
        return result

    def _take(self, count: int) -> list[int]:
        self._next_block += count
        return list(range(self._next_block - count, self._next_block))

    def _new_row(self, row: int, tokens: np.ndarray, temperature: float) -> NewRow:
        return NewRow(
            row=row,
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            num_computed_tokens=0,
            block_ids=np.array(self._take(self._num_blocks[row]), np.int32),
            sampling=Sampling(max_tokens=1 << 20, temperature=temperature, ignore_eos=True),
            seed=row,
        )

    def close(self) -> None:
        self.executor.stop()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def weight_flops(config: dict[str, Any]) -> tuple[int, int]:
    """Elements of the matrices that every token meets in the layers, and of the head."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    attention = hidden * head_dim * 2 * (heads + config["num_key_value_heads"])
    layers = config["num_hidden_layers"] * (attention + 3 * hidden * config["intermediate_size"])
    return layers, config["vocab_size"] * hidden


def cache_bytes(config: dict[str, Any], tokens: int, itemsize: int = 2) -> int:
    """Keys and values of so many tokens."""
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * tokens * itemsize
