"""Each tensor of a quantised matrix is needed as its format stores it: what differs is refused, and never misread."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints as made
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from test_quantisation import CASES, Q_PROJ
from thinned import every, thinned
from torch import Tensor

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.models.reading import CheckedWeights
from headrace.ipc.failure import ModelError
from headrace.kernels.grouped import InputRounding

MADE = {name: case[0] for name, case in CASES.items()} | {
    "compressed W8A8 static": lambda: made.compressed("W8A8", InputRounding(0.03, -5), **made.W8)
}
AS_ANOTHER = {
    *("gptq 8 bits", "gptq 3 bits", "gptq 2 bits, zeros", "gptq planar 5 bits", "gptq planar 7 bits, zeros"),
    *("quark uint4", "quark mxfp6 e3m2", "compressed W3A16 zeros", "compressed W5A16", "compressed W8A16"),
    *("hqq 8 bits", "hqq 2 bits", "bitsandbytes nf4 as bfloat16"),
}
"""What has the tensors of another, with other numbers in them."""
FIRST = set({case.split()[0]: case for case in reversed(MADE)}.values())
"""The first of each format."""
SOME = thinned(MADE, lambda case: case not in AS_ANOTHER)
TYPES = (torch.float32, torch.int16, torch.int32, torch.uint8, torch.float8_e4m3fn)
HARMLESS = (
    ("modelopt .*", "input_scale", ".*"),  # inputs stay in floats
    ("compressed W.A16.*", "weight_shape", ".*"),  # the codes and the config say it
    ("hqq .*", "nbits", "missing"),  # the config says it
    ("bitsandbytes int8", "weight_format", "missing"),  # rows
    ("bitsandbytes int8", "weight_format", "as int(16|32)"),
    ("gptq (?!.*desc_act).*", "g_idx", "missing"),  # inputs stand group by group
    ("quark int4", "weight_zero_point", "missing"),  # symmetric: the middle of the codes
    ("torchao int8", "_weight_zero_point", "missing"),  # symmetric: 0
    # A few numbers count by their values, whatever their type.
    ("gptq .*|compressed W4A16 ordered", "g_idx|weight_g_idx", "as int16"),
    ("hqq .*", "shape|nbits", "as int(16|32)"),
    ("compressed W8A8 static", "input_zero_point", "as int(16|32)"),
    ("torchao .*", "_weight_zero_point", "as (float32|int16|int32)"),
)
"""By cases, tensors and changes: what loads, and reads as the same values."""
AMBIGUOUS = (("fp8 .*", "weight_scale(_inv)?", "as (float32|uint8)"),)
"""The same of what reads as other values, because its type alone says what it means: bytes are exponents."""


def is_among(rows: tuple[tuple[str, str, str], ...], *found: str) -> bool:
    return any(all(map(re.fullmatch, row, found)) for row in rows)


def matrix(folder: Path) -> Tensor:
    """The values of one matrix, checked and read as for a model."""
    source = open_checkpoint(Options(model=str(folder))).weights()
    return CheckedWeights(source, torch.float32, torch.device("cpu")).matrix(f"{Q_PROJ}.weight", 64, 64)


def changes(tensor: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """A tensor that is missing, shorter and longer along each dimension, and of the other kinds of types."""
    yield "missing", None
    for axis, size in enumerate(tensor.shape):
        if size > 1:
            yield f"shorter along {axis}", tensor.narrow(axis, 0, size - 1).contiguous()
        yield f"longer along {axis}", torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis).contiguous()
    wide_floats = torch.float16, torch.bfloat16, torch.float32
    for dtype in TYPES:
        if dtype != tensor.dtype and not {dtype, tensor.dtype}.issubset(wide_floats):
            yield f"as {dtype}".replace("torch.", ""), tensor.float().to(dtype)


@pytest.mark.parametrize("case", thinned(MADE, FIRST.__contains__))
def test_a_tensor_that_is_missing_or_of_another_shape_or_type_is_refused_by_name(case: str, tmp_path: Path) -> None:
    made.write(tmp_path, tiny_models.build("llama", num_hidden_layers=1), *MADE[case]())
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    exact = matrix(tmp_path)
    wrong = []
    for name in tensors:
        part = name.removeprefix(f"{Q_PROJ}.")
        if part in (name, "bias"):
            continue
        for change, tensor in changes(tensors[name]):
            others = {other: each for other, each in tensors.items() if other != name}
            save_file(others if tensor is None else others | {name: tensor}, file)
            row = case, part, change
            try:
                found = "harmless" if torch.equal(matrix(tmp_path), exact) else "misread"
            except ModelError as error:
                is_named = (name if change == "missing" else Q_PROJ) in str(error)
                found = "refused" if is_named else f"refused without a name: {error}"
            declared = "harmless" if is_among(HARMLESS, *row) else "refused"
            if found != declared and not is_among(AMBIGUOUS, *row):
                wrong.append((part, change, found, f"{declared} is expected"))
    assert not wrong


@pytest.mark.parametrize("case", ["quark fp8", "compressed fp8"])
def test_zero_points_of_floats_are_zero_or_refused(case: str, tmp_path: Path) -> None:
    made.write(tmp_path, tiny_models.build("llama", num_hidden_layers=1), *MADE[case]())
    file, exact = tmp_path / "model.safetensors", matrix(tmp_path)
    tensors, name = load_file(file), f"{Q_PROJ}.weight_zero_point"
    save_file(tensors | {name: torch.zeros(64, 1, dtype=torch.int8)}, file)
    assert torch.equal(matrix(tmp_path), exact)
    save_file(tensors | {name: torch.full((64, 1), 3, dtype=torch.int8)}, file)
    with pytest.raises(ModelError, match=f"{name} is not zero, and nothing is shifted"):
        matrix(tmp_path)


def test_int8_weights_in_a_gpus_own_order_are_refused(tmp_path: Path) -> None:
    made.write(tmp_path, tiny_models.build("llama", num_hidden_layers=1), *made.bitsandbytes("int8"))
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {f"{Q_PROJ}.weight_format": torch.tensor(2, dtype=torch.uint8)}, file)
    with pytest.raises(ModelError, match=rf"{Q_PROJ} .* weight_format is one GPU's own order .* rows \(0\)"):
        matrix(tmp_path)


ODD_NUMBERS: tuple[Any, ...] = (0, -1, 1 << 31, 1 << 62, 10**400, 1e300, True, "4", None, [], {})


def numbers_in(config: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of each number."""
    pairs = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for key, value in list(pairs):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield config, key
        yield from numbers_in(value)


@pytest.mark.parametrize("case", every(3, MADE))
def test_a_number_of_a_config_that_is_none_is_refused_and_takes_no_memory(case: str, tmp_path: Path) -> None:
    made.write(tmp_path, tiny_models.build("llama", num_hidden_layers=1), *MADE[case]())
    file, wrong = tmp_path / "config.json", []
    whole = json.loads(file.read_text())
    for container, key in numbers_in(whole["quantization_config"]):
        value = container[key]
        for odd in ODD_NUMBERS:
            container[key] = odd
            file.write_text(json.dumps(whole))
            try:
                matrix(tmp_path)
            except ModelError:
                pass
            except Exception as error:
                wrong.append((key, odd, repr(error)[:200]))
        container[key] = value
    assert not wrong
