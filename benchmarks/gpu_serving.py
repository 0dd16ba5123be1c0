"""Whole requests on a GPU through `LLM`: nano-vllm's workload, and 1000 tokens in and out at full load.

    python benchmarks/gpu_serving.py --out results/gpu_serving.json [--case nano] [--case full] [--no-peer] [--dry]

nano: 256 requests of 100 to 1024 tokens in and out at temperature 0.6, dummy weights in the shape of Qwen3-0.6B,
compared with transformers' continuous batching on the same GPU in the same run (target: 3 times its tokens per second).
Published figures for this workload are listed too, with their hardware.

full: requests of 1000 tokens in and 1000 out, all submitted at the beginning, dummy weights in the shape of
Llama-3.1-8B in fp8, and an fp8 cache, as in TensorRT-LLM's figure (--weights bf16 and --kv-cache-dtype auto turn both
off). TensorRT-LLM's 17,744 output tok/s on an H200 are for 3000 requests, a batch as large as its cache holds (95% of
the free memory) and graphs of up to 8192. Here --requests sets the number of requests, and --max-num-seqs how many run
at once, by default as many as the cache holds to their end. With fewer requests the beginning and the end, where the
batch is not full, weigh more, which is no advantage.

An existing output file keeps its other case.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gpu_common
from gpu_common import BLOCK_SIZE, attempt, limits
from gpu_shapes import LLAMA_8B, head_dim_of, weight_elements
from gpu_shapes import cache_bytes as cache_bytes_of

from headrace import LLM, SamplingParams
from headrace.executor.gpu.hardware.device import gpu_facts

PUBLISHED: list[dict[str, Any]] = [
    {"case": "nano", "engine": "nano-vllm", "hardware": "RTX 4070 Laptop", "out_tok_s": 1434.13},
    {"case": "nano", "engine": "vLLM", "hardware": "RTX 4070 Laptop (by nano-vllm)", "out_tok_s": 1361.84},
    {"case": "nano", "engine": "mini-sglang", "hardware": "H200", "out_tok_s": None, "note": "a chart, no number"},
    {"case": "full", "engine": "TensorRT-LLM 1.0", "hardware": "H200", "out_tok_s": 17744.0},
]
"""nano-vllm's README; mini-sglang's README; TensorRT-LLM's perf-overview.md (Llama-3.1-8B-Instruct-FP8, TP1)."""
FULL_TOKENS = 1000
"""Tokens in, and out, of each request of the full load."""
FULL_SHARE = 0.92
"""Share of the GPU's memory."""
STEP_BYTES = 4 << 30
"""Activations and graphs of the full load, with a margin."""
MOST_SEQS = 1024
GRAPHS_MOST_S = 90.0
WARM_UP_REQUESTS = 64
CAPTURED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 896)
"""For the full load, whose batch is below the maximum only at its end."""
PEER_TOKENS = 32
"""Tokens of each of the requests that warm transformers up."""
PEER_WARM_UP_S = 60.0
Workload = tuple[list[list[int]], list[int]]
"""Prompts, and the number of tokens to generate for each."""


def nano_workload(dry: bool) -> Workload:
    """The lengths and the seed of nano-vllm's bench.py."""
    dice = random.Random(0)
    count, longest, vocabulary = (8, 64, 500) if dry else (256, 1024, 10_000)
    shortest = longest // 10
    prompts = [[dice.randint(2, vocabulary) for _ in range(dice.randint(shortest, longest))] for _ in range(count)]
    return prompts, [dice.randint(shortest, longest) for _ in range(count)]


def full_workload(dry: bool, num_requests: int) -> Workload:
    dice = random.Random(1)
    count, length, vocabulary = (4, 32, 500) if dry else (num_requests, FULL_TOKENS, 100_000)
    return [[dice.randint(2, vocabulary) for _ in range(length)] for _ in range(count)], [length] * count


def seqs_that_fit(total_bytes: int, weight_bytes: int, cache_bytes: int) -> int:
    """How many requests of the full load a GPU of this memory holds to their end; bytes of a weight and a cached value.

    All begin together and have the same length, so with more of them all would be preempted at their end.
    """
    elements, head = weight_elements(LLAMA_8B)
    room_bytes = FULL_SHARE * total_bytes - STEP_BYTES - elements * weight_bytes - 2 * 2 * head
    each_bytes = cache_bytes_of(
        LLAMA_8B, 2 * FULL_TOKENS, cache_bytes + (4 / head_dim_of(LLAMA_8B)) * (cache_bytes < 2)
    )
    return max(1, min(MOST_SEQS, int(room_bytes / each_bytes)))


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
        block_size=BLOCK_SIZE,
        **options,
    ) as llm:
        startup_s = time.perf_counter() - began_s

        def generate(count: int, most: int) -> int:
            params = [
                SamplingParams(temperature=temperature, max_tokens=min(length, most), ignore_eos=True, detokenize=False)
                for length in lengths[:count]
            ]
            asked = [{"prompt_token_ids": prompt} for prompt in prompts[:count]]
            return sum(len(output.outputs[0].token_ids) for output in llm.generate(asked, params, use_tqdm=False))

        captured_s = wait_for_graphs(llm, partial(generate, 2, 4))
        generate(min(WARM_UP_REQUESTS, len(prompts)), 8)
        is_full = len(set(lengths)) == 1
        found = timed(lambda: generate(len(prompts), longest), 1 if is_full or arguments.dry else arguments.repeats)
        stats, report = llm.get_stats(), llm.describe_engine()
    return {
        "startup_s": startup_s,
        "graphs_s": captured_s,
        "options": options,
        "requests": len(prompts),
        "kv_cache_tokens": stats.num_blocks * BLOCK_SIZE,
        "preemptions": stats.num_preemptions,
        "workers": report.workers,
        **found,
    }


def wait_for_graphs(llm: LLM, generate: Callable[[], Any]) -> float:
    """Seconds until all graphs that `generate` needs are captured; an engine captures while it has no requests."""
    began_s, count = time.perf_counter(), -1
    generate()
    while (found := llm.describe_engine().workers[0].get("graphs", 0)) != count:
        count = found
        time.sleep(1.0 if found else 0.0)
        if time.perf_counter() - began_s > GRAPHS_MOST_S:
            break
    return time.perf_counter() - began_s


def timed(generate: Callable[[], int], repeats: int) -> dict[str, Any]:
    samples_s, tokens = [], 0
    for _ in range(repeats):
        began_s = time.perf_counter()
        tokens = generate()
        samples_s.append(time.perf_counter() - began_s)
    median_s = statistics.median(samples_s)
    return {"seconds": median_s, "out_tokens": tokens, "out_tok_s": tokens / median_s, "samples_s": samples_s}


def transformers_batching(folder: Path, arguments: Any, workload: Workload, temperature: float) -> dict[str, Any]:
    """transformers' own continuous batching, with random weights of the same shape and each request's own length.

    Its paged attention is torch's: flash-attn's kernels are not looked for, as that may query the network. If it takes
    longer than --peer-seconds, only the tokens until then count.
    """
    import torch
    import transformers
    from transformers.generation.continuous_batching.utils import WorkloadHints

    prompts, lengths = workload
    device = gpu_common.device_of(arguments.dry, arguments.device)
    with torch.device(device):  # random numbers on a CPU would take longer than the workload
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(folder),
            dtype=torch.float32 if arguments.dry else torch.bfloat16,
            attn_implementation="sdpa",
        )
    model.set_attn_implementation("paged|sdpa")
    settings = transformers.GenerationConfig(
        max_new_tokens=max(lengths),
        do_sample=temperature > 0,
        temperature=temperature,
        eos_token_id=-1,  # matches no token, so every request gets its full length
        pad_token_id=0,
    )
    # By default it fills all memory, which takes minutes on a CPU.
    small: dict[str, Any] = {"num_blocks": 64, "block_size": 32, "max_batch_tokens": 256} if arguments.dry else {}
    with (
        model.to(device)
        .eval()
        .continuous_batching_context_manager(
            generation_config=settings,
            continuous_batching_config=transformers.ContinuousBatchingConfig(**small),
            workload_hints=WorkloadHints(max(map(len, prompts)), max(lengths), len(prompts)),
            timeout=30,
        ) as manager
    ):
        run_peer(manager, prompts[:8], [PEER_TOKENS] * 8, PEER_WARM_UP_S)
        found = run_peer(manager, prompts, lengths, arguments.peer_seconds)
    return {"transformers": transformers.__version__, "attention": "paged|sdpa", **found}


def run_peer(manager: Any, prompts: list[list[int]], lengths: list[int], most_s: float) -> dict[str, Any]:
    began_s = time.perf_counter()
    for prompt, length in zip(prompts, lengths, strict=True):
        manager.add_request(prompt, max_new_tokens=length)
    tokens, finished = 0, 0
    while finished < len(prompts) and (left_s := began_s + most_s - time.perf_counter()) > 0:
        result = manager.get_result(timeout=left_s)
        if result is None:
            if not manager.is_running():
                raise RuntimeError(f"transformers stopped after {finished} of {len(prompts)} requests")
            continue
        if result.error:
            raise RuntimeError(f"transformers: {result.error}")
        tokens, finished = tokens + len(result.generated_tokens), finished + 1
    seconds = time.perf_counter() - began_s
    if finished < len(prompts):
        under_way = list(manager.batch_processor.scheduler.active_requests.values())
        tokens += sum(len(request.generated_tokens) for request in under_way)
    return {"seconds": seconds, "finished": finished, "out_tokens": tokens, "out_tok_s": tokens / seconds}


def nano(arguments: Any) -> dict[str, Any]:
    workload = nano_workload(arguments.dry)
    name = "tiny" if arguments.dry else "qwen3-0.6b"
    with gpu_common.model_folder(name) as folder:
        found: dict[str, Any] = {"ours": ours(folder, arguments, workload, 0.6, max_num_seqs=len(workload[0]))}
        rate = found["ours"]["out_tok_s"]
        print(f"nano: {rate:.0f} out tok/s", flush=True)
        if arguments.peer:
            try:
                found["transformers"] = transformers_batching(folder, arguments, workload, 0.6)
            except Exception as error:
                found["transformers"] = {"failed": f"{type(error).__name__}: {error}"}
                print(f"  transformers could not run it: {error}")
            else:
                found["times_transformers"] = rate / found["transformers"]["out_tok_s"]
                theirs = found["transformers"]
                print(
                    f"  transformers {theirs['out_tok_s']:.0f} out tok/s, {theirs['finished']} requests done: ours is "
                    f"{found['times_transformers']:.2f} times that"
                )
    return found


def full(arguments: Any) -> dict[str, Any]:
    workload = full_workload(arguments.dry, arguments.requests)
    fit = MOST_SEQS
    if not arguments.dry:
        total_bytes = gpu_facts(gpu_common.device_of(False, arguments.device)).total_bytes
        fit = seqs_that_fit(
            total_bytes, 2 if arguments.weights == "bf16" else 1, 2 if arguments.kv_cache_dtype == "auto" else 1
        )
    seqs = min(arguments.max_num_seqs or fit, len(workload[0]))
    options: dict[str, Any] = {"max_num_seqs": seqs, "max_num_batched_tokens": max(seqs, 8192)}
    if not arguments.dry:
        options |= {"kv_cache_dtype": arguments.kv_cache_dtype, "gpu_memory_utilization": FULL_SHARE}
        options |= {"cudagraph_capture_sizes": (*(size for size in CAPTURED if size < seqs), seqs)}
        options |= {} if arguments.weights == "bf16" else {"quantization": "fp8"}
    with gpu_common.model_folder("tiny" if arguments.dry else "llama-8b") as folder:
        found = ours(folder, arguments, workload, 0.0, **options)
    print(f"full: {found['out_tok_s']:.0f} out tok/s, {found['preemptions']} preemptions", flush=True)
    return found


CASES = {"nano": nano, "full": full}


def earlier(path: Path | None, names: list[str], dry: bool) -> list[dict[str, Any]]:
    """The cases of an existing file, if it is of the same kind (dry or not), without those about to be run."""
    if path is None or not path.exists():
        return []
    results = json.loads(path.read_text())["results"]
    return [case for case in results["cases"] if case["case"] not in names and results.get("dry", False) == dry]


def main() -> None:
    parser = gpu_common.arguments(__doc__)
    parser.add_argument("--case", choices=list(CASES), action="append", help="repeatable; default both")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="without transformers")
    parser.add_argument("--peer-seconds", type=float, default=150.0, help="of transformers at the most")
    parser.add_argument("--repeats", type=gpu_common.positive, default=2, help="of nano; a full load is run once")
    parser.add_argument("--weights", choices=["bf16", "fp8"], default="fp8", help="of the full load")
    parser.add_argument("--kv-cache-dtype", default="fp8", help="of the full load")
    parser.add_argument("--requests", type=gpu_common.positive, default=2048, help="of the full load")
    parser.add_argument(
        "--max-num-seqs", type=gpu_common.positive, help="of the full load; default what the cache holds"
    )
    arguments = parser.parse_args()
    names = arguments.case or list(CASES)
    found = limits(gpu_common.device_of(arguments.dry, arguments.device), arguments.dry)
    results = {"limits": found, "published": PUBLISHED, "cases": earlier(arguments.out, names, arguments.dry)}
    report = gpu_common.open_report(arguments, "gpu_serving", results)
    for name in names:
        attempt(report, {"case": name}, lambda name=name: CASES[name](arguments))  # type: ignore[misc]
    gpu_common.finish(report)


if __name__ == "__main__":
    main()
