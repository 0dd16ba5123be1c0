"""What a separately installed package brings: a family with a block of its own, a scheduler, and what it gets wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from installed_packages import install
from test_models import reference_logits

from headrace import LLM, HeadraceError, ModelError, ModelRegistry, OptionError, SamplingParams
from headrace.executor.models import families, registry
from headrace.ipc.process.program import FOR_PROGRAMS

ENTRY_POINTS = """
[headrace.plugins]
squared = squared_family:FAMILY
gentle = gentle_scheduler:GentleScheduler
broken = squared_family:MISSING
number = squared_family:NUMBER
[vllm.general_plugins]
patches = squared_family:patch
"""
FAMILY = '''
from dataclasses import dataclass

from headrace.executor.models.arch import ArchSpec, LayerSpec, NormSpec, RopeSpec
from headrace.executor.models.blocks import Axis, Ffn, Linear
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.families import Family


@dataclass(frozen=True)
class SquaredRelu(Ffn):
    """down(relu(up(x)) ** 2)"""

    inner: int

    def declare(self, spec):
        up = Linear((("mlp.up_proj", Axis(self.inner)),), spec.hidden_size, activation="relu")
        return {"up": up, "down": Linear((("mlp.down_proj", spec.hidden_size),), Axis(self.inner))}

    def emit(self, ops, held, x):
        return [ops.product(held["down"], ops.call(lambda value: value * value, ops.linear(held["up"], x)))]

    def values_per_token(self, tp_size):
        return 2 * self.inner // tp_size

    def why_no_program(self, spec, tp_size):
        return "squares are not among the program's ops."


def build(config):
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    mixer = Attention(
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=RopeSpec(config["rope_parameters"]["rope_theta"], head_dim),
    )
    return ArchSpec(
        architecture="SquaredForCausalLM",
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        layers=(LayerSpec(mixer, SquaredRelu(config["intermediate_size"])),) * config["num_hidden_layers"],
        norm=NormSpec("rms", config["rms_norm_eps"]),
    )


FAMILY = Family(("SquaredForCausalLM",), build)
NUMBER = 3
'''
SCHEDULER = """
from headrace.core.schedule.scheduler import Scheduler


class GentleScheduler(Scheduler):
    pass
"""
GENERATE = """
import json, logging, sys
logging.basicConfig(level=logging.WARNING)
from headrace import LLM, SamplingParams
options = json.loads(sys.argv[2])
with LLM(sys.argv[1], dtype="float32", skip_tokenizer_init=True, max_model_len=64, max_num_seqs=2, **options) as llm:
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    print(json.dumps(list(llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)[0].outputs[0].token_ids)))
"""
PROMPT, NEW_TOKENS = [5, 6, 7, 8], 10


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the package is installed into."""
    files = {"squared_family.py": FAMILY, "gentle_scheduler.py": SCHEDULER}
    return install(tmp_path_factory.mktemp("site"), "squared-for-headrace", ENTRY_POINTS, files)


@pytest.fixture(scope="module")
def arcee(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    import transformers

    config = transformers.ArceeConfig(**tiny_models.COMMON)
    model = transformers.ArceeForCausalLM(config).eval()
    tiny_models._randomise(model, 0, 0.1)
    folder = tmp_path_factory.mktemp("arcee")
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["SquaredForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model


def generate(model: Path, site: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", GENERATE, str(model), json.dumps(options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=variables, check=False)


@pytest.mark.system
@pytest.mark.parametrize("options", [{"scheduler_cls": "gentle", "tensor_parallel_size": 2}], ids=str)
def test_a_family_with_a_block_of_its_own_is_served(
    options: dict[str, Any], arcee: tuple[Path, Any], installed: Path
) -> None:
    folder, model = arcee
    done = generate(folder, installed, **options)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    with torch.inference_mode():
        assert answer == reference_logits(model, PROMPT, answer).argmax(-1).tolist()
    assert len(answer) == NEW_TOKENS
    assert "runs op by op, and not as one program of the CPU kernels: squares are not among" in done.stderr
    assert "the plugin patches of squared-for-headrace is registered for vLLM (vllm.general_plugins)" in done.stderr


def test_without_the_package_the_architecture_is_unknown_and_a_plugin_that_fails_is_named(
    arcee: tuple[Path, Any], installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = arcee
    with pytest.raises(ModelError, match="the architecture SquaredForCausalLM is not supported"):
        LLM(str(folder), skip_tokenizer_init=True, in_process=True)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["OtherForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    monkeypatch.syspath_prepend(str(installed))
    with pytest.raises(ModelError) as refused:
        LLM(str(tmp_path), skip_tokenizer_init=True, in_process=True)
    said = str(refused.value)
    assert "the architecture OtherForCausalLM is not supported" in said
    assert "the plugin broken of squared-for-headrace (squared_family:MISSING) cannot be loaded" in said
    assert "the plugin number of squared-for-headrace (squared_family:NUMBER) is a int; a Family or a class" in said


def test_a_plugin_of_another_kind_or_none_is_refused_by_name(arcee: tuple[Path, Any], installed: Path) -> None:
    said = generate(arcee[0], installed, scheduler_cls="squared").stderr
    assert "scheduler_cls=squared is a Family; it must be a class" in said
    said = generate(arcee[0], installed, distributed_executor_backend="nothing").stderr
    assert "a plugin's name (broken, gentle, number, squared) or module:Class" in said


OTHER_MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM


class OtherConfig(LlamaConfig):
    model_type = "other_llama"


class OtherForCausalLM(LlamaForCausalLM):
    config_class = OtherConfig
"""


@pytest.mark.parametrize(
    ("architecture", "path", "tiny", "model_type"),
    [
        ("TinyForCausalLM", "tiny_family:FAMILY", "qwen3", "qwen3"),
        ("OtherForCausalLM", "other_model:OtherForCausalLM", "llama", "other_llama"),
    ],
)
def test_what_the_docs_register_is_served(
    architecture: str, path: str, tiny: str, model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
    (tmp_path / "tiny_family.py").write_text(next(part for part in page.split("```") if "# tiny_family.py" in part)[6:])
    (tmp_path / "other_model.py").write_text(OTHER_MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(FOR_PROGRAMS, registry.VARIABLE, "{}")
    ModelRegistry.register_model(architecture, path)
    assert architecture in ModelRegistry.get_supported_archs()
    folder = tiny_models.save(tiny, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": [architecture], "model_type": model_type
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    with LLM(str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=64, in_process=True) as llm:
        answer = list(llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert answer == reference_logits(tiny_models.build(tiny), PROMPT, answer).argmax(-1).tolist()


def test_what_an_engine_could_not_import_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FOR_PROGRAMS, registry.VARIABLE, "{}")
    for model in ("no_colon", type("Local", (), {"__module__": "__main__"})):
        with pytest.raises(OptionError, match=r"module:name"):
            ModelRegistry.register_model("LocalForCausalLM", model)
    ModelRegistry.register_model("LocalForCausalLM", "nowhere_at_all:FAMILY")
    with pytest.raises(OptionError, match=r"LocalForCausalLM is registered as nowhere_at_all:FAMILY, which cannot be"):
        registry.registered_model("LocalForCausalLM")


ODD_MODELS = (
    OTHER_MODEL.replace("other_llama", "odd_llama")
    + """

class Plain:
    config_class = OtherConfig


class Unbuilt(OtherForCausalLM):
    config_class = OtherConfig

    def __init__(self, config):
        raise RuntimeError("no such luck")


class OddConfig(LlamaForCausalLM):
    config_class = 5


NUMBER = 3
"""
)


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("odd_models:Plain", r"is registered as <class 'odd_models\.Plain'>; a class derived from transformers'"),
        ("odd_models:Unbuilt", r"transformers cannot compute OddForCausalLM here: RuntimeError: no such luck"),
        ("odd_models:OddConfig", r"OddConfig'>, whose config_class is 5; a class derived from"),
        ("odd_models:NUMBER", r"is registered as odd_models:NUMBER, a int; a Family or a class derived from"),
        ("odd_models:Missing", r"^OddForCausalLM is registered as odd_models:Missing, which cannot be loaded: Attrib"),
        ("no_odd_models:Any", r"^OddForCausalLM is registered as no_odd_models:Any, which cannot be loaded: Module"),
    ],
)
def test_a_registered_model_that_cannot_compute_is_refused_by_its_architectures_name(
    name: str, said: str, model_impl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_models.py").write_text(ODD_MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "odd_models", raising=False)
    monkeypatch.setitem(FOR_PROGRAMS, registry.VARIABLE, "{}")
    ModelRegistry.register_model("OddForCausalLM", name)
    config = {**tiny_models.COMMON, "architectures": ["OddForCausalLM"], "model_type": "odd_llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(HeadraceError, match=said):
        LLM(str(tmp_path), skip_tokenizer_init=True, load_format="dummy", in_process=True, model_impl=model_impl)


def register_family(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers FAMILY of a module with this text for OddForCausalLM."""
    (folder / "failing_family.py").write_text(f"from headrace.executor.models.families import Family\n{text}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "failing_family", raising=False)
    monkeypatch.setitem(FOR_PROGRAMS, registry.VARIABLE, "{}")
    ModelRegistry.register_model("OddForCausalLM", "failing_family:FAMILY")


@pytest.mark.parametrize(
    ("build", "said"), [('config["nowhere"]', "KeyError: 'nowhere'"), ("None", "TypeError: its build returned None")]
)
def test_a_family_that_fails_is_named_with_its_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: str, said: str
) -> None:
    register_family(tmp_path, f'FAMILY = Family(("OddForCausalLM",), lambda config: {build})', monkeypatch)
    where = rf"the family of OddForCausalLM \(failing_family\) cannot read the config: {said}"
    with pytest.raises(ModelError, match=where):
        families.spec_from_config({"architectures": ["OddForCausalLM"]})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('"OddForCausalLM", len', "a family's architectures are 'OddForCausalLM'; they must be a tuple of names"),
        ('("OddForCausalLM",), 7', "the build of the family of OddForCausalLM is 7; it must be a function"),
    ],
)
def test_a_family_of_other_parts_is_refused_where_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    register_family(tmp_path, f"FAMILY = Family({arguments})", monkeypatch)
    with pytest.raises(OptionError, match=f"failing_family:FAMILY, which cannot be loaded: TypeError: {said}"):
        families.spec_from_config({"architectures": ["OddForCausalLM"]})


BLOCKS = """
from dataclasses import dataclass, replace
from headrace.executor.models.blocks import Declared, WithoutWeights
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.families._config import llama_like

@dataclass(frozen=True)
class Op(WithoutWeights, Declared):
    eager_reader = "READER"

class Raising:
    def __init__(self, weights, declared, prefix):
        pass
    def __call__(self, x):
        raise SystemExit(3)

@dataclass(frozen=True)
class Odd(Dense):
    def declare(self, spec):
        DECLARE
        return {**super().declare(spec), "odd": Op()}
    def emit(self, ops, held, x):
        return super().emit(ops, held, ops.compute(held["odd"], x))

def build(config):
    spec = llama_like(config)
    return replace(spec, layers=tuple(replace(each, ffn=Odd(96, "silu")) for each in spec.layers))

FAMILY = Family(("OddForCausalLM",), build)
"""


@pytest.mark.parametrize(
    ("reader", "declare", "said"),
    [
        (
            "failing_family:Raising",
            "raise KeyError(7)",
            r"OddForCausalLM, with blocks of failing_family, failed: KeyErr",
        ),
        ("nowhere:Raising", "", r"the eager_reader 'nowhere:Raising' of failing_family.Op failed: ModuleNotFoundError"),
        ("failing_family:Nope", "", r"the eager_reader 'failing_family:Nope' of failing_family.Op failed: Attribute"),
        ("failing_family:Raising", "", r"the op failing_family.Raising failed: SystemExit\(3\)"),
    ],
)
def test_a_block_or_op_of_a_package_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, declare: str, said: str
) -> None:
    register_family(tmp_path, BLOCKS.replace("READER", reader).replace("DECLARE", declare), monkeypatch)
    config = {**tiny_models.COMMON, "architectures": ["OddForCausalLM"], "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(HeadraceError, match=said):
        answer_of(tmp_path)


def answer_of(folder: Path) -> None:
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32"}
    llm = LLM(str(folder), in_process=True, max_model_len=64, num_gpu_blocks_override=40, **options)
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), use_tqdm=False)
