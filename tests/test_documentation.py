"""The pages of docs/: generated ones are what the declarations make, all are in the site, and links lead somewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from server_here import serving_here
from source_tree import ROOT, docs_program

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.M | re.S)


def test_the_reference_is_what_the_declarations_make() -> None:
    pages = docs_program("reference").pages()
    assert {path.name for path in (DOCS / "reference").glob("*.md")} == pages.keys()
    stale = [name for name, text in pages.items() if (DOCS / "reference" / name).read_text(encoding="utf-8") != text]
    assert not stale, "run make docs"


def test_the_measured_figures_are_those_of_the_results() -> None:
    plots = docs_program("plots")
    assert plots.PAGE.read_text(encoding="utf-8") == plots.page(), "run make docs"
    for plot in plots.plots():
        drawn = (plots.PLOTS / f"{plot.name}.svg").read_text(encoding="utf-8")
        values = [f"{value:,.0f}" for group in plot.groups.values() for value in group.values()]
        assert all(f">{value}<" in drawn for value in values), plot.name
        assert not re.search(r"(href|src)=\"http", drawn)


def test_every_metric_that_a_server_exports_is_on_its_page() -> None:
    page = (DOCS / "reference/metrics.md").read_text(encoding="utf-8")
    with serving_here(kv_cache_metrics=True, enable_mfu_metrics=True) as server, server.client() as client:
        client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).raise_for_status()
        exported = re.findall(r"^# TYPE (\S+) (\w+)", client.get("/metrics").text, re.M)
    names = {
        name.removeprefix("headrace:").removesuffix("_total" if kind == "counter" else "") for name, kind in exported
    }
    assert len(names) > 60
    assert [name for name in sorted(names) if f"`{name}`" not in page and f"`{name}_total`" not in page] == []


def test_every_page_is_in_the_site() -> None:
    def pages_of(entries: list[Any]) -> list[str]:
        return [
            page
            for entry in entries
            for value in entry.values()
            for page in ([value] if isinstance(value, str) else pages_of(value))
        ]

    nav = pages_of(tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"])
    assert sorted(nav) == sorted(path.relative_to(DOCS).as_posix() for path in PAGES)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_the_links_of_a_page_lead_to_pages_of_the_site(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    wrong = []
    for link in _LINK.findall(_CODE.sub("", text)):
        target, _, anchor = link.partition("#")
        if target.startswith(("http://", "https://")):
            continue
        file = (path.parent / target).resolve() if target else path
        if not file.is_relative_to(DOCS) or not file.exists() or (anchor and anchor not in anchors(file)):
            wrong.append(link)
    assert not wrong


def anchors(page: Path) -> set[str]:
    heads = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.system
def test_the_site_is_built_and_asks_no_other_server(tmp_path: Path) -> None:
    zensical = shutil.which("zensical") or ROOT / ".venv/docs/bin/zensical"
    if not Path(zensical).exists():
        pytest.skip("zensical is not installed: make docs-site")
    # Copies: of a link zensical would write the site to where it leads.
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    built = subprocess.run([zensical, "build", "--strict"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = sorted((tmp_path / "build/site").rglob("index.html"))
    assert len(pages) == len(PAGES)
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?://[^\" >]+)", page.read_text())
        assert not loaded, page
