"""A mixture of experts with packed weights compared with llama.cpp, on one GGUF file, in alternating pairs.

    python benchmarks/moe_gguf.py --peers PEERS [--types Q4_K] [--pairs 3] [--out FILE.json]

The file is made first if it is missing: the shape of Qwen3-MoE with 8 of 64 experts and 8 layers, about 1.5 GB of
random blocks. PEERS/llamacpp is a virtual environment with llama-cpp-python. Each pair runs both engines one after the
other, each in its own process, with two threads; a ratio is the median of the pairs' ratios. The read bandwidth of two
threads is measured before each run, and decoding is reported as a share of it. Nothing else may run on the machine
meanwhile. `--engine headrace FILE` or `--engine llama.cpp FILE` runs one of them alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workload import Case, Generate, generator, run_cases

if TYPE_CHECKING:
    import gguf
    import numpy as np

LAYERS, HIDDEN, INNER, EXPERTS, CHOSEN = 8, 2048, 768, 64, 8
HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, CONTEXT = 32, 4, 128, 40_960, 2048
CASES = (Case("decode_1", 1, 16, 64, 3), Case("prefill_512", 1, 512, 1, 3))
TARGETS = {"decode_1": 1.5, "prefill_512": 1.3}
THREADS = 2
SCALES = {"Q4_K": (0, 2), "Q6_K": (208,), "Q4_0": (0,), "Q8_0": (0,)}
"""Byte offsets of the fp16 scales in a block."""
SCALE = 2.0**-10
"""The scale of each block: small enough that no layer's values overflow fp16."""


def random_blocks(generator: np.random.Generator, kind: gguf.GGMLQuantizationType, *shape: int) -> np.ndarray:
    """A matrix of this shape as [..., bytes of a row], with blocks that are random except for their scales."""
    import gguf
    import numpy as np

    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.frombuffer(
        generator.bytes(block_bytes * (int(np.prod(shape)) // block_size)), dtype=np.uint8
    ).reshape(-1, block_bytes).copy()  # fmt: skip
    for at in SCALES[kind.name]:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(SCALE).tobytes(), dtype=np.uint8)
    return blocks.reshape(*shape[:-1], shape[-1] // block_size * block_bytes)


def make(path: Path, type_name: str) -> None:
    """Writes the file. As in usual mixed files, the head and every other layer's down projections have more bits."""
    import gguf
    import numpy as np

    coarse = gguf.GGMLQuantizationType[type_name]
    fine = gguf.GGMLQuantizationType[{"Q4_K": "Q6_K", "Q4_0": "Q8_0"}.get(type_name, type_name)]
    numbers = np.random.default_rng(0)
    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, "qwen3moe", use_temp_file=True)
    write_config(writer)

    def matrix(name: str, kind: gguf.GGMLQuantizationType, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", random_blocks(numbers, kind, *shape), raw_dtype=kind)

    def ones(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))

    matrix("token_embd", coarse, VOCABULARY, HIDDEN)
    matrix("output", fine, VOCABULARY, HIDDEN)
    ones("output_norm", HIDDEN)
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        for name, size in (("attn_norm", HIDDEN), ("ffn_norm", HIDDEN)):
            ones(at + name, size)
        for name in ("attn_q_norm", "attn_k_norm"):
            ones(at + name, HEAD_DIM)
        matrix(at + "attn_q", coarse, HEADS * HEAD_DIM, HIDDEN)
        matrix(at + "attn_k", coarse, KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(at + "attn_v", coarse, KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(at + "attn_output", coarse, HIDDEN, HEADS * HEAD_DIM)
        router = numbers.standard_normal((EXPERTS, HIDDEN), dtype=np.float32) / HIDDEN**0.5
        writer.add_tensor(f"{at}ffn_gate_inp.weight", router)
        matrix(at + "ffn_gate_exps", coarse, EXPERTS, INNER, HIDDEN)
        matrix(at + "ffn_up_exps", coarse, EXPERTS, INNER, HIDDEN)
        matrix(at + "ffn_down_exps", fine if layer % 2 else coarse, EXPERTS, HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)


def write_config(writer: gguf.GGUFWriter) -> None:
    import gguf

    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(3 * HIDDEN)  # for dense layers, which the model does not have
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(CHOSEN)
    writer.add_expert_feed_forward_length(INNER)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"<{number}>" for number in range(VOCABULARY)])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCABULARY)
    writer.add_token_merges(["< 1", "< 2"])
    for name in ("bos", "eos"):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", 0)


def run_headrace(path: Path) -> dict[str, Any]:
    from headrace import LLM

    began = time.perf_counter()
    with LLM(str(path), max_model_len=CONTEXT, enable_prefix_caching=False, skip_tokenizer_init=True) as llm:
        startup_s = time.perf_counter() - began
        return {"startup_s": startup_s, "cases": run_cases(generator(llm), cases=CASES)}


def run_llama_cpp(path: Path) -> dict[str, Any]:
    """Runs in the peer's environment, which has none of our packages."""
    from llama_cpp import Llama

    began = time.perf_counter()
    llm = Llama(
        str(path),
        n_ctx=CONTEXT,
        n_threads=THREADS,
        n_threads_batch=THREADS,
        n_batch=CONTEXT,
        n_ubatch=512,
        verbose=False,
    )
    startup_s = time.perf_counter() - began

    def generate(batch: list[list[int]], output_tokens: int) -> float:
        began = time.perf_counter()
        for prompt in batch:
            llm.reset()
            llm.eval(prompt)
            for _ in range(output_tokens - 1):
                llm.eval([llm.sample(temp=0)])
            llm.sample(temp=0)
        return time.perf_counter() - began

    checked: Generate = generate
    return {"startup_s": startup_s, "cases": run_cases(checked, cases=CASES)}


ENGINES = {"headrace": run_headrace, "llama.cpp": run_llama_cpp}


def measure(engine: str, python: Path, path: Path) -> dict[str, Any]:
    """One engine's run, in its own process and in another folder, as one of our folders has the name of a package."""
    command = [str(python), str(Path(__file__).resolve()), "--engine", engine, str(path)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=folder)
    if done.returncode:
        raise SystemExit(f"{engine} failed with status {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def read_bytes_per_s() -> float:
    """The read bandwidth of as many threads, from a process of its own; on shared machines it changes by the minute."""
    command = [sys.executable, "-m", "headrace.kernels.cpu.linear.limits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return 1e9 * float(json.loads(done.stdout)["read_gigabytes_per_s"])


def bytes_of_token(path: Path) -> int:
    """Bytes read to decode one token of one stream: all weights except the embedding and the experts not chosen."""
    import gguf

    tensors = {tensor.name: tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors}
    experts = sum(size for name, size in tensors.items() if "_exps." in name)
    others = sum(tensors.values()) - experts - tensors["token_embd.weight"]
    return int(others + experts * CHOSEN // EXPERTS)


def rate(run: dict[str, Any], case: str) -> float:
    """Tokens per second."""
    figure: float = run["cases"][case]["in_tok_s" if case.startswith("prefill") else "out_tok_s"]
    return figure


def compare(arguments: argparse.Namespace, path: Path) -> dict[str, Any]:
    pythons = {"headrace": Path(sys.executable), "llama.cpp": arguments.peers.absolute() / "llamacpp/bin/python"}
    token_bytes = bytes_of_token(path)
    pairs: list[dict[str, Any]] = []
    for number in range(arguments.pairs):
        order = list(pythons) if number % 2 == 0 else list(reversed(pythons))
        pairs.append({})
        for engine in order:
            limit = read_bytes_per_s()
            run = measure(engine, pythons[engine], path)
            share = rate(run, "decode_1") * token_bytes / limit
            pairs[-1][engine] = {**run, "read_bytes_per_s": limit, "share_of_reading": round(share, 3)}
        shown = (f"{engine} {case} {rate(run, case):.1f}" for engine, run in pairs[-1].items() for case in TARGETS)
        shares = (f"{engine} {run['share_of_reading']:.0%}" for engine, run in pairs[-1].items())
        print(f"pair {number + 1}: {', '.join(shown)} tok/s; decoding reads at {', '.join(shares)}", flush=True)
    ratios = {
        case: [rate(pair["headrace"], case) / rate(pair["llama.cpp"], case) for pair in pairs] for case in TARGETS
    }
    for case, target in TARGETS.items():
        print(f"{case}: {statistics.median(ratios[case]):.2f} x llama.cpp (to reach: {target:g} x)")
    sizes = {"file_bytes": path.stat().st_size, "bytes_of_token": token_bytes}
    return {**sizes, "pairs": pairs, "ratios": ratios, "targets": TARGETS}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="the folder with the peer's environment")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the file is or goes")
    parser.add_argument("--types", choices=("Q4_K", "Q4_0", "Q8_0"), default="Q4_K", help="of the experts' blocks")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--engine", nargs=2, metavar=("ENGINE", "FILE"), help="run one alone and print its JSON")
    arguments = parser.parse_args()
    if not arguments.engine and not arguments.peers:
        parser.error("--peers is missing")
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.engine:
        engine, path = arguments.engine
        print(json.dumps(ENGINES[engine](Path(path))))
        return
    path = arguments.folder / f"headrace-moe-{arguments.types}.gguf"
    if not path.exists():
        print(f"making {path}", flush=True)
        make(path, arguments.types)
    os.environ["HF_HUB_OFFLINE"] = "1"
    results = compare(arguments, path)
    if arguments.out:
        from report import write_report

        write_report(arguments.out, "moe_gguf", {"types": arguments.types, **results})


if __name__ == "__main__":
    main()
