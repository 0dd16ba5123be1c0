"""Bodies that the OpenAPI document allows, made hostile in places, and the real model behind the server lives on.

allowed body --- a value anywhere becomes hostile, or an extra field comes ---> answered below 500, engine the same
"""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
import tiny_models
from http_server import Server, engine_of, serving
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from served_routes import DEVELOPMENT_ROUTES, ROUTES, document_of

pytestmark = pytest.mark.system


DEEP = {
    "@lists": "[" * 3000 + "]" * 3000,
    "@objects": '{"a":' * 3000 + "1" + "}" * 3000,
    "@open": "[" * 100_000,
    "@digits": "9" * 5000,
    "@twice": '{"stream": true, "stream": 7}',
}
"""What json does not write, by what stands for it in a body."""
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**31 - 1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400),
    *(0.0, -0.0, 1e-320, 3.5e38, 1e308, -1e308, math.inf, -math.inf, math.nan),
    *("", "\0", "\x1b[2J", "\n\ndata: [DONE]\n\n", "é" * 500, "x" * 100_000, "\ud800", "1", "nan", "../../etc/passwd"),
    *("{{ 7 * 7 }}", "{% for a in range(10**9) %}{% endfor %}", "<|im_start|>", "(" * 5000, "a{1,100000}", "$ref"),
    *([], {}, [[]], [None], {"": ""}, [0] * 5000, ["x"] * 5000, {str(each): each for each in range(2000)}),
    *DEEP,
    *({"type": "object", "$ref": "#"}, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
)
NAMES = ("enable_thinking", "self", "__class__", "metadata", "x" * 3000, "\x1b[31m", "", "model", "stream", "n", "echo")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tiny_models.save("llama", tmp_path_factory.mktemp("model"), tokenizer=True)
    model = (str(folder), "--dtype", "float32", "--max-model-len", "128", "--num-gpu-blocks-override", "200")
    with serving(*model, "--server-dev-mode", "--request-timeout", "20", attached=True) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything in a JSON value, itself included."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inside for place in places_in(each, (*path, key)))]


def spoiled(numbers: random.Random, body: Any) -> Any:
    places, put = places_in(body), list[Any]()
    for _ in range(numbers.randint(1, 3)):
        path, hostile = numbers.choice(places), numbers.choice(HOSTILE)
        name, takes_all = numbers.choice(NAMES), numbers.random() < 0.1
        if path == () and takes_all:
            return hostile
        target = body
        for key in path[:-1]:
            target = target[key]
            if any(target is each for each in put):  # a value of HOSTILE, which stays as it is
                break
        else:
            if isinstance(target, dict) and (path == () or takes_all):
                target[name] = hostile
            elif path != ():
                target[path[-1]] = hostile
            put.append(hostile)
    return body


OPERATIONS = [
    result.ok()
    for result in schemathesis.openapi.from_dict(
        json.loads(document_of(*ROUTES, *DEVELOPMENT_ROUTES))
    ).get_all_operations()
]


@pytest.mark.parametrize("operation", [each for each in OPERATIONS if len(each.body)], ids=lambda each: each.label)
def test_hostile_values_and_extra_fields_are_answered_below_500_by_an_engine_that_lives(server, client, operation):
    engine = engine_of(server).pid

    @settings(
        max_examples=120,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(), seed=st.integers(0, 2**32))
    def check(case: schemathesis.Case, seed: int) -> None:
        if not isinstance(case.body, dict | list):
            return
        body = spoiled(random.Random(seed), json.loads(json.dumps(case.body)))
        content = json.dumps(body)
        for name, text in DEEP.items():
            content = content.replace(json.dumps(name), text)
        answer = client.request(
            operation.method, operation.path, content=content.encode(), headers={"content-type": "application/json"}
        )
        assert answer.status_code < 500, (content[:2000], answer.text[:2000])

    with contextlib.suppress(Unsatisfiable):
        check()
    assert engine_of(server).pid == engine
    assert client.get("/health").status_code == 200
