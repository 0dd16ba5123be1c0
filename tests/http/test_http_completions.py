"""Completions and chat over a real server, with the openai client and without it: shapes, usage, streams."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from http_server import Server, ask, joined, serving, stream
from server_here import serving_here

from headrace.frontend.http.options import ServeOptions
from headrace.frontend.text import template_renderer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--trust-request-chat-template") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def test_openai_client_completes(sdk):
    answer = sdk.completions.create(model="null", prompt="the quick", max_tokens=7, temperature=0)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", "null")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7


def test_openai_client_biases_and_limits(sdk):
    limits = {"allowed_token_ids": [5, 6, 7], "bad_words": ["lazy"]}
    answer = sdk.completions.create(model="null", prompt="x", max_tokens=3, logit_bias={"5": 10}, extra_body=limits)
    assert answer.usage.completion_tokens == 3


PLACE = {"type": "object", "properties": {"at": {"enum": ["sea", "hill"]}}, "required": ["at"]}
ONLY_PLACE = {**PLACE, "additionalProperties": False}
FORMS = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "at", "schema": ONLY_PLACE, "strict": True}}},
    {"structured_outputs": {"json": ONLY_PLACE}},
    {"guided_json": json.dumps(ONLY_PLACE)},
    {"structured_outputs": {"choice": ['{"at":"sea"}', '{"at":"hill"}']}},
    {"guided_regex": r'\{"at":"(sea|hill)"\}'},
    {"guided_grammar": 'root ::= "{\\"at\\":\\"" ("sea" | "hill") "\\"}"'},
    {"guided_choice": ['{"at":"sea"}', '{"at":"hill"}']},
    {"guided_json": ONLY_PLACE, "guided_whitespace_pattern": " ?"},
    {"guided_json": ONLY_PLACE, "guided_decoding_backend": "guidance:no-fallback,disable-any-whitespace"},
    {"guided_json": json.dumps(ONLY_PLACE), "guided_decoding_backend": "xgrammar"},
    {"response_format": {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": ONLY_PLACE}}},
    {
        "structural_tag": json.dumps(
            {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": ONLY_PLACE}}
        )
    },
    {"structured_outputs": {"structural_tag": {"format": {"type": "json_schema", "json_schema": ONLY_PLACE}}}},
]


@pytest.mark.parametrize("asked", FORMS, ids=lambda asked: next(iter(asked)))
def test_every_spelling_of_structured_outputs_gives_an_answer_of_that_form(client, asked):
    body = {"max_tokens": 400, "structured_outputs": {"json": PLACE}, "seed": 3}
    if "structured_outputs" not in asked:
        del body["structured_outputs"]
    for route, prompt in ((COMPLETIONS, {"prompt": "where"}), (CHAT, {"messages": [{"role": "user", "content": "?"}]})):
        answer = client.post(route, json={**body, **asked, **prompt})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        text = choice["text"] if route == COMPLETIONS else choice["message"]["content"]
        assert json.loads(text)["at"] in ("sea", "hill")


def test_openai_client_parses_an_answer_into_a_pydantic_model(sdk):
    class Flag(pydantic.BaseModel):
        colours: list[Literal["red", "blue"]] = pydantic.Field(max_length=3)
        square: bool

    messages = [{"role": "user", "content": "describe a flag"}]
    answer = sdk.chat.completions.parse(model="null", messages=messages, response_format=Flag, max_tokens=400)
    assert isinstance(answer.choices[0].message.parsed, Flag)
    with sdk.chat.completions.stream(model="null", messages=messages, response_format=Flag, max_tokens=400) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Flag)


def test_openai_client_streams_what_it_would_get_whole(sdk):
    ask = {"model": "null", "prompt": "the quick", "max_tokens": 20, "temperature": 0}
    whole = sdk.completions.create(**ask)
    events = list(sdk.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].text for event in events if event.choices) == whole.choices[0].text
    assert events[-1].usage == whole.usage
    assert [event.usage for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-2].choices[0].finish_reason == "length"


def test_openai_client_chats(sdk):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    ask = {"model": "null", "messages": messages, "max_completion_tokens": 12, "temperature": 0}
    whole = sdk.chat.completions.create(**ask, logprobs=True, top_logprobs=3)
    assert whole.id.startswith("chatcmpl-")
    assert whole.choices[0].message.role == "assistant"
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens == 12
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 3
    events = list(sdk.chat.completions.create(**ask, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content for event in events) == whole.choices[0].message.content
    # An answer goes back as it came.
    messages += [whole.choices[0].message.model_dump(), {"role": "user", "content": "More"}]
    assert sdk.chat.completions.create(model="null", messages=messages, max_tokens=2).usage.completion_tokens == 2


def test_openai_async_client_runs_many_at_once(server):
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as sdk:

            async def one(index: int) -> str:
                events = await sdk.completions.create(model="null", prompt=[5, 6, index], max_tokens=30, stream=True)
                return "".join([event.choices[0].text async for event in events])

            return await asyncio.gather(*(one(index) for index in range(3, 35)))

    texts = asyncio.run(run())
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as sdk:
        for index in (3, 17, 34):
            alone = sdk.completions.create(model="null", prompt=[5, 6, index], max_tokens=30)
            assert alone.choices[0].text == texts[index - 3]
    assert len(set(texts)) == 32


def test_lists_of_prompts_and_n_are_numbered_and_counted(client):
    answer = ask(client, COMPLETIONS, prompt=["one", "two"], n=2, max_tokens=4, temperature=1.0)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    alone = ask(client, COMPLETIONS, prompt="two", max_tokens=4)
    assert answer["choices"][2]["text"] == alone["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 16
    both = sum(ask(client, "/tokenize", prompt=prompt)["count"] for prompt in ("one", "two"))
    assert answer["usage"]["prompt_tokens"] == both
    events = stream(client, COMPLETIONS, {"prompt": [[5, 6], [7, 8, 9]], "n": 2, "max_tokens": 4, "temperature": 1.0})
    finished = [e["choices"][0]["index"] for e in events if e["choices"][0]["finish_reason"]]
    assert sorted(finished) == [0, 1, 2, 3]


def test_echo_begins_with_the_prompt_and_its_logprobs(client):
    body = {"prompt": "the quick fox", "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    choice = ask(client, COMPLETIONS, **body)["choices"][0]
    tokens = ask(client, "/tokenize", prompt="the quick fox")["tokens"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("the quick fox")
    assert len(logprobs["tokens"]) == len(tokens) + 1
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"][: len(tokens)]) == "the quick fox"
    assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])
    nothing = ask(client, COMPLETIONS, **{**body, "max_tokens": 0})
    assert nothing["choices"][0]["text"] == "the quick fox"
    assert nothing["usage"]["completion_tokens"] == 0
    assert len(nothing["choices"][0]["logprobs"]["tokens"]) == len(tokens)


def test_the_logprobs_of_an_echo_begin_every_output_whole_and_as_events(client):
    body = {"prompt": [9, 10, 11], "echo": True, "logprobs": 1, "max_tokens": 3, "n": 3, "seed": 4}
    choices = ask(client, COMPLETIONS, **body)["choices"]
    events = [event["choices"][0] for event in stream(client, COMPLETIONS, body)]
    for choice in choices:
        told = [event["logprobs"] for event in events if event["index"] == choice["index"]]
        for name, whole in choice["logprobs"].items():
            assert joined(each[name] for each in told) == whole, name
            assert len(whole) == 6
            assert whole[:3] == choices[0]["logprobs"][name][:3]
        starts, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
        assert starts == [len("".join(tokens[:place])) for place in range(6)]


def test_token_ids_on_request(client):
    body = {"prompt": [9, 10, 11], "max_tokens": 5, "logprobs": 0, "temperature": 0}
    choice = ask(client, COMPLETIONS, **body, return_token_ids=True, return_tokens_as_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == [9, 10, 11]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    events = stream(client, COMPLETIONS, {**body, "return_token_ids": True})
    assert joined(event["choices"][0]["token_ids"] for event in events) == choice["token_ids"]
    assert events[0]["choices"][0]["prompt_token_ids"] == [9, 10, 11]
    chat = ask(client, CHAT, messages=[{"role": "user", "content": "x"}], max_tokens=3, return_token_ids=True)
    assert len(chat["choices"][0]["token_ids"]) == 3
    assert chat["prompt_token_ids"]


def test_prompt_logprobs_on_request(client):
    answer = ask(client, COMPLETIONS, prompt=[9, 10, 11], max_tokens=1, prompt_logprobs=1)["choices"][0]
    assert answer["prompt_logprobs"][0] is None
    assert set(answer["prompt_logprobs"][1]) == {"10"}
    assert answer["prompt_logprobs"][1]["10"]["rank"] == 1


def test_continuous_usage_counts_up(client):
    body = {"prompt": [9, 10], "max_tokens": 6}
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(client, COMPLETIONS, {**body, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-2:] == [6, 6]
    assert {event["usage"]["prompt_tokens"] for event in events} == {2}


def test_a_request_has_the_name_it_was_given(client):
    assert ask(client, COMPLETIONS, prompt=[5], request_id="mine")["id"] == "cmpl-mine"
    response = client.post(COMPLETIONS, json={"prompt": [5]}, headers={"x-request-id": "header"})
    assert response.json()["id"] == "cmpl-header"


def test_two_requests_of_one_name_are_both_answered_under_it(client):
    body = {"prompt": [5], "max_tokens": 3000, "request_id": "same", "stream": True}
    with client.stream("POST", COMPLETIONS, json=body) as first:
        lines = first.iter_lines()
        assert '"cmpl-same"' in next(lines)  # it runs
        assert ask(client, COMPLETIONS, prompt=[5], max_tokens=2, request_id="same")["id"] == "cmpl-same"


def test_content_parts_of_text_are_joined(client):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    joined = ask(client, "/tokenize", messages=[{"role": "user", "content": "one\ntwo"}])
    assert ask(client, "/tokenize", messages=[{"role": "user", "content": parts}]) == joined


def test_chat_templates_and_what_they_see(client):
    name = "{{ tools[0].function.name if tools }}"
    template = f"{{{{ messages[0].content }}}}|{{{{ colour }}}}|{name}|{{{{ add_generation_prompt }}}}"

    def rendered(**more: Any) -> str:
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template": template, **more}
        tokens = ask(client, "/tokenize", **body)["tokens"]
        return str(ask(client, "/detokenize", tokens=tokens)["prompt"])

    assert rendered(chat_template_kwargs={"colour": "red"}) == "x|red||True"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert rendered(tools=tools, add_generation_prompt=False) == "x||f|False"


@pytest.mark.parametrize(("path", "name"), [("/tokenize", rb"chat\u005ftemplate"), (CHAT, b"chat_template")])
def test_while_the_template_of_a_request_runs_others_are_answered(client, path, name):
    n = "{% for i in range(250) %}{% for j in range(9999) %}{% endfor %}{% endfor %}x"
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "chat_template": n}).encode()
    content = body.replace(b"chat_template", name)
    ended: list[httpx.Response] = []
    headers = {"content-type": "application/json"}
    asking = threading.Thread(target=lambda: ended.append(client.post(path, content=content, headers=headers)))
    asking.start()
    num_answered = 0
    while not ended and num_answered < 10:
        client.get("/health")
        num_answered += not ended
    asking.join()
    assert num_answered == 10, "the server answered nobody else meanwhile"
    assert ended[0].status_code == 200


def test_a_template_that_compares_without_end_is_refused_and_the_limit_told(monkeypatch):
    monkeypatch.setattr(template_renderer, "MOST_COMPUTING_S", 0.3)
    template = (
        "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
        "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}"
    )
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template": template}
    with serving_here(ServeOptions(port=0, trust_request_chat_template=True)) as server, server.client() as client:
        answer = client.post(CHAT, json=body, timeout=120)
        assert answer.status_code == 400, answer.text
        # The second, where the machine is so busy that it has not computed for 0.3 s in a minute.
        limits = r"the chat template (takes more than 0.3 s of processor time|took more than 60 s)"
        assert re.match(limits, answer.json()["error"]["message"])
        assert client.get("/health").status_code == 200


def test_a_template_of_a_request_that_fails_is_the_requests_fault(client):
    for template, said in (("{{ 1 / 0 }}", "ZeroDivisionError"), ("{{ range(1000000000) }}", "OverflowError")):
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template": template}
        answer = client.post(CHAT, json=body)
        assert (answer.status_code, said in answer.json()["error"]["message"]) == (400, True), answer.text


def test_documents_and_efforts_reach_the_template_of_a_chat(client):
    """The answer echoes the prompt's tokens, so they show what was rendered."""
    template = "{{ documents[0].text if documents }}|{{ reasoning_effort }}|{{ enable_thinking }}"

    def rendered(**more: Any) -> str:
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template": template, "max_tokens": 1, **more}
        tokens = ask(client, "/v1/chat/completions", **body, return_token_ids=True)["prompt_token_ids"]
        return str(ask(client, "/detokenize", tokens=tokens)["prompt"])

    assert rendered(documents=[{"title": "a", "text": "one"}]) == "one||"
    assert rendered(reasoning_effort="high") == "|high|"
    assert rendered(reasoning_effort="none") == "|none|False"
    assert rendered(reasoning_effort="none", enable_thinking=True) == "|none|True"
    assert rendered(chat_template_kwargs={"enable_thinking": False}) == "||False"


def test_results_of_tools_may_be_parts(client):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "sun"}, {"type": "text", "text": "ny"}]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": parts},
    ]
    template = "{{ messages[1].tool_calls[0].function.arguments.a }}|{{ messages[2].content }}"
    tokens = ask(client, "/tokenize", messages=messages, chat_template=template)["tokens"]
    assert ask(client, "/detokenize", tokens=tokens)["prompt"] == "1|sun\nny"


def test_roles_in_an_order_that_the_template_refuses_are_a_bad_request(client):
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    body = {"messages": [{"role": "assistant", "content": "x"}], "chat_template": template}
    answer = client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "roles must alternate" in answer.json()["error"]["message"]


def test_continue_final_message(client):
    messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "I am"}]
    tokens = ask(client, "/tokenize", messages=messages, continue_final_message=True)["tokens"]
    assert ask(client, "/detokenize", tokens=tokens)["prompt"].endswith("I am")


def test_models_version_load_and_docs(client):
    (card,) = client.get("/v1/models").json()["data"]
    assert card["id"] == "null"
    assert client.get("/v1/models/null").json() == card
    assert client.get("/version").json().keys() == {"version"}
    assert client.get("/load").json() == {"server_load": 0}
    page = client.get("/docs").text
    assert "/v1/chat/completions" in page
    assert "http" not in page.split("curl")[0].replace("http-equiv", ""), "the page must need no other server"


def test_a_default_number_of_tokens_is_that_of_the_generation_config_for_completions_too():
    with serving("--override-generation-config", '{"max_tokens": 5}') as server, server.client() as client:
        for body, expected in (({}, 5), ({"max_tokens": 3}, 3)):
            answer = ask(client, COMPLETIONS, prompt=[5], ignore_eos=True, **body)
            assert answer["usage"]["completion_tokens"] == expected


def test_several_conversations_are_answered_at_once(client):
    conversations = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
    asked = {"max_tokens": 5, "temperature": 0, "logprobs": True}
    answer = ask(client, "/v1/chat/completions/batch", messages=conversations, **asked)
    openai.types.chat.ChatCompletion.model_validate(answer)
    alone = [ask(client, "/v1/chat/completions", messages=each, **asked) for each in conversations]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice, own in zip(answer["choices"], alone, strict=True):
        assert choice["message"] == own["choices"][0]["message"]
        assert choice["logprobs"] == own["choices"][0]["logprobs"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(each["usage"][name] for each in alone)
    for wrong, param in (
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [conversations[0], []]}, "messages[1]"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ):
        body = {"messages": conversations, **asked, **wrong}
        refused = client.post("/v1/chat/completions/batch", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
