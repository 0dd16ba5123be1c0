"""Checkpoints that real quantisation tools make from a tiny model, compared with the values that the tools compute.

    python benchmarks/quantised_tools.py bitsandbytes=/tmp/bnb/bin/python llmcompressor=/tmp/llmc/bin/python \\
        torchao=/tmp/ao/bin/python hqq=/tmp/hqq/bin/python modelopt=/tmp/modelopt/bin/python \\
        quark=/tmp/quark/bin/python gptqmodel=/tmp/gptqmodel/bin/python auto_round=/tmp/auto_round/bin/python

Each tool runs in the given Python, in a virtual environment with the tool, this project's version of torch, and
transformers. Reported for each scheme: the error of logits (root mean square divided by their spread) against
transformers' model of the dequantised weights in float64 (with rounded inputs where the scheme rounds them); whether
greedy tokens are equal in float32; the difference in perplexity of a fixed text; and the memory of weights. Where
inputs are rounded, also the median error of a text's tokens against the tool's own model in float32 (with and without
the borderline cases of `quantised_maker.own_logits`).

TOOL/SCHEME=... runs one scheme alone; other schemes keep their earlier results.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from quantised_maker import ROUNDED
from report import write_report
from safetensors.torch import load_file

from headrace.kernels.grouped import InputRounding

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("support", "checkpoints", "cpu", "models")]
SCHEMES = {
    "bitsandbytes": ("nf4", "nf4 double", "fp4", "int8"),
    "llmcompressor": (
        "W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16",
        "MXFP8A16", "W3A16", "W5A16", "W4A8",
    ),
    "torchao": (
        "Int8WeightOnly", "IntxWeightOnly", "Int8DynamicActivationInt8Weight", "Int8DynamicActivationIntxWeight",
        "Float8WeightOnly",
    ),
    "hqq": ("8 bits", "4 bits", "2 bits"),
    "modelopt": ("FP8_DEFAULT", "NVFP4_DEFAULT"),
    "gptqmodel": (
        "4 bits", "4 bits asymmetric", "4 bits desc_act", "8 bits", "3 bits", "2 bits", "2 bits asymmetric",
        "3 bits planar", "5 bits", "6 bits desc_act", "7 bits asymmetric", "awq 4 bits", "fp8 matrix", "fp8 rows",
        "fp8 blocks",
    ),
    "auto_round": (
        "4 bits", "4 bits asymmetric", "4 bits awq", "3 bits", "2 bits asymmetric", "5 bits asymmetric", "8 bits",
        "awq 4 bits", "gptq 3 bits", "gptq 2 bits asymmetric",
    ),
    "quark": ("fp8", "int8", "int4", "uint4", "mxfp4", "mxfp6 e2m3", "mxfp6 e3m2"),
}  # fmt: skip
DISTRIBUTIONS = {"modelopt": "nvidia-modelopt", "quark": "amd-quark", "auto_round": "auto-round"}
"""Distribution names of tools that are imported by another name."""
SHIFTED = ("Int8DynamicActivationIntxWeight",)
"""Schemes with int8 inputs and a zero point per token."""
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
NEW_TOKENS, TEXT_TOKENS = 16, 48
RESULTS = ROOT / "benchmarks/results/quantised_tools.json"


def main(tools: dict[str, str]) -> None:
    import tiny_models

    results = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else []
    chosen = {name: tuple(filter(None, name.partition("/")[2:])) or SCHEMES[name.partition("/")[0]] for name in tools}
    anew = {(name.partition("/")[0], scheme) for name, schemes in chosen.items() for scheme in schemes}
    results = [row for row in results if (row["tool"], row["scheme"]) not in anew]
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.save("llama", Path(folder) / "float", tokenizer=True, **SIZES)
        for name, python in tools.items():
            tool = name.partition("/")[0]
            package = DISTRIBUTIONS.get(tool, tool)
            version = _output(python, "-c", f"import importlib.metadata as m; print(m.version('{package}'))").strip()
            for scheme in chosen[name]:
                into = Path(folder) / f"{tool} {scheme}"
                made = subprocess.run(
                    [python, str(ROOT / "benchmarks/quantised_maker.py"), tool, scheme, str(model), str(into)],
                    capture_output=True, text=True, timeout=600, check=False,
                )  # fmt: skip
                row: dict[str, Any] = {"tool": tool, "version": version, "scheme": scheme}
                if made.returncode:
                    row["not made"] = (made.stderr.strip().splitlines() or ["it said nothing"])[-1][:200]
                else:
                    rounding = InputRounding(shifted=scheme in SHIFTED) if scheme in ROUNDED else None
                    row |= compare(model, into, rounding)
                print(json.dumps(row), flush=True)
                results.append(row)
                write_report(RESULTS, "quantised_tools", results)


def compare(model: Path, into: Path, rounding: InputRounding | None) -> dict[str, Any]:
    """Our logits, tokens and perplexity compared with those of the dequantised model."""
    import transformers
    from model_driver import Driver
    from quantised_checkpoints import inputs_rounded
    from test_quantisation import PROMPT, exact_greedy, kinds_of, opened, relative_to_spread

    exact = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    _, unknown = exact.load_state_dict(load_file(into / "dequantised.safetensors"), strict=False)
    assert not unknown, unknown
    exact = exact.double().eval()
    text = torch.randint(0, exact.config.vocab_size, (TEXT_TOKENS,), generator=torch.Generator().manual_seed(0))
    with inputs_rounded(exact, rounding) if rounding else nullcontext(), torch.no_grad():
        tokens, logits = exact_greedy(exact, NEW_TOKENS)
        expected = perplexity(exact(text[None]).logits[0, :-1], text)
    decoder = opened(into / "model")

    def of_beginnings(ids: torch.Tensor) -> torch.Tensor:
        ends = range(1, len(ids) + 1)
        rows = [Driver(decoder).greedy([ids[:end].tolist()], 1, chunk=64)[1][0][0] for end in ends]
        return torch.stack(rows).double()

    (found,), (own,) = Driver(decoder).greedy([PROMPT], NEW_TOKENS, chunk=64)
    row = {
        "method": json.loads((into / "model/config.json").read_text())["quantization_config"]["quant_method"],
        "kinds": sorted(kinds_of(decoder)),
        "error": relative_to_spread(own, logits),
        "tokens are equal": found == tokens,
        "perplexity": expected,
        "perplexity differs by": perplexity(of_beginnings(text[:-1]), text) / expected - 1,
        "weight bytes": decoder.weight_bytes,
    }
    if rounding is not None:
        of_tool = load_file(into / "own.safetensors")
        ours = of_beginnings(of_tool["ids"])
        for name, theirs in (("", "logits"), (", borders decided", "decided")):
            if theirs not in of_tool:
                continue
            errors = [relative_to_spread(*pair) for pair in zip(ours, of_tool[theirs].double(), strict=True)]
            row[f"error against the tool's model{name}"] = sorted(errors)[len(errors) // 2]
    return row


def perplexity(logits: torch.Tensor, text: torch.Tensor) -> float:
    """Perplexity of text [count] after its first token, from logits [count - 1, vocabulary]."""
    return float(torch.nn.functional.cross_entropy(logits, text[1:]).exp())


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


if __name__ == "__main__":
    main(dict(pair.split("=", 1) for pair in sys.argv[1:]))
