"""What is wrong with an adapter's files is said, with the adapter's path, and nothing of it is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from model_driver import DictSource
from safetensors.torch import save_file
from torch import Tensor

from headrace.core.options.adapters import AdapterLimits
from headrace.core.options.engine_options import Options
from headrace.executor.adapters.located import located
from headrace.executor.adapters.slots import AdapterSlots
from headrace.executor.checkpoints import expressions
from headrace.executor.checkpoints.hub import HubChoice
from headrace.executor.checkpoints.hub.hugging_face import HuggingFace
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.sizes import weight_shapes
from headrace.executor.parallel.rank_place import SINGLE
from headrace.ipc.failure import MissingAdapterError, ModelError

LIMITS = AdapterLimits(max_loras=1, slots=2, max_rank=8, dtype="float32", target_modules=())
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "tie_word_embeddings": False,
}
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"
Tensors = dict[str, Tensor]


def slots(limits: AdapterLimits = LIMITS, **config: Any) -> AdapterSlots:
    spec = spec_from_config(CONFIG | config)
    source = DictSource({name: torch.ones(shape) for name, shape in weight_shapes(spec).items()})
    return AdapterSlots(limits, Decoder(spec, source, torch.float32, adapters=limits), SINGLE, lambda: source)


def write(folder: Path, config: dict[str, Any] | None = None, tensors: Tensors | None = None) -> str:
    folder.mkdir(exist_ok=True)
    whole = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | (config or {})
    (folder / "adapter_config.json").write_text(json.dumps(whole))
    factors = {f"{QUERY}.lora_A.weight": torch.ones(4, 16), f"{QUERY}.lora_B.weight": torch.ones(16, 4)}
    save_file(factors if tensors is None else tensors, folder / "adapter_model.safetensors")
    return str(folder)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "LOHA"}, "peft_type is 'LOHA', and LORA is supported"),
    "an unknown key": ({"lora_gamma": 1}, "unknown keys lora_gamma"),
    "qalora": ({"use_qalora": True}, "use_qalora is not supported"),
    "replicated layers": ({"layer_replication": [[0, 1]]}, "layer_replication is not supported"),
    "a changed base": ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4' is for a base model whose weights"),
    "no rank": ({"r": 0}, "r is 0; a positive number of at most"),
    "a rank of text": ({"r": "4"}, "r is '4'; a positive number of at most"),
    "a high rank": ({"r": 16}, "has r 16, which is greater than max_lora_rank, 8"),
    "a high rank of one module": (
        {"rank_pattern": {"q_proj": 9}},
        "has rank_pattern 9, which is greater than max_lora_rank, 8",
    ),
    "another rank than said": ({"r": 2}, "factors of rank 4, and the config says 2"),
    "no pattern": ({"alpha_pattern": {"q_proj(": 9}}, "alpha_pattern has 'q_proj(', which is no regular expression"),
    "a pattern that nests": ({"rank_pattern": {"(" * 5000: 4}}, "which is no regular expression: maximum recursion"),
    "a pattern that ends in a comment": ({"rank_pattern": {"(?x) #": 4}}, "#', which is no regular expression"),
    "a factor beyond all floats": ({"lora_alpha": 10**400}, "a positive number of at most"),
    "a factor beyond float32": ({"lora_alpha": 1e300}, "a positive number of at most"),
    "no tokens": ({"alora_invocation_tokens": [-1]}, "alora_invocation_tokens is a list of token ids"),
    "many tokens": ({"alora_invocation_tokens": [5] * 129}, "129 tokens, and at most 128 are looked for"),
    "dora without magnitudes": ({"use_dora": True}, "has no magnitude, and use_dora is True"),
}


ENDLESS = (r"(\w|\.|[a-z])+$(?<!j)", r"(?:(\w|[a-z]|\.)+)+\d$")
"""Expressions that are tried in exponentially many ways on a module's name."""


@pytest.mark.parametrize("pattern", ENDLESS)
@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_an_expression_that_never_ends_is_given_up(
    key: str, pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expressions, "MOST_S", 0.05)
    path = write(tmp_path / "adapter", {key: {pattern: 4, "q_proj": 4}})
    with pytest.raises(ModelError, match=f"{path}: its regular expressions for modules' names take too long"):
        slots().load(0, path)


def test_expressions_name_modules_as_for_peft(tmp_path: Path) -> None:
    """The first that a name ends with, as a whole part of it."""
    for pattern in ("q_proj", r"layers\.\d+\.self_attn\..*", "model.layers.0.self_attn.q_proj", "^model.*_proj"):
        assert slots().load(0, write(tmp_path / "adapter", {"r": 2, "rank_pattern": {"proj": 3, pattern: 4}})).rank == 4


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_is_not_computed_is_refused_by_name(case: str, tmp_path: Path) -> None:
    config, message = CONFIGS[case]
    with pytest.raises(ModelError, match=_pattern(message)):
        slots().load(0, write(tmp_path / "adapter", config))


def _renamed(old: str, new: str) -> Tensors:
    return {
        f"{QUERY.replace(old, new)}.lora_{factor}.weight": torch.ones(shape)
        for factor, shape in (("A", (4, 16)), ("B", (16, 4)))
    }


FACTORS: dict[str, tuple[Tensors, str]] = {
    "a prefix that the model lacks": (
        _renamed("model.layers", "model.text.layers"),
        "under the names model.text.layers.0",
    ),
    "a layer too many": (_renamed("layers.0", "layers.7"), "under the names model.layers.7.self_attn.q_proj"),
    "another model": (
        {f"{QUERY}.lora_A.weight": torch.ones(4, 32), f"{QUERY}.lora_B.weight": torch.ones(16, 4)},
        "of a matrix of [16, 32], and the model's has [16, 16]: it is of another model",
    ),
    "an embedding of a higher rank": (
        {
            "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(9, 32),
            "base_model.model.model.embed_tokens.lora_embedding_B": torch.ones(16, 9),
        },
        "model.embed_tokens has factors of rank 9, and the config says 4 at most",
    ),
    "half a pair": ({f"{QUERY}.lora_A.weight": torch.ones(4, 16)}, "has one of its two factors only"),
    "factors that do not fit": (
        {f"{QUERY}.lora_A.weight": torch.ones(4, 16), f"{QUERY}.lora_B.weight": torch.ones(16, 3)},
        "[4, 16] and [16, 3], which do not go together",
    ),
    "a vector": (
        {f"{QUERY}.lora_A.weight": torch.ones(4), f"{QUERY}.lora_B.weight": torch.ones(16, 4)},
        "which do not go together",
    ),
    "a tensor of no kind": (
        {f"{QUERY}.lora_C.weight": torch.ones(4, 16)},
        "under the names model.layers.0.self_attn.q_proj.lora_C",
    ),
    "a bias of a factor that is too short": (
        {
            f"{QUERY}.lora_A.weight": torch.ones(4, 16),
            f"{QUERY}.lora_B.weight": torch.ones(16, 4),
            f"{QUERY}.lora_B.bias": torch.ones(1),
        },
        "q_proj has a bias of lora_B of 1 values, and its lora_B has 16 rows",
    ),
    "no number": (
        {f"{QUERY}.lora_A.weight": torch.full((4, 16), torch.nan), f"{QUERY}.lora_B.weight": torch.ones(16, 4)},
        "q_proj has values that are no finite numbers",
    ),
    "an infinite number in eight bits": (
        {
            f"{QUERY}.lora_A.weight": torch.ones(4, 16),
            f"{QUERY}.lora_B.weight": torch.full((16, 4), -torch.inf).to(torch.float8_e5m2),
        },
        "q_proj has values that are no finite numbers",
    ),
    "integers": ({f"{QUERY}.lora_A.weight": torch.ones(4, 16, dtype=torch.int32)}, "stored as I32"),
    "a whole matrix of a layer": (
        {f"{QUERY}.weight": torch.ones(16, 16)},
        "only the head, the embedding and classifiers may have",
    ),
    "a bias that the model lacks": (
        {
            f"{QUERY}.lora_A.weight": torch.ones(4, 16),
            f"{QUERY}.lora_B.weight": torch.ones(16, 4),
            f"{QUERY}.base_layer.bias": torch.ones(16),
        },
        "has a bias, and the model's has none",
    ),
    "nothing": ({}, "has no tensors"),
    "more than the model": (
        {f"{QUERY}.lora_A.weight": torch.ones(4, 16), "base_model.model.lm_head.weight": torch.ones(4096, 16)},
        "has 65600 values, and the model itself",
    ),
}


@pytest.mark.parametrize("case", FACTORS)
def test_tensors_that_no_layer_takes_are_refused_by_name(case: str, tmp_path: Path) -> None:
    tensors, message = FACTORS[case]
    with pytest.raises(ModelError, match=_pattern(message)):
        slots().load(0, write(tmp_path / "adapter", None, tensors))


FACTORS_OF_QUERY = {f"{QUERY}.lora_A.weight": torch.ones(4, 16), f"{QUERY}.lora_B.weight": torch.ones(16, 4)}


def test_vectors_of_another_length_are_refused(tmp_path: Path) -> None:
    """One value would do for all rows, and too many reach into the next matrix of a fused layer."""
    of_magnitude = FACTORS_OF_QUERY | {f"{QUERY}.lora_magnitude_vector": torch.ones(1)}
    with pytest.raises(ModelError, match="has a magnitude of 1 values, and its lora_B has 16 rows"):
        slots().load(0, write(tmp_path / "a", {"use_dora": True}, of_magnitude))
    of_bias = FACTORS_OF_QUERY | {f"{QUERY}.base_layer.bias": torch.ones(1)}
    with pytest.raises(ModelError, match=r"has a bias of \[1\], and the model's has \[16\]: it is of another model"):
        slots(attention_bias=True).load(0, write(tmp_path / "b", None, of_bias))


def _cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (
        lambda folder: folder.rename(folder.with_name("gone")),
        "does not exist: it should have adapter_config",
    ),
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "has no readable adapter_config.json"),
    "a broken config": (lambda folder: (folder / "adapter_config.json").write_text("{"), "is not JSON"),
    "a list": (lambda folder: (folder / "adapter_config.json").write_text("[]"), "is not an object"),
    "no tensors": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "neither adapter_model.safetensors"),
    "a truncated file": (_cut, "is not a whole safetensors file"),
    "a pickle": (
        lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
        "is not a whole file of torch.save",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_missing_or_damaged_are_named(case: str, tmp_path: Path) -> None:
    harm, message = FILES[case]
    path = write(tmp_path / "adapter")
    harm(Path(path))
    with pytest.raises(ModelError, match=_pattern(message)) as refusal:
        slots().load(0, path)
    assert path in str(refusal.value)
    assert isinstance(refusal.value, MissingAdapterError) == (case in ("no folder", "no config"))


def test_a_file_of_an_adapter_leads_to_its_folder(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "adapter"))
    with pytest.raises(ModelError, match=r"is neither a folder nor a \.gguf file") as refusal:
        slots().load(0, str(path / "adapter_model.safetensors"))
    assert refusal.value.hint == f"give its folder, {path}"


def test_folders_that_peft_names_after_adapters_are_led_to(tmp_path: Path) -> None:
    for name in ("sql", "chat"):
        write(tmp_path / name)
    with pytest.raises(MissingAdapterError, match=r"has no readable adapter_config\.json") as refusal:
        slots().load(0, str(tmp_path))
    assert refusal.value.hint == "give one of the folders in it that are adapters: chat, sql"


def test_a_repositorys_name_is_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(write(tmp_path / "adapter"))
    asked = list[tuple[str, str | None, list[str]]]()

    def fetch(_: HuggingFace, repo: str, choice: HubChoice, patterns: Sequence[str]) -> Path:
        asked.append((repo, choice.revision, sorted(patterns)))
        return folder

    monkeypatch.setattr(HuggingFace, "listing", lambda *_: ([each.name for each in folder.iterdir()], ""))
    monkeypatch.setattr(HuggingFace, "fetch", fetch)
    options = Options(model="mills/mill", revision="v1")
    assert located("mills/sql", options) == str(folder)
    assert asked == [("mills/sql", None, ["adapter_config.json", "adapter_model.safetensors"])]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert located("~/adapter", options) == str(folder)
    monkeypatch.chdir(tmp_path.parent)
    for path in (str(tmp_path / "no/where"), "nowhere", f"{tmp_path.name}/adapter", "../mills/sql", "a/b/c"):
        assert located(path, options) == path
    monkeypatch.setattr(HuggingFace, "listing", lambda *_: (None, "HF_HUB_OFFLINE is set"))
    monkeypatch.setattr(HuggingFace, "cached", lambda *_: (tmp_path / "none").iterdir())
    with pytest.raises(MissingAdapterError, match="mills/sql does not exist here, nor as a repository: HF_HUB_OFFLINE"):
        located("mills/sql", options)


def _pattern(message: str) -> str:
    return message.replace("[", r"\[").replace("(", r"\(")


def test_an_identity_is_of_the_content_and_not_of_the_path(tmp_path: Path) -> None:
    loaded = slots()
    first = loaded.load(0, write(tmp_path / "one"))
    again = loaded.load(1, write(tmp_path / "two", {"base_model_name_or_path": "elsewhere", "peft_version": "0"}))
    assert first.identity == again.identity
    assert first.rank == 4
    assert first.num_bytes >= 4 * 2 * 4 * 16
    others = [
        write(tmp_path / "three", {"lora_alpha": 9}),
        write(tmp_path / "four", None, _renamed("q_proj", "o_proj")),
    ]
    assert len({first.identity, *(loaded.load(1, path).identity for path in others)}) == 3


def test_torch_files_and_names_of_targets_are_read(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "adapter"))
    tensors = _renamed("q_proj", "q_proj") | _renamed("self_attn.q_proj", "mlp.other")
    (path / "adapter_model.safetensors").unlink()
    torch.save(tensors, path / "adapter_model.bin")
    only = AdapterLimits(max_loras=1, slots=2, max_rank=8, dtype="float32", target_modules=("q_proj",))
    assert slots(only).load(0, str(path)).num_bytes
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.other"):
        slots().load(0, str(path))
