"""The servers and requests of `api_corpus.py`.

Four servers see them: `model` answers with the demo model's real weights, `echo` says back what it is told (so that
the requests choose the answers that tool calls and reasoning are read from), `keyed` has keys, strict requests and all
other options that change answers, and `pooling` embeds. All requests are greedy or have a seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

METRICS = "/metrics"
COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
SKY: list[dict[str, Any]] = [{"role": "user", "content": "Why is the sky blue?"}]
ANTHROPIC = {"anthropic-version": "2023-06-01"}


@dataclass(frozen=True)
class Case:
    name: str
    method: str
    path: str
    body: Any = None
    """JSON, or bytes as they are."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Besides Host, Connection, Content-Type and Content-Length, or in their place."""
    raw: bytes | None = None
    """The whole request instead."""
    keep: Mapping[str, str] = field(default_factory=dict)
    """Names for parts of the answer, by path (`data.0.id`): `<<name>>` in later requests stands for one."""
    until: Callable[[Any], bool] | None = None
    """The request is repeated until the answer fulfils this."""


@dataclass(frozen=True)
class ServerCase:
    name: str
    arguments: tuple[str, ...]
    cases: list[Case]
    headers: Mapping[str, str] = field(default_factory=dict)
    """With which /metrics and /openapi.json are read."""


def _posts(path: str, **shared: Any) -> Callable[..., Case]:
    """A maker of cases of a route, whose bodies have the shared fields."""

    def case(name: str, /, keep: Mapping[str, str] | None = None, **body: Any) -> Case:
        return Case(f"{path} {name}", "POST", path, {**shared, **body}, keep=keep or {})

    return case


def _with(case: Case, **headers: str) -> Case:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Case(case.name, case.method, case.path, case.body, {**case.headers, **named}, keep=case.keep)


def _get(path: str, name: str = "", **more: Any) -> Case:
    return Case(f"GET {path} {name}".strip(), "GET", path, **more)


_completion = _posts(COMPLETIONS, prompt="The sky is", max_tokens=6, temperature=0)
_chat = _posts(CHAT, messages=SKY, max_tokens=6, temperature=0)
_message = _posts(MESSAGES, model="SmolLM2-135M-Instruct", messages=SKY, max_tokens=6, temperature=0)
_response = _posts(RESPONSES, input="Why is the sky blue?", max_output_tokens=6, temperature=0)
_ollama_chat = _posts(
    "/api/chat", model="SmolLM2-135M-Instruct", messages=SKY, options={"num_predict": 6, "temperature": 0}
)
_generate = _posts(
    "/api/generate", model="SmolLM2-135M-Instruct", prompt="The sky is", options={"num_predict": 6, "temperature": 0}
)
_tokenize = _posts("/tokenize")
_detokenize = _posts("/detokenize")

COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["blue", "red"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
    },
}
STRICT_WEATHER: dict[str, Any] = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
BAD_COMPLETION_FIELDS: tuple[tuple[str, Any], ...] = (
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "many"), ("max_tokens", 10**6), ("max_tokens", 1.5),
    ("temperature", -1), ("temperature", "hot"), ("temperature", None), ("temperature", 100),
    ("top_p", 0), ("top_p", 2), ("top_k", -5), ("min_p", 7), ("seed", "x"), ("seed", 2**70),
    ("n", 0), ("n", 10**5), ("best_of", 0), ("stop", 7), ("stop", [""]), ("stop", ["x"] * 100), ("stop", [1]),
    ("logprobs", -2), ("logprobs", 10**4), ("prompt_logprobs", 10**4), ("logit_bias", {"x": 1}),
    ("logit_bias", {"999999999": 1}), ("logit_bias", []), ("presence_penalty", 9), ("frequency_penalty", -9),
    ("repetition_penalty", 0), ("bad_words", [""]), ("bad_words", "x"), ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]), ("stop_token_ids", ["x"]), ("min_tokens", 100), ("stream", "perhaps"),
    ("stream_options", {"include_usage": True}), ("echo", 3), ("suffix", "end"), ("model", "gpt-4"), ("model", 5),
    ("prompt", None), ("prompt", 5), ("prompt", []), ("prompt", ""), ("prompt", [[]]), ("prompt", [-1]),
    ("prompt", [10**9]), ("prompt", ["a", 1]), ("prompt", {"text": "a"}), ("prompt_embeds", "AAAA"),
    ("tempreature", 0.5), ("unknown_field", 1), ("messages", SKY), ("user", "me"), ("priority", "high"),
    ("data_parallel_rank", 7), ("cache_salt", ""), ("truncate_prompt_tokens", -9), ("stream_interval", 0),
    ("structured_outputs", {}), ("structured_outputs", {"regex": "("}),
    ("structured_outputs", {"json": {}, "regex": "a"}), ("structured_outputs", {"choice": []}),
    ("response_format", {"type": "xml"}), ("response_format", "json"),
    ("response_format", {"type": "json_schema"}), ("guided_regex", "[ab]"), ("use_beam_search", "yes"),
    ("skip_special_tokens", "x"), ("lora_name", "x"), ("adapter_id", "x"), ("images", ["x"]), ("n_predict", 3),
    ("max_new_tokens", 3), ("repeat_penalty", 1.1), ("samplers", "top_k"), ("mirostat", 5), ("dry_multiplier", -1),
    ("xtc_probability", 2), ("typical_p", 0), ("thinking_budget", -3), ("request_id", 5), ("request_id", "mine"),
)  # fmt: skip
BAD_CHAT_FIELDS: tuple[tuple[str, Any], ...] = (
    ("messages", []), ("messages", None), ("messages", "hello"), ("messages", [{}]), ("messages", [{"role": "user"}]),
    ("messages", [{"role": "nobody", "content": "x"}]), ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"id": "x"}]}]),
    ("messages", [{"role": "tool", "content": "x"}]), ("messages", [{"role": "user", "content": "x", "extra": 1}]),
    ("top_logprobs", 3), ("top_logprobs", 1000), ("logprobs", 5), ("tools", []), ("tools", [{}]), ("tools", "x"),
    ("tools", [{"type": "function", "function": {"name": "bad name!"}}]), ("tools", [{"type": "web_search"}]),
    ("tool_choice", "required"), ("tool_choice", NAMED), ("tool_choice", "sometimes"), ("prompt", "x"),
    ("chat_template", "{{ x }}"), ("chat_template_kwargs", 3), ("reasoning_effort", 5), ("reasoning_effort", "high"),
    ("continue_final_message", True), ("add_generation_prompt", "x"), ("max_completion_tokens", 0),
    ("modalities", ["audio"]), ("functions", []), ("function_call", "auto"), ("store", True), ("metadata", {"a": "b"}),
    ("service_tier", "auto"), ("parallel_tool_calls", "x"), ("documents", [{"text": "x"}]), ("verbosity", "low"),
    ("prediction", {"type": "content", "content": "x"}), ("audio", {}), ("web_search_options", {}), ("session_id", "s"),
    ("safety_identifier", "x"), ("prompt_cache_key", "x"), ("echo", True), ("best_of", 2),
)  # fmt: skip


def _bad(case: Callable[..., Case], fields: Iterable[tuple[str, Any]]) -> list[Case]:
    return [
        case(f"{name}={json.dumps(value)[:60]} #{index}", **{name: value}) for index, (name, value) in enumerate(fields)
    ]


def _text_completions() -> list[Case]:
    return [
        _completion("plain"),
        _completion("n and seed", n=2, seed=7, temperature=1),
        _completion("best_of", n=1, best_of=2, seed=7, temperature=1),
        _completion("two prompts", prompt=["The sky is", "Grass is"]),
        _completion("token ids", prompt=[504, 6376, 314], return_token_ids=True),
        _completion("lists of token ids", prompt=[[504, 6376], [504, 314]]),
        _completion("echo", echo=True),
        _completion("score", echo=True, max_tokens=0, logprobs=2),
        _completion("logprobs", logprobs=3),
        _completion("logprobs as token ids", logprobs=1, return_tokens_as_token_ids=True),
        _completion("prompt_logprobs", prompt_logprobs=2),
        _completion("stop", stop=[" and", "."], max_tokens=30),
        _completion("stop kept", stop=".", include_stop_str_in_output=True, max_tokens=30),
        _completion("stop_token_ids", stop_token_ids=[30, 28], max_tokens=30),
        _completion("min_tokens", min_tokens=6, ignore_eos=True),
        _completion("logit_bias", logit_bias={"2000": 100}),
        _completion("bad_words", bad_words=["blue", "falling"]),
        _completion("allowed_token_ids", allowed_token_ids=[100, 200, 300]),
        _completion("penalties", presence_penalty=1, frequency_penalty=1, repetition_penalty=1.3, max_tokens=12),
        _completion("sampling", temperature=0.9, top_p=0.8, top_k=20, min_p=0.05, seed=3),
        _completion("sampling of llama.cpp", temperature=0.9, typical_p=0.9, top_n_sigma=2, seed=3),
        _completion("dry", dry_multiplier=1, dry_base=2, max_tokens=12),
        _completion("xtc", xtc_probability=0.5, xtc_threshold=0.1, temperature=1, seed=5),
        _completion("mirostat", mirostat=2, mirostat_tau=3, mirostat_eta=0.2, temperature=1, seed=5),
        _completion(
            "truncate_prompt_tokens", prompt="one two three four five six", truncate_prompt_tokens=2, echo=True
        ),
        _completion("beams", use_beam_search=True, n=2),
        _completion("beams and length_penalty", use_beam_search=True, n=2, best_of=3, length_penalty=1.5),
        _completion("choice", structured_outputs={"choice": ["blue", "red"]}),
        _completion("regex", structured_outputs={"regex": " [a-c]{3}"}),
        _completion("json", structured_outputs={"json": COLOUR}, max_tokens=20),
        _completion("grammar", structured_outputs={"grammar": 'root ::= " yes" | " no"'}),
        _completion(
            "response_format",
            response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR}},
            max_tokens=20,
        ),
        _completion("json_object", response_format={"type": "json_object"}, max_tokens=12),
        _completion(
            "repetition_detection",
            prompt="a a a a a a a a",
            repetition_detection={"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 3},
            max_tokens=30,
        ),
        _completion("stream", stream=True),
        _completion("stream usage", stream=True, stream_options={"include_usage": True}),
        _completion(
            "stream continuous usage",
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        ),
        _completion("stream n", stream=True, n=2, seed=1, temperature=1),
        _completion("stream of two prompts", stream=True, prompt=["The sky is", "Grass is"]),
        _completion("stream logprobs", stream=True, logprobs=2),
        _completion("stream echo", stream=True, echo=True),
        _completion("stream stop", stream=True, stop=[" and"], max_tokens=30),
        _completion("stream interval", stream=True, stream_interval=4, max_tokens=10),
        _completion("stream beams", stream=True, use_beam_search=True, n=2),
        _completion("stream token ids", stream=True, return_token_ids=True),
        _completion("stream of json", stream=True, structured_outputs={"json": COLOUR}, max_tokens=20),
        _completion("cache_salt and key", cache_salt="s", prompt_cache_key="k"),
        _completion("skip_reading_prefix_cache", skip_reading_prefix_cache=True),
        _with(_completion("request id in a header"), X_Request_Id="mine"),
        _with(_completion("load in a header"), endpoint_load_metrics_format="TEXT"),
        _with(_completion("load as JSON"), endpoint_load_metrics_format="JSON"),
        _completion("too long", prompt="word " * 3000),
        *_bad(_completion, BAD_COMPLETION_FIELDS),
    ]


def _chats() -> list[Case]:
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "Again", "name": "Ann"},
    ]
    called = [
        *SKY,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    return [
        _chat("plain"),
        _chat("history", messages=history),
        _chat("developer", messages=[{"role": "developer", "content": "Be brief."}, *SKY]),
        _chat("tool results", messages=called, tools=[WEATHER]),
        _chat("n", n=2, seed=4, temperature=1),
        _chat("logprobs", logprobs=True, top_logprobs=2),
        _chat("stop", stop=" a", max_tokens=20),
        _chat("max_completion_tokens", max_completion_tokens=3),
        _chat(
            "continue",
            messages=[*SKY, {"role": "assistant", "content": "Because"}],
            continue_final_message=True,
            add_generation_prompt=False,
        ),
        _chat(
            "echo",
            messages=[*SKY, {"role": "assistant", "content": "Because"}],
            continue_final_message=True,
            add_generation_prompt=False,
            echo=True,
        ),
        _chat("prompt text", return_prompt_text=True, return_token_ids=True),
        _chat("prompt_logprobs", prompt_logprobs=1),
        _chat(
            "json_schema",
            response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR, "strict": True}},
            max_tokens=20,
        ),
        _chat("json_object", response_format={"type": "json_object"}),
        _chat("choice", structured_outputs={"choice": ["yes", "no"]}),
        _chat("required tool", tools=[WEATHER], tool_choice="required", max_tokens=30),
        _chat("named tool", tools=[WEATHER], tool_choice=NAMED, max_tokens=30),
        _chat("strict tool", tools=[STRICT_WEATHER], max_tokens=12),
        _chat("tools and none", tools=[WEATHER], tool_choice="none"),
        _chat(
            "allowed tools",
            tools=[WEATHER],
            tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
            max_tokens=30,
        ),
        _chat("beams", use_beam_search=True, n=2),
        _chat("stream", stream=True),
        _chat("stream usage", stream=True, stream_options={"include_usage": True}),
        _chat("stream n", stream=True, n=2, seed=1, temperature=1),
        _chat("stream logprobs", stream=True, logprobs=True, top_logprobs=1),
        _chat("stream stop", stream=True, stop=" a", max_tokens=20),
        _chat("stream required tool", stream=True, tools=[WEATHER], tool_choice="required", max_tokens=30),
        _chat("stream named tool", stream=True, tools=[WEATHER], tool_choice=NAMED, max_tokens=30),
        _chat(
            "stream echo",
            stream=True,
            messages=[*SKY, {"role": "assistant", "content": "Because"}],
            continue_final_message=True,
            add_generation_prompt=False,
            echo=True,
        ),
        _chat(
            "stream json",
            stream=True,
            response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR}},
            max_tokens=20,
        ),
        _chat("too long", messages=[{"role": "user", "content": "word " * 3000}]),
        _chat("stream that is refused", stream=True, temperature=-1),
        *_bad(_chat, BAD_CHAT_FIELDS),
        Case(
            "batch of chats", "POST", f"{CHAT}/batch", {"messages": [SKY, history], "max_tokens": 4, "temperature": 0}
        ),
        Case("batch of chats, streamed", "POST", f"{CHAT}/batch", {"messages": [SKY], "stream": True}),
        Case("batch of no chats", "POST", f"{CHAT}/batch", {"messages": []}),
        Case("batch of chats, one bad", "POST", f"{CHAT}/batch", {"messages": [SKY, []], "max_tokens": 4}),
    ]


def _other_apis() -> list[Case]:
    tool = {"name": "get_weather", "description": "of a city", "input_schema": COLOUR}
    model = "SmolLM2-135M-Instruct"
    return [
        _message("plain"),
        _message(
            "system and blocks",
            system="Be brief.",
            messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        ),
        _message("stop", stop_sequences=[" a"], max_tokens=20),
        _message("stream", stream=True),
        _message("any tool", tools=[tool], tool_choice={"type": "any"}, max_tokens=40),
        _message("stream any tool", stream=True, tools=[tool], tool_choice={"type": "any"}, max_tokens=40),
        _message("output_config", output_config={"format": {"type": "json_schema", "schema": COLOUR}}, max_tokens=20),
        _message(
            "thinking", thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2048, stop_sequences=["a"]
        ),
        _message("no max_tokens", max_tokens=None),
        _message("other model", model="claude"),
        _message("image", messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        _message("bad block", messages=[{"role": "user", "content": [{"type": "what"}]}]),
        _message("no messages", messages=[]),
        _message("unknown field", mcp_servers=[]),
        _message("server tool", tools=[{"type": "web_search_20250305", "name": "web_search"}]),
        _message("bad temperature", temperature=-3),
        _message("too long", messages=[{"role": "user", "content": "word " * 3000}]),
        _message("stream that is refused", stream=True, max_tokens=-1),
        _posts(f"{MESSAGES}/count_tokens", model=model, messages=SKY)("plain"),
        _posts(f"{MESSAGES}/count_tokens", model=model, messages=SKY)("tools", tools=[tool]),
        _posts(f"{MESSAGES}/count_tokens", model=model, messages=SKY)("bad", messages=5),
        Case("messages in batches", "POST", f"{MESSAGES}/batches", {}),
        _get("/v1/models", "of Anthropic", headers=ANTHROPIC),
        _get(f"/v1/models/{model}", "of Anthropic", headers=ANTHROPIC),
        _get("/v1/models/none", "of Anthropic", headers=ANTHROPIC),
        _response("plain", keep={"first": "id"}),
        _response("follows", previous_response_id="<<first>>", input="Shorter."),
        _response(
            "items",
            input=[{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            instructions="Be brief.",
        ),
        _response("not stored", store=False),
        _response("metadata", metadata={"a": "b"}, user="me"),
        _response("logprobs", include=["message.output_text.logprobs"], top_logprobs=2),
        _response(
            "schema", text={"format": {"type": "json_schema", "name": "c", "schema": COLOUR}}, max_output_tokens=20
        ),
        _response(
            "function",
            tools=[{"type": "function", **WEATHER["function"]}],
            tool_choice="required",
            max_output_tokens=40,
        ),
        _response("stream", stream=True),
        _response(
            "stream function",
            stream=True,
            tools=[{"type": "function", **WEATHER["function"]}],
            tool_choice="required",
            max_output_tokens=40,
        ),
        _response("background", background=True, keep={"background": "id"}),
        _get(
            f"{RESPONSES}/<<background>>",
            "in the background",
            until=lambda body: body["status"] not in ("queued", "in_progress"),
        ),
        _get(f"{RESPONSES}/<<first>>"),
        _get(f"{RESPONSES}/<<first>>/input_items"),
        _get(f"{RESPONSES}/<<first>>/input_items?limit=0", "bad limit"),
        _get(f"{RESPONSES}/resp_none", "unknown"),
        _get(f"{RESPONSES}/resp_none/input_items", "unknown"),
        Case("cancel a response that is complete", "POST", f"{RESPONSES}/<<first>>/cancel"),
        Case("delete a response", "DELETE", f"{RESPONSES}/<<first>>"),
        Case("delete a response again", "DELETE", f"{RESPONSES}/<<first>>"),
        _response("follows what is gone", previous_response_id="<<first>>"),
        _response("follows what never was", previous_response_id="resp_none"),
        _response("no input", input=None),
        _response("bad item", input=[{"type": "what"}]),
        _response("image", input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        _response("conversation", conversation="x"),
        _response("web search", tools=[{"type": "web_search"}]),
        _response("mcp", tools=[{"type": "mcp", "server_label": "none"}]),
        _response("bad include", include=["what"]),
        _response("bad truncation", truncation="some"),
        _response("truncation", input="word " * 3000, truncation="auto"),
        _response("too long", input="word " * 3000),
        _response("background stream not stored", background=True, store=False),
        _posts(f"{RESPONSES}/input_tokens", input="Why is the sky blue?")("plain"),
        _posts(f"{RESPONSES}/input_tokens", input="Why is the sky blue?")("bad", input=5),
        _ollama_chat("stream"),
        _ollama_chat("whole", stream=False),
        _ollama_chat("format", stream=False, format=COLOUR, options={"num_predict": 20, "temperature": 0}),
        _ollama_chat("tools", stream=False, tools=[WEATHER]),
        _ollama_chat("logprobs", stream=False, logprobs=True, top_logprobs=1),
        _ollama_chat("latest", stream=False, model=f"{model}:latest"),
        _ollama_chat("no messages", messages=[]),
        _ollama_chat("unknown model", model="llama3"),
        _ollama_chat("bad option", options={"what": 1}),
        _ollama_chat("too long a context", options={"num_ctx": 10**7}),
        _ollama_chat(
            "options of loading",
            stream=False,
            options={"num_gpu": 1, "num_thread": 4, "num_predict": 2, "temperature": 0},
            keep_alive="5m",
        ),
        _generate("stream"),
        _generate("whole", stream=False),
        _generate("raw", stream=False, raw=True),
        _generate("system", stream=False, system="Be brief."),
        _generate("format json", stream=False, format="json"),
        _generate("suffix", suffix="x"),
        _generate("template", template="x"),
        _generate("images", images=["x"]),
        _generate("load", prompt="", stream=False),
        _posts("/api/show")("plain", model=model),
        _posts("/api/show")("unknown", model="llama3"),
        _posts("/api/show")("nothing"),
        *(_get(f"/api/{name}") for name in ("tags", "ps", "version", "nothing")),
        Case("pull", "POST", "/api/pull", {"model": "x"}),
        Case("embed of Ollama", "POST", "/api/embed", {"model": "x", "input": "x"}),
        _get("/"),
        Case("HEAD of /", "HEAD", "/"),
    ]


def _tokens_and_state() -> list[Case]:
    model = "SmolLM2-135M-Instruct"
    return [
        _tokenize("text", prompt="The sky is blue"),
        _tokenize("strings", prompt="The sky", return_token_strs=True),
        _tokenize("no special tokens", prompt="The sky", add_special_tokens=False),
        _tokenize("messages", messages=SKY),
        _tokenize("tools", messages=SKY, tools=[WEATHER]),
        _tokenize("both", prompt="x", messages=SKY),
        _tokenize("nothing"),
        _tokenize("unknown model", prompt="x", model="none"),
        _tokenize("unknown field", prompt="x", tokens=[1]),
        _detokenize("tokens", tokens=[504, 6376, 314]),
        _detokenize("out of range", tokens=[10**9]),
        _detokenize("negative", tokens=[-1]),
        _detokenize("none"),
        _get("/tokenizer_info"),
        _get("/v1/models"),
        _get(f"/v1/models/{model}"),
        _get("/v1/models/none"),
        *(_get(path) for path in ("/version", "/load", "/health", "/health/live", "/health/ready", "/health/progress")),
        _get("/ping"),
        Case("POST /ping", "POST", "/ping"),
        _get("/docs"),
        _get("/openapi.json"),
        *(
            Case(f"invocations {sorted(body)}", "POST", "/invocations", {**body, "max_tokens": 3, "temperature": 0})
            for body in ({"prompt": "The sky is"}, {"messages": SKY}, {}, {"prompt": "x", "messages": SKY})
        ),
        _posts(EMBEDDINGS)("of a model that generates", input="x"),
    ]


def _multipart(purpose: str, text: str, *, name: str = "file") -> dict[str, Any]:
    edge = "edge"
    body = (
        f'--{edge}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
        f'--{edge}\r\nContent-Disposition: form-data; name="{name}"; filename="lines.jsonl"\r\n'
        f"Content-Type: application/jsonl\r\n\r\n{text}\r\n--{edge}--\r\n"
    )
    return {"body": body.encode(), "headers": {"Content-Type": f"multipart/form-data; boundary={edge}"}}


def _batch_lines(*bodies: dict[str, Any], url: str = COMPLETIONS) -> str:
    lines = [{"custom_id": str(index), "method": "POST", "url": url, "body": body} for index, body in enumerate(bodies)]
    return "".join(json.dumps(line) + "\n" for line in lines)


def _files() -> list[Case]:
    good = {"prompt": "The sky is", "max_tokens": 4, "temperature": 0}
    lines = _batch_lines(good, {**good, "temperature": -1})
    batches = _posts("/v1/batches", completion_window="24h", endpoint=COMPLETIONS)
    ended = ("completed", "failed", "cancelled", "expired")
    return [
        Case("upload", "POST", "/v1/files", **_multipart("batch", lines), keep={"file": "id"}),
        Case(
            "upload of nothing readable", "POST", "/v1/files", **_multipart("batch", "not JSON\n"), keep={"bad": "id"}
        ),
        Case("upload, bad purpose", "POST", "/v1/files", **_multipart("fine-tune", lines)),
        Case("upload without a file", "POST", "/v1/files", **_multipart("batch", lines, name="other")),
        Case("upload as JSON", "POST", "/v1/files", {"purpose": "batch"}),
        _get("/v1/files"),
        _get("/v1/files?purpose=batch&limit=1&order=asc"),
        _get("/v1/files?limit=0", "bad"),
        _get("/v1/files/<<file>>"),
        _get("/v1/files/<<file>>/content"),
        _get("/v1/files/file-none"),
        _get("/v1/files/file-none/content"),
        batches("plain", input_file_id="<<file>>", metadata={"a": "b"}, keep={"batch": "id"}),
        _get(
            "/v1/batches/<<batch>>",
            "at its end",
            until=lambda body: body["status"] in ended,
            keep={"output": "output_file_id", "errors": "error_file_id"},
        ),
        _get("/v1/files/<<output>>/content", "output"),
        _get("/v1/files/<<errors>>/content", "errors"),
        batches("unreadable", input_file_id="<<bad>>", keep={"failed": "id"}),
        _get("/v1/batches/<<failed>>", "failed", until=lambda body: body["status"] in ended),
        batches("unknown file", input_file_id="file-none"),
        batches("unknown endpoint", input_file_id="<<file>>", endpoint="/v1/images"),
        batches("bad window", input_file_id="<<file>>", completion_window="1h"),
        _get("/v1/batches"),
        _get("/v1/batches?limit=1"),
        _get("/v1/batches/batch_none"),
        Case("cancel a batch that is complete", "POST", "/v1/batches/<<batch>>/cancel"),
        Case("cancel an unknown batch", "POST", "/v1/batches/batch_none/cancel"),
        Case("delete a file", "DELETE", "/v1/files/<<file>>"),
        Case("delete a file again", "DELETE", "/v1/files/<<file>>"),
    ]


def _transport() -> list[Case]:
    """Methods, paths, CORS, and bodies that cannot be read."""
    host = b"Host: 127.0.0.1\r\n"
    body = b'{"prompt": "x", "max_tokens": 1}'
    page = {"Origin": "https://page.example"}
    asked = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    return [
        *(
            Case(f"{method} of completions", method, COMPLETIONS)
            for method in ("GET", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE")
        ),
        *(
            Case(f"POST {path}", "POST", path, {})
            for path in ("/v1/models", "/health", "/metrics", "/version", "/docs")
        ),
        *(Case(f"HEAD {path}", "HEAD", path) for path in ("/health", "/v1/models", "/metrics", "/nothing")),
        *(
            Case(f"PUT {path}", "PUT", path, {})
            for path in (CHAT, MESSAGES, RESPONSES, "/api/chat", "/v1/files", "/tokenize")
        ),
        *(
            Case(f"unknown {path}", "POST", path, {})
            for path in (
                "/v1/completion",
                "/completions",
                "/v1/v1/chat/completions",
                "/v1/audio/speech",
                "/v1/fine_tuning/jobs",
                "/v1/load_lora_adapter",
                "/generate",
                "/v1beta/models",
                "/v1/assistants",
                "/v1/messages/what",
                "/api/create",
                "/inference/v1/generate",
                "/v1/chat/completions/render",
            )
        ),
        _get("/v1/models/", "with a slash"),
        _get("//v1/models"),
        _get("/v1/models?what=1", "with a query"),
        _get("/v1/responses"),
        Case("preflight", "OPTIONS", CHAT, headers=asked),
        Case("preflight from elsewhere", "OPTIONS", CHAT, headers={**asked, "Origin": "https://evil.example"}),
        Case("CORS", "GET", "/v1/models", headers=page),
        Case("CORS from elsewhere", "GET", "/v1/models", headers={"Origin": "https://evil.example"}),
        Case("CORS of an error", "POST", COMPLETIONS, {"prompt": 5}, headers=page),
        Case("CORS of Ollama", "POST", "/api/chat", {}, headers=page),
        Case("another host", "GET", "/v1/models", headers={"Host": "evil.example"}),
        Case("not JSON", "POST", COMPLETIONS, b"{"),
        Case("empty body", "POST", COMPLETIONS, b""),
        Case("JSON that is no object", "POST", COMPLETIONS, b"[1]"),
        Case("not UTF-8", "POST", COMPLETIONS, b'{"prompt": "\xff"}'),
        Case("lone surrogate", "POST", COMPLETIONS, rb'{"prompt": "\ud800", "max_tokens": 1, "temperature": 0}'),
        Case("a number out of range", "POST", COMPLETIONS, b'{"prompt": "x", "temperature": 1e999}'),
        Case("deep JSON", "POST", COMPLETIONS, b'{"prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}"),
        Case("content type", "POST", COMPLETIONS, body, {"Content-Type": "text/plain"}),
        Case(
            "content type with a charset",
            "POST",
            COMPLETIONS,
            body,
            {"Content-Type": "application/json; charset=utf-8"},
        ),
        Case(
            "Ollama without a content type", "POST", "/api/show", b'{"model": "none"}', {"Content-Type": "text/plain"}
        ),
        Case("too large", "POST", COMPLETIONS, b'{"prompt": "' + b"x" * (9 << 20) + b'"}'),
        Case(
            "no length",
            "POST",
            COMPLETIONS,
            raw=b"POST /v1/completions HTTP/1.1\r\n"
            + host
            + b"Connection: close\r\nContent-Type: application/json\r\n\r\n",
        ),
        Case(
            "chunked",
            "POST",
            COMPLETIONS,
            raw=b"POST /v1/completions HTTP/1.1\r\n"
            + host
            + b"Connection: close\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            + f"{len(body):x}\r\n".encode()
            + body
            + b"\r\n0\r\n\r\n",
        ),
        Case(
            "bad chunk",
            "POST",
            COMPLETIONS,
            raw=b"POST /v1/completions HTTP/1.1\r\n"
            + host
            + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        ),
        Case(
            "two lengths",
            "POST",
            COMPLETIONS,
            raw=b"POST /v1/completions HTTP/1.1\r\n" + host + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        ),
        Case(
            "length and chunks",
            "POST",
            COMPLETIONS,
            raw=b"POST /v1/completions HTTP/1.1\r\n"
            + host
            + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        ),
        Case("no host", "GET", "/v1/models", raw=b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n"),
        Case("HTTP/1.0", "GET", "/v1/models", raw=b"GET /v1/models HTTP/1.0\r\n" + host + b"\r\n"),
        Case("no HTTP", "GET", "/", raw=b"hello\r\n\r\n"),
        Case(
            "large header",
            "GET",
            "/",
            raw=b"GET /v1/models HTTP/1.1\r\n" + host + b"X-Long: " + b"a" * 200_000 + b"\r\n\r\n",
        ),
    ]


def _development() -> list[Case]:
    def post(path: str, name: str = "", body: Any = None) -> Case:
        return Case(f"POST {path} {name}".strip(), "POST", path, body)

    return [
        _get("/is_paused"),
        post("/pause?mode=keep&clear_cache=false"),
        _get("/is_paused", "paused"),
        _get("/health/progress", "paused"),
        post("/resume"),
        post("/pause?mode=what"),
        post("/pause?what=1"),
        post("/reset_prefix_cache"),
        post("/reset_prefix_cache?reset_running_requests=true"),
        post("/reset_mm_cache"),
        post("/sleep?level=3"),
        post("/sleep?level=1"),
        _get("/is_sleeping", "asleep"),
        _completion("asleep"),
        _chat("asleep", stream=True),
        _message("asleep"),
        _get("/health/ready", "asleep"),
        post("/wake_up?tags=weights"),
        post("/wake_up"),
        post("/wake_up?tags=what"),
        _get("/is_sleeping", "awake"),
        _completion("awake"),
        post("/reload_weights"),
        post("/reload_weights?weights_path=/nonexistent"),
        post("/collective_rpc", "unknown", {"method": "nothing"}),
        post("/collective_rpc", "bad", {"args": 5}),
        post("/start_profile"),
        post("/stop_profile"),
        _get("/get_world_size"),
        _get("/server_info"),
        post("/is_scaling_elastic_ep"),
        post("/scale_elastic_ep", "bad", {"new_data_parallel_size": 0}),
        post("/scale_elastic_ep", "no body"),
        post("/scale_elastic_ep", "as it is", {"new_data_parallel_size": 1}),
    ]


def _said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
OTHER_CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
SPOKEN: dict[str, str] = {
    "text": "Sure.",
    "reasoning": "<think>hm</think>Sure.",
    "only reasoning": "<think>hm</think>",
    "open reasoning": "<think>hm and",
    "call": CALL,
    "text and call": f"Sure.\n{CALL}",
    "two calls": f"{CALL}\n{OTHER_CALL}",
    "reasoning and call": f"<think>hm</think>Sure.\n{CALL}",
    "call in reasoning": f"<think>{CALL}</think>no",
    "bad call": '<tool_call>{"name": 5}</tool_call>',
    "unknown tool": '<tool_call>{"name": "what", "arguments": {}}</tool_call>',
    "open call": '<tool_call>{"name": "get_weather", "arguments": {"ci',
    "not ASCII": "Zürich 🦀 ok",
}


def _echoed() -> list[Case]:
    """Each kind of answer on each API, whole and streamed."""
    chat = _posts(CHAT, max_tokens=120, temperature=0, tools=[WEATHER])
    message = _posts(
        MESSAGES,
        model="null",
        max_tokens=120,
        temperature=0,
        tools=[{"name": "get_weather", "input_schema": {"type": "object"}}],
    )
    response = _posts(
        RESPONSES,
        max_output_tokens=120,
        temperature=0,
        tools=[{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}],
    )
    ollama = _posts("/api/chat", model="null", options={"num_predict": 120, "temperature": 0}, tools=[WEATHER])
    cases = []
    for kind, text in SPOKEN.items():
        for stream in (False, True):
            name = f"{kind}{', streamed' if stream else ''}"
            cases += [
                chat(name, messages=_said(text), stream=stream),
                message(name, messages=_said(text), stream=stream),
                response(name, input=_said(text), stream=stream),
                ollama(name, messages=_said(text), stream=stream),
            ]
    said = _said(SPOKEN["reasoning and call"])
    return [
        *cases,
        chat("without reasoning", messages=said, include_reasoning=False),
        chat("one call", messages=_said(SPOKEN["two calls"]), parallel_tool_calls=False),
        chat("one call, streamed", messages=_said(SPOKEN["two calls"]), parallel_tool_calls=False, stream=True),
        chat("no tools", messages=said, tools=None),
        chat("no tools, streamed", messages=said, tools=None, stream=True),
        chat("logprobs", messages=said, logprobs=True, top_logprobs=1),
        chat("cut", messages=said, max_tokens=40),
        chat("thinking_token_budget", messages=_said("<think>" + "hm " * 20), thinking_token_budget=5),
        message(
            "thinking, hidden", messages=said, thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
        ),
        response("encrypted reasoning", input=said, include=["reasoning.encrypted_content"]),
        response("custom tool", input=said, tools=[{"type": "custom", "name": "get_weather"}]),
        ollama("think off", messages=said, think=False),
    ]


def _keyed() -> list[Case]:
    keys = {
        "none": {},
        "wrong": {"Authorization": "Bearer what"},
        "malformed": {"Authorization": "k"},
        "client": {"Authorization": "Bearer k"},
        "admin": {"Authorization": "Bearer boss"},
        "x-api-key": {"x-api-key": "k"},
    }
    client = keys["client"]
    cases = []
    body = {"prompt": "Hi", "max_tokens": 3, "temperature": 0}
    for name, headers in keys.items():
        cases += [
            Case(f"completions, key {name}", "POST", COMPLETIONS, body, headers),
            Case(
                f"messages, key {name}",
                "POST",
                MESSAGES,
                {"model": "null", "messages": _said("x"), "max_tokens": 2, "temperature": 0},
                headers,
            ),
            *(
                _get(path, f"key {name}", headers=headers)
                for path in (
                    "/v1/models",
                    "/health",
                    "/metrics",
                    "/version",
                    "/openapi.json",
                    "/v1/files",
                    "/api/tags",
                    "/nothing",
                )
            ),
            Case(f"scaling, key {name}", "POST", "/scale_elastic_ep", {"new_data_parallel_size": 1}, headers),
        ]
    strict = [
        _completion("plain"),
        _completion("numbers as text", logprobs="1"),
        _completion("unknown field", unknown_field=1),
        _chat("unknown field", unknown_field=1),
        _chat("store", store=True),
        _chat("cache_control", messages=[{"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}}]),
        _chat("template of a request", chat_template="{{ messages[0].content }}!"),
        _chat("usage by itself", stream=True),
        _completion("metrics of one request", stream=True, stream_options={"include_usage": True}),
        _response("web search", tools=[{"type": "web_search"}]),
        _response("stored by a key", keep={"mine": "id"}),
    ]
    cases += [_with(each, **client) for each in strict]
    other = {"Authorization": "Bearer k2"}
    return [
        *cases,
        _get(f"{RESPONSES}/<<mine>>", "with another key", headers=other),
        _get(f"{RESPONSES}/<<mine>>", "with its key", headers=client),
        Case("scale up", "POST", "/scale_elastic_ep", {"new_data_parallel_size": 2}, keys["admin"]),
        Case(
            "still scaling",
            "POST",
            "/is_scaling_elastic_ep",
            headers=keys["admin"],
            until=lambda body: body is False or (isinstance(body, dict) and not body.get("is_scaling_elastic_ep")),
        ),
        Case("completions of two engines", "POST", COMPLETIONS, {**body, "data_parallel_rank": 1}, client),
        Case("scale down", "POST", "/scale_elastic_ep", {"new_data_parallel_size": 1}, keys["admin"]),
        Case("is_paused without development routes", "GET", "/is_paused", headers=keys["admin"]),
    ]


def _pooled() -> list[Case]:
    embed = _posts(EMBEDDINGS, input="The sky is blue")
    return [
        embed("text"),
        embed("texts", input=["The sky is blue", "Grass is green"]),
        embed("token ids", input=[504, 6376]),
        embed("lists of token ids", input=[[504, 6376], [314]]),
        embed("base64", encoding_format="base64"),
        embed("dimensions", dimensions=8),
        embed("truncated", truncate_prompt_tokens=2),
        embed("bad format", encoding_format="what"),
        embed("nothing", input=None),
        embed("empty", input=[]),
        embed("unknown field", what=1),
        embed("unknown model", model="none"),
        embed("too long", input="word " * 9000),
        _completion("of a model that embeds"),
        _chat("of a model that embeds"),
        _get("/v1/models"),
        _tokenize("text", prompt="The sky is blue"),
        *_other_vectors(),
        *_compared(),
    ]


def _other_vectors() -> list[Case]:
    """Vectors by the other routes, and classes, which this model has none of."""
    texts, long = ["The sky is blue", "Grass is green"], "word " * 9000
    embed, pool, cohere = _posts(EMBEDDINGS), _posts("/pooling"), _posts("/v2/embed", model=MODEL)
    return [
        embed("not in the vocabulary", input=[[504], [10**6]]),
        embed("negative ids", input=[-1]),
        embed("truncated to nothing", input="The sky is blue", truncate_prompt_tokens=0),
        embed("one of them too long", input=["The sky", long]),
        embed("one too long, cut", input=[long], truncate_prompt_tokens=-1),
        embed("too many dimensions", input="The sky is blue", dimensions=10**6),
        embed("a name of no prompt", input="The sky is blue", prompt_name="none"),
        pool("text", input="The sky is blue"),
        pool("tokens", input="The sky is blue", task="token_embed"),
        pool("a task of no classes", input="The sky is blue", task="classify"),
        pool("no task", input="The sky is blue", task="what"),
        pool("process rewards", input="The sky is blue", step_tag_id=3),
        *(_posts(path)("texts", input=texts) for path in ("/classify", "/v1/classify")),
        cohere("texts", texts=texts, input_type="search_query", embedding_types=["float", "int8"]),
        cohere("refused as too long", texts=[long], input_type="search_document", truncate="NONE"),
        cohere("no type", texts=texts, input_type="what"),
        *(
            _posts(path)("texts", inputs=texts)
            for path in ("/embed", "/embed_all", "/embed_sparse", "/embeddings", "/")
        ),
        _posts("/embed")("too long", inputs=[*texts, long], truncate=False),
        _posts("/embed")("empty", inputs=[]),
        _posts("/predict")("text", inputs="The sky is blue"),
        _posts("/api/embeddings", model=MODEL)("text", prompt="The sky is blue"),
        _posts("/api/embed", model=MODEL)("too long", input=[long], truncate=False),
        _get("/info"),
    ]


def _compared() -> list[Case]:
    """Texts compared by their vectors."""
    texts, long = ["The sky is blue", "Grass is green"], "word " * 9000
    score, rerank = _posts("/score"), _posts("/rerank", query="What is blue?")
    return [
        score("one with several", queries="What is blue?", documents=texts),
        score("pairs", text_1=texts, text_2=list(reversed(texts))),
        score("unlike numbers", text_1=texts, text_2=["a", "b", "c"]),
        score("nothing", queries="What is blue?", documents=[]),
        score("too long", queries="What is blue?", documents=[*texts, long]),
        score("too long, cut", queries="What is blue?", documents=[*texts, long], truncate_prompt_tokens=-1),
        score("dimensions", queries="What is blue?", documents=texts, dimensions=8),
        rerank("documents", documents=texts),
        rerank("the best", documents=texts, top_n=1, return_documents=False),
        rerank("too long", documents=[long]),
        rerank("as text-embeddings-inference has it", texts=texts, return_text=True),
        *(
            _posts(path, query="What is blue?")("documents", documents=texts, model=MODEL)
            for path in ("/v1/rerank", "/v2/rerank", "/v1/score")
        ),
        _posts("/similarity")("sentences", inputs={"source_sentence": texts[0], "sentences": texts}),
    ]


MODEL = "SmolLM2-135M-Instruct"
DEMO = ("{model}", "--served-model-name", MODEL, "--max-model-len", "2048", "--kv-cache-memory-bytes", str(256 << 20))
NULL = ("null", "--hf-overrides", '{{"vocab_size": 400}}', "--max-model-len", "1024")
ECHO_TEMPLATE = '{{# <tool_call> "arguments" #}}{{{{ messages[-1].content }}}}'
SERVERS: tuple[ServerCase, ...] = (
    ServerCase(
        "model",
        (
            *DEMO,
            "--server-dev-mode",
            "--enable-sleep-mode",
            "--enable-tokenizer-info-endpoint",
            "--file-store",
            "{folder}/files",
            "--allowed-origins",
            "https://page.example",
            "--tool-call-parser",
            "hermes",
        ),
        [
            *_text_completions(),
            *_chats(),
            *_other_apis(),
            *_tokens_and_state(),
            *_files(),
            *_transport(),
            *_development(),
        ],
    ),
    ServerCase(
        "echo",
        (
            *NULL,
            "--distributed-executor-backend",
            "null_with_tokenizer:EchoExecutor",
            "--chat-template",
            ECHO_TEMPLATE,
            "--reasoning-parser",
            "qwen3",
            "--tool-call-parser",
            "hermes",
        ),
        _echoed(),
    ),
    ServerCase(
        "keyed",
        (
            *NULL,
            "--distributed-executor-backend",
            "null_with_tokenizer:TokenizingNullExecutor",
            "--chat-template",
            "{{{{ messages[-1].content }}}}",
            "--api-key",
            "k",
            "--api-key",
            "k2",
            "--admin-api-key",
            "boss",
            "--guard-metrics",
            "--strict-requests",
            "--enable-request-id-headers",
            "--enable-per-request-metrics",
            "--enable-force-include-usage",
            "--trust-request-chat-template",
            "--return-tokens-as-token-ids",
            "--response-role",
            "bot",
            "--metrics-prefix",
            "other",
        ),
        _keyed(),
        {"Authorization": "Bearer boss"},
    ),
    ServerCase("pooling", (*DEMO, "--runner", "pooling"), _pooled()),
)
