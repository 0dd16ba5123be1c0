"""config.json of well-known checkpoints is read, with every field that its publishers wrote, and so is what
transformers saves of it.

`support/published_configs.json` has them without fields of tokens and of training; lists of factors are shortened.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from thinned import every

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks.selective import Selective
from headrace.executor.models.families import spec_from_config

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "support" / "published_configs.json").read_text(encoding="utf-8")
)
NOT_SAVED = {
    "Grok-2": "its model_type is that of another model, of images",
    "Mistral-Small-3.1": "transformers' class says that the head is tied",
    "nomic-embed-text-v1.5": "transformers' class has the context that it was trained with",
    "nomic-embed-text-v2-moe": "transformers' class has no experts",
    "granite-4.0-micro": "transformers checks sizes of layers that it has none of",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_in_full(name: str, caplog: pytest.LogCaptureFixture) -> None:
    spec_from_config(PUBLISHED[name], warns=True)
    assert "nothing reads them" not in caplog.text


SAVED = [
    name
    for name, each in PUBLISHED.items()
    if each["model_type"] in transformers.CONFIG_MAPPING and name not in NOT_SAVED
]


@pytest.mark.parametrize("name", every(2, SAVED))
def test_what_transformers_saves_of_a_published_config_is_the_same_model(name: str) -> None:
    published = PUBLISHED[name]
    saved = transformers.CONFIG_MAPPING[published["model_type"]].from_dict(dict(published)).to_dict()
    assert spec_from_config(saved | {"architectures": published["architectures"]}) == spec_from_config(published)


CLASSES = (
    "AXK1Config",
    "DeepseekV4Config",
    "Glm5NextTextConfig",
    "HYV4Config",
    "Mistral4Config",
    "MuseGlimmerTextConfig",
)
"""Of models whose published config is that of transformers' class without arguments."""


@pytest.mark.parametrize("name", CLASSES)
def test_the_config_of_a_class_is_read_in_full(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config = getattr(transformers, name)().to_dict()
    spec_from_config(config | {"architectures": [re.sub("(Text)?Config$", "ForCausalLM", name)]}, warns=True)
    assert "nothing reads them" not in caplog.text


def _spec(name: str, **fields: Any) -> ArchSpec:
    return spec_from_config(PUBLISHED[name] | fields)


def test_values_of_published_configs() -> None:
    mixer = _spec("falcon-mamba-7b").layers[0].mixer
    assert isinstance(mixer, Selective)
    assert mixer.channels == 8192  # whose expand would make it eight times that
    assert _spec("MiMo-V2-Flash").norm.eps == 1e-5
    assert _spec("Qwen-7B").max_positions == 8192
    assert _spec("MiniCPM3-4B") == _spec("MiniCPM3-4B", v_head_dim=64)
    assert _spec("Nemotron-H-56B-Base-8K") == _spec("Nemotron-H-56B-Base-8K", head_dim=128)
    assert _spec("Bamba-9B") == _spec("Bamba-9B", attn_rotary_emb=None) != _spec("Bamba-9B", attn_rotary_emb=32)
