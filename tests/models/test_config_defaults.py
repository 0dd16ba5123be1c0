"""A config that leaves a field out is computed with what transformers' class of it has there, or refused."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headrace.executor.models.families import families, spec_from_config
from headrace.executor.models.families._model_types import MODEL_TYPES
from headrace.ipc.failure import HeadraceError

FIELDS = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "attn_logit_softcapping", "final_logit_softcapping"),
    *("routed_scaling_factor", "sliding_window"),
)
NAMED = {"iquestcoder": "IQuestCoderForCausalLM"}
"""What folders name, which transformers loads by another family's class."""
SCALED = {
    "apertus": "Llama 3's scaling",
    "cwm": "Llama 3's scaling",
    "gpt_oss": "YaRN",
    "olmo3": "one for each kind of layers",
    "exaone4": "a file without one is not rotated in full layers",
    "exaone_moe": "a file without one is not rotated in full layers",
    "olmo_hybrid": "a file without one is not rotated",
    "minimax_m3_vl_text": "is no model's own default",
}
"""Rotations of the classes' defaults that a file must name here, and why."""


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_is_left_out_has_transformers_default_or_is_asked_for(kind: str) -> None:
    whole = config_of(kind)
    if whole is None:
        pytest.skip("the class has no defaults that are a model")
    expected = spec_from_config(whole)
    left_out = [name for name in FIELDS if whole.get(name) is not None]
    rope = whole.get("rope_parameters") or {}
    if kind not in SCALED and "rope_theta" in rope:
        left_out.append("rope_parameters")
    for name in left_out:
        try:
            spec = spec_from_config({key: value for key, value in whole.items() if key != name})
        except HeadraceError:
            continue
        assert spec == expected, name
