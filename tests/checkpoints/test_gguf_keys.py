"""Nothing that a GGUF file says of its architecture is ignored: each metadata key is changed, and each that the format
has is added; the model changes, the key is refused, or it is known not to matter."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_models
import torch
from gguf_cases import CASES, recurrent
from model_driver import Driver
from thinned import every
from tiny_gguf import convert, save_gguf, saved_state
from torch import Tensor

from headrace import kernels
from headrace.executor.checkpoints.sources.gguf.architecture import UNUSED
from headrace.executor.checkpoints.sources.gguf.config import config_from_gguf
from headrace.executor.checkpoints.sources.gguf.file import GGUFFile
from headrace.executor.checkpoints.sources.gguf.header import GGUFHeader
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.rotary import inverse_frequencies
from headrace.executor.models.sizes import model_weights
from headrace.ipc.failure import HeadraceError, ModelError

SIZES = {"feed_forward_length", "expert_feed_forward_length"}
"""Where the family derives them from others; the shapes of weights are checked."""
ROTATION = {"rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.dimension_count_swa"}
OF_PREDICTION = {"attention.layer_norm_epsilon"}
"""Of layers that only predict."""
UNSCALED = {"context_length", "rope.scale_linear"}
"""With YaRN: its context is the original one times the factor, which has a newer key."""
OFF_BY_TYPE = {"rope.scaling.factor", "rope.scale_linear"}
"""With a scaling of type none."""
OF_NO_EFFECT: dict[str, set[str]] = {
    "gpt2": ROTATION,
    "starcoder": ROTATION,
    "bloom": ROTATION,
    "mpt": ROTATION,
    "baichuan, 13B": ROTATION,
    "deepseek2": {"attention.key_length"},  # of the compressed key; the heads' stand in another
    "granitehybrid": ROTATION,  # there is none, but in Bamba
    "granitehybrid, dense": {"expert_used_count"},  # there are no experts
    "nemotron_h": {"expert_shared_feed_forward_length", "moe_latent_size", *ROTATION, *OF_PREDICTION},  # likewise
    "nemotron_h_moe": {"expert_shared_count", *ROTATION, *OF_PREDICTION},  # whose size together has a key of its own
    "jamba": ROTATION,  # there is none
    "glm-dsa": {"attention.key_length"},
    "kimi-linear": {"attention.key_length", "attention.head_count_kv"},  # 0 says which layers do not attend
    "deepseek2, version 2": UNSCALED,
    "deepseek2, version 3": UNSCALED,
    "deepseek2, mistral": UNSCALED,
    "mistral4": {"attention.key_length", *UNSCALED},
    "gpt-oss": UNSCALED,
    "mistral3": UNSCALED,
    "deepseek": OFF_BY_TYPE,
    "hunyuan-dense": {"rope.scaling.original_context_length"},  # beside a base that is stretched already
    "hunyuan-dense, alpha": {"rope.scaling.original_context_length", *OFF_BY_TYPE},
    "hunyuan-moe": {"rope.scaling.original_context_length"},
    "qwen2vl": {"n_deepstack_layers"},  # of images
    "qwen3vl": {"n_deepstack_layers"},
    "qwen3vlmoe": {"n_deepstack_layers"},
    "llama, yarn": UNSCALED,
    "llama, linear scaling": {"rope.scale_linear"},
    "exaone4, full": {"attention.sliding_window_pattern"},  # there is no window
    "olmo2": {"attention.sliding_window_pattern"},
}


def keys_of_the_format() -> list[str]:
    """All metadata keys of architectures, without the prefix, as the gguf package lists them."""
    groups = [each for _, each in inspect.getmembers(gguf.Keys, inspect.isclass)]
    named = {value for group in groups for value in vars(group).values() if isinstance(value, str)}
    found = {name.removeprefix("{arch}.") for name in named if name.startswith("{arch}.")}
    return [*sorted(name for name in found if "{" not in name), "rope.scale_linear"]


FLOATS = (
    "scale",
    "softcapping",
    "base",
    "epsilon",
    "factor",
    "multiplier",
    "beta",
    "bias",
    "clamp",
    "alpha",
    "clamp_kqv",
)
FLAGS = ("causal", "weights_norm", "parallel_residual", "finetuned", "swin_norm")


def others(key: str, value: Any) -> list[Any]:
    if value is None and key == "rope.scaling.type":
        return ["yarn", "longrope", "other"]
    if value is None and key.endswith(FLAGS):
        return [True, False]
    if value is None:
        return [0.37, 3.5] if key.endswith(FLOATS) or "_beta_" in key else [3, 7]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return [value + "_other"]
    if isinstance(value, np.ndarray):
        copies = [value.copy() for _ in value]  # the last entries may be of layers that only predict
        for index, changed in enumerate(copies):
            changed[index] = not changed[index] if value.dtype == bool else changed[index] + 1
        return copies
    return [value + 1, 2 * value + 4] if isinstance(value, int) else [value * 1.5 + 0.25]


def changes(header: GGUFHeader, prefix: str) -> Iterator[tuple[str, Any]]:
    for key in keys_of_the_format():
        for value in others(key, header.metadata.get(f"{prefix}.{key}")):
            yield key, value


def spec_of(header: GGUFHeader) -> ArchSpec:
    return spec_from_config(config_from_gguf(header))


@pytest.mark.parametrize("name", every(6, CASES))
def test_a_changed_key_changes_the_model_or_is_refused_or_is_known_not_to_matter(name: str, tmp_path: Path) -> None:
    header = GGUFFile(CASES[name].make().save(tmp_path / "model.gguf")).header
    prefix, spec, stored = header.metadata["general.architecture"], spec_of(header), dict(header.metadata)
    known = UNUSED.keys() | SIZES | OF_NO_EFFECT.get(name.partition(",")[0], set()) | OF_NO_EFFECT.get(name, set())
    silent: dict[str, list[bool]] = {}
    for key, value in changes(header, prefix):
        header.metadata = stored | {f"{prefix}.{key}": value}
        try:
            same = spec_of(header) == spec
        except HeadraceError:
            same = False
        silent.setdefault(key, []).append(same)
    ignored = {key for key, same in silent.items() if all(same)} - known
    assert not ignored


def altered(
    path: Path, keys: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None, name: str = "llama"
) -> Path:
    """A copy of a tiny model's GGUF file with more metadata of its architecture, and more tensors."""
    source = GGUFHeader(save_gguf(tiny_models.build(name), path.with_suffix(".plain")))
    writer = gguf.GGUFWriter(path, source.metadata["general.architecture"])
    prefix = source.metadata["general.architecture"]
    for key, value in {**source.metadata, **{f"{prefix}.{key}": value for key, value in keys.items()}}.items():
        if key == "general.architecture":
            continue
        add: Any = writer.add_string if isinstance(value, str) else writer.add_float32
        add = writer.add_uint32 if isinstance(value, int) else add
        add(key, value)
    for record in source.tensors.values():
        writer.add_tensor(record.name, record.data.reshape(-1).view("<f4").reshape(record.shape))
    for key, tensor in (tensors or {}).items():
        writer.add_tensor(key, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def frequencies(path: Path) -> Tensor:
    spec = spec_from_config(GGUFFile(path).config).for_context(None)
    (rope,) = spec.ropes
    return inverse_frequencies(rope)


@pytest.mark.parametrize(
    ("keys", "divisor"),
    [
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, 4.0),
        ({"rope.scaling.factor": 0.0, "rope.scale_linear": 2.0}, 1.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
        ({"rope.scaling.type": "linear"}, 1.0),
        ({"rope.scaling.type": "yarn"}, 1.0),
    ],
)
def test_a_rope_factor_scales_as_llama_cpp_reads_it(keys: dict[str, Any], divisor: float, tmp_path: Path) -> None:
    found = frequencies(altered(tmp_path / "model.gguf", keys))
    torch.testing.assert_close(found, frequencies(altered(tmp_path / "plain.gguf", {})) / divisor)


@pytest.mark.parametrize("name", ["gpt-oss", "apertus"])
def test_a_file_without_scaling_has_none_where_the_class_of_its_config_has(name: str, tmp_path: Path) -> None:
    header = GGUFFile(CASES[name].make().save(tmp_path / "model.gguf")).header
    header.metadata = {key: value for key, value in header.metadata.items() if ".rope.scaling." not in key}
    header.tensors = {key: value for key, value in header.tensors.items() if key != "rope_freqs.weight"}
    assert {rope.kind for rope in spec_of(header).ropes} == {"default"}


def test_divisors_of_frequencies_that_follow_no_rule_are_applied_as_they_are(tmp_path: Path) -> None:
    plain = frequencies(altered(tmp_path / "plain.gguf", {}))
    divisors = torch.linspace(1.0, 3.0, len(plain))
    scaled = altered(tmp_path / "scaled.gguf", {}, {"rope_freqs.weight": divisors})
    torch.testing.assert_close(frequencies(scaled), plain / divisors)
    both = altered(tmp_path / "both.gguf", {"rope.scaling.factor": 2.0}, {"rope_freqs.weight": divisors})
    torch.testing.assert_close(frequencies(both), plain / divisors / 2.0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope.scaling.type": "spiral"}, "llama.rope.scaling.type is 'spiral'; none, linear, yarn and longrope"),
        ({"rope.scaling.attn_factor": 1.5}, "llama.rope.scaling.attn_factor is 1.5, and 1.0 is computed"),
        ({"attention.sliding_window": 16}, "llama.attention.sliding_window is 16, and 0 or False"),
        ({"attention.scale": 0.5}, "llama.attention.scale is 0.5"),
        ({"attention.value_length": 8}, "llama.attention.value_length is 8, and 16 is computed"),
        ({"made_up": 3}, "llama.made_up is 3"),
        ({"rope.freq_base": -1.0}, "llama.rope.freq_base is -1.0; more than 1 is expected"),
        ({"rope.freq_base": float("nan")}, "llama.rope.freq_base is nan; a number is expected"),
        ({"rope.dimension_count": 0}, "llama.rope.dimension_count is 0; from 1 to"),
        ({"attention.head_count_kv": 0}, "llama.attention.head_count_kv is 0; from 1 to"),
        ({"block_count": 10**9}, "llama.block_count is 1000000000; from 1 to 4,096"),
    ],
)
def test_a_key_that_the_architecture_does_not_compute_with_is_refused(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        _ = GGUFFile(altered(tmp_path / "model.gguf", keys)).config


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen3_moe", "qwen3moe.expert_weights_scale", 2.5),
        ("qwen3_moe", "qwen3moe.leading_dense_block_count", 1),
        ("qwen3_moe", "qwen3moe.expert_gating_func", 2),
        ("mixtral", "llama.expert_weights_norm", False),
        ("mixtral", "llama.expert_group_count", 4),
        ("olmoe", "olmoe.expert_shared_count", 1),
    ],
)
def test_routing_that_a_mixture_does_not_compute_is_refused_by_its_key(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    header = GGUFHeader(save_gguf(tiny_models.build(name), tmp_path / "model.gguf"))
    header.metadata[key] = value
    with pytest.raises(ModelError, match=f"metadata key {key} is {value}"):
        config_from_gguf(header)


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("attention.head_count", [4, 4, 4, 0, 4], "layer 1 has a linear layer in the place of attention"),
        ("attention.head_count_kv", [4, 0, 2], "head_count_kv has 3 entries, and there are 5 layers"),
        ("attention.head_count", [4, 0, 2, 0, 4], "attention.head_count is an array of 5; a single int"),
    ],
)
def test_layers_that_a_deci_file_describes_and_nothing_computes_are_refused(
    key: str, values: list[int], message: str, tmp_path: Path
) -> None:
    header = GGUFHeader(CASES["deci"].make().save(tmp_path / "model.gguf"))
    header.metadata[f"deci.{key}"] = np.array(values, np.int32)
    with pytest.raises(ModelError, match=message):
        config_from_gguf(header)


def test_which_layers_have_an_index_the_tensors_say_and_a_list_of_others_is_refused(tmp_path: Path) -> None:
    header = GGUFFile(CASES["glm-dsa"].make().save(tmp_path / "model.gguf")).header
    key, spec = "glm-dsa.attention.indexer.types", spec_of(header)
    assert header.metadata.pop(key).tolist() == [True, False, True, False]
    assert spec_of(header) == spec
    header.metadata[key] = np.array([True, True, False, False])
    with pytest.raises(ModelError, match=r"indexer.types is \[True, True, False, False\], and the layers' tensors say"):
        config_from_gguf(header)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    every(
        2,
        [
            ("mimo2", "attention.sliding_window_pattern", None, "sliding_window_pattern has 0 of 2 layers"),
            ("mimo2", "rope.scaling.factor", 2.0, "the rotation is scaled, and mimo2 is computed without that"),
            ("mimo2", "leading_dense_block_count", 0, "leading_dense_block_count is 0, and 1 is computed"),
            (
                "step35",
                "attention.head_count_kv",
                np.array([2, 1, 1, 2, 2], np.int32),
                r"layers have \[1, 2\] key/value",
            ),
            ("step35", "attention.head_count", np.array([4, 6, 4, 4, 4], np.int32), "differs in layers of one kind"),
            ("step35", "attention.head_count", np.array([4, 6, 6], np.int32), "has 3 entries, and there are 5 layers"),
            ("mistral4", "rope.scaling.type", "linear", "mistral4.rope.scaling.type must be yarn"),
            ("deepseek2, mistral", "attention.temperature_length", 99, "temperature_length is 99, and 64 is computed"),
            ("rwkv7", "token_shift_count", 1, "token_shift_count is 1, and 2 is computed"),
            ("bloom", "attention.head_count_kv", 2, "head_count_kv is 2, and 4 is computed"),
            ("starcoder", "attention.head_count_kv", 2, "head_count_kv is 2, and 1 or 4 is computed"),
            ("mistral4", "rope.scaling.attn_factor", 0.5, "attn_factor is 0.5, and 1.0 is computed"),
            (
                "qwen3vl",
                "rope.dimension_sections",
                np.array([9, 3, 5, 0], np.int32),
                "three of together 16 are computed",
            ),
            (
                "qwen2vl",
                "rope.dimension_sections",
                np.array([2, 1, 1, 1], np.int32),
                "three of together 4 are computed",
            ),
        ],
    ),
)
def test_what_these_families_do_not_compute_is_refused(
    name: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    header = GGUFFile(CASES[name].make().save(tmp_path / "model.gguf")).header
    header.metadata[f"{header.metadata['general.architecture']}.{key}"] = value
    with pytest.raises(ModelError, match=message):
        config_from_gguf(header)


def test_layers_beyond_the_last_are_left_out_where_they_only_predict(tmp_path: Path) -> None:
    """As their tensors show: a number of such layers in another file takes none away."""
    file = GGUFFile(altered(tmp_path / "model.gguf", {"nextn_predict_layers": 1}))
    with pytest.raises(ModelError, match=r"blk\.1\.attn_norm\.weight"):
        Decoder(spec_from_config(file.config), file.weights(), torch.float32, choose=kernels.choose_reference)


def test_sections_of_a_rotation_that_make_the_whole_are_one_position(tmp_path: Path) -> None:
    header = GGUFFile(CASES["qwen3vl"].make().save(tmp_path / "model.gguf")).header
    spec = spec_of(header)
    header.metadata["qwen3vl.rope.dimension_sections"] = np.array([4, 2, 10, 0], np.int32)
    assert spec_of(header) == spec


def test_older_mimo_files_have_the_published_factor_of_values(tmp_path: Path) -> None:
    header = GGUFFile(CASES["mimo2"].make().save(tmp_path / "model.gguf")).header
    spec = spec_of(header)
    assert header.metadata.pop("mimo2.attention.value_scale") == pytest.approx(0.707)
    assert dict(spec_of(header).scaled) == pytest.approx(dict(spec.scaled))


def test_a_yarn_files_attention_factor_multiplies_its_own(tmp_path: Path) -> None:
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    own, more = (
        spec_from_config(GGUFFile(altered(tmp_path / f"{len(each)}.gguf", keys | each)).config).ropes[0]
        for each in ({}, {"rope.scaling.attn_factor": 0.5})
    )
    assert more.attention_factor == pytest.approx(0.5 * own.attention_factor)


FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@pytest.mark.parametrize("name", every(2, ["bloom", "gpt2", "mpt", "starcoder", "baichuan, 13B"]))
def test_factors_of_a_rotation_are_refused_where_nothing_rotates(name: str, tmp_path: Path) -> None:
    file = GGUFFile(CASES[name].make().save(tmp_path / "model.gguf"))
    some = next(record for record in file.tensors.values() if len(record.shape) == 1)
    for factors in (FACTORS[:1], FACTORS[1:]):
        own = {each: replace(some, name=each) for each in factors}
        file.header.tensors = file.tensors = {
            key: each for key, each in file.tensors.items() if key not in FACTORS
        } | own
        with pytest.raises(ModelError, match=factors[0].replace(".", "\\.")):
            Decoder(spec_of(file.header), file.weights(), torch.float32, choose=kernels.choose_reference)


@pytest.mark.parametrize(
    ("name", "factors"),
    [("gemma4", FACTORS), ("gemma4", ()), ("gemma4", FACTORS[1:]), ("phi3, long", FACTORS), ("llama", FACTORS)],
)
def test_two_kinds_of_factors_of_one_rotation_are_refused(name: str, factors: tuple[str, ...], tmp_path: Path) -> None:
    header = GGUFFile(CASES[name].make().save(tmp_path / "model.gguf")).header
    some = next(record for record in header.tensors.values() if len(record.shape) == 1)
    kept = {key: each for key, each in header.tensors.items() if key not in FACTORS}
    header.tensors = kept | {each: header.tensors.get(each, replace(some, name=each)) for each in factors}
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        config_from_gguf(header)


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_q.scale",
        "blk.1.layer_output_scale.weight",
        "blk.0.attn_rot_embd.weight",
        "rope_factors_short.weight",
    ],
)
def test_a_tensor_that_nothing_reads_is_named(name: str, tmp_path: Path) -> None:
    file = GGUFFile(altered(tmp_path / "model.gguf", {}, {name: torch.ones(4)}))
    with pytest.raises(ModelError, match=name.replace(".", "\\.")):
        Decoder(spec_from_config(file.config), file.weights(), torch.float32, choose=kernels.choose_reference)


def test_a_llama_with_biases_of_queries_keys_and_values_alone_computes_them(tmp_path: Path) -> None:
    """As converters write models with Llama's shape and Qwen's biases."""
    model = tiny_models.build("qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            for each in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, each).bias.normal_(std=0.5)
    config = model.config.to_dict()
    path = convert("LlamaForCausalLM", config, saved_state(model), tmp_path / "model.gguf")
    file = GGUFFile(path)
    decoder = Decoder(spec_from_config(file.config), file.weights(), torch.float32, choose=kernels.choose_reference)
    prompt = [5, 9, 200, 31, 7]
    answers, logits = Driver(decoder).greedy([prompt], 3, 16, 40)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt + answers[0][:-1]])).logits[0, len(prompt) - 1 :]
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)


def test_gemma_2_files_without_caps_and_window_have_those_of_llama_cpp(tmp_path: Path) -> None:
    header = GGUFHeader(save_gguf(tiny_models.build("gemma2"), tmp_path / "model.gguf"))
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window"):
        del header.metadata[f"gemma2.{key}"]
    config = config_from_gguf(header)
    assert (config["sliding_window"], config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (
        4096, 50.0, 30.0,
    )  # fmt: skip


def test_defaults_of_sampling_that_nothing_reads_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = GGUFFile(altered(tmp_path / "model.gguf", {}))
    file.header.metadata |= {"general.sampling.temp": 0.5, "general.sampling.mirostat": 2, "general.sampling.top_k": 20}
    assert file.generation_config == {"temperature": 0.5, "top_k": 20}
    assert "sampling defaults without effect: mirostat" in caplog.text


@pytest.mark.parametrize("value", ["0.5", True, np.array([0.5, 0.6])], ids=["text", "flag", "array"])
def test_a_default_of_sampling_that_is_no_number_is_refused_or_named(
    value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = GGUFFile(altered(tmp_path / "model.gguf", {}))
    file.header.metadata["general.sampling.mirostat_tau"] = value
    assert file.generation_config == {}
    assert "sampling defaults without effect: mirostat_tau" in caplog.text
    file.header.metadata["general.sampling.temp"] = value
    with pytest.raises(ModelError, match=r"general\.sampling\.temp is .*; a number is expected"):
        assert file.generation_config


def test_a_period_of_sliding_layers_is_read_as_a_list_of_them_is(tmp_path: Path) -> None:
    header = GGUFHeader(save_gguf(tiny_models.build("gemma3"), tmp_path / "model.gguf"))
    header.metadata["gemma3.attention.sliding_window_pattern"] = 2
    by_period = config_from_gguf(header)["layer_types"]
    header.metadata["gemma3.attention.sliding_window_pattern"] = np.array([True, False] * 2)
    assert by_period == config_from_gguf(header)["layer_types"]
    assert by_period.count("full_attention") == 2


EPS = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon")


@pytest.mark.parametrize("name", every(6, CASES))
def test_the_eps_of_norms_of_another_kind_says_nothing_of_these(name: str, tmp_path: Path) -> None:
    header = GGUFFile(CASES[name].make().save(tmp_path / "model.gguf")).header
    prefix = header.metadata["general.architecture"]
    (own,) = (each for each in EPS if f"{prefix}.{each}" in header.metadata)
    other = EPS[1 - EPS.index(own)]
    header.metadata[f"{prefix}.{other}"] = header.metadata.pop(f"{prefix}.{own}")
    with pytest.raises(ModelError, match=f"lacks the metadata key {prefix}.{own}|{prefix}.{other} is"):
        config_from_gguf(header)


@pytest.mark.parametrize(
    ("key", "value", "names"),
    [
        ("rope.dimension_count", None, ("glm4", "gptneox", "phi2", "stablelm", "nemotron", "minimax-m2", "qwen35")),
        ("rope.freq_base", 10_000.0, ("gemma3", "gemma3n", "gemma4", "apertus", "smollm3", "cohere2")),
        ("expert_weights_norm", False, ("exaone-moe", "glm4moe", "nemotron_h_moe", "deepseek2, version 3")),
        ("final_logit_softcapping", 30.0, ("gemma2", "gemma4", "gemma4, experts")),
        ("rope.freq_base_swa", 10_000.0, ("gemma3", "gemma3n", "gemma4")),
        ("attention.sliding_window_pattern", 4, ("cohere2", "exaone4", "exaone-moe")),
    ],
)
def test_a_key_that_is_left_out_has_the_value_of_llama_cpp(
    key: str, value: Any, names: tuple[str, ...], tmp_path: Path
) -> None:
    """And not the one of the class of its config."""
    for name in names:
        header = GGUFFile(CASES[name].make().save(tmp_path / "model.gguf")).header
        whole = f"{header.metadata['general.architecture']}.{key}"
        header.metadata.pop(whole, None)
        left_out = spec_of(header)
        header.metadata[whole] = config_from_gguf(header)["head_dim"] if value is None else value
        assert left_out == spec_of(header), name


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("cohere2", "attention.sliding_window", "lacks the metadata key cohere2.attention.sliding_window"),
        ("gpt-oss", "attention.sliding_window", "lacks the metadata key gpt-oss.attention.sliding_window"),
        ("exaone-moe", "attention.sliding_window", "lacks the metadata key exaone-moe.attention.sliding_window"),
        ("gemma4", "attention.sliding_window_pattern", "sliding_window_pattern has 0 of"),
        ("chatglm", "rope.dimension_count", "lacks the metadata key chatglm.rope.dimension_count"),
        ("deepseek2, version 3", "expert_group_used_count", "lacks .* deepseek2.expert_group_used_count"),
    ],
)
def test_a_key_without_which_nothing_is_known_is_missed_by_name(
    name: str, key: str, message: str, tmp_path: Path
) -> None:
    header = GGUFFile(CASES[name].make().save(tmp_path / "model.gguf")).header
    del header.metadata[f"{header.metadata['general.architecture']}.{key}"]
    with pytest.raises(ModelError, match=message):
        config_from_gguf(header)


def test_exaone_4_of_the_32b_has_windows_though_its_file_does_not_say_so(tmp_path: Path) -> None:
    header = GGUFFile(CASES["exaone4"].make().save(tmp_path / "model.gguf")).header
    del header.metadata["exaone4.attention.sliding_window"]
    header.metadata["exaone4.block_count"] = 64
    header.metadata.pop("exaone4.attention.sliding_window_pattern", None)
    windows = [layer.mixer.sliding_window for layer in spec_of(header).layers]
    assert windows[:5] == [4096, 4096, 4096, None, 4096]


@pytest.mark.parametrize(
    ("key", "value"), [("general.type", "adapter"), ("general.quantization_version", 1), ("general.type", 3)]
)
def test_a_file_of_another_kind_or_of_another_version_of_blocks_is_refused(
    key: str, value: Any, tmp_path: Path
) -> None:
    header = GGUFFile(altered(tmp_path / "model.gguf", {})).header
    header.metadata[key] = value
    with pytest.raises(ModelError, match=f"the metadata key {key} is {value!r}; (model|2) is expected"):
        config_from_gguf(header)


@pytest.mark.parametrize("name", ["gemma4", "deci", "step35", "jamba", "lfm2", "gemma3n", "nemotron_h_moe", "mimo2"])
def test_a_list_has_an_entry_for_each_layer(name: str, tmp_path: Path) -> None:
    header = GGUFFile(CASES[name].make().save(tmp_path / "model.gguf")).header
    stored, prefix = dict(header.metadata), header.metadata["general.architecture"]
    lists = {key: each for key, each in stored.items() if key.startswith(prefix) and isinstance(each, np.ndarray)}
    assert lists
    for key, values in lists.items():
        for other in (values[:-1], np.concatenate([values, values[:1]]), values[:0]):
            header.metadata = stored | {key: other}
            with pytest.raises(ModelError, match=key):
                config_from_gguf(header)


@pytest.mark.parametrize("value", [np.array([2, 2], np.int32), np.zeros(0, np.int32), np.ones(3, np.float32)], ids=str)
@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_a_list_of_numbers_of_layers_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    header = GGUFFile(CASES[name].make().save(tmp_path / "model.gguf")).header
    header.metadata[f"{name}.block_count"] = value
    with pytest.raises(ModelError, match=rf"{name}\.block_count"):
        config_from_gguf(header)


@pytest.mark.parametrize("value", [np.array([4, 8], np.int32), np.zeros(0, np.int32), "8", True], ids=str)
def test_a_number_of_experts_that_is_none_is_refused(value: Any, tmp_path: Path) -> None:
    header = GGUFFile(CASES["qwen3moe"].make().save(tmp_path / "model.gguf")).header
    header.metadata["qwen3moe.expert_count"] = value
    with pytest.raises(ModelError, match=r"qwen3moe\.expert_count is .*; a number is expected"):
        config_from_gguf(header)


def test_biases_that_the_converter_multiplies_and_the_model_does_not_are_refused(tmp_path: Path) -> None:
    case = recurrent("falcon_h1_normed", attention_bias=True, projectors_bias=False, tie_word_embeddings=False).make()
    with pytest.raises(ModelError, match=r"attn_q.bias of a Falcon-H1 is not supported: the converter multiplies it"):
        config_from_gguf(GGUFFile(case.save(tmp_path / "model.gguf")).header)


def test_a_list_of_nothing_is_no_value(tmp_path: Path) -> None:
    header = GGUFFile(CASES["llama, biases, wide heads"].make().save(tmp_path / "model.gguf")).header
    header.metadata["llama.attention.value_length"] = np.zeros(0, np.int32)
    with pytest.raises(ModelError, match=r"llama\.attention\.value_length is \[\[\]\]|value_length is \[\]"):
        config_from_gguf(header)


@pytest.mark.parametrize(
    ("name", "others"),
    [("mamba", {}), ("mamba2", {}), ("granitehybrid", {}), ("falcon-h1", {"mamba_d_ssm": 120})],
)
def test_any_inner_size_is_a_multiple_of_the_hidden_one(name: str, others: dict[str, Any], tmp_path: Path) -> None:
    """Families compute it as int(expansion * hidden_size), and 120 / 88 * 88 is below 120."""
    header = GGUFFile(CASES[name].make().save(tmp_path / "model.gguf")).header
    sizes = {"embedding_length": 88, "ssm.inner_size": 120, "ssm.time_step_rank": 15, "ssm.group_count": 1}
    own = header.metadata["general.architecture"]
    header.metadata |= {f"{own}.{key}": each for key, each in sizes.items() if f"{own}.{key}" in header.metadata}
    spec = spec_of(header)
    assert [weight for weight in model_weights(spec) if weight.shape[-1] == 120]
    if others:
        config = config_from_gguf(header)
        assert spec_from_config({key: each for key, each in config.items() if key != "mamba_expand"} | others) == spec
