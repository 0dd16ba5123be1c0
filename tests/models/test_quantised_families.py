"""Quantised checkpoints of every family: the logits are those of the same model in floats of the same values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import QUANTISED
from model_driver import Driver
from quantised_checkpoints import W8, compressed
from safetensors.torch import load_file, save_file
from test_cpu_decoder import LIMITS
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.cpu.decoder import CpuDecoder, why_not
from headrace.executor.models.blocks import NoFfn
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.kernels.cpu import build
from headrace.kernels.cpu.linear.linear import runtime

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not())),
]

PROMPT = [5, 81, 17, 100, 33, 9, 64, 101, 12, 77]
MOST_ERROR = 1e-4
"""Of the logits over their spread. Codes of fp8 are exact in float32; what is left is the order of sums."""
KEPT = ("embed", "lm_head", "wte", "wpe", "tok_", "output.weight", "norm", "router", ".gate.weight", "altup", "laurel")
"""Parts of names of what tools leave in floats."""


def quantise(folder: Path, quantised: Path) -> int:
    """Writes the checkpoint of `folder` with its matrices in fp8 into `quantised`, and their values back into `folder`.
    Gives the number of matrices."""
    stored, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    exact, codes, count = dict(stored), dict[str, Tensor](), 0
    quantization_config, writer = compressed("fp8", **(W8 | {"type": "float"}))
    for name, tensor in stored.items():
        if tensor.dim() != 2 or not name.endswith(".weight") or any(part in name for part in KEPT):
            codes[name] = tensor
            continue
        module, count = name.removesuffix(".weight"), count + 1
        tensors, values = writer(module, tensor.float())
        codes |= {f"{module}{suffix}": each.contiguous().clone() for suffix, each in tensors.items()}
        exact[name] = values.contiguous()
    quantised.mkdir()
    save_file(codes, quantised / "model.safetensors")
    save_file(exact, folder / "model.safetensors")
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": quantization_config}))
    return count


def logits_of(folder: Path) -> Tensor:
    checkpoint = open_checkpoint(Options(model=str(folder), dtype="float32"))
    spec = spec_from_config(checkpoint.config).for_context(64)
    if spec.has_states:
        return log_probabilities_of(folder)
    decoder: CpuDecoder | Decoder
    if why_not(spec, torch.float32):
        decoder = Decoder(spec, checkpoint.weights(), torch.float32)
    else:
        decoder = CpuDecoder(
            spec, checkpoint.weights(), torch.float32, LIMITS, keep_packed=True, used=runtime(num_threads=1)
        )
    _, (rows,) = Driver(decoder).greedy([PROMPT], 4, chunk=4)
    return rows


def log_probabilities_of(folder: Path) -> Tensor:
    """As `logits_of`, by an engine, since the driver of decoders keeps no states; each row differs by a constant."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=-1)
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "float32", "max_model_len": 64}
    options |= {"max_num_batched_tokens": 4, "max_num_seqs": 1, "max_logprobs": -1, "skip_tokenizer_init": True}
    with LLM(str(folder), in_process=True, **options) as llm:
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    rows = [[row[token].logprob for token in sorted(row)] for row in output.outputs[0].logprobs or ()]
    return torch.tensor(rows)


def least_matrices(folder: Path) -> int:
    """How many matrices two layers have at least: four each, and two where there is a mixer alone."""
    layers = spec_from_config(json.loads((folder / "config.json").read_text())).layers
    return sum(2 if isinstance(layer.ffn, NoFfn) else 4 for layer in layers[:2])


@pytest.mark.parametrize("architecture", QUANTISED)
def test_a_quantised_checkpoint_gives_the_logits_of_its_values(architecture: str, tmp_path: Path) -> None:
    folder, quantised = tmp_path / "exact", tmp_path / "quantised"
    QUANTISED[architecture](folder)
    in_floats = logits_of(folder)
    assert quantise(folder, quantised) >= least_matrices(folder)
    found, exact = logits_of(quantised), logits_of(folder)
    assert not torch.equal(exact, in_floats), "the values of codes are others than those before"
    assert float((found - exact).square().mean().sqrt() / exact.std()) < MOST_ERROR


@pytest.mark.parametrize("others", ["floats", "fp8"])
def test_a_table_of_8_bit_floats_has_one_scale_for_all_its_parts(others: str, tmp_path: Path) -> None:
    """As Qwen4-Exp's tables of n-grams are published, beside matrices of a format of their own."""
    folder, quantised = tmp_path / "exact", tmp_path / "quantised"
    QUANTISED["Qwen4ExpForCausalLM"](folder)
    in_floats = logits_of(folder)
    if others == "fp8":
        quantise(folder, quantised)
    else:
        shutil.copytree(folder, quantised)
    exact, codes = (load_file(each / "model.safetensors") for each in (folder, quantised))
    scale = torch.tensor(0.0125)
    for name in [name for name in exact if ".shard_" in name]:
        codes[name] = (exact[name] / scale).to(torch.float8_e4m3fn)
        exact[name] = codes[name].float() * scale
        codes[f"{name.partition('.shard_')[0]}.weight_scale"] = scale.clone()
    for path, tensors in ((folder, exact), (quantised, codes)):
        save_file({name: each.contiguous() for name, each in tensors.items()}, path / "model.safetensors")
    found, expected = logits_of(quantised), logits_of(folder)
    assert not torch.equal(expected, in_floats)
    assert float((found - expected).square().mean().sqrt() / expected.std()) < MOST_ERROR
