"""A real Prometheus, of Debian's package, and what it answers."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from debian_programs import program
from patience import wait_until


@contextlib.contextmanager
def prometheus(folder: Path, config: str) -> Iterator[Callable[[str], list[Any]]]:
    """Runs it with this configuration; yields a function that answers a query with its samples."""
    (folder / "prometheus.yml").write_text(config)
    log = folder / "prometheus.log"
    command = [
        program("prometheus", "usr/bin/prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=output)
    try:
        listening = re.compile(r'"?Listening on"? address="?(127\.0\.0\.1:\d+)')
        wait_until(lambda: listening.search(log.read_text()) is not None, 60, "Prometheus' start")
        found = listening.search(log.read_text())
        assert found is not None
        with httpx.Client(base_url=f"http://{found[1]}", timeout=30) as client:
            wait_until(lambda: _is_ready(client), 60, "Prometheus to answer")

            def result(query: str) -> list[Any]:
                answer = client.get("/api/v1/query", params={"query": query})
                assert answer.status_code == 200, (query, answer.text)
                samples: list[Any] = answer.json()["data"]["result"]
                return samples

            yield result
    finally:
        process.terminate()
        process.wait(30)


def _is_ready(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/-/ready").status_code == 200
    return False
