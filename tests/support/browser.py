"""A real Chromium for tests, driven by Playwright, and axe-core's judgement of a page."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from debian_programs import program_with_libraries

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--no-proxy-server", "--disable-background-networking")
"""A container has no namespaces for Chromium's sandbox; what it shows here are this tree's own pages."""
WAIT_MS = 30_000
"""How long a page may take for anything; machines that run tests are busy."""


def program() -> str:
    """The Chromium of HEADRACE_TEST_CHROMIUM, or Debian's. Skips the test where there is none."""
    return os.environ.get("HEADRACE_TEST_CHROMIUM") or program_with_libraries("chromium", "usr/lib/chromium/chromium")


@contextmanager
def chromium() -> Iterator[Browser]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program(), args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, **context: Any) -> Iterator[Page]:
    """The page at the URL, in a profile of its own. Fails if the page raised an error or broke its own policy.

    context: options of Playwright's new_context, such as viewport and color_scheme.
    """
    own = browser.new_context(**context)
    own.set_default_timeout(WAIT_MS)
    page = own.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if "Content Security Policy" in said.text else None)
    try:
        page.goto(url)
        yield page
        assert not problems, problems
    finally:
        own.close()


def faults_of(page: Page) -> list[str]:
    """What axe-core finds wrong with the page as it is now. The page's policy must be off (bypass_csp)."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{each['id']}: {node['html'][:200]}" for each in found for node in each["nodes"]]
