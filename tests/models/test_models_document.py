"""docs/models.md says what the tests run."""

from __future__ import annotations

import re

import models_document
import pytest

from headrace.executor.models.families import families
from headrace.kernels.cpu import build


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
def test_the_table_of_models_is_made_of_what_is_tested() -> None:
    page = models_document.page()
    assert page == models_document.DOCS_PAGE.read_text(encoding="utf-8"), "make docs writes it anew"
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert families().keys() <= listed
    assert len(listed) >= 60
