"""Models whose layers keep a state per sequence, on the CPU at their true dimensions, with random weights.

    python benchmarks/recurrent.py [--models qwen3_5 lfm2 mamba2] [--quantization none int4] [--out FILE.json]

`decode`: tokens per second of 1, 8 and 32 streams, and the share of the limit at which weights are read once a step
and each stream's state twice, or bf16 products are computed, whichever takes longer, by the machine's read bandwidth
and arithmetic, measured in the same run. `prefill`: tokens per second
of one prompt of 2,048. `turn 2`: seconds until the first token of a prompt that continues one of 8,192 and its answer,
also for a dense model of about the same size. `shared`: of 300 tokens that 300 requests begin with, the share that all
but the first find in the cache. `drafts`: the speed of one stream with n-gram drafts that are all right, as none of
random weights' would be otherwise, divided by that without. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peers import machine_limits
from report import Report

from headrace import LLM, SamplingParams
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.sizes import weight_elements

STREAMS, PREFILL, FIRST_TURN, SHARED = (1, 8, 32), 2048, 8192, 300
NEW_TOKENS, ANSWER, OWN_TOKENS = 64, 16, 20
COMMON = {"max_position_embeddings": 32768, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 248320,
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048,
        "intermediate_size": 12288, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "conv_L_cache": 3, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "norm_eps": 1e-5,
    },
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "vocab_size": 50288, "hidden_size": 1024,
        "num_hidden_layers": 48, "num_heads": 32, "head_dim": 64, "state_size": 128, "n_groups": 1, "expand": 2,
        "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-5,
    },
    "dense": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128,
    },
}  # fmt: skip
"""Those of Qwen3.5-0.8B, LFM2-1.2B, Mamba2-370M and, to compare with, Qwen3-0.6B."""


def saved(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(COMMON | MODELS[name]), encoding="utf-8")
    return path


def engine(path: Path, quantization: str, **options: Any) -> LLM:
    packed = {} if quantization == "none" else {"quantization": quantization}
    own: dict[str, Any] = {"dtype": "bfloat16", "load_format": "dummy", "max_model_len": 9216, "max_num_seqs": 32}
    return LLM(str(path), skip_tokenizer_init=True, **(own | packed | options))


def prompt(numbers: random.Random, length: int) -> dict[str, Any]:
    return {"prompt_token_ids": [numbers.randrange(100, 50000) for _ in range(length)]}


def params(tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **fields)


def timed(llm: LLM, prompts: Sequence[Any], tokens: int) -> tuple[list[Any], float]:
    begin = time.perf_counter()
    outputs = llm.generate(list(prompts), params(tokens), use_tqdm=False)
    return outputs, time.perf_counter() - begin


def decode_rate(llm: LLM, prompts: Sequence[Any], **fields: Any) -> float:
    """Tokens per second after the first tokens. Prompts are of one token, or steps of others' prompts would count."""
    outputs = llm.generate(list(prompts), params(NEW_TOKENS, **fields), use_tqdm=False)
    seconds = max(output.metrics.decode_s or 0.0 for output in outputs if output.metrics is not None)
    return len(outputs) * (NEW_TOKENS - 1) / seconds


def limit(name: str, streams: int, measured: dict[str, Any]) -> float:
    """Tokens per second at which bf16 weights are read once a step and each stream's state is read and written, or at
    which each stream's products with the weights are computed."""
    read, computed = 1e9 * measured["read_gigabytes_per_s"], 1e9 * measured["bf16 dot product gigaflops"]
    spec = spec_from_config(COMMON | MODELS[name])
    states = sum(kept.elements for layer in spec.own_states(1) for kept in layer)
    weights = weight_elements(spec)
    return streams / max((2 * weights + streams * 2 * 4 * states) / read, streams * 2 * weights / computed)


def decode(llm: LLM, name: str, numbers: random.Random, arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    for streams in STREAMS:
        rates = [decode_rate(llm, [prompt(numbers, 1) for _ in range(streams)]) for _ in range(arguments.rounds)]
        most = limit(name, streams, machine_limits())
        found[f"decode, {streams}"] = {"tok_s": rates, "limit_tok_s": most, "share": statistics.median(rates) / most}


def prefill(llm: LLM, numbers: random.Random, rounds: int) -> list[float]:
    return [PREFILL / timed(llm, [prompt(numbers, PREFILL)], 1)[1] for _ in range(rounds)]


def second_turn(llm: LLM, numbers: random.Random, rounds: int) -> dict[str, list[float]]:
    """Seconds until the first token, and how many tokens of the prompt came from the cache."""
    found: dict[str, list[float]] = {"seconds": [], "cached_tokens": []}
    for _ in range(rounds):
        first = prompt(numbers, FIRST_TURN)
        ((output,), _) = timed(llm, [first], ANSWER)
        said = [*first["prompt_token_ids"], *output.outputs[0].token_ids, *prompt(numbers, 32)["prompt_token_ids"]]
        ((again,), seconds) = timed(llm, [{"prompt_token_ids": said}], 1)
        found["seconds"].append(seconds)
        found["cached_tokens"].append(again.num_cached_tokens or 0)
    return found


def shared_hits(llm: LLM, numbers: random.Random) -> float:
    begin = prompt(numbers, SHARED)["prompt_token_ids"]
    prompts = [{"prompt_token_ids": begin + prompt(numbers, OWN_TOKENS)["prompt_token_ids"]} for _ in range(SHARED)]
    timed(llm, prompts[:1], 1)
    outputs, _ = timed(llm, prompts[1:], 1)
    return sum(output.num_cached_tokens or 0 for output in outputs) / (SHARED * len(outputs))


def drafts(path: Path, quantization: str, rounds: int) -> dict[str, Any]:
    ngram = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    copied = [{"prompt_token_ids": [200] * 64}]
    with engine(path, quantization) as plain, engine(path, quantization, speculative_config=ngram) as drafting:
        pairs = [
            [decode_rate(llm, copied, allowed_token_ids=[200]) for llm in (plain, drafting)] for _ in range(rounds)
        ]
    return {"tok_s": pairs, "ratio": statistics.median(right / without for without, right in pairs)}


def measure(folder: Path, name: str, quantization: str, arguments: argparse.Namespace) -> dict[str, Any]:
    path, numbers, found = saved(folder, name), random.Random(0), dict[str, Any]()
    with engine(path, quantization) as llm:
        timed(llm, [prompt(numbers, 64)], 4)
        decode(llm, name, numbers, arguments, found)
        found["prefill_tok_s"] = prefill(llm, numbers, arguments.rounds)
        found["turn 2"] = second_turn(llm, numbers, arguments.rounds)
        found["shared_hits"] = shared_hits(llm, numbers)
    if name != "dense":
        found["drafts"] = drafts(path, quantization, arguments.rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--quantization", nargs="+", default=["none", "int4"], help="of the weights; none: bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    report = Report(arguments.out, "recurrent", {})
    with TemporaryDirectory() as folder:
        for quantization in arguments.quantization:
            for name in arguments.models:
                found = measure(Path(folder), name, quantization, arguments)
                report.add_case({"model": name, "quantization": quantization, **found})
                print(f"{name}, {quantization}: {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
