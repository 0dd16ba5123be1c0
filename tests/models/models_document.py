"""Writes docs/models.md from what the tests run: `python tests/models/models_document.py` (`make docs`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
from every_family import QUANTISED, TABLES
from gguf_cases import CASES
from multimodal_models import WITH_STATES
from multimodal_models import config_of as multimodal_config
from published_models import PUBLISHED
from published_models import config_of as published_config
from rwkv_models import CONFIG as RWKV
from tiny_encoders import ENCODERS, JINA_BERT, encoder_config
from tiny_families import FOREIGN, foreign
from tiny_models import COMMON, TINY_MODELS, TinyModel

from headrace.executor.checkpoints.sources.dummy_weights import DummyWeights
from headrace.executor.checkpoints.sources.gguf.encoders import ENCODERS as GGUF_ENCODERS
from headrace.executor.cpu.decoder import why_not
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import families, spec_from_config
from headrace.executor.models.families._lacking import LACKING
from headrace.executor.models.sizes import weight_shapes
from headrace.executor.parallel.divisibility import check_shares
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.ipc.failure import HeadraceError
from headrace.kernels.registry import choose_reference
from headrace.kernels.triton import versions as triton_versions
from headrace.kernels.triton.versions import VERSIONS

DOCS_PAGE = Path(__file__).parents[2] / "docs/models.md"
MOST_TOKENS = 64
LANGUAGE_MODEL = "LlavaForConditionalGeneration"
BIDIRECTIONAL: dict[str, Any] = {"architectures": ["LlamaBidirectionalModel"], "pooling": "avg"}
MARK = "<!-- what follows is written by tests/models/models_document.py: make docs -->\n"


class Row(NamedTuple):
    architecture: str
    implementation: str
    on_cpu: str
    on_gpu: str
    ranks: str
    gguf: str
    quantised: str
    tests: str


def native_rows() -> Iterator[Row]:
    gguf = {source.architecture for source in CASES.values()} | {each.architecture for each in GGUF_ENCODERS.values()}
    known = families()
    tested: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {}
    for tests, table in TABLES:
        for tiny in table.values():
            tested.setdefault(tiny.model_class, (tests, partial(config_of, tiny)))
    for name, published in PUBLISHED.items():
        tested.setdefault(published.architecture, ("test_published_layouts", partial(published_config, name)))
    tested["RWKV7ForCausalLM"] = ("test_rwkv", lambda: RWKV)
    tested[LANGUAGE_MODEL] = ("test_odd_checkpoints", partial(multimodal_config, "llava with llama"))
    for make in WITH_STATES.values():
        model = make()
        config = model.config.to_dict() | {"architectures": [type(model).__name__]}
        tested[type(model).__name__] = ("test_recurrent_families", partial(dict, config))
    for name in ENCODERS:
        (architecture,) = encoder_config(name)["architectures"]
        tested.setdefault(architecture, ("test_encoders", partial(encoder_config, name)))
    tested[JINA_BERT["architectures"][0]] = ("test_encoders", lambda: JINA_BERT)
    tested[BIDIRECTIONAL["architectures"][0]] = ("test_embed", lambda: config_of(TINY_MODELS["llama"]) | BIDIRECTIONAL)
    for architecture in sorted(known, key=str.lower):
        twin = next((name for name in tested if known.get(name) is known[architecture]), None)
        assert twin is not None, f"no test runs a model of {architecture}"
        tests, config = tested.get(architecture, tested[twin])
        if architecture not in tested:
            tests += f", as {twin}"
        spec = spec_from_config(config())
        on_cpu = "op by op" if why_not(spec, torch.float32) else "program"
        found = "yes" if architecture in gguf else ""
        quantised = "yes" if (architecture if architecture in tested else twin) in QUANTISED else ""
        yield Row(architecture, "headrace", on_cpu, on_gpu(spec), divided(spec), found, quantised, tests)


def foreign_rows() -> Iterator[Row]:
    for name in FOREIGN:
        architecture = foreign(name).model_class
        if architecture not in families():
            yield Row(architecture, "transformers", "op by op", "", "", "", "", "test_transformers_backend")


def config_of(tiny: TinyModel) -> dict[str, Any]:
    config = getattr(transformers, tiny.config_class)(**(COMMON | tiny.config))
    return config.to_dict() | {"architectures": [tiny.model_class]}


def on_gpu(spec: ArchSpec) -> str:
    """What computes the ops that have Triton kernels, asked as a GPU's rank asks when it reads the model."""
    if spec.cpu_alone:
        return "no"
    refused = set[str]()

    def choose(op: str, **facts: Any) -> Callable[..., Any]:
        versions = [each for each in VERSIONS if each.op == op]
        if all(each.why_not(**facts) for each in versions):
            refused.add(op)
        return choose_reference(op)

    spec = spec.for_context(MOST_TOKENS)
    # Whether this machine has a GPU is not asked.
    with mock.patch.object(triton_versions, "why_no_triton", return_value=""):
        Decoder(spec, DummyWeights(weight_shapes(spec)), torch.float32, choose=choose)
    return "Triton" + (f", {', '.join(sorted(refused))} in torch" if refused else "")


def divided(spec: Any) -> str:
    """Which of both kinds of ranks can divide it."""
    found = []
    for kind, place in (("tensor", RankCoordinates.of(0, 2, 1)), ("pipeline", RankCoordinates.of(0, 1, 2))):
        try:
            check_shares(spec, place)
        except HeadraceError:
            continue
        found.append(kind)
    return ", ".join(found)


def table() -> str:
    rows = [*native_rows(), *foreign_rows()]
    head = ("architecture", "implementation", "on a CPU", "on a GPU", "ranks", "GGUF", "quantised", "tests")
    lines = [f"{len(rows)} architectures.", "", f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    told = [*lines, *(f"| {' | '.join((f'`{row[0]}`', *row[1:]))} |" for row in rows)]
    told += ["", "Without a family, and what one would need; `--model-impl transformers` runs some of them:", ""]
    told += ["| architecture | lacks |", "| --- | --- |", *(f"| `{name}` | {why} |" for name, why in LACKING.items())]
    return "\n".join(told) + "\n"


def page() -> str:
    """The page with its table made anew."""
    written, mark, _ = DOCS_PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{DOCS_PAGE} has no line {MARK!r}"
    return f"{written}{MARK}\n{table()}"


if __name__ == "__main__":
    DOCS_PAGE.write_text(page(), encoding="utf-8")
