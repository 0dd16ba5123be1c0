"""An op that a separately installed package brings: its reference on tensors, and its kernel in CPU programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from model_driver import DictSource, Driver
from test_models import reference_logits

from headrace.executor.cpu.decoder import CpuDecoder
from headrace.executor.cpu.program import StepLimits
from headrace.executor.models import blocks
from headrace.executor.models.arch import ArchSpec, LayerSpec, NormSpec, RopeSpec, WeightNames
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.reading import _reader
from headrace.executor.models.sizes import weight_shapes

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "squares-for-headrace"
version = "1.0"
[tool.setuptools]
packages = ["squares"]
[tool.setuptools.package-data]
squares = ["kernels/*.cpp"]
[project.entry-points."headrace.plugins"]
squares = "squares:FAMILY"
eager = "squares:EAGER"
"""
FAMILY = '''
"""A family whose FFN computes scale * x ** 2 by an op of this package. Imports no torch."""
from dataclasses import dataclass, replace

from headrace.executor.models.blocks import Axis, Declared, Ffn, Linear, Vector
from headrace.executor.models.families import Family
from headrace.executor.models.families._config import llama_like


@dataclass(frozen=True)
class ScaledSquare(Declared):
    scale: Vector
    eager_reader = "squares.ops:EagerSquare"
    program_reader = "squares.ops:ProgramSquare"

    def weights(self):
        return self.scale.weights()


class EagerScaledSquare(ScaledSquare):
    program_reader = ""


@dataclass(frozen=True)
class Squared(Ffn):
    inner: int
    op: type = ScaledSquare

    def declare(self, spec):
        inner, hidden = Axis(self.inner), spec.hidden_size
        return {
            "up": Linear((("mlp.up_proj", inner),), hidden, activation="relu"),
            "square": self.op(Vector("mlp.scale", inner)),
            "down": Linear((("mlp.down_proj", hidden),), inner),
        }

    def emit(self, ops, held, x):
        return [ops.product(held["down"], ops.compute(held["square"], ops.linear(held["up"], x)))]

    def values_per_token(self, tp_size):
        return 2 * self.inner // tp_size


def build(config, op):
    spec = llama_like(config)
    layers = tuple(replace(each, ffn=Squared(config["intermediate_size"], op)) for each in spec.layers)
    return replace(spec, layers=layers)


FAMILY = Family(("SquaresForCausalLM",), lambda config: build(config, ScaledSquare))
EAGER = Family(("EagerSquaresForCausalLM",), lambda config: build(config, EagerScaledSquare))
'''
OPS = """
import ctypes
from pathlib import Path

from headrace.kernels.cpu.facade import ROW_COUNTS, build, pointer


class EagerSquare:
    def __init__(self, weights, declared, prefix):
        self.scale = weights.values(declared.scale, prefix)

    def __call__(self, x):
        return (x.float().square() * self.scale).to(x.dtype)


class SquareArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64), ("out_stride", ctypes.c_int64), ("columns", ctypes.c_int64),
        ("rows", ctypes.c_int32),
    )


class ProgramSquare:
    def __init__(self, weights, declared, prefix):
        self.scale = weights.values(declared.scale, prefix)
        self.library = build.build(folder=Path(__file__).parent / "kernels")

    def write(self, ops, x):
        out = ops.room(x.columns, x.tensor.dtype)
        rows = ROW_COUNTS[x.rows]
        args = SquareArgs(x.address, pointer(self.scale), out.address, x.stride, out.stride, x.columns, rows)
        ops.builder.op(self.library.dll.squares_op, args, (x,), (out,), keep=(self,))
        print("written", x.rows)
        return out
"""
KERNEL = """
#include "runtime/op.h"

using namespace headrace;

struct SquareArgs {
  const float *x, *scale;
  float* out;
  int64_t x_stride, out_stride, columns;
  Rows rows;
};

HR_EXPORT void squares_op(const void* raw, const Step& step, int thread, int num_threads) {
  const auto& args = *static_cast<const SquareArgs*>(raw);
  const Range mine = split(step.rows(args.rows, 0), thread, num_threads);
  for (int64_t row = mine.begin; row < mine.end; ++row)
    for (int64_t i = 0; i < args.columns; ++i) {
      const float value = args.x[row * args.x_stride + i];
      args.out[row * args.out_stride + i] = value * value * args.scale[i];
    }
}
"""
GENERATE = """
import json, logging, sys
logging.basicConfig(level=logging.WARNING)
from headrace import LLM, SamplingParams
with LLM(sys.argv[1], dtype="float32", skip_tokenizer_init=True, max_model_len=64, in_process=True) as llm:
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    print(json.dumps(list(llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)[0].outputs[0].token_ids)))
"""
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the package is installed into."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    files = {
        "pyproject.toml": PROJECT,
        "squares/__init__.py": FAMILY,
        "squares/ops.py": OPS,
        "squares/kernels/square.cpp": KERNEL,
    }
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, timeout=120)
    return target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint, and a model of transformers that computes the same: there the matrix after the squares has the
    scales."""
    import transformers
    from safetensors.torch import load_file, save_file

    reference = transformers.ArceeForCausalLM(transformers.ArceeConfig(**tiny_models.COMMON)).eval()
    tiny_models._randomise(reference, 0, 0.1)
    folder = tmp_path_factory.mktemp("squares")
    reference.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for index, layer in enumerate(reference.model.layers):
        scale = torch.linspace(0.5, 2.0, layer.mlp.down_proj.in_features)
        weights[f"model.layers.{index}.mlp.scale"] = scale
        layer.mlp.down_proj.weight.data *= scale
    save_file(weights, folder / "model.safetensors")
    return folder, reference


@pytest.mark.parametrize(
    "architecture", ["SquaresForCausalLM", pytest.param("EagerSquaresForCausalLM", marks=pytest.mark.system)]
)
def test_a_block_with_an_op_of_its_own_is_computed(architecture: str, model: tuple[Path, Any], installed: Path) -> None:
    folder, reference = model
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    variables = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", GENERATE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    answer = json.loads(lines[-1])
    with torch.inference_mode():
        assert answer == reference_logits(reference, PROMPT, answer).argmax(-1).tolist()
    if architecture == "SquaresForCausalLM":
        assert lines.count("written tokens") == config["num_hidden_layers"] - 1
        assert lines.count("written logits") == 1
    else:
        assert "written tokens" not in lines
        assert "the program has no op for EagerScaledSquare." in done.stderr


@dataclass(frozen=True)
class Tripled(blocks.Declared):
    """3 * x"""

    eager_reader = program_reader = "test_own_ops:Triple"

    def weights(self) -> Iterator[blocks.Weight]:
        return iter(())


class Triple:
    def __init__(self, weights: Any, declared: Tripled, prefix: str) -> None:
        pass

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * x

    def write(self, ops: Any, x: Any) -> Any:
        out = ops.room(x.columns, x.tensor.dtype)
        ops.builder.copy(x, out)
        ops.builder.add(x, out, 2.0)
        return out


@dataclass(frozen=True)
class TripledAttention(Attention):
    """Attention whose input and result are tripled."""

    def declare(self, spec: ArchSpec) -> Mapping[str, blocks.Declared]:
        return {**super().declare(spec), "triple": Tripled()}

    def emit(self, ops: blocks.LayerOps, held: blocks.Held, x: Any) -> Sequence[Any]:
        qkv = ops.linear(held["qkv"], ops.compute(held["triple"], x))
        attended = ops.mix(held["attend"], qkv)
        return [ops.product(held["output"], ops.compute(held["triple"], attended))]


@dataclass(frozen=True)
class TripledDense(Dense):
    """An FFN whose input is tripled."""

    def declare(self, spec: ArchSpec) -> Mapping[str, blocks.Declared]:
        return {**super().declare(spec), "triple": Tripled()}

    def emit(self, ops: blocks.Ops, held: blocks.Held, x: Any) -> Sequence[Any]:
        return super().emit(ops, held, ops.compute(held["triple"], x))


@pytest.mark.parametrize("placement", ["pre", "sandwich", "parallel", "post"])
def test_an_op_may_read_the_input_of_a_block_and_the_result_of_attention(placement: Any) -> None:
    """Which in steps of few tokens each thread has for itself."""
    layer = LayerSpec(TripledAttention(4, 2, 16, 0.25, RopeSpec(10_000.0, 16)), TripledDense(96, "silu"))
    names = replace(WeightNames(), attention_post_norm="a.post", mlp_post_norm="m.post", mlp_norm="m.pre")
    spec = ArchSpec("Tripled", 64, 320, 512, (layer, layer), NormSpec("rms", 1e-6), placement, names=names)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in weight_shapes(spec).items()}
    prompts = [list(range(5, 45)), [7, 8, 9]]
    decoders = (
        Decoder(spec, DictSource(weights), torch.float32),
        CpuDecoder(spec, DictSource(weights), torch.float32, StepLimits(64, 2, 128)),
    )
    (tokens, wanted), (ours, logits) = (Driver(each).greedy(prompts, 4, chunk=20) for each in decoders)
    assert ours == tokens
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def _subclasses(of: type[blocks.Declared]) -> list[type[blocks.Declared]]:
    return [each for found in of.__subclasses__() for each in (found, *_subclasses(found))]


def test_the_readers_of_all_that_is_declared_exist() -> None:
    own = [each for each in _subclasses(blocks.Declared) if each.__module__.startswith("headrace.")]
    assert blocks.Linear in own
    for each in own:
        for path in (each.eager_reader, each.program_reader):
            assert not path or callable(_reader(path)), each
