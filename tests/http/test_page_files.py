"""The page's files and its route, as a browser and other programs get them: headers, keys, caching, --no-ui."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import metric, stream
from patience import wait_until
from server_here import serving_here
from source_tree import ROOT

from headrace.core.options.option import Secret
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.metrics import Pages, pages_bytes

STATIC = ROOT / "frontend/http/apis/page/static"
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving_here() as server, server.client() as client:
        yield client


def test_a_browser_gets_the_page_and_a_program_what_it_got_before(client: httpx.Client) -> None:
    assert client.get("/", headers=BROWSER).headers["content-type"] == "text/html; charset=utf-8"
    assert client.get("/").text == "Headrace is running"
    assert client.get("/", headers={"accept": ""}).text == "Headrace is running"


def test_every_file_is_served_and_needs_no_other_server(client: httpx.Client) -> None:
    for file in STATIC.iterdir():
        path = "/" if file.name == "index.html" else f"/ui/{file.name}"
        answer = client.get(path, headers=BROWSER)
        assert answer.status_code == 200, path
        assert answer.content == file.read_bytes(), path
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        addresses = set(re.findall(r"https?://[\w.]+", file.read_text())) - {"http://www.w3.org"}  # SVG's name
        assert not addresses, path
        for named in re.findall(r'(?:from|src=|href=) ?"(?:\./|ui/)([\w.]+)"', file.read_text()):
            assert (STATIC / named).is_file(), (path, named)
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert not [each.name for each in STATIC.glob("*.js") if sink in each.read_text()], sink
    assert client.get("/ui/..%2froutes.py").status_code == 404
    assert client.get("/ui/nothing.js").status_code == 404


def test_a_file_is_sent_again_only_when_it_has_changed(client: httpx.Client) -> None:
    first = client.get("/ui/main.js")
    assert first.headers["cache-control"] == "no-cache"
    again = client.get("/ui/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/ui/main.js", headers={"if-none-match": '"other"'}).status_code == 200
    assert client.head("/ui/main.js").status_code == 200


def test_the_live_view_is_told_counts_that_only_grow(client: httpx.Client) -> None:
    def engine() -> Any:
        (each,) = client.get("/ui/live").json()["engines"]
        return each

    assert client.get("/ui/live").json()["server"] == client.get("/ui/live").json()["server"]
    before = engine()
    assert (before["state"], before["problem"], before["models"]) == ("ready", "", ["null"])
    assert (before["adapters"], before["generates"]) == ([], True)
    assert before["max_model_len"] == 32_768
    assert sum(before["startup_s"].values()) > 0
    stream(client, "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True})
    after = engine()
    assert after["generated_tokens"] - before["generated_tokens"] == 6
    assert after["prompt_tokens"] - before["prompt_tokens"] == 3
    for name, expected in (("time_to_first_token_seconds", 1), ("inter_token_latency_seconds", 5)):
        assert sum(after["latencies"][name]) - sum(before["latencies"][name]) == expected, name
        assert len(after["latencies"][name]) == len(client.get("/ui/live").json()["bounds"][name]) + 1


def test_counts_say_of_which_server_they_are_in_each_of_its_processes(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "ab"]
    for file in files:
        file.write_bytes(bytes(pages_bytes(2)))
    first, second = ([Pages(file=file, num_processes=2, index=index).server for index in (0, 1)] for file in files)
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert len({first[0], second[0], Pages().server, Pages().server}) == 4


def test_a_first_token_is_counted_before_its_answer_is_whole(client: httpx.Client) -> None:
    def counts() -> list[int]:
        (each,) = client.get("/ui/live").json()["engines"]
        return [sum(each["latencies"][name]) for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds")]

    first, whole = counts()
    body = {"prompt": [5, 6], "max_tokens": 30_000, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
        assert counts() == [first + 1, whole]
    wait_until(lambda: metric(client, "headrace:num_requests_running") == 0, 30, "the request's end")
    assert counts() == [first + 1, whole], "it is counted once, also of a request that its client leaves"


def test_files_are_public_and_the_engines_state_is_not(client: httpx.Client) -> None:
    with serving_here(ServeOptions(port=0, api_key=(Secret("right"),))) as server, server.client() as guarded:
        assert guarded.get("/", headers=BROWSER).status_code == 200
        assert guarded.get("/ui/main.js").status_code == 200
        for key, status in (("", 401), ("Bearer wrong", 401), ("Bearer right", 200)):
            assert guarded.get("/ui/live", headers={"authorization": key}).status_code == status, key
    foreign = {**BROWSER, "host": "evil.example"}
    for path in ("/", "/ui/main.js", "/ui/live"):
        assert client.get(path, headers=foreign).status_code == 403, "a name that may be re-bound"
        assert client.get(path, headers={"origin": "http://evil.example"}).status_code == 403, path


def test_without_ui_there_is_no_page_and_the_rest_is_as_ever() -> None:
    with serving_here(ServeOptions(port=0, ui=False)) as server, server.client() as client:
        assert client.get("/", headers=BROWSER).text == "Headrace is running"
        for path in ("/ui/main.js", "/ui/live"):
            answer = client.get(path)
            assert answer.status_code == 404
            assert "--no-ui" in answer.json()["error"]["message"]
        assert client.get("/v1/models").status_code == 200


def test_behind_a_proxy_with_a_path_the_page_finds_its_files() -> None:
    with serving_here(ServeOptions(port=0, root_path="/models/a")) as server, server.client() as client:
        bare = server.url.removesuffix("/models/a")
        for url in (f"{bare}/", f"{bare}/models/a/", f"{bare}/models/a"):
            page = client.get(url, headers=BROWSER)
            assert '<base href="/models/a/">' in page.text, url
        assert client.get("/ui/main.js").status_code == 200


def test_every_file_is_in_the_package() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = setup["package-data"]["headrace.frontend.http.apis.page"]
    packed = {file for pattern in patterns for file in STATIC.parent.glob(pattern)}
    assert packed == {each for each in STATIC.iterdir() if each.is_file()}
    assert Path(STATIC / "index.html") in packed
