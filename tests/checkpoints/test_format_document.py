"""docs/quantization.md: it is what the formats say, and the tests that it names are there and show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints as made
import test_as_loaded
import test_quantisation
import test_quantised_inputs
import tiny_models
from test_quantisation import CASES, MOST_ERROR, error_of, kinds_of, opened

from headrace.executor.checkpoints.formats import Stored, formats, forms_as_loaded
from headrace.executor.checkpoints.formats.document import DOCS_PAGE, quantisation_page
from headrace.kernels.cpu import build

STORED: dict[str, Stored] = {
    f"{format_.names[0]}: {stored.text[:40]}": stored
    for format_ in dict.fromkeys(formats().values())
    for stored in format_.stored
} | {f"{name}: as loaded": each.stored for name, each in forms_as_loaded().items()}


def test_the_page_of_formats_is_what_the_formats_say() -> None:
    page = Path(__file__).parents[2] / DOCS_PAGE
    assert page.read_text(encoding="utf-8") == quantisation_page(), "run make docs"


@pytest.mark.parametrize("name", STORED)
def test_the_tests_that_a_row_names_are_there_and_find_matrices_packed_as_it_says(name: str) -> None:
    stored = STORED[name]
    assert stored.tests
    functions = [test for test in stored.tests if test not in CASES]
    held = {*globals(), *vars(test_quantisation), *vars(test_quantised_inputs), *vars(test_as_loaded)}
    assert [test for test in functions if test not in held] == []
    found = set[str]().union(*(CASES[test][1] for test in stored.tests if test in CASES))
    assert found <= set(stored.kinds)
    if not functions:
        assert found == set(stored.kinds)


def test_every_case_of_the_comparison_is_in_a_row() -> None:
    assert {test for stored in STORED.values() for test in stored.tests} >= CASES.keys()


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
def test_quark_stores_each_module_by_its_pattern(tmp_path: Path) -> None:
    config, most = made.quark("uint4")
    other, few = made.quark("fp8_e4m3")
    config["layer_quant_config"] = {"*down_proj": other["global_quant_config"]}

    def writer(module: str, weight: Any) -> made.Written:
        return (few if "down_proj" in module else most)(module, weight)

    model = made.write(tmp_path, tiny_models.build("llama"), config, writer)
    decoder = opened(tmp_path)
    assert kinds_of(decoder) == {"int4", "e4m3"}
    assert error_of(decoder, model) < MOST_ERROR
