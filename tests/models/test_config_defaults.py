"""A config that leaves a field out is computed with what transformers' class of it has there, or refused."""

from __future__ import annotations

import copy
import importlib
import json
from functools import cache
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from thinned import every
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headrace.executor.models.families import families, spec_from_config
from headrace.executor.models.families._model_types import MODEL_TYPES
from headrace.executor.models.rotary import inverse_frequencies
from headrace.executor.models.sizes import weight_shapes
from headrace.ipc.failure import HeadraceError

NAMED = {"iquestcoder": "IQuestCoderForCausalLM"}
"""What folders name, which transformers loads by another family's class."""
NAMING = ("architectures", "model_type", "vocab_size")


def kinds() -> dict[str, str]:
    """The architecture of each type of model that is a family here."""
    found = {}
    for kind, listed in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        name = NAMED.get(kind) or MODEL_TYPES.get(kind, listed)
        if isinstance(name, str) and name in families():
            found[kind] = name
    return found


KINDS = kinds()


@cache
def config_of(kind: str) -> dict[str, Any] | None:
    """The defaults of a class; None: they are no model."""
    try:
        own = AutoConfig.for_model(kind).to_dict() | {"architectures": [KINDS[kind]]}
        own = json.loads(json.dumps(own, default=str))
        spec_from_config(own)
    except (HeadraceError, ValueError, TypeError, AttributeError):
        return None
    return own


def test_most_families_have_defaults_that_are_a_model() -> None:
    assert sum(config_of(kind) is not None for kind in KINDS) > 70


def expect_defaults_of_transformers(kind: str, config: dict[str, Any], what: str) -> None:
    """Of a config that is taken. Where shapes differ, the weights do not fit, which is an error that names them."""
    try:
        spec = spec_from_config(config)
    except HeadraceError:
        return
    fields = {name: value for name, value in config.items() if name not in NAMING[:2]}
    try:
        whole = AutoConfig.for_model(kind, **copy.deepcopy(fields)).to_dict() | {"architectures": [KINDS[kind]]}
        expected = spec_from_config(json.loads(json.dumps(whole, default=str)))
    except (HeadraceError, StrictDataclassError, ValueError, TypeError, AttributeError):
        return
    assert spec == expected or weight_shapes(spec) != weight_shapes(expected), what


@pytest.mark.parametrize("kind", every(6, KINDS))
def test_a_field_that_is_left_out_has_transformers_default_or_is_asked_for(kind: str) -> None:
    whole = config_of(kind)
    if whole is None:
        pytest.skip("the class has no defaults that are a model")
    for name in whole.keys() - set(NAMING):
        expect_defaults_of_transformers(kind, {key: value for key, value in whole.items() if key != name}, name)


@pytest.mark.parametrize("kind", every(3, sorted(KINDS)))
def test_a_rotation_without_its_base_or_with_null_has_transformers_base(kind: str) -> None:
    whole = config_of(kind)
    if whole is None or not isinstance((whole.get("rope_parameters") or {}).get("rope_theta"), float):
        pytest.skip("the class has no rotation, or one of each kind of layers")
    rest = {key: value for key, value in whole.items() if key not in ("rope_parameters", "rope_theta")}
    for name, value in (
        ("rope_parameters", {"rope_type": "default"}),
        ("rope_parameters", {"rope_type": "linear", "factor": 4.0}),
        ("rope_parameters", None),
        ("rope_parameters", {}),
        ("rope_scaling", None),
        ("rope_scaling", {}),
        ("rope_theta", None),
    ):
        expect_defaults_of_transformers(kind, {**rest, name: value}, f"{name}: {value}")


YARN = {"rope_type": "yarn", "rope_theta": 9000.0, "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("ministral3", {"rope_parameters": {**YARN, "rope_theta": 7000.0, "llama_4_scaling_beta": 0.3}}),
        ("ministral3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1}}),
        (
            "ministral3",
            {"rope_parameters": {"type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1},
             "original_max_position_embeddings": 4096},
        ),
        ("olmo3", {"rope_parameters": {"full_attention": YARN}}),
        ("olmo3", {"rope_parameters": {"full_attention": YARN, "sliding_attention": None}}),
        ("olmo3", {"rope_parameters": {"full_attention": {"type": "linear", "factor": 3.0}, "sliding_attention": {}}}),
        ("olmo3", {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 700.0}}}),
        ("olmo3", {"rope_scaling": {key: value for key, value in YARN.items() if key != "rope_theta"}}),
        ("lfm3", {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {}}}),
        ("lfm3", {"rope_parameters": {"full_attention": {**YARN}, "sliding_attention": {"rope_theta": 50.0}}}),
        ("minicpm3", {"scale_depth": None}),
        ("minicpm3", {"scale_depth": None, "dim_model_base": None}),
        ("olmo_hybrid", {"rope_parameters": {"rope_type": "default", "rope_theta": None}}),
        ("olmo_hybrid", {"rope_parameters": {"rope_type": "default", "rope_theta": None}, "rope_theta": 9000.0}),
        ("olmo_hybrid", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    ],
)  # fmt: skip
def test_what_a_section_leaves_out_is_transformers(kind: str, changed: dict[str, Any]) -> None:
    """The class fills its config in, which is then one that leaves nothing out."""
    whole = config_of(kind)
    assert whole is not None
    rest = {key: value for key, value in whole.items() if key not in (*NAMING, "rope_parameters", *changed)}
    filled = AutoConfig.for_model(kind, **copy.deepcopy(rest | changed)).to_dict()
    expected = spec_from_config(
        json.loads(
            json.dumps(filled | {"architectures": [KINDS[kind]], "vocab_size": whole["vocab_size"]}, default=str)
        )
    )
    left_out = {name: whole[name] for name in NAMING} | rest | changed
    assert spec_from_config(left_out) == expected
    assert expected != spec_from_config(whole)


def test_a_scaling_of_olmo_3_leaves_the_base_of_layers_with_windows() -> None:
    """As files have it that an older transformers wrote, in one section."""
    whole = config_of("olmo3")
    assert whole is not None
    spec = spec_from_config(whole | {"rope_parameters": YARN})
    kinds = {(layer.mixer.sliding_window, layer.mixer.rope.kind, layer.mixer.rope.theta) for layer in spec.layers}
    assert kinds == {(None, "yarn", 9000.0), (4096, "default", 9000.0)}


@pytest.mark.parametrize(
    ("changed", "rotates"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, False),
        ({"rope_parameters": {"rope_theta": None}}, False),  # as the published model has it
        ({"rope_parameters": None, "rope_theta": None}, False),  # as transformers' script converts it
        ({"rope_parameters": None}, True),
        ({"rope_parameters": {}}, True),
        ({}, True),
    ],
)
def test_an_olmo_hybrid_rotates_as_transformers_unless_its_base_is_null(changed: dict[str, Any], rotates: bool) -> None:
    whole = config_of("olmo_hybrid")
    assert whole is not None
    rest = {key: value for key, value in whole.items() if key != "rope_parameters"}
    own = AutoConfig.for_model("olmo_hybrid", **copy.deepcopy(changed)).rope_parameters
    assert (own["rope_theta"] is not None) == rotates
    assert [rope.theta for rope in spec_from_config(rest | changed).ropes] == [own["rope_theta"]] * rotates


LAYERS = {
    "mimo_v2_flash": ("full_attention", "sliding_attention"),
    "mellum": ("full_attention", "sliding_attention"),
    "deepseek_v4": ("sliding_attention", "compressed_sparse_attention"),
}
SECTIONS: tuple[Any, ...] = (
    None,
    {},
    {"rope_type": "default"},
    {"rope_theta": 900.0},
    {"rope_type": "default", "rope_theta": 900.0},
    {"rope_type": "default", "partial_rotary_factor": 0.25},
    {"rope_type": "default", "rope_theta": 900.0, "partial_rotary_factor": 0.25},
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 900.0, "original_max_position_embeddings": 512},
)


def rotations(kind: str, config: dict[str, Any]) -> set[tuple[float, ...]] | None:
    """The factors of positions, then that of cos and sin, of each section of transformers' model; None: it cannot be
    built."""
    try:
        filled = AutoConfig.for_model(kind, **copy.deepcopy(config))
        module = importlib.import_module(type(filled).__module__.replace("configuration", "modeling"))
        rotary = next(each for name, each in vars(module).items() if name.endswith("RotaryEmbedding"))(filled)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError):
        return None
    kinds = [name.removesuffix("_inv_freq") for name in dict(rotary.named_buffers()) if "original" not in name]
    return {
        (*getattr(rotary, f"{each}_inv_freq").tolist(), getattr(rotary, f"{each}_attention_scaling")) for each in kinds
    }


@pytest.mark.parametrize("beside", [{}, {"rope_theta": 700.0}, {"partial_rotary_factor": 0.5}], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_section_without_its_base_or_share_rotates_as_transformers_or_is_refused(
    kind: str, beside: dict[str, Any]
) -> None:
    whole = config_of(kind)
    assert whole is not None
    sections = whole["rope_parameters"]
    given = [{"rope_parameters": each} for each in SECTIONS]
    given += [{"rope_parameters": sections | {name: each}} for name in sections for each in SECTIONS]
    given += [{"rope_parameters": {name: each}} for name in sections for each in (sections[name], None)]
    rest = {key: value for key, value in whole.items() if key not in (*NAMING, "rope_parameters", "rope_theta")}
    rest |= {"num_hidden_layers": 2, "layer_types": list(LAYERS[kind]), "mlp_layer_types": whole["mlp_layer_types"][:2]}
    taken = 0
    for each in given:
        if not each["rope_parameters"] and beside and kind == "mimo_v2_flash":
            continue  # the authors' code reads what stands beside
        try:
            spec = spec_from_config({name: whole[name] for name in NAMING} | rest | beside | each)
        except HeadraceError:
            continue
        expected, taken = rotations(kind, rest | beside | each), taken + 1
        if expected is None and each["rope_parameters"] in ({}, {"rope_type": "default"}):
            continue  # says nothing
        own = {(*inverse_frequencies(rope).tolist(), rope.attention_factor) for rope in spec.ropes}
        assert expected is not None, each
        assert sorted(own) == [pytest.approx(one, rel=1e-5) for one in sorted(expected)], each
    assert taken or beside  # which may contradict the sections
