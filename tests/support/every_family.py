"""A tiny checkpoint, in the published layout, of every architecture that a family supports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import published_models
import tiny_models
from published_models import PUBLISHED
from tiny_families import FAMILIES
from tiny_mixtures import FAMILIES as MIXTURES
from tiny_models import TINY_MODELS, TinyModel
from tiny_recurrent import FAMILIES as RECURRENT

TABLES: tuple[tuple[str, dict[str, TinyModel]], ...] = (
    ("test_models, test_parallel_model", TINY_MODELS),
    ("test_dense_families", FAMILIES),
    ("test_mixture_families", MIXTURES),
    ("test_recurrent_families", RECURRENT),
)
"""Tables of tiny models, each with the tests that run it."""
STORED_OTHERWISE = "MistralConsolidated"
"""Quantised files of Mistral's own layout are refused: tests/checkpoints/test_mistral_files.py."""


NOT_QUANTISED = (
    *("DbrxForCausalLM", "Zamba2ForCausalLM", "LongcatFlashForCausalLM"),
    *("MiniMaxM3VLForCausalLM", "Step3p5ForCausalLM"),
)
"""Whose experts have no matrices of their own in files, whose adapters are named as entries of a list, and others."""


def _save_tiny(tiny: TinyModel, folder: Path) -> None:
    tiny_models.make(tiny).save_pretrained(folder)


def _save_published(name: str, folder: Path) -> None:
    published_models.save(name, folder)


def _every() -> dict[str, Callable[[Path], None]]:
    found: dict[str, Callable[[Path], None]] = {}
    for _, table in TABLES:
        for tiny in table.values():
            found.setdefault(tiny.model_class, partial(_save_tiny, tiny))
    for name, published in PUBLISHED.items():
        found.setdefault(published.architecture, partial(_save_published, name))
    for name in (STORED_OTHERWISE, *NOT_QUANTISED):
        del found[name]
    return found


QUANTISED: Mapping[str, Callable[[Path], None]] = MappingProxyType(_every())
"""The architectures whose quantised checkpoints are compared, each with a function that writes a float checkpoint into
a folder."""
