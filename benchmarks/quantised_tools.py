"""Checkpoints that the real tools make of a tiny model, against what the tools say that they stand for.

    python benchmarks/quantised_tools.py bitsandbytes=/tmp/bnb/bin/python llmcompressor=/tmp/llmc/bin/python

Each tool runs in the Python given, of a virtual environment of its own that has the tool, torch of this project's
version and transformers. For each scheme: the error of logits, root mean square over their spread, against
transformers' model of the dequantised weights in float64, whether greedy tokens are equal in float32, and the memory
of weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from report import write_report
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
SCHEMES = {
    "bitsandbytes": ("nf4", "nf4 double", "fp4", "int8"),
    "llmcompressor": (
        "W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16",
    ),
}  # fmt: skip
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
NEW_TOKENS = 16
RESULTS = ROOT / "benchmarks/results/quantised_tools.json"


def main(tools: dict[str, str]) -> None:
    import tiny_models

    results = []
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.save("llama", Path(folder) / "float", **SIZES)
        for tool, python in tools.items():
            version = _output(python, "-c", f"import importlib.metadata as m; print(m.version('{tool}'))").strip()
            for scheme in SCHEMES[tool]:
                into = Path(folder) / f"{tool} {scheme}"
                made = subprocess.run(
                    [python, str(ROOT / "benchmarks/quantised_maker.py"), tool, scheme, str(model), str(into)],
                    capture_output=True, text=True, timeout=600, check=False,
                )  # fmt: skip
                row: dict[str, Any] = {"tool": tool, "version": version, "scheme": scheme}
                if made.returncode:
                    row["not made"] = (made.stderr.strip().splitlines() or ["it said nothing"])[-1][:200]
                else:
                    row |= compare(model, into)
                print(json.dumps(row), flush=True)
                results.append(row)
                write_report(RESULTS, "quantised_tools", results)


def compare(model: Path, into: Path) -> dict[str, Any]:
    """Our logits and tokens beside those of the dequantised model."""
    import transformers
    from model_driver import Driver
    from test_quantisation import PROMPT, exact_greedy, kinds_of, opened

    exact = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    _, unknown = exact.load_state_dict(load_file(into / "dequantised.safetensors"), strict=False)
    assert not unknown, unknown
    tokens, logits = exact_greedy(exact.double().eval(), NEW_TOKENS)
    decoder = opened(into / "model")
    (found,), (own,) = Driver(decoder).greedy([PROMPT], NEW_TOKENS, chunk=64)
    error = float((own.double() - logits).square().mean().sqrt() / logits.std())
    return {
        "method": json.loads((into / "model/config.json").read_text())["quantization_config"]["quant_method"],
        "kinds": sorted(kinds_of(decoder)),
        "error": error,
        "tokens are equal": found == tokens,
        "weight bytes": decoder.weight_bytes,
    }


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


if __name__ == "__main__":
    main(dict(pair.split("=", 1) for pair in sys.argv[1:]))
