"""Whole requests on a GPU through `LLM`: nano-vllm's workload, and 1000 tokens in and out at full load.

    python benchmarks/gpu_serving.py --out results/gpu_serving.json [--case nano] [--case full] [--no-peer] [--dry]

nano: 256 requests of 100 to 1024 tokens in and out at temperature 0.6, dummy weights in the shape of Qwen3-0.6B, beside
transformers' continuous batching on the same GPU in the same run (to reach: 3 times its tokens per second). Published
on other hardware: nano-vllm 1434.13 tok/s and vLLM 1361.84 tok/s on an RTX 4070 Laptop (nano-vllm's README);
mini-sglang shows a chart of the same workload on an H200 and no number.

full: requests of 1000 tokens in and 1000 out, as many at once as the cache holds up to --max-num-seqs, dummy weights
in the shape of Llama-3.1-8B, rounded to fp8 (--weights bf16 leaves them). The mark to pass is TensorRT-LLM's published
17,744 output tok/s; the cache here is bf16.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_common
from gpu_common import LLAMA_8B, QWEN3_06B, TINY, limits
from report import write_report

from headrace import LLM, SamplingParams

PUBLISHED = {
    "nano-vllm, RTX 4070 Laptop": 1434.13,
    "vLLM, RTX 4070 Laptop (by nano-vllm)": 1361.84,
    "TensorRT-LLM, Llama-3.1-8B fp8, 1000 in 1000 out": 17744.0,
}
Workload = tuple[list[list[int]], list[int]]
"""Prompts, and how many tokens to generate for each."""


def nano_workload(dry: bool) -> Workload:
    """The lengths that nano-vllm's bench.py draws, and its seed."""
    dice = random.Random(0)
    count, longest, vocabulary = (8, 64, 500) if dry else (256, 1024, 10_000)
    shortest = longest // 10
    prompts = [[dice.randint(2, vocabulary) for _ in range(dice.randint(shortest, longest))] for _ in range(count)]
    return prompts, [dice.randint(shortest, longest) for _ in range(count)]


def full_workload(dry: bool, num_requests: int) -> Workload:
    dice = random.Random(1)
    count, length, vocabulary = (4, 32, 500) if dry else (num_requests, 1000, 100_000)
    return [[dice.randint(2, vocabulary) for _ in range(length)] for _ in range(count)], [length] * count


def ours(folder: Path, arguments: Any, workload: Workload, temperature: float, **options: Any) -> dict[str, Any]:
    prompts, lengths = workload
    began_s = time.perf_counter()
    longest = max(len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True))
    with LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cpu" if arguments.dry else arguments.device,
        max_model_len=longest + 1,
        enable_prefix_caching=False,
        **options,
    ) as llm:
        startup_s = time.perf_counter() - began_s
        params = [
            SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in lengths
        ]

        def generate() -> int:
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        generate()  # graphs are captured while it runs
        found = timed(generate, 1 if arguments.dry else arguments.repeats)
    return {"startup_s": startup_s, "options": options, **found}


def timed(generate: Callable[[], int], repeats: int) -> dict[str, Any]:
    samples_s, tokens = [], 0
    for _ in range(repeats):
        began_s = time.perf_counter()
        tokens = generate()
        samples_s.append(time.perf_counter() - began_s)
    median_s = statistics.median(samples_s)
    return {"seconds": median_s, "out_tokens": tokens, "out_tok_s": tokens / median_s, "samples_s": samples_s}


def transformers_batching(folder: Path, arguments: Any, workload: Workload, temperature: float) -> dict[str, Any]:
    """transformers' own continuous batching, with random weights of the same shape and each request's own length."""
    import torch
    import transformers

    prompts, lengths = workload
    device = gpu_common.device_of(arguments.dry, arguments.device)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32 if arguments.dry else torch.bfloat16, attn_implementation="sdpa"
    )
    model = model.to(device).eval()

    def generate() -> int:
        settings = transformers.GenerationConfig(
            max_new_tokens=max(lengths),
            do_sample=temperature > 0,
            temperature=temperature,
            eos_token_id=-1,  # no token has it, so every request gets its length
            pad_token_id=0,
        )
        manager = model.init_continuous_batching(generation_config=settings)
        manager.start()
        try:
            for prompt, length in zip(prompts, lengths, strict=True):
                manager.add_request(prompt, max_new_tokens=length)
            tokens = 0
            for _ in prompts:
                result = manager.get_result(timeout=600)
                if result is None or result.error:
                    raise RuntimeError(f"transformers: {getattr(result, 'error', 'no result within 600 s')}")
                tokens += len(result.generated_tokens)
            return tokens
        finally:
            manager.stop(block=True)

    generate()
    return {"transformers": transformers.__version__, **timed(generate, 1)}


def nano(arguments: Any) -> dict[str, Any]:
    workload = nano_workload(arguments.dry)
    name = "tiny" if arguments.dry else "qwen3-0.6b"
    with gpu_common.model_folder(name) as folder:
        found: dict[str, Any] = {"ours": ours(folder, arguments, workload, 0.6, max_num_seqs=len(workload[0]))}
        print(f"nano: {found['ours']['out_tok_s']:.0f} out tok/s")
        if arguments.peer:
            try:
                found["transformers"] = transformers_batching(folder, arguments, workload, 0.6)
            except Exception as error:
                found["transformers"] = {"failed": f"{type(error).__name__}: {error}"}
                print(f"  transformers could not run it: {error}")
            else:
                ratio = found["ours"]["out_tok_s"] / found["transformers"]["out_tok_s"]
                found["times_transformers"] = ratio
                print(f"  transformers {found['transformers']['out_tok_s']:.0f} out tok/s: {ratio:.2f} times that")
    return found


def full(arguments: Any) -> dict[str, Any]:
    workload = full_workload(arguments.dry, arguments.requests)
    with gpu_common.model_folder("tiny" if arguments.dry else "llama-8b") as folder:
        seqs = min(arguments.max_num_seqs, len(workload[0]))
        options = {} if arguments.dry or arguments.weights == "bf16" else {"quantization": "fp8"}
        tokens = max(seqs, 8192)
        found = ours(folder, arguments, workload, 0.0, max_num_seqs=seqs, max_num_batched_tokens=tokens, **options)
    print(f"full: {found['out_tok_s']:.0f} out tok/s")
    return found


def main() -> None:
    parser = gpu_common.arguments(__doc__)
    parser.add_argument("--case", choices=["nano", "full"], action="append", help="repeatable; default both")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="without transformers")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--weights", choices=["bf16", "fp8"], default="fp8", help="of the full load")
    parser.add_argument("--requests", type=int, default=1024, help="of the full load")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    arguments = parser.parse_args()
    found = limits(gpu_common.device_of(arguments.dry, arguments.device), arguments.dry)
    cases = {"nano": nano, "full": full}
    results = {name: cases[name](arguments) for name in arguments.case or cases}
    shapes = {"nano": TINY if arguments.dry else QWEN3_06B, "full": TINY if arguments.dry else LLAMA_8B}
    if arguments.out:
        body = {"limits": found, "published_out_tok_s": PUBLISHED, "shapes": shapes, **results}
        write_report(arguments.out, "gpu_serving", body)


if __name__ == "__main__":
    main()
