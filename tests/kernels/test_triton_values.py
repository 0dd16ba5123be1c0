"""Every Triton kernel gives its reference's values, under the interpreter."""

from __future__ import annotations

from pathlib import Path

import case_process
import pytest
import triton_cases
from triton_cases import FILES, full_name, why_not_interpreted

if reason := why_not_interpreted():
    pytest.skip(reason, allow_module_level=True)

pytestmark = case_process.PATIENT


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, str]:
    return case_process.failures(request, Path(triton_cases.__file__))


@pytest.mark.parametrize("name", case_process.parameters(FILES, full_name))
def test_a_kernel_equals_its_reference(name: str, failures: dict[str, str]) -> None:
    assert not failures[name], failures[name]
