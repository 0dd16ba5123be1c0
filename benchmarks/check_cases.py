"""The hot paths that `check.py` counts and times: a program that takes a case and the number of repetitions.

It runs against the package on the import path, which may be another commit's, so it depends on little of it.
"""

from __future__ import annotations

import functools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

RUNNING = 32
KERNEL_ROUNDS = 40
VOCAB_SIZE = 49152
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, CONTEXT = 576, 1536, 9, 3, 64, 16, 256


def scheduler_step(repeats: int) -> None:
    """Iterations of the core's loop with 32 running requests, with an executor that computes nothing."""
    from engine_parts import VOCAB_SIZE, SteppedCore

    from headrace.executor.testing.null import NullModel

    core = SteppedCore(
        NullModel(vocab_size=VOCAB_SIZE),
        max_num_seqs=64, max_num_batched_tokens=4096, block_size=16, max_model_len=1024, num_blocks=4096,
    )  # fmt: skip
    client = core.open()
    for slot in range(RUNNING):
        client.add(slot, [slot % 97] * 16, max_tokens=500, ignore_eos=True)
    while len(client.tokens()) < RUNNING:
        core.loop.turn()
    for _ in range(repeats):
        core.loop.turn()
        client.heard.clear()


def ring(repeats: int) -> None:
    """Writes a message of 256 bytes to the ring and reads it, in one thread."""
    from headrace.ipc.transport.ring import RingLayout, RingReader, RingWriter, lay_out_ring
    from headrace.ipc.wait import Deadline

    layout = RingLayout.holding(256, 8, 1)
    fd = os.memfd_create("headrace-check")
    lay_out_ring(fd, layout)
    writer, reader, message, deadline = RingWriter(fd, layout), RingReader(fd, layout, 0), bytes(256), Deadline(600)
    for _ in range(repeats):
        writer.put(message, deadline)
        reader.take(deadline)


def codec(repeats: int) -> None:
    """Encodes and decodes a step's outputs for 64 tokens."""
    from headrace.ipc.codec import Codec, Tensor
    from headrace.ipc.messages import CoreMessage, StepOutputs

    sender, receiver = Codec[Any](CoreMessage), Codec[Any](CoreMessage)
    step = StepOutputs(step=7, slots=Tensor.of("int32", range(64)), token_ids=Tensor.of("int32", range(900, 964)))
    for _ in range(repeats):
        receiver.decode([bytes(frame) for frame in sender.encode(step)])


def detokeniser(repeats: int) -> None:
    """Detokenises one token after another."""
    from fake_tokenizers import bundle_of, byte_level_tokenizer

    from headrace.frontend.text.tokenizer import Tokenizer

    text = Tokenizer(bundle_of(byte_level_tokenizer())).detokenizer()
    numbers = random.Random(0)
    ids = [numbers.randrange(3, 390) for _ in range(repeats)]
    for token_id in ids:
        text.extend([token_id])


def answer_reader(repeats: int) -> None:
    """Parses pieces of an answer, one after another, for reasoning and tool calls; nearly all pieces are plain text."""
    from headrace.frontend.text.formats.declaration import load_format
    from headrace.frontend.text.formats.parser import OutputParser

    parser = OutputParser(load_format("qwen3"), load_format("hermes"), prompt="<think>")
    for number in range(repeats):
        parser.feed(" word" if number % 50 else "\n")


def arguments_reader(repeats: int) -> None:
    """Parses one piece after another of a string within a call's arguments, in JSON and in XML form."""
    from headrace.frontend.text.formats.declaration import load_format
    from headrace.frontend.text.formats.parser import OutputParser

    begun = {
        "hermes": '<tool_call>{"name": "f", "arguments": {"a": "',
        "qwen3_xml": "<tool_call>\n<function=f>\n<parameter=a>\n",
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]
    for name, beginning in begun.items():
        parser = OutputParser(None, load_format(name), tools=tools)
        parser.feed(beginning)
        for number in range(repeats):
            parser.feed(" word" if number % 50 else "\n")


def kernels(_: int) -> None:
    """Prints microseconds of each CPU kernel on the demo model's shapes: the median of several calls."""
    import torch

    torch.manual_seed(0)
    print(
        json.dumps(
            {name: _median_us(run) for name, run in {**_linear_runs(), **_op_runs(), **_sampling_runs()}.items()}
        )
    )


def _median_us(run: Callable[[], object]) -> float:
    for _ in range(3):
        run()
    samples = []
    for _ in range(KERNEL_ROUNDS):
        began_s = time.perf_counter()
        run()
        samples.append(1e6 * (time.perf_counter() - began_s))
    return statistics.median(samples)


def _linear_runs() -> dict[str, Callable[[], object]]:
    """The gate and up projection in each weight type, for one row and for 64 rows."""
    import torch

    from headrace.kernels.cpu.linear.linear import FLOAT_TYPES, WEIGHT_TYPES, pack

    floats = {name: dtype for dtype, name in FLOAT_TYPES.items()}
    packed = {}
    for name, kind in WEIGHT_TYPES.items():
        columns = HIDDEN // kind.block_size * kind.block_size  # slightly fewer where blocks have 256
        if kind.quantised:
            # Random bytes serve as weights; bytes below 60 keep the fp16 values among them finite and small.
            row_bytes = columns // kind.block_size * kind.block_bytes
            packed[name] = pack((name, torch.randint(0, 60, (2 * INTERMEDIATE, row_bytes), dtype=torch.uint8)))
        else:
            packed[name] = pack(torch.randn(2 * INTERMEDIATE, columns).to(floats[name]))
    return {
        f"linear {name}, {rows} rows": functools.partial(each.apply, torch.randn(rows, each.k).bfloat16())
        for name, each in packed.items()
        for rows in (1, 64)
    }


def _sampling_runs() -> dict[str, Callable[[], object]]:
    """Eight rows of a vocabulary: the argmax, and a draw from the top tokens."""
    import torch

    from headrace.kernels.cpu.linear.linear import runtime
    from headrace.kernels.cpu.sampling.sampling import SampleBuffers, sample

    rows, logits = 8, torch.randn(8, VOCAB_SIZE)
    greedy, drawn = (SampleBuffers(runtime(), rows, VOCAB_SIZE) for _ in range(2))
    drawn.temperature[:], drawn.top_k[:], drawn.top_p[:] = 0.8, 50, 0.95
    return {
        "sampling, greedy": functools.partial(sample, runtime(), logits, greedy),
        "sampling, top-k and top-p": functools.partial(sample, runtime(), logits, drawn),
    }


def _op_runs() -> dict[str, Callable[[], object]]:
    import torch

    from headrace.kernels.cpu.ops import shared_ops
    from headrace.kernels.reference.attention import AttentionParams, PagedBatch

    ops, rows = shared_ops(), 8
    blocks = -(-CONTEXT // BLOCK_SIZE)
    x, weight = torch.randn(rows, HIDDEN), torch.randn(HIDDEN)
    query, key = torch.randn(rows, HEADS, HEAD_DIM), torch.randn(rows, KV_HEADS, HEAD_DIM)
    cos, sin = torch.randn(rows, HEAD_DIM // 2), torch.randn(rows, HEAD_DIM // 2)
    cache = torch.randn(2, rows * blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM).bfloat16()
    tables = torch.randperm(rows * blocks).int().view(rows, blocks)
    last = torch.full((rows,), CONTEXT, dtype=torch.int32)
    slots = tables[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 1
    batch = PagedBatch(torch.arange(rows + 1, dtype=torch.int32), last, tables, slots, BLOCK_SIZE)
    params = AttentionParams(scale=HEAD_DIM**-0.5)
    return {
        "norm": lambda: ops.rms_norm(x, x, weight, 1e-5),
        "activation": lambda: ops.activate_and_multiply(torch.cat((x, x), -1), "silu"),
        "rotary": lambda: ops.rotary(query, key, cos, sin),
        "cache write": lambda: ops.write_cache(key, key, cache[0], cache[1], batch),
        "attention": lambda: ops.paged_attention(query, cache[0], cache[1], batch, params),
    }


CASES: dict[str, Callable[[int], None]] = {
    "scheduler step": scheduler_step,
    "ring": ring,
    "codec": codec,
    "detokeniser": detokeniser,
    "answer reader": answer_reader,
    "arguments reader": arguments_reader,
    "kernels": kernels,
}

if __name__ == "__main__":
    CASES[sys.argv[1]](int(sys.argv[2]))
