"""Speed of quantised checkpoints of the demo model's shape compared with bf16, as shares of the memory bandwidth.

    python benchmarks/quantised_speed.py [--only W4A16 ...] [--rounds 3] [--out FILE.json]
    python benchmarks/quantised_speed.py --peers PEERS --scripts ../shared/peers    # compared with vLLM

Weights are random, in the layouts of compressed-tensors: W4A16 in groups of 128 (of 64 where 128 does not divide the
rows: the hidden size is 576), W8A8 with a scale per row and token; GPTQ and AWQ have 4 bits in groups of 64. The head
is bf16 and tied to the embedding, so a decode step reads the whole checkpoint, and the bytes per token are its size.
Each round measures every kind and, right after it, vLLM if that runs the kind on a CPU; figures are medians. PEERS is
where the peers' setup.sh installed vLLM. Nothing else may run on the machine meanwhile. A round takes a minute, and
each kind with vLLM two more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers import run
from report import write_report
from safetensors.torch import save_file
from torch import Tensor
from workload import generator, run_cases

from headrace import LLM
from headrace.kernels.cpu.linear.limits import limits
from headrace.kernels.cpu.linear.linear import runtime

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 30, 576, 1536, 9, 3, 49152
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "hidden_act": "silu", "rope_theta": 100000.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "self_attn.v_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
GROUPS = {HIDDEN: 64, INNER: 128}
COMMON_GROUP = 64
CASES = {"decode_1": "out_tok_s", "decode_8": "out_tok_s", "prefill_1024": "in_tok_s"}
RUN_BY_VLLM = ("W8A8", "GPTQ", "AWQ")
"""The kinds that vLLM runs on a CPU."""
Rates = dict[str, Any]
"""By case, the figures of `workload.py`."""


def floats(n: int, k: int, random: torch.Generator) -> dict[str, Tensor]:
    return {"weight": (torch.randn(n, k, generator=random) * k**-0.5).bfloat16()}


def codes_of_4_bits(n: int, k: int, random: torch.Generator) -> dict[str, Tensor]:
    words = torch.randint(-(1 << 31), 1 << 31, (n, k // 8), generator=random).to(torch.int32)
    scales = torch.full((n, k // GROUPS[k]), k**-0.5 / 4.6).half()  # 4.6: the spread of uniformly distributed codes
    return {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor([n, k])}


def codes_of_8_bits(n: int, k: int, random: torch.Generator) -> dict[str, Tensor]:
    codes = torch.randint(-127, 128, (n, k), generator=random).to(torch.int8)
    return {"weight": codes, "weight_scale": torch.full((n, 1), k**-0.5 / 73)}


def every_word(n: int, k: int, code: int) -> Tensor:
    """4-bit zero points that all have this code: [k / 64, n / 8] int32."""
    return torch.full((k // COMMON_GROUP, n // 8), int.from_bytes([17 * code] * 4, "little", signed=True)).to(
        torch.int32
    )


def codes_of_gptq(n: int, k: int, random: torch.Generator) -> dict[str, Tensor]:
    return {
        "qweight": torch.randint(-(1 << 31), 1 << 31, (k // 8, n), generator=random).to(torch.int32),
        "qzeros": every_word(n, k, 7),
        "scales": torch.full((k // COMMON_GROUP, n), k**-0.5 / 4.6).half(),
        "g_idx": (torch.arange(k) // COMMON_GROUP).to(torch.int32),
    }


def codes_of_awq(n: int, k: int, random: torch.Generator) -> dict[str, Tensor]:
    return {
        "qweight": torch.randint(-(1 << 31), 1 << 31, (k, n // 8), generator=random).to(torch.int32),
        "qzeros": every_word(n, k, 8),
        "scales": torch.full((k // COMMON_GROUP, n), k**-0.5 / 4.6).half(),
    }


def scheme(layout: str, *groups: dict[str, Any]) -> dict[str, Any]:
    named = {f"group_{index}": group for index, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": named, "ignore": ["lm_head"]}


def in_groups(size: int, *targets: str) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size, "symmetric": True}
    return {"targets": list(targets), "weights": weights}


W8A8 = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True},
}
OF_4_BITS = {"bits": 4, "group_size": COMMON_GROUP}
Writer = Callable[[int, int, torch.Generator], dict[str, Tensor]]
KINDS: dict[str, tuple[dict[str, Any] | None, Writer]] = {
    "bf16": (None, floats),
    "W4A16": (
        scheme("pack-quantized", in_groups(GROUPS[INNER], r"re:.*down_proj"), in_groups(GROUPS[HIDDEN], "Linear")),
        codes_of_4_bits,
    ),
    "W8A8": (scheme("int-quantized", W8A8), codes_of_8_bits),
    "GPTQ": ({"quant_method": "gptq", **OF_4_BITS, "desc_act": False, "sym": True}, codes_of_gptq),
    "AWQ": ({"quant_method": "awq", **OF_4_BITS, "zero_point": True, "version": "gemm"}, codes_of_awq),
}


def write_checkpoint(folder: Path, kind: str) -> int:
    """Writes random weights; returns the bytes of the tensors."""
    quantisation, writer = KINDS[kind]
    random = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": (torch.randn(VOCABULARY, HIDDEN, generator=random) * 0.05).bfloat16(),
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(HIDDEN).bfloat16()
        for name, (n, k) in SHAPES.items():
            tensors |= {f"{prefix}.{name}.{part}": each for part, each in writer(n, k, random).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = CONFIG | {"dtype": "bfloat16"} | ({"quantization_config": quantisation} if quantisation else {})
    (folder / "config.json").write_text(json.dumps(config))
    return sum(each.nbytes for each in tensors.values())


def add_tokenizer(folder: Path) -> None:
    """Adds the demo model's tokenizer, which has the shape's vocabulary: vLLM needs one."""
    import transformers

    from headrace.executor.checkpoints.demo_model import fetch_demo_model

    gguf = fetch_demo_model()
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def ours(folder: Path) -> Rates:
    with LLM(
        str(folder), dtype="bfloat16", max_model_len=2048, enable_prefix_caching=False, skip_tokenizer_init=True
    ) as llm:
        return run_cases(generator(llm), list(CASES))


def vllms(folder: Path, arguments: argparse.Namespace) -> Rates:
    command = ["bash", str(arguments.scripts / "run_vllm.sh"), str(arguments.peers), str(folder), *CASES]
    rates: Rates = run("vllm", command)["rows"]
    return rates


def median(samples: list[Rates], case: str, figure: str) -> float:
    return statistics.median(sample[case][figure] for sample in samples)


def summary(found: dict[str, Any], read_bytes_per_s: float) -> dict[str, Any]:
    """The figures of one kind's samples."""
    mine, theirs = found["headrace"], found["vllm"]
    share = median(mine, "decode_1", "out_tok_s") * found["bytes of a token"] / read_bytes_per_s
    against = {
        case: round(median(mine, case, figure) / median(theirs, case, figure), 2)
        for case, figure in CASES.items()
        if theirs
    }
    return {"share of read bandwidth": round(share, 3), **({"times vLLM's": against} if theirs else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(KINDS), help="repeatable")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peers", type=Path, help="where the peers are installed; without it only ours is measured")
    parser.add_argument("--scripts", type=Path, help="the folder of the peers' scripts, for --peers")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    if (arguments.peers is None) != (arguments.scripts is None):
        parser.error("--peers and --scripts go together")
    for name in ("peers", "scripts"):
        if (path := getattr(arguments, name)) is not None:
            setattr(arguments, name, path.resolve())
    kinds = arguments.only or list(KINDS)
    results: dict[str, Any] = {"limits": limits(runtime())}
    with tempfile.TemporaryDirectory() as work:
        folders = {kind: Path(work) / kind for kind in kinds}
        for kind, folder in folders.items():
            results[kind] = {"bytes of a token": write_checkpoint(folder, kind), "headrace": [], "vllm": []}
            if arguments.peers:
                add_tokenizer(folder)
        for number in range(arguments.rounds):
            for kind, folder in folders.items():
                measured = {"headrace": ours(folder)}
                if arguments.peers and kind in RUN_BY_VLLM:
                    measured["vllm"] = vllms(folder, arguments)
                for engine, rates in measured.items():
                    results[kind][engine].append(rates)
                    shown = ", ".join(f"{case} {rates[case][figure]}" for case, figure in CASES.items())
                    print(f"round {number + 1}, {kind}, {engine}, tok/s: {shown}", flush=True)
    for kind in kinds:
        results[kind] |= summary(results[kind], results["limits"]["read_gigabytes_per_s"] * 1e9)
        print(kind, {name: value for name, value in results[kind].items() if name not in ("headrace", "vllm")})
    if "bf16" in results and "W8A8" in results:
        before, now = (median(results[kind]["headrace"], "prefill_1024", "in_tok_s") for kind in ("bf16", "W8A8"))
        results["W8A8 prefill against bf16"] = round(now / before, 2)
        print(f"W8A8 prefill of 1024: {now / before:.2f} times bf16's")
    if arguments.out:
        write_report(arguments.out, "quantised_speed", results)


if __name__ == "__main__":
    main()
