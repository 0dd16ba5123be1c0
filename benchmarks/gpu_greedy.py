"""Compares greedy answers on a GPU with transformers on the same GPU, for random weights in the shape of Qwen3-0.6B.

    python benchmarks/gpu_greedy.py --out results/gpu_greedy.json [--dry]

Judged token by token on our own sequences: transformers computes the logits at each of their positions. In float32 our
token must be its highest everywhere, so that the answers are equal. In bfloat16 it must be the highest wherever
transformers' two highest logits differ by more than twice the largest difference between its bf16 and fp32 logits
there, which is the observed size of rounding; the number of such positions is reported.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import gpu_common
import numpy as np
import torch
from gpu_common import attempt
from gpu_shapes import MODELS
from gpu_startup import make_checkpoint

from headrace import LLM, SamplingParams

LENGTHS = (5, 17, 64, 150, 300, 600)
NUM_TOKENS = 64


def ours(folder: Path, prompts: list[list[int]], dtype: str, device: torch.device) -> list[list[int]]:
    """Prompts followed by our answers."""
    memory: dict[str, Any] = {"gpu_memory_utilization": 0.3} if device.type == "cuda" else {}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    with LLM(
        str(folder), device=str(device), dtype=dtype, skip_tokenizer_init=True, max_model_len=1024, **memory
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [prompt + list(output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)]


@torch.inference_mode()
def logits_of(folder: Path, sequences: list[list[int]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """[len(sequence) - 1, vocab_size] float32 on the host for each sequence, by transformers."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model.to(device).eval()
    return [model(torch.tensor([ids[:-1]], device=device)).logits[0].float().cpu() for ids in sequences]


def judge(
    sequences: list[list[int]], prompts: list[list[int]], theirs: list[torch.Tensor], slack: Any
) -> dict[str, int]:
    """slack: for each sequence [len - 1], the least difference of the two highest logits at which a position counts."""
    judged = wrong = 0
    for ids, prompt, logits, least in zip(sequences, prompts, theirs, slack, strict=True):
        best = logits.topk(2)
        at = torch.arange(len(prompt) - 1, len(ids) - 1)
        clear = (best.values[:, 0] - best.values[:, 1] > least)[at]
        differs = best.indices[at, 0] != torch.tensor(ids)[at + 1]
        judged, wrong = judged + int(clear.sum()), wrong + int((clear & differs).sum())
    return {"tokens": NUM_TOKENS * len(prompts), "judged": judged, "wrong": wrong}


def measure(folder: Path, device: torch.device, vocab_size: int, dtype: str) -> dict[str, Any]:
    dice = np.random.default_rng(0)
    prompts = [dice.integers(2, vocab_size, length).tolist() for length in LENGTHS]
    sequences = ours(folder, prompts, dtype, device)
    exact = logits_of(folder, sequences, torch.float32, device)
    if dtype == "float32":
        return judge(sequences, prompts, exact, [torch.tensor(0.0)] * len(prompts))
    rounded = logits_of(folder, sequences, torch.bfloat16, device)
    slack = [2 * (a - b).abs().amax(1) for a, b in zip(exact, rounded, strict=True)]
    return judge(sequences, prompts, rounded, slack)


def main() -> None:
    parser = gpu_common.arguments(__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="qwen3-0.6b")
    arguments = parser.parse_args()
    name = "tiny" if arguments.dry else arguments.model
    config, device = MODELS[name], gpu_common.device_of(arguments.dry, arguments.device)
    report = gpu_common.open_report(arguments, "gpu_greedy", {"model": name})
    with tempfile.TemporaryDirectory(prefix="headrace-checkpoint-") as folder:
        make_checkpoint(Path(folder), config, device)
        for dtype in ("float32", "bfloat16"):
            row = attempt(report, {"dtype": dtype}, partial(measure, Path(folder), device, config["vocab_size"], dtype))
            print(row, flush=True)
    gpu_common.finish(report)


if __name__ == "__main__":
    main()
