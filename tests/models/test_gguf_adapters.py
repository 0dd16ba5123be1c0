"""Adapters in GGUF files, as llama.cpp's converter writes them: the same as peft's files of the same factors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf_cases import CASES
from model_driver import DictSource
from peft_adapters import PeftModels
from safetensors.torch import load_file, save_file
from test_adapters_beside import ENGINE, expect
from tiny_gguf import save_adapter, save_gguf
from torch import Tensor

from headrace import LLM, LoRARequest
from headrace.core.options.adapters import AdapterLimits
from headrace.executor.adapters.adapter import Adapter
from headrace.executor.adapters.gguf_files import read_gguf
from headrace.executor.adapters.heads import HeadDelta
from headrace.executor.adapters.layers import AdaptableLayers
from headrace.executor.adapters.peft_files import read_peft
from headrace.executor.adapters.slots import AdapterSlots
from headrace.executor.checkpoints.declared_weights import places_of
from headrace.executor.checkpoints.sources.gguf.file import GGUFFile
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks import ExpertStack, LayerDeclaration, Linear
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.sizes import weight_shapes
from headrace.executor.parallel.rank_place import SINGLE
from headrace.ipc.failure import ModelError
from headrace.kernels.low_rank import EmbeddingDelta, LowRank, LowRankExperts

RANK, ALPHA, MOST = 3, 6, 1 << 30
Factors = dict[str, tuple[Tensor, Tensor]]
NO_ADAPTER = {
    "gpt2": "the converter transposes factors that are not",
    "starcoder": "the same",
    **dict.fromkeys(("mamba", "mamba, falcon", "mamba2", "mamba2, one group, tied"), "no linear layers by these names"),
    **dict.fromkeys(("falcon-h1", "falcon-h1, normed"), "refused: the converter multiplies rows"),
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next", "gpt-oss", "llama4", "granitemoe"), "rows of other tensors"),
}
"""Cases that are not converted here, or that are tested on their own."""


def modules_of(spec: ArchSpec, state: Mapping[str, Tensor]) -> list[str]:
    """The checkpoint's modules that adapters may change, by its own names."""
    places, found = places_of(spec, frozenset(state)), set[str]()
    for index, layer in enumerate(spec.layers):
        start = spec.names.layer(spec.names.prefixes[0], index)
        declared = LayerDeclaration.of(spec, layer)
        names = list[str]()
        for part in (*declared.mixer.values(), *declared.ffn.values()):
            if isinstance(part, Linear):
                names += [name for name, _ in part.matrices]
            elif isinstance(part, ExpertStack):
                names += [*part.gates, *part.ups, *part.downs]
        for name in (f"{start}{each}.weight" for each in names):
            own = places[name].name if name in places else name
            if own in state and state[own].dim() == 2:
                found.add(own.removesuffix(".weight"))
    return sorted(found)


def random_factors(modules: list[str], state: Mapping[str, Tensor]) -> Factors:
    generator = torch.Generator().manual_seed(7)
    shapes = {each: state[f"{each}.weight"].shape for each in modules}
    return {
        each: (torch.randn(RANK, columns, generator=generator), torch.randn(rows, RANK, generator=generator))
        for each, (rows, columns) in shapes.items()
    }


def save_peft(factors: Factors, folder: Path) -> str:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "peft_version": "0.21.2"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {
        f"base_model.model.{module}.lora_{name}.weight": tensor
        for module, pair in factors.items()
        for name, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def dense(spec: ArchSpec, adapter: Adapter) -> dict[str, Tensor]:
    """What the adapter adds to each of the model's matrices."""

    def of(delta: LowRank | None) -> Tensor:
        return torch.zeros(0) if delta is None else delta.dense_b() @ delta.a

    found = dict[str, Tensor]()
    layers = AdaptableLayers(spec, spec, SINGLE, spec.names.prefixes[0], lambda: pytest.fail("reads the model"))
    for name, delta in layers.deltas(adapter)[0].items():
        if isinstance(delta, LowRankExperts):
            found |= {f"{name} {number}": of(each) for number, each in enumerate((*delta.gate_up, *delta.down))}
        elif isinstance(delta, EmbeddingDelta):
            found[name] = delta.a @ delta.b
        else:
            assert not isinstance(delta, HeadDelta)
            found[name] = of(delta)
    return found


ONE_OF_A_KIND = {
    *("llama, shared heads, tied", "phi3", "falcon", "bloom", "mixtral", "qwen3moe", "glm4", "internlm2", "lfm2"),
    "nemotron_h_moe",
}
"""The others convert their tensors as one of these, and take their time together."""
UNDER_OTHER_NAMES = {"chatglm, glm4"}
"""The file is read as another architecture of the same shape, under whose names PEFT's adapter says nothing."""


def by_size(matrices: dict[str, Tensor]) -> dict[str, Tensor]:
    """Numbered in the order of the sums of their values."""
    return {
        str(at): each for at, each in enumerate(sorted(matrices.values(), key=lambda each: each.abs().sum().item()))
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ONE_OF_A_KIND else pytest.mark.system)
        for name in sorted(CASES.keys() - NO_ADAPTER.keys())
    ],
)
def test_an_adapter_in_gguf_adds_to_each_matrix_what_pefts_does(name: str, tmp_path: Path) -> None:
    """For a model in either form."""
    case = CASES[name].make()
    spec = spec_from_config(case.config)
    factors = random_factors(modules_of(spec, case.state), case.state)
    peft = read_peft(save_peft(factors, tmp_path / "peft"), 8, MOST)
    file = save_adapter(case.architecture, case.config, factors, tmp_path / "adapter.gguf", ALPHA)
    of_file = spec_from_config(GGUFFile(case.save(tmp_path / "model.gguf")).config)
    for each in (spec, of_file):
        found, known = dense(each, read_gguf(file, each, 8, MOST)), spec if name in UNDER_OTHER_NAMES else each
        wanted = dense(known, peft)
        if known is not each:
            wanted, found = by_size(wanted), by_size(found)
        assert found.keys() == wanted.keys()
        assert len(wanted) >= 3
        for matrix, values in wanted.items():
            assert torch.allclose(found[matrix], values, rtol=1e-5, atol=1e-5), matrix


def factors_of(folder: Path) -> Factors:
    """Those of an adapter that peft saved."""
    tensors = load_file(folder / "adapter_model.safetensors")
    found = dict[str, tuple[Tensor, Tensor]]()
    for name, a in tensors.items():
        for kind, other in ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B")):
            if name.endswith(kind):
                module = name.removeprefix("base_model.model.").removesuffix(kind)
                found[module] = a, tensors[name.removesuffix(kind) + other]
    return found


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_answers_are_pefts_over_models_in_either_form(form: str, tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    config = model.config.to_dict()
    models = PeftModels(model, tmp_path)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]
    folder = models.make("a", target_modules=targets)
    file = save_adapter("LlamaForCausalLM", config, factors_of(folder), tmp_path / "adapter.gguf", 8)
    if form == "gguf":
        path = str(save_gguf(model, tmp_path / "model.gguf", Kind.F32))
    else:
        model.save_pretrained(path := str(tmp_path / "model"))
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "any.gguf").hardlink_to(file)
    with LLM(path, **ENGINE, skip_tokenizer_init=True) as llm:
        for each in (LoRARequest("a", 1, str(file)), None, LoRARequest("a", 2, str(alone))):
            expect(llm, models, each)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "tie_word_embeddings": False,
}
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def slots() -> AdapterSlots:
    spec = spec_from_config(LLAMA)
    source = DictSource({name: torch.ones(shape) for name, shape in weight_shapes(spec).items()})
    limits = AdapterLimits(max_loras=1, slots=2, max_rank=8, dtype="float32", target_modules=())
    return AdapterSlots(limits, Decoder(spec, source, torch.float32, adapters=limits), SINGLE, lambda: source)


def write(path: Path, module: str = QUERY, rank: int = 2, architecture: str = "LlamaForCausalLM", **more: Any) -> str:
    factors = {module: (torch.ones(rank, 64), torch.ones(64, rank))}
    return str(save_adapter(architecture, LLAMA, factors, path, **({"alpha": 4.0} | more)))


def test_what_the_metadata_says_is_computed(slots: AdapterSlots, tmp_path: Path) -> None:
    """Without an alpha, products are not scaled: as in llama.cpp."""
    tokens: dict[str, Any] = {"adapter__alora__invocation_tokens": [5, 6]}
    plain = slots.load(0, write(tmp_path / "a.gguf"))
    active = slots.load(1, write(tmp_path / "b.gguf", **tokens))
    unscaled = slots.load(1, write(tmp_path / "c.gguf", alpha=0.0, adapter__lora__task_name="sql"))
    told = slots.load(1, write(tmp_path / "d.gguf", adapter__lora__task_name="sql", adapter__lora__prompt_prefix="q: "))
    assert (told.task_name, told.prompt_prefix, told.identity) == ("sql", "q: ", plain.identity)
    assert (plain.rank, plain.invocation_tokens, active.invocation_tokens) == (2, (), (5, 6))
    assert len({plain.identity, active.identity, unscaled.identity}) == 3
    assert plain.identity == slots.load(1, write(tmp_path / "elsewhere.gguf")).identity
    spec = spec_from_config(LLAMA)
    deltas = [dense(spec, read_gguf(tmp_path / f"{each}.gguf", spec, 8, MOST)) for each in "ac"]
    (scaled,), (as_it_is,) = (list(each.values()) for each in deltas)
    assert float(scaled[0, 0]) == 2 * 4 / 2
    assert float(as_it_is[0, 0]) == 2


def test_factors_of_eight_bits_are_read(slots: AdapterSlots, tmp_path: Path) -> None:
    assert slots.load(0, write(tmp_path / "a.gguf", kind=Kind.Q8_0)).num_bytes


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "of another architecture": ({"architecture": "Qwen2ForCausalLM"}, "llama.cpp's architecture qwen2, and this one"),
    "of another model": ({"module": "model.layers.7.self_attn.q_proj"}, "no matrices that adapters change under .*blk"),
    "a high rank": ({"rank": 9}, "has factors of rank 9, which is greater than max_lora_rank, 8"),
    "of another size": ({"module": "model.layers.0.self_attn.k_proj"}, r"a matrix of \[64, 64\], and the model's has"),
    "no scale": ({"alpha": -1.0}, "adapter.lora.alpha is -1.0; a number from 0 to"),
    "endless tokens": ({"adapter__alora__invocation_tokens": [5] * 129}, "has 129 tokens, over 128"),
    "no tokens": ({"adapter__alora__invocation_tokens": "five"}, "invocation_tokens is no list of token ids"),
    "a long text": ({"adapter__lora__prompt_prefix": "a" * 5000}, "prompt_prefix is 'aaa.*at most 4096 characters"),
    "no text": ({"adapter__lora__task_name": 7}, "task_name is 7; a text of at most"),
    "an unknown key": ({"adapter__lora__gamma": 1}, "unknown keys adapter.lora.gamma"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_by_name(case: str, slots: AdapterSlots, tmp_path: Path) -> None:
    changes, message = BAD[case]
    if "module" in changes and "layers.7" in changes["module"]:
        config = LLAMA | {"num_hidden_layers": 8}
        factors = {changes["module"]: (torch.ones(2, 64), torch.ones(64, 2))}
        path = str(save_adapter("LlamaForCausalLM", config, factors, tmp_path / "a.gguf", 4.0))
    else:
        path = write(tmp_path / "a.gguf", **changes)
    with pytest.raises(ModelError, match=message) as refusal:
        slots.load(0, path)
    assert path in str(refusal.value)


def test_files_that_are_no_adapters_are_named(slots: AdapterSlots, tmp_path: Path) -> None:
    model = save_gguf(tiny_models.build("llama"), tmp_path / "model.gguf", Kind.F32)
    with pytest.raises(ModelError, match=r"model\.gguf.*(is no adapter|more than the)"):
        slots.load(0, str(model))
    whole = Path(write(tmp_path / "a.gguf")).read_bytes()
    for cut in (4, 100, len(whole) - 8):
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            slots.load(0, str(tmp_path / "cut.gguf"))
    (tmp_path / "other.gguf").write_bytes(b"PK" + whole[2:])
    with pytest.raises(ModelError, match=r"other\.gguf is not a GGUF file"):
        slots.load(0, str(tmp_path / "other.gguf"))
    unnamed = whole.replace(b"general.architecture", b"general.architectura")
    (tmp_path / "unnamed.gguf").write_bytes(unnamed)
    with pytest.raises(ModelError, match=r"unnamed\.gguf has no general\.architecture"):
        slots.load(0, str(tmp_path / "unnamed.gguf"))
    (tmp_path / "two").mkdir()
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / "two" / name).write_bytes(whole)
    with pytest.raises(ModelError, match=r"no readable adapter_config\.json"):
        slots.load(0, str(tmp_path / "two"))


def test_an_adapter_whose_matrices_the_converter_multiplies_is_refused(slots: AdapterSlots, tmp_path: Path) -> None:
    config = CASES["falcon-h1"].make().config
    path = save_adapter(
        "FalconH1ForCausalLM", config, {QUERY: (torch.ones(2, 64), torch.ones(64, 2))}, tmp_path / "a.gguf", 4.0
    )
    with pytest.raises(ModelError, match="multipliers"):
        slots.load(0, str(path))
