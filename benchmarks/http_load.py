"""A closed loop of streaming requests to an OpenAI-compatible /v1/completions: the client of `http_overhead.py`.

    python benchmarks/http_load.py URL MODEL STREAMS REQUESTS PROMPT_TOKENS OUTPUT_TOKENS [BODY [HEADERS]]

Each of STREAMS connections sends one request after another, with a prompt of random token ids, greedy, always of
OUTPUT_TOKENS, until REQUESTS are done. With a BODY (JSON), these are chat completions with its fields in place of a
prompt; HEADERS (JSON) go with each request. Prints one JSON line: rates, and percentiles of the time to the first event
and between events. Needs aiohttp. On a machine shared with the server, the client's own time per event matters.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import aiohttp


class Load:
    def __init__(
        self, url: str, model: str, prompts: Iterator[list[int]], output_tokens: int, body: dict[str, Any] | None = None
    ) -> None:
        self._url = f"{url}/v1/completions" if body is None else f"{url}/v1/chat/completions"
        self._body = body
        self._fixed = {
            "model": model,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        self._prompts = prompts
        self.first_s: list[float] = []
        self.between_s: list[float] = []
        self.done = self.errors = 0

    async def connection(self, session: aiohttp.ClientSession) -> None:
        for prompt in self._prompts:
            try:
                ended = await self._request(session, prompt)
            except (aiohttp.ClientError, TimeoutError) as error:
                print(repr(error), file=sys.stderr)
                ended = False
            self.done += ended
            self.errors += not ended

    async def _request(self, session: aiohttp.ClientSession, prompt: list[int]) -> bool:
        """Whether it ended as expected."""
        last_s, times = time.perf_counter(), self.first_s
        more = {"prompt": prompt} if self._body is None else self._body
        async with session.post(self._url, json={**self._fixed, **more}) as response:
            if response.status != 200:
                print(await response.text(), file=sys.stderr)
                return False
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    return True
                if line.startswith(b"data:"):
                    now_s = time.perf_counter()
                    times.append(now_s - last_s)
                    last_s, times = now_s, self.between_s
        return False


def percentiles_ms(values: list[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    return {
        name: round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else None
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }


async def run(
    url: str,
    model: str,
    streams: int,
    requests: int,
    prompt_tokens: int,
    output_tokens: int,
    body: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> Any:
    numbers = random.Random(0)
    prompts = [[numbers.randrange(1000, 40000) for _ in range(prompt_tokens)] for _ in range(requests)]
    load = Load(url, model, iter(prompts), output_tokens, body)
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        began_s = time.perf_counter()
        await asyncio.gather(*(load.connection(session) for _ in range(streams)))
        seconds = time.perf_counter() - began_s
    return {
        "conc": streams,
        "done": load.done,
        "errors": load.errors,
        "req_s": round(load.done / seconds, 2),
        "out_tok_s": round(load.done * output_tokens / seconds, 1),
        "ttft_ms": percentiles_ms(load.first_s),
        "itl_ms": percentiles_ms(load.between_s),
    }


if __name__ == "__main__":
    url, model, *numbers = sys.argv[1:7]
    num_streams, num_requests, num_prompt, num_output = map(int, numbers)
    body, headers = (json.loads(sys.argv[at]) if len(sys.argv) > at else None for at in (7, 8))
    print(json.dumps(asyncio.run(run(url, model, num_streams, num_requests, num_prompt, num_output, body, headers))))
