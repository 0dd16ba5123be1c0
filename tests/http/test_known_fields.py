"""Every field that is known anywhere, on every route that generates text: it has an effect or is refused by name."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_server import events_of
from server_here import MODEL, ServerHere, serving_here
from thinned import every, thinned

from headrace.frontend.http.apis import found, known_fields
from headrace.frontend.http.apis.anthropic.messages import MessagesRequest
from headrace.frontend.http.apis.ollama.requests import OllamaChatRequest, OllamaGenerateRequest
from headrace.frontend.http.apis.openai.requests import (
    ChatBatchRequest,
    ChatCompletionRequest,
    CompletionRequest,
    StreamOptions,
)
from headrace.frontend.http.apis.responses.requests import ResponsesRequest
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.decoding.decoder import RequestDecoder
from headrace.frontend.http.server.decoding.foreign_fields import ANY, Neutral
from headrace.frontend.http.server.errors import ApiError
from headrace.frontend.request.parameters.structured_outputs import from_response_format

OTHERS = known_fields()
KINDS: dict[str, Any] = {body.kind.__name__: body.kind for api in found() for body in api.bodies}
"""The kinds of request that the APIs declare."""
HI = [{"role": "user", "content": "hello there"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CLAUDES_TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
RESPONSES_TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ROUTES: dict[Any, tuple[str, dict[str, Any]]] = {
    CompletionRequest: ("/v1/completions", {"prompt": "hello there", "max_tokens": 2}),
    ChatCompletionRequest: ("/v1/chat/completions", {"messages": HI, "max_tokens": 2}),
    ChatBatchRequest: ("/v1/chat/completions/batch", {"messages": [HI], "max_tokens": 2}),
    ResponsesRequest: ("/v1/responses", {"input": "hello there", "max_output_tokens": 2}),
    MessagesRequest: ("/v1/messages", {"messages": HI, "max_tokens": 2}),
    OllamaChatRequest: ("/api/chat", {"model": MODEL, "messages": HI, "stream": False, "options": {"num_predict": 2}}),
    OllamaGenerateRequest: (
        "/api/generate",
        {"model": MODEL, "prompt": "hello there", "stream": False, "options": {"num_predict": 2}},
    ),
}
CANDIDATES: tuple[Any, ...] = (3, -7, 0.25, True, "word", ["word"], [5], {"a": 1}, [{"a": 1}])
"""Values of every JSON type, none of which asks for nothing."""
OF_SERVERS = (
    *("n_predict", "repeat_penalty", "repeat_last_n", "grammar", "json_schema", "samplers", "cache_prompt"),
    *("id_slot", "n_probs", "timings_per_token", "reasoning_format", "mirostat_mode", "n_keep"),
    *("thinking_budget_tokens", "return_tokens", "dynatemp_range", "max_new_tokens", "do_sample", "adapter_id"),
    *("return_full_text", "decoder_input_details", "watermark", "top_n_tokens", "truncate", "details", "regex"),
    *("ebnf", "lora_path", "min_new_tokens", "stop_regex", "no_stop_trim", "custom_logit_processor"),
    *("separate_reasoning", "rid", "extra_key", "images", "options", "keep_alive", "format", "think", "raw"),
    *("template", "context", "system", "num_predict", "num_ctx", "suffix", "models", "provider", "route"),
    *("transforms", "plugins", "reasoning", "usage", "top_a", "session_id", "api_base", "num_retries"),
    *("fallbacks", "custom_llm_provider", "mock_response", "extra_body", "lora_name", "max_tokens_to_sample"),
    *("stop_sequences", "thinking", "anthropic_version", "mcp_servers", "container", "contents"),
    *("generationConfig", "systemInstruction", "maxOutputTokens", "stopSequences", "responseSchema"),
    *("responseMimeType", "topK", "random_seed", "safe_prompt", "enable_search", "thinking_budget"),
    *("return_prompt_text", "media_io_kwargs", "mm_payload", "mm_processor_kwargs", "ec_transfer_params"),
    *("kv_transfer_params", "return_mm_kwargs", "return_token_offsets", "previous_input_messages"),
    *("enable_response_messages", "include_reasoning", "prompt_embeds", "watermarking", "guided_json"),
    *("guided_regex", "structured_outputs", "lora", "lora_adapter", "banned_tokens", "banned_strings"),
    *("custom_token_bans", "bad_words_ids", "suppress_tokens", "guidance_scale", "negative_prompt", "num_beams"),
    *("no_repeat_ngram_size", "force_words_ids", "forced_eos_token_id", "prompt_token_ids", "token_ids", "video"),
    *("grammar_string", "tfs", "tfs_z", "epsilon_cutoff", "eta_cutoff", "smoothing_factor", "penalty_alpha", "skew"),
    *("encoder_repetition_penalty", "dynamic_temperature", "dynatemp_min", "dynatemp_max", "min_temp", "max_temp"),
    *("adaptive_target", "bypass_eos", "add_bos_token", "auto_max_new_tokens", "context_overflow_policy", "memory"),
    *("max_length", "min_length", "sampler_seed", "tokens_to_generate", "use_default_badwordsids"),
    *("cfg_scale", "ban_eos_token", "character", "instruction_template", "instruction_template_str", "text_format"),
    # of TabbyAPI and KoboldCpp
    *(
        "regex_pattern",
        "stop_sequence",
        "allowed_tokens",
        "dry_range",
        "token_healing",
        "generate_window",
        "singleline",
    ),
    *("repetition_range", "speculative_ngram", "temp_exponent", "render_special", "grammar_retain_state", "genkey"),
    # of text-generation-webui, transformers and TensorRT-LLM
    *("stopping_strings", "stop_strings", "chat_template_str", "continue_", "user_bio", "greeting", "eos_token_id"),
    *("max_time", "exponential_decay_length_penalty", "sequence_bias", "diversity_penalty", "stop_words", "top_p_min"),
    *("top_p_decay", "guided_decoding_params", "disaggregated_params", "return_context_logits", "token_ban_ranges"),
    # of SGLang, llama.cpp and hosted APIs
    *("session_params", "multimodal_data", "system_prompt", "preamble", "chat_history", "schema", "responseJsonSchema"),
    *("prompt_truncate_len", "context_length_exceeded_behavior", "data_sources", "search_domain_filter"),
    *("translation_options", "responseFormat", "toolChoice", "logitBias", "maxCompletionTokens", "chatTemplate"),
)
"""Fields of other servers' APIs and of vLLM's, as their documentation has them."""


def of_clients() -> set[str]:
    """The fields that the clients of OpenAI, Anthropic and Ollama can send."""
    from anthropic.types import message_create_params as claude  # more than a second
    from ollama import _types as ollama_types
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params
    from openai.types.responses import response_create_params

    kinds: list[Any] = [
        completion_create_params.CompletionCreateParamsBase,
        chat_create_params.CompletionCreateParamsBase,
        response_create_params.ResponseCreateParamsBase,
        claude.MessageCreateParamsBase,
    ]
    found = {name for kind in kinds for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    for kind in (ollama_types.ChatRequest, ollama_types.GenerateRequest):
        found |= set(kind.model_fields)
    return found


AS_IT_IS = (("cache_prompt", True), ("do_sample", True))
"""Values that ask for what happens anyway."""


@functools.cache
def all_names() -> list[str]:
    return sorted(
        {
            *OF_SERVERS,
            *of_clients(),
            *(name for kind in KINDS.values() for name in kind.__struct_fields__),
            *(name for others in OTHERS.values() for name in others),
        }
    )


def asks_for_nothing(other: Any, value: Any) -> bool:
    """Whether the route's declaration says that no answer depends on the field at this value."""
    return isinstance(other, Neutral) and (
        other.is_harmless or any(each is ANY or (each == value and type(each) is type(value)) for each in other.values)
    )


def in_snake_case(name: str) -> str:
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in name)


def decoded(decoder: RequestDecoder, body: dict[str, Any], kind: Any) -> tuple[Any, str]:
    """The request, or None and the error's message."""
    try:
        return decoder.decode(json.dumps(body).encode(), kind), ""
    except ApiError as error:
        return None, error.body.message


LEAST: dict[str, dict[str, Any]] = {
    **{kind.__name__: body for kind, (_, body) in ROUTES.items()},
    "TokenizeRequest": {"prompt": "hello there"},
    "DetokenizeRequest": {"tokens": [30]},
    "CountTokensRequest": {"messages": HI},
    **{each: {"input": "hello there"} for each in ("EmbeddingRequest", "PoolingRequest", "ClassifyRequest")},
    "ScoreRequest": {"text_1": "hello", "text_2": "there"},
    "RerankRequest": {"query": "hello", "documents": ["there"]},
    "CohereEmbedRequest": {"texts": ["hello there"]},
    **{f"Tei{each}Request": {"inputs": "hello there"} for each in ("Embed", "EmbedAll", "EmbedSparse", "Predict")},
    "TeiRerankRequest": {"query": "hello", "texts": ["there"]},
    "TeiSimilarityRequest": {"inputs": {"source_sentence": "hello", "sentences": ["there"]}},
    "OllamaEmbedRequest": {"model": MODEL, "input": "hello there"},
    "OllamaEmbeddingsRequest": {"model": MODEL, "prompt": "hello there"},
}
"""The least body of every kind of request that an API declares."""


@pytest.mark.parametrize("kind", every(2, KINDS.values()), ids=KINDS.keys())
def test_a_field_that_a_route_lacks_is_taken_as_one_of_its_own_or_refused_by_name(kind):
    body = LEAST[kind.__name__]
    decoder = RequestDecoder(strict=False, others=OTHERS)
    plain = decoder.decode(json.dumps(body).encode(), kind)
    missing = [name for name in all_names() if name not in kind.__struct_fields__]
    assert len(missing) > 200
    for name in missing:
        refused = changed = 0
        other = OTHERS[kind].get(name, OTHERS[kind].get(in_snake_case(name)))
        for value in CANDIDATES:
            if asks_for_nothing(other, value):
                continue
            taken, error = decoded(decoder, {**body, name: value}, kind)
            assert name in error or taken is not None, (name, value, error)
            assert taken != plain or (name, value) in AS_IT_IS, (name, value, "is taken, and does nothing")
            refused, changed = refused + bool(error), changed + (not error)
        assert refused + changed or asks_for_nothing(other, 3), name


EXAMPLES: dict[str, list[Any]] = {
    "allowed_token_ids": [[30, 31]],
    "background": [True],
    "bad_words": [["x"]],
    "best_of": [2],
    "cache_salt": ["x"],
    "chat_template": ["word"],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "continue_final_message": [True],
    "documents": [[{"text": "x"}]],
    "dry_sequence_breakers": [["x"]],
    "format": ["json"],
    "guided_choice": [["a"]],
    "guided_decoding_backend": ["xgrammar"],
    "guided_whitespace_pattern": [" "],
    "include": [["message.output_text.logprobs"]],
    "length_penalty": [2.0],
    "logit_bias": [{"30": 1.0}],
    "logprob_token_ids": [[30]],
    "max_completion_tokens": [1],
    "max_output_tokens": [1],
    "max_tokens": [1],
    "n": [2],
    "options": [{"temperature": 0.5}],
    "output_config": [{"format": {"type": "json_schema", "schema": SCHEMA}}],
    "previous_response_id": ["resp_none"],
    "prompt_logprobs": [1],
    "reasoning": [{"effort": "low"}],
    "reasoning_effort": ["low"],
    "repetition_detection": [{"max_pattern_size": 3, "min_count": 2}],
    "request_id": ["named"],
    "response_format": [{"type": "json_object"}],
    "seed": [7],
    "spaces_between_special_tokens": [False],
    "skip_special_tokens": [False],
    "stop": ["x"],
    "store": [False],
    "stream_options": [{"include_usage": True}],
    "stop_sequences": [["x"]],
    "stop_token_ids": [[30]],
    "structural_tag": [{"format": {"type": "any_text"}}],
    "structured_outputs": [{"choice": ["a"]}],
    "text": [{"format": {"type": "json_object"}}],
    "think": [False],
    "thinking": [{"type": "disabled"}],
    "thinking_token_budget": [3],
    "tool_choice": ["required", {"type": "any"}],
    "tools": [[TOOL], [CLAUDES_TOOL], [RESPONSES_TOOL]],
    "top_logprobs": [2],
    "truncate_prompt_tokens": [2],
    "truncation_side": ["right"],
    "verbosity": ["low"],
    "vllm_xargs": [{"a": 1}],
}
"""Values of fields that need one of their own to have an effect."""
BESIDES: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "logprob_token_ids": {"logprobs": True},
    "stream_options": {"stream": True},
    "length_penalty": {"use_beam_search": True},
    "truncation_side": {"truncate_prompt_tokens": 2},
    "guided_decoding_backend": {"guided_choice": ["a"]},
    "guided_whitespace_pattern": {"guided_json": {}},
    "tool_choice": {"tools": [TOOL]},
    "dry_base": {"dry_multiplier": 1.0},
    "dry_allowed_length": {"dry_multiplier": 1.0},
    "dry_penalty_last_n": {"dry_multiplier": 1.0},
    "dry_sequence_breakers": {"dry_multiplier": 1.0},
    "return_tokens_as_token_ids": {"logprobs": True},
}
"""Fields without which one has no effect."""
WITHOUT_EFFECT: dict[str, str] = {
    "length_penalty": "all beams of the null model have the same length",
    "repetition_detection": "looked for in the output, where tests of completions try it",
    "model": "the server has one",
    "data_parallel_rank": "the server has one engine",
    "prompt_cache_key": "the server has one engine",
    "thinking_budget": "the null model has no reasoning",
    "include_reasoning": "the null model has no reasoning",
    "enable_thinking": "the test's template does not read it",
    "reasoning_effort": "the test's template does not read it",
    "verbosity": "the test's template does not read it",
    "chat_template_kwargs": "the test's template does not read it",
    "documents": "the test's template does not read them",
    "think": "the test's template does not read it",
    "tools": "the test's template does not read them, and the null model calls none",
    "thinking": "the test's template does not read it",
    "reasoning": "told in the response alone",
    "parallel_tool_calls": "the null model calls no tools",
    "max_tool_calls": "the null model calls no tools",
    "skip_special_tokens": "the null model writes no special tokens",
    "spaces_between_special_tokens": "the test's tokenizer puts no spaces between them",
    "echo": "in a chat, there is no message of the assistant's to begin with",
    "add_special_tokens": "the test's tokenizer adds none",
    "stream_interval": "a whole answer has one piece",
    "truncation": "the conversation fits",
    "keep_alive": "documented as without effect",
    "service_tier": "documented as without effect",
    "include_stop_str_in_output": "no stop string is found",
    "stream_options": "the events of a response end with its usage anyway, and those of a batch are refused",
    "stop": "found in the text, where tests of completions try it",
    "stop_sequences": "found in the text, where tests of messages try it",
    "metadata": "Anthropic's is documented as without effect",
    "add_generation_prompt": "its default is true",
    "include": "some of what can be included is never there",
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerHere]:
    options = ServeOptions(port=0, tool_call_parser="hermes")
    with serving_here(options, {"max_model_len": 512}) as server:
        with server.client() as client:  # starts the process that tries grammars, which ends with the server
            client.post("/v1/completions", json={"prompt": "hello there", "structured_outputs": {"regex": "a"}})
        yield server


def outcome(server: ServerHere, client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[int, Any, str]:
    """The status, everything that the engine was told and the client got except ids and times, and any error."""
    num_sent = len(server.requests())
    answer = client.post(path, json=body)
    told = [
        (bytes(each.prompt_token_ids.data), each.task, each.priority, each.cache_salt, "named" in each.request_id)
        for each in server.requests()[num_sent:]
    ]
    if answer.status_code != 200:
        return answer.status_code, None, answer.text
    said = re.sub(r'"(id|created|created_at|completed_at|[a-z_]*duration)":("[^"]*"|[\d.]+|null)', "", answer.text)
    said = re.sub(r"(cmpl|resp|msg|chatcmpl|ollama)[-_][0-9a-f]{32}", "", said)
    return 200, (told, said), ""


@pytest.mark.parametrize(
    "kind",
    thinned(ROUTES, lambda kind: kind not in (ChatBatchRequest, CompletionRequest, ResponsesRequest)),
    ids=lambda kind: kind.__name__,
)
def test_an_own_field_of_a_route_has_an_effect_or_is_refused_by_name(server, kind):
    path, body = ROUTES[kind]
    plain_answers: dict[str, tuple[int, Any, str]] = {}
    with server.client() as client:

        def plain_of(body: dict[str, Any]) -> tuple[int, Any, str]:
            """The outcome that a field's are compared with, asked for once, since most fields have the same one."""
            if (asked := json.dumps(body)) not in plain_answers:
                plain = outcome(server, client, path, body)
                if plain[0] == 200 and "stream" not in body:
                    # The first one may have found less in the prefix cache.
                    plain = outcome(server, client, path, body)
                    assert plain == outcome(server, client, path, body), "the null model's answers are the same"
                plain_answers[asked] = plain
            return plain_answers[asked]

        for name in kind.__struct_fields__:
            if name in ("prompt", "messages", "input"):
                continue
            besides = {each: v for each, v in BESIDES.get(name, {}).items() if each in kind.__struct_fields__}
            if name == "tool_choice":
                besides["tools"] = [
                    CLAUDES_TOOL if kind is MessagesRequest else RESPONSES_TOOL if kind is ResponsesRequest else TOOL
                ]
            with_others = {**body, **besides}
            if name == "max_completion_tokens":
                del with_others["max_tokens"]
            plain = plain_of(with_others)
            if plain[0] != 200:  # the route refuses what the field needs
                assert any(each in plain[2] for each in besides), (name, plain)
                with_others, plain = body, plain_of(body)
            works = refused = 0
            for value in EXAMPLES.get(name, CANDIDATES):
                status, seen, error = outcome(server, client, path, {**with_others, name: value})
                assert status in (200, 400, 404), (name, value, error)
                works += status == 200 and seen != plain[1]
                if status != 200:
                    refused += 1
                    assert name in error, (name, value, error)
            assert works or (refused == len(EXAMPLES.get(name, CANDIDATES))) or name in WITHOUT_EFFECT, (name, refused)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_a_cache_salt_separates_the_prefix_cache_on_every_route(server, path):
    body = next(body for each, body in ROUTES.values() if each == path)
    with server.client() as client:
        for salt in ("a", "b"):
            assert client.post(path, json={**body, "cache_salt": salt}).status_code == 200
    assert [each.cache_salt for each in server.requests()[-2:]] == ["/a", "/b"]


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"n_predict": 5}, {"max_tokens": 5}),
        ({"n_predict": -1}, {"max_tokens": None}),
        ({"max_new_tokens": 5, "max_tokens": 5}, {"max_tokens": 5}),
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"grammar": 'root ::= "a"'}, {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        ({"grammar": {"type": "regex", "value": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
        ({"grammar": {"type": "json", "value": SCHEMA}}, {"structured_outputs": {"json": SCHEMA}}),
        ({"json_schema": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
        ({"json_schema": {"name": "x", "schema": SCHEMA}}, {"structured_outputs": {"json": SCHEMA}}),
        ({"ebnf": 'root ::= "a"'}, {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        ({"format": "json"}, {"structured_outputs": {"json_object": True}}),
        ({"responseMimeType": "application/json"}, {"structured_outputs": {"json_object": True}}),
        (
            {"responseMimeType": "application/json", "responseSchema": SCHEMA},
            {"structured_outputs": {"json": SCHEMA}},
        ),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}),
        ({"cache_prompt": False}, {"skip_reading_prefix_cache": True}),
        ({"n_probs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True, "thinking_budget": 9}),
        ({"reasoning": {"effort": "low", "exclude": True}}, {"reasoning_effort": "low", "include_reasoning": False}),
        ({"think": "high"}, {"reasoning_effort": "high"}),
        ({"usage": {"include": True}, "stream": True}, {"stream_options": StreamOptions(include_usage=True)}),
        ({"session_id": "s"}, {"prompt_cache_key": "s"}),
        ({"extra_key": "s"}, {"cache_salt": "s"}),
        ({"stopSequences": ["x"]}, {"stop": ["x"]}),
        ({"stop_sequence": ["x"]}, {"stop": ["x"]}),
        ({"regex_pattern": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"responseJsonSchema": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
        ({"schema": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
        ({"allowed_tokens": [5]}, {"allowed_token_ids": [5]}),
        ({"mirostat_target": 3, "mirostat_lr": 0.2}, {"mirostat_tau": 3.0, "mirostat_eta": 0.2}),
        ({"dry_penalty_range": 9, "nsigma": 1.5}, {"dry_penalty_last_n": 9, "top_n_sigma": 1.5}),
        ({"dry_sequence_breakers": '["\\n", ":", "\\""]'}, {"dry_sequence_breakers": ["\n", ":", '"']}),
        ({"dry_sequence_breakers": '"\\n", ":", "\\"", "*"'}, {"dry_sequence_breakers": ["\n", ":", '"', "*"]}),
        ({"temperature_last": True, "mode": "instruct", "truncation_length": 9, "pad_token_id": 0}, {}),
    ],
)
def test_a_field_of_another_server_is_taken_as_the_one_that_means_the_same(extra, expected):
    decoder = RequestDecoder(strict=False, others=OTHERS)
    request = decoder.decode(json.dumps({"messages": HI, **extra}).encode(), ChatCompletionRequest)
    assert {name: getattr(request, name) for name in expected} == expected


@pytest.mark.parametrize("name", ["system", "system_prompt", "preamble"])
def test_instructions_beside_the_messages_of_a_chat_come_first(name):
    decoder = RequestDecoder(strict=True, others=OTHERS)
    request = decoder.decode(json.dumps({"messages": HI, name: "Be brief."}).encode(), ChatCompletionRequest)
    assert [(each.role, each.content) for each in request.messages] == [
        ("system", "Be brief."),
        ("user", HI[0]["content"]),
    ]


def test_what_other_servers_tune_is_logged_once_and_changes_nothing(server, caplog):
    path, body = ROUTES[ChatCompletionRequest]
    tuning = {"reasoning_format": "deepseek", "template": "{{ .Prompt }}", "models": ["a", "b"], "thinking_budget": 3}
    with server.client() as client:
        assert client.post(path, json={**body, **tuning, "top_logprobs": 0}).status_code == 200
        client.post(path, json={**body, **tuning})
    for name in ("reasoning_format", "template", "models"):
        assert caplog.text.count(f"'{name}'") == 1


def test_an_unknown_field_of_an_ollama_message_is_treated_as_one_of_a_body(server):
    path, body = ROUTES[OllamaChatRequest]
    with server.client() as client:
        known = {**HI[0], "created_at": "now", "name": None}
        assert client.post(path, json={**body, "messages": [known]}).status_code == 200
        misspelt = client.post(path, json={**body, "messages": [{**HI[0], "contents": "x"}]})
        assert (misspelt.status_code, "did you mean content?" in misspelt.text) == (400, True)


def test_the_prompt_as_the_template_wrote_it_is_given_on_request(server):
    path, body = ROUTES[ChatCompletionRequest]
    with server.client() as client:
        whole = client.post(path, json={**body, "return_prompt_text": True}).json()
        assert HI[0]["content"] in whole["prompt_text"]
        events = events_of(client.post(path, json={**body, "return_prompt_text": True, "stream": True}))
        assert [each.get("prompt_text") for each in events if "prompt_text" in each] == [whole["prompt_text"]]
        assert "prompt_text" not in client.post(path, json=body).json()


def test_a_priority_that_the_engine_does_not_read_is_told_once(caplog):
    path, body = ROUTES[CompletionRequest]
    told = "priority has no effect: the engine has scheduling_policy=fcfs"
    with serving_here() as server, server.client() as client:
        assert client.post(path, json={**body, "priority": 0}).status_code == 200
        assert told not in caplog.text
        for priority in (3, 4):
            assert client.post(path, json={**body, "priority": priority}).status_code == 200
    assert caplog.text.count(told) == 1


@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        ({"type": "json_object", "schema": SCHEMA}, ("json", SCHEMA)),
        ({"type": "json_object", "value": SCHEMA}, ("json", SCHEMA)),
        ({"type": "json_schema", "schema": SCHEMA}, ("json", SCHEMA)),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}, "schema": None}, ("json", SCHEMA)),
        ({"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}, ("json", SCHEMA)),
        ({"type": "regex", "value": "a+"}, ("regex", "a+")),
        ({"type": "grammar", "grammar": 'root ::= "a"'}, ("grammar", 'root ::= "a"')),
        ({"type": "json_object"}, ("json_object", True)),
    ],
)
def test_other_servers_forms_of_a_response_format_are_followed(response_format, expected):
    params = from_response_format(response_format)
    assert params is not None
    assert getattr(params, expected[0]) == expected[1]


@pytest.mark.parametrize(
    ("path", "extra", "said"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "text", "schema": {}}}, "'schema' is unknown"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_object", "json_schema": {}}},
            "'json_schema' is",
        ),
        ("/v1/chat/completions", {"response_format": {"type": "regex"}}, "response_format.regex must be a text"),
        ("/v1/responses", {"text": {"formats": {"type": "json_object"}}}, "unknown field 'formats' of text; did you"),
        ("/v1/responses", {"reasoning": {"max_tokens": 5}}, "unknown field 'max_tokens' of reasoning"),
    ],
)
def test_an_unknown_field_inside_another_is_refused_by_name(server, path, extra, said):
    body = next(body for each, body in ROUTES.values() if each == path)
    with server.client() as client:
        answer = client.post(path, json={**body, **extra})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


# What SillyTavern sends to text-generation-webui with every sampler off.
SAMPLERS_THAT_ARE_OFF: dict[str, Any] = {
    **{"typical_p": 1, "typical": 1, "sampler_seed": 7, "seed": 7, "min_p": 0, "repetition_penalty": 1, "top_k": 0},
    **{"skew": 0, "length_penalty": 1, "early_stopping": False, "add_bos_token": True, "smoothing_factor": 0},
    **{"smoothing_curve": 1, "max_tokens_second": 0, "sampler_priority": ["top_k", "temperature"], "top_a": 0},
    **{"truncation_length": 8192, "ban_eos_token": False, "skip_special_tokens": True, "tfs": 1, "tfs_z": 1},
    **{"epsilon_cutoff": 0, "eta_cutoff": 0, "mirostat_mode": 0, "mirostat_tau": 5, "mirostat_eta": 0.1},
    **{"custom_token_bans": "", "banned_strings": [], "sampler_order": [6, 0], "xtc_threshold": 0.1},
    **{"xtc_probability": 0, "nsigma": 0, "min_keep": 0, "adaptive_target": -0.01, "adaptive_decay": 0.9},
    **{"rep_pen": 1, "rep_pen_range": 0, "repetition_penalty_range": 0, "encoder_repetition_penalty": 1},
    **{"no_repeat_ngram_size": 0, "penalty_alpha": 0, "num_beams": 1, "do_sample": True, "guidance_scale": 1},
    **{"negative_prompt": "", "grammar_string": "", "dynamic_temperature": False, "dynatemp_low": 1},
    **{"dynatemp_high": 1, "dynatemp_range": 0, "dynatemp_exponent": 1, "dynatemp_min": 0, "dynatemp_max": 0},
    **{"temperature_last": True, "repeat_penalty": 1, "mirostat": 0, "num_ctx": 8192, "min_length": 0},
}


def test_a_client_that_sends_every_sampler_switched_off_is_answered(server):
    with server.client() as client:
        for path in ("/v1/completions", "/v1/chat/completions"):
            body = next(body for each, body in ROUTES.values() if each == path)
            answer = client.post(path, json={**body, **SAMPLERS_THAT_ARE_OFF})
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tfs", 0.9), ("tfs_z", 0.9), ("top_a", 0.2), ("epsilon_cutoff", 3), ("eta_cutoff", 3), ("penalty_alpha", 0.6),
        ("smoothing_factor", 0.5), ("dynamic_temperature", True), ("dynatemp_range", 0.5), ("max_temp", 2),
        ("adaptive_target", 0.5), ("encoder_repetition_penalty", 1.2),
    ],
)  # fmt: skip
def test_a_sampler_that_is_not_here_is_refused_when_it_is_switched_on(server, name, value):
    with server.client() as client:
        for path in ("/v1/completions", "/v1/chat/completions"):
            body = next(body for each, body in ROUTES.values() if each == path)
            answer = client.post(path, json={**body, name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
            assert "there is no such sampler here" in answer.json()["error"]["message"]


def test_a_grammar_of_text_generation_webui_is_followed(server):
    with server.client() as client:
        body = {"prompt": "hello there", "max_tokens": 5, "grammar_string": 'root ::= "a"'}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "a"


@pytest.mark.parametrize(
    ("field", "is_refused"),
    [
        ({"images": ["iVBO"]}, True), ({"images": []}, False), ({"attachments": [{"type": "image"}]}, True),
        ({"prefix": True}, True), ({"prefix": False}, False), ({"partial": True}, True), ({"content": None}, False),
        ({"parts": [{"type": "text", "text": "hello"}]}, False), ({"text": "hello"}, False),
        ({"content": None, "text": "hello"}, True), ({"content": None, "parts": [{"text": "hello"}]}, True),
        ({"createdAt": "now", "weight": 1}, False), ({"tools": [TOOL]}, True), ({"tools": []}, False),
    ],
)  # fmt: skip
def test_a_field_of_a_message_that_would_choose_what_is_read_is_refused_by_name(server, field, is_refused):
    with server.client() as client:
        messages = [{**HI[0], **field}]
        answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == (400 if is_refused else 200), answer.text
    assert not is_refused or f"messages[0].{list(field)[-1]}" in answer.json()["error"]["message"]
