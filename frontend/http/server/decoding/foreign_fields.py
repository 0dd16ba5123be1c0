"""Fields of other servers' APIs that clients send here too, and what each means here.

A field that has an equivalent is taken as that one (`SameAs`). One that no answer depends on, or that only says how
something is done in detail that this server does in its own way (the order of samplers, the range of a penalty), is
accepted with a line in the log. One that would choose or constrain the answer, or switch on a sampler that is not here,
is refused by name, except at the value that asks for nothing (`Neutral`).

The names come from llama.cpp, TGI, SGLang, TensorRT-LLM, Ollama, LM Studio, text-generation-webui, TabbyAPI, KoboldCpp,
transformers, OpenRouter, LiteLLM, Anthropic, Gemini, Mistral, DeepSeek, DashScope, Cohere, Fireworks and Azure.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headrace.frontend.http.server.errors import bad_field

ANY = object()
"""In `Neutral.values`: every value is accepted."""


class Neutral(msgspec.Struct, frozen=True):
    """A field that is accepted at values without effect (`values`, or None), else refused."""

    reason: str
    values: tuple[Any, ...] = ()
    is_harmless: bool = False
    """No answer depends on the field: every value is accepted, unless the server is strict."""
    is_noted: bool = False
    """A harmless field's first value that asks for something is logged."""
    code: str = "unsupported_parameter"
    """Of the error that refuses it."""


Fields = dict[str, Any]
"""Fields of a request's body."""


class SameAs(msgspec.Struct, frozen=True):
    """A field that means the same as others of this server's."""

    name: str
    """The field that errors name, and whose value this one has unless `fields` is given."""
    fields: Callable[[Any, Fields], Fields] | None = None
    """Returns this server's fields, given the value and the request's other fields. Raises ApiError."""


def _at_most(name: str) -> Callable[[Any, Fields], Fields]:
    """A number of new tokens; -1 and -2 mean as many as fit."""

    def convert(value: Any, body: Fields) -> Fields:
        if isinstance(value, bool) or value not in (-1, -2):
            return {"max_tokens": value}
        if "prompt" in body:
            raise bad_field(name, f"{name} is {value}; a completion has 16 tokens unless a number is given")
        return {}

    return convert


def _structured(form: str) -> Callable[[Any, Fields], Fields]:
    return lambda value, body: {"structured_outputs": {form: value}}


def _schema(value: Any, body: Fields) -> Fields:
    """A JSON schema: an object, text, or OpenAI's object with a name and a schema."""
    if isinstance(value, dict) and isinstance(value.get("schema"), dict) and "type" not in value:
        value = value["schema"]
    return {"structured_outputs": {"json": value}}


def _grammar(value: Any, body: Fields) -> Fields:
    """llama.cpp's text in GBNF, or TGI's {type, value}."""
    if not isinstance(value, dict):
        return {"structured_outputs": {"grammar": value}} if value != "" else {}
    kinds = {"json": "json", "json_schema": "json", "json_object": "json", "regex": "regex"}
    if value.get("type") not in kinds or value.get("value") is None:
        raise bad_field("grammar", "grammar must be a text in GBNF, or {type: json or regex, value: ...}")
    if kinds[value["type"]] == "json":
        return _schema(value["value"], body)
    return {"structured_outputs": {"regex": value["value"]}}


def _grammar_text(value: Any, body: Fields) -> Fields:
    if not isinstance(value, str):
        raise bad_field("grammar_string", "grammar_string must be a text in GBNF")
    return _grammar(value, body)


def _format(value: Any, body: Fields) -> Fields:
    """Ollama's: json, or a schema."""
    if value == "json":
        return {"structured_outputs": {"json_object": True}}
    if value == "":
        return {}
    if not isinstance(value, dict):
        raise bad_field("format", "format must be json or a JSON schema")
    return _schema(value, body)


def _mime_type(value: Any, body: Fields) -> Fields:
    if value == "application/json":
        return {} if body.get("responseSchema") is not None else {"structured_outputs": {"json_object": True}}
    if value != "text/plain":
        raise bad_field("responseMimeType", "responseMimeType must be text/plain or application/json")
    return {}


def _greedy(value: Any, body: Fields) -> Fields:
    """do_sample: false samples greedily, whatever the temperature."""
    if not isinstance(value, bool):
        raise bad_field("do_sample", "do_sample must be true or false")
    if not value:
        body.pop("temperature", None)
        return {"temperature": 0}
    return {}


def _cached(value: Any, body: Fields) -> Fields:
    if not isinstance(value, bool):
        raise bad_field("cache_prompt", "cache_prompt must be true or false")
    return {} if value else {"skip_reading_prefix_cache": True}


def _top_tokens(name: str) -> Callable[[Any, Fields], Fields]:
    """A number of likeliest tokens to report, 0 for none."""

    def convert(value: Any, body: Fields) -> Fields:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise bad_field(name, f"{name} must be an integer that is not negative")
        if not value:
            return {}
        return {"logprobs": value} if "prompt" in body else {"logprobs": True, "top_logprobs": value}

    return convert


def _thinking(value: Any, body: Fields) -> Fields:
    """Anthropic's {type: enabled or disabled, budget_tokens}, which DeepSeek, GLM and LiteLLM have in chats."""
    if not isinstance(value, dict) or value.get("type") not in ("enabled", "adaptive", "auto", "disabled"):
        raise bad_field("thinking", "thinking must be {type: enabled, budget_tokens: ...} or {type: disabled}")
    if value["type"] == "disabled":
        return {"enable_thinking": False}
    found: Fields = {} if value["type"] == "auto" else {"enable_thinking": True}
    return found | ({"thinking_budget": value["budget_tokens"]} if value.get("budget_tokens") is not None else {})


def _reasoning(value: Any, body: Fields) -> Fields:
    """OpenRouter's {effort, max_tokens, exclude, enabled}."""
    known = {"effort": "reasoning_effort", "max_tokens": "thinking_budget", "enabled": "enable_thinking"}
    if not isinstance(value, dict) or not value.keys() <= {*known, "exclude", "summary"}:
        raise bad_field("reasoning", "reasoning must be an object of effort, max_tokens, enabled and exclude")
    found = {ours: value[name] for name, ours in known.items() if value.get(name) is not None}
    return found | ({"include_reasoning": False} if value.get("exclude") else {})


def _think(value: Any, body: Fields) -> Fields:
    """Ollama's: whether to reason, or how much."""
    return {"enable_thinking": value} if isinstance(value, bool) else {"reasoning_effort": value}


def _system(name: str) -> Callable[[Any, Fields], Fields]:
    """Instructions beside the messages become the first message, or the instructions of a response."""

    def convert(value: Any, body: Fields) -> Fields:
        if "input" in body:
            return {"instructions": value}
        messages = body.get("messages")
        is_text = isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, dict) for each in value))
        if not is_text or not isinstance(messages, list) or any(isinstance(each, list) for each in messages):
            raise bad_field(name, f"{name} is refused: give it as a message of the role system")
        body["messages"] = [{"role": "system", "content": value}, *messages] if value else messages
        return {}

    return convert


def _usage(value: Any, body: Fields) -> Fields:
    """OpenRouter's {include: true}: whole answers have their usage anyway."""
    if not isinstance(value, dict) or value.keys() != {"include"} or not isinstance(value["include"], bool):
        raise bad_field("usage", "usage must be {include: true or false}")
    if not value["include"] or not body.get("stream") or body.get("stream_options") is not None:
        return {}
    return {"stream_options": {"include_usage": True}}


LISTS_IN_TEXT = ("dry_sequence_breakers",)
"""Fields whose list clients send as a text: SillyTavern as JSON, text-generation-webui also without the brackets."""


def list_in_text(said: Any) -> Any:
    """The list that a text holds as JSON; else the value itself."""
    if not isinstance(said, str):
        return said
    written = said.strip()
    try:
        found = msgspec.json.decode(written if written.startswith("[") else f"[{written}]")
    except (msgspec.DecodeError, RecursionError):
        return said
    return found if isinstance(found, list) else said


_LIMITS = (
    *("n_predict", "max_new_tokens", "num_predict", "maxOutputTokens", "max_tokens_to_sample", "maxTokens"),
    "tokens_to_generate",
)
_SAME: Mapping[str, str] = types.MappingProxyType(
    {
        **dict.fromkeys(("max_output_tokens", "max_completion_tokens"), "max_tokens"),
        "min_new_tokens": "min_tokens",
        **dict.fromkeys(("stop_sequences", "stopSequences", "stop_sequence"), "stop"),
        **dict.fromkeys(("stopping_strings", "stop_strings", "stop_words"), "stop"),
        "allowed_tokens": "allowed_token_ids",
        **dict.fromkeys(("repeat_penalty", "rep_pen", "repetitionPenalty"), "repetition_penalty"),
        **{"presencePenalty": "presence_penalty", "frequencyPenalty": "frequency_penalty"},
        **{"topP": "top_p", "topK": "top_k", "minP": "min_p"},
        **dict.fromkeys(("typ_p", "typical"), "typical_p"),
        **{"mirostat_mode": "mirostat", "mirostat_target": "mirostat_tau", "mirostat_lr": "mirostat_eta"},
        **{
            "dry_penalty_range": "dry_penalty_last_n",
            "dry_range": "dry_penalty_last_n",
            "nsigma": "top_n_sigma",
            "top_nsigma": "top_n_sigma",
        },
        **dict.fromkeys(("random_seed", "sampling_seed", "sampler_seed"), "seed"),
        **dict.fromkeys(("n_cmpl", "candidateCount", "num_return_sequences"), "n"),
        **dict.fromkeys(("thinking_budget_tokens", "reasoning_budget", "thinkingBudget"), "thinking_budget"),
        **dict.fromkeys(("truncate", "prompt_truncate_len"), "truncate_prompt_tokens"),
        "return_full_text": "echo",
        "return_tokens": "return_token_ids",
        "no_stop_trim": "include_stop_str_in_output",
        **{"rid": "request_id", "extra_key": "cache_salt", "session_id": "prompt_cache_key"},
        "routed_dp_rank": "data_parallel_rank",
        "logprob": "logprobs",
    }
)
"""Names of other servers, and this server's names of fields with the same values."""

_OWN_WAY = "this server does it in its own way"
_ROUTED = "requests are answered by this server alone"
_ADAPTER = "a LoRA adapter is named as `model` (GET /v1/models lists those that are loaded)"
_TEXT = "models read and write text alone"
_HOSTED = "the server searches and runs nothing; give what was found as messages, or tools"
_NOT_SPLIT = "an engine keeps its cache to itself"

_TUNING: Mapping[str, tuple[Any, ...]] = types.MappingProxyType(
    {
        # of llama.cpp
        **dict.fromkeys(("id_slot", "slot_id"), (-1,)),
        **{"n_keep": (0,), "n_discard": (0,), "n_indent": (0,), "t_max_predict_ms": (0,), "t_max_prompt_ms": (0,)},
        **{"samplers": (), "min_keep": (0,), "dynatemp_exponent": (1,)},
        **{
            "penalize_nl": (False,),
            "repeat_last_n": (-1,),
            "backend_sampling": (False,),
            "timings_per_token": (False,),
        },
        **{"reasoning_format": ("auto", "none"), "return_progress": (False,), "post_sampling_probs": (False,)},
        **{"response_fields": ([],), "parse_tool_calls": (True,), "chat_format": (), "reasoning_in_content": (False,)},
        **{"adaptive_decay": (), "speculative.n_max": (), "speculative.n_min": (), "speculative.p_min": ()},
        # of Ollama
        **{"keep_alive": (), "template": ("",), "num_ctx": (), "num_gpu": (), "num_thread": (), "num_batch": ()},
        **{"num_keep": (0,), "shift": (), "low_vram": (False,), "use_mmap": (), "use_mlock": (False,)},
        # of TGI and SGLang
        **{"details": (), "stream_reasoning": (True,), "separate_reasoning": (True,), "log_metrics": ()},
        **{"return_cached_tokens_details": (False,), "priority_level": (), "return_meta_info": (False,)},
        # of TabbyAPI, text-generation-webui, KoboldCpp and LM Studio
        **{"temperature_last": (False,), "truncation_length": (), "mode": (), "sampler_priority": ()},
        **{"repetition_decay": (0,), "repetition_penalty_range": (-1,), "penalty_range": (-1,), "pad_token_id": ()},
        **{"dynatemp_low": (1,), "dynatemp_high": (1,), "smoothing_curve": (1,), "max_tokens_second": (0,)},
        **{"prompt_lookup_num_tokens": (0,), "static_cache": (False,), "rep_pen_range": (), "rep_pen_slope": ()},
        **{"sampler_order": (), "max_context_length": (), "trim_stop": (), "draft_model": ("",), "ttl": ()},
        **{"repetition_range": (-1,), "generate_window": (), "speculative_ngram": (False,), "temp_exponent": (1,)},
        **{"render_special": (False,), "grammar_retain_state": (False,), "genkey": (), "max_time": ()},
        # of Mistral, DashScope and Gemini
        **{"prompt_mode": (), "incremental_output": (), "result_format": ("message",), "safety_settings": ()},
        **{"safetySettings": (), "labels": ()},
    }
)
"""Fields that tune, or ask for more about the answer, and the values that ask for nothing."""
_ROUTING = (
    # of OpenRouter
    *("models", "route", "provider", "transforms", "preset"),
    # of LiteLLM
    *("api_base", "api_key", "api_version", "base_url", "custom_llm_provider", "num_retries", "max_retries", "timeout"),
    *("fallbacks", "context_window_fallbacks", "caching", "cache", "no-log", "drop_params", "allowed_openai_params"),
    *("additional_drop_params", "extra_headers", "headers", "tags", "proxy_server_request", "litellm_metadata"),
    *("litellm_params", "litellm_call_id", "litellm_session_id", "litellm_trace_id", "litellm_logging_obj"),
    *(
        "force_timeout",
        "cooldown_time",
        "input_cost_per_token",
        "output_cost_per_token",
        "model_info",
        "stream_timeout",
    ),
    *("trace_id", "generation_name", "trace_name", "parent_otel_span"),
    # of Anthropic, in bodies of Bedrock and Vertex
    *("anthropic_version", "anthropic_beta", "betas"),
)
"""Fields by which a client or a proxy chooses among servers, or describes itself."""
_NO_SAMPLER = (
    "there is no such sampler here; there are temperature, top_k, top_p, min_p, typical_p, top_n_sigma, mirostat, xtc, "
    "dry and the penalties"
)
_SAMPLERS: Mapping[str, tuple[Any, ...]] = types.MappingProxyType(
    {
        **{"tfs_z": (1,), "tfs": (1,), "top_a": (0,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "skew": (0,)},
        **{"smoothing_factor": (0,), "penalty_alpha": (0,), "encoder_repetition_penalty": (1,)},
        **{"dynamic_temperature": (False,), "dynatemp_range": (0,), "dynatemp_min": (0,), "dynatemp_max": (0,)},
        **{"min_temp": (0, 1), "max_temp": (0, 1), "adaptive_target": (-1, -0.01)},
        **{"top_p_min": (), "top_p_decay": (1,), "top_p_reset_ids": (-1,), "diversity_penalty": (0,)},
        **{"beam_search_diversity_rate": (0,), "exponential_decay_length_penalty": ()},
    }
)
"""Samplers that this server lacks, and the values at which they are off."""
_CHOOSING: Mapping[str, tuple[str, tuple[Any, ...]]] = types.MappingProxyType(
    {
        **dict.fromkeys(("adapter_id", "adapter_source", "adapter", "adapters", "adapter_name"), (_ADAPTER, ("", []))),
        **dict.fromkeys(("lora_name", "lora_path", "lora_id", "lora_request", "loras"), (_ADAPTER, ("", []))),
        **dict.fromkeys(("lora", "lora_adapter", "lora_adapters", "peft_config"), (_ADAPTER, ("", [], {}))),
        **dict.fromkeys(("images", "image", "image_data", "image_url", "image_urls"), (_TEXT, ("", []))),
        **dict.fromkeys(
            ("audio_data", "video", "video_data", "videos", "multi_modal_data", "mm_data"), (_TEXT, ([], {}))
        ),
        **dict.fromkeys(("files", "file_ids", "attachments", "input_embeds", "input_embeddings"), (_TEXT, ([],))),
        "multimodal_data": (_TEXT, ([], {})),
        **dict.fromkeys(("plugins", "web_search", "search_options", "search_parameters"), (_HOSTED, ([], {}, False))),
        **dict.fromkeys(("data_sources", "search_domain_filter", "search_settings"), (_HOSTED, ([], {}))),
        **dict.fromkeys(("enable_search", "tool_resources", "guardrails"), (_HOSTED, ([], {}, False))),
        **dict.fromkeys(
            ("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank", "disaggregated_params"),
            (_NOT_SPLIT, ()),
        ),
        **dict.fromkeys(("suffix", "input_prefix", "input_suffix"), ("filling in the middle is not supported", ("",))),
        "input_extra": ("filling in the middle is not supported", ([],)),
        "input_ids": ("token ids are given as the prompt of a completion", ()),
        "prompt_token_ids": ("token ids are given as the prompt of a completion", ()),
        "token_ids": ("token ids are given as the prompt of a completion", ()),
        "inputs": ("the text is given as prompt, or as messages", ()),
        "parameters": ("its fields are given in the body itself", ({},)),
        "sampling_params": ("its fields are given in the body itself", ({},)),
        "extra_body": ("an argument of OpenAI's Python client; its fields are given in the body itself", ({},)),
        "options": ("Ollama's; its fields are given in the body itself", ({},)),
        "generationConfig": ("Gemini's; its fields are given in the body itself", ({},)),
        "generation_config": ("its fields are given in the body itself", ({},)),
        "contents": ("Gemini's; give messages", ()),
        "systemInstruction": ("Gemini's; give a message of the role system", ()),
        "system_instruction": ("Gemini's; give a message of the role system", ()),
        "cachedContent": ("no contents are kept; send all of the conversation", ("",)),
        "thinkingConfig": ("Gemini's; use enable_thinking and thinking_budget", ({},)),
        "context": ("the tokens of an earlier answer are not continued; send all of the conversation", ([],)),
        "raw": ("a prompt is taken as it is by /v1/completions", (False,)),
        **dict.fromkeys(("banned_tokens", "banned_strings", "custom_token_bans"), ("use bad_words", ("", []))),
        **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens"), ("use logit_bias", ([], [[]]))),
        **dict.fromkeys(
            ("force_words_ids", "forced_bos_token_id", "forced_eos_token_id"), ("use structured_outputs", ([], -1))
        ),
        **dict.fromkeys(("guidance_scale", "cfg_scale"), ("answers are not steered by a second prompt", (0, 1))),
        "negative_prompt": ("answers are not steered by a second prompt", ("",)),
        "ban_eos_token": ("use ignore_eos", (False,)),
        **dict.fromkeys(("bypass_eos", "use_default_badwordsids"), ("use ignore_eos", (False,))),
        "add_bos_token": ("use add_special_tokens", (True,)),
        "auto_max_new_tokens": ("an answer is as long as fits if max_tokens is left out in a chat", (False,)),
        "context_overflow_policy": (
            "a prompt that is too long is an error; use truncate_prompt_tokens",
            ("stopAtLimit",),
        ),
        "contextOverflowPolicy": (
            "a prompt that is too long is an error; use truncate_prompt_tokens",
            ("stopAtLimit",),
        ),
        "context_length_exceeded_behavior": (
            "a prompt that is too long is an error; use truncate_prompt_tokens",
            ("error",),
        ),
        "max_length": ("servers count the prompt's tokens or not; use max_tokens", ()),
        "min_length": ("servers count the prompt's tokens or not; use min_tokens", (0,)),
        "memory": ("give the text as a part of the prompt", ("",)),
        "character": ("give a message of the role system", ("",)),
        **dict.fromkeys(("user_bio", "greeting"), ("give a message of the role system", ("",))),
        "chat_history": ("give it as messages", ([],)),
        "translation_options": ("give a message that says what to translate", ({},)),
        **dict.fromkeys(
            ("instruction_template", "instruction_template_str", "chat_template_str"), ("use chat_template", ("",))
        ),
        "continue_": ("a message is continued with continue_final_message", (False,)),
        "session_params": ("no session is kept; send all of the conversation", ({},)),
        "text_format": ("an argument of OpenAI's Python client; it sends the schema in text.format", ()),
        "num_beams": ("use use_beam_search with n", (1,)),
        "no_repeat_ngram_size": ("use repetition_penalty or repetition_detection", (0,)),
        "singleline": ("use stop", (False,)),
        "eos_token_id": ("use stop_token_ids", ()),
        "token_ban_ranges": ("use logit_bias", ([],)),
        "sequence_bias": ("use logit_bias", ([], {})),
        "token_healing": ("the prompt's tokens stay as they are", (False,)),
        "guided_decoding_params": ("use structured_outputs", ({},)),
        "return_context_logits": ("log-probabilities of the prompt are asked for with prompt_logprobs", (False,)),
        "stop_regex": ("outputs end at texts: use stop", ([], "")),
        "logits_processor": ("code in requests is not supported", ()),
        "custom_logit_processor": ("code in requests is not supported", ("",)),
        "custom_params": ("logits processors read vllm_xargs", ({},)),
        "watermark": ("outputs are not marked", (False,)),
        "decoder_input_details": ("the prompt's tokens are reported with prompt_logprobs", (False,)),
        "return_hidden_states": ("hidden states are not returned", (False,)),
        "return_routed_experts": ("the choice of experts is not returned", (False,)),
        "return_logprob": ("log-probabilities are asked for with logprobs", (False,)),
        "top_logprobs_num": ("log-probabilities are asked for with logprobs", (0,)),
        "token_ids_logprob": ("use logprob_token_ids", ([],)),
        "logprob_start_len": ("log-probabilities of the prompt are asked for with prompt_logprobs", (-1,)),
        "mock_response": ("answers come from the model", (False, "")),
        "safe_prompt": ("no prompt is added", (False,)),
        "disable_thinking": ("use enable_thinking: false", (False,)),
        "grammar_lazy": ("a grammar holds from the first token; use tools or a structural_tag", (False,)),
        "grammar_triggers": ("a grammar holds from the first token; use tools or a structural_tag", ([],)),
        "prefix": ("a message is continued with continue_final_message", ("", False)),
    }
)
"""Fields that would choose or constrain the answer and have no equivalent: why, and the values that ask for nothing."""

FOREIGN: Mapping[str, Neutral | SameAs] = types.MappingProxyType(
    {
        **{name: SameAs("max_tokens", _at_most(name)) for name in _LIMITS},
        **{name: SameAs(ours) for name, ours in _SAME.items()},
        **dict.fromkeys(
            ("json_schema", "responseSchema", "response_schema", "responseJsonSchema", "schema"),
            SameAs("structured_outputs", _schema),
        ),
        "responseMimeType": SameAs("structured_outputs", _mime_type),
        "format": SameAs("structured_outputs", _format),
        "grammar": SameAs("structured_outputs", _grammar),
        "grammar_string": SameAs("structured_outputs", _grammar_text),
        "ebnf": SameAs("structured_outputs", _structured("grammar")),
        **dict.fromkeys(("regex", "regex_pattern"), SameAs("structured_outputs", _structured("regex"))),
        "do_sample": SameAs("temperature", _greedy),
        "cache_prompt": SameAs("skip_reading_prefix_cache", _cached),
        "n_probs": SameAs("logprobs", _top_tokens("n_probs")),
        "top_n_tokens": SameAs("logprobs", _top_tokens("top_n_tokens")),
        "thinking": SameAs("enable_thinking", _thinking),
        "reasoning": SameAs("reasoning_effort", _reasoning),
        "think": SameAs("enable_thinking", _think),
        **{name: SameAs("messages", _system(name)) for name in ("system", "system_prompt", "preamble", "instructions")},
        "usage": SameAs("stream_options", _usage),
        **{name: Neutral(_OWN_WAY, values, is_harmless=True, is_noted=True) for name, values in _TUNING.items()},
        **dict.fromkeys(_ROUTING, Neutral(_ROUTED, is_harmless=True, is_noted=True)),
        **{name: Neutral(_NO_SAMPLER, values) for name, values in _SAMPLERS.items()},
        **{name: Neutral(reason, values) for name, (reason, values) in _CHOOSING.items()},
    }
)
CONTENTS = ("text", "value", "parts")
"""Names that content has elsewhere; clients also send them beside content."""
OF_MESSAGES: Mapping[str, Neutral] = types.MappingProxyType(
    {
        **dict.fromkeys(("images", "image", "image_url", "image_urls", "videos", "video"), Neutral(_TEXT, ("", []))),
        **dict.fromkeys(("attachments", "experimental_attachments", "files", "file_ids"), Neutral(_TEXT, ("", []))),
        **dict.fromkeys(("prefix", "partial"), Neutral("a message is continued with continue_final_message", (False,))),
        **dict.fromkeys(CONTENTS, Neutral("what a message says is its content", ("", []))),
        "tools": Neutral("tools are a field of the request", ([],)),
    }
)
"""Fields of messages that would choose what the model reads, or how it goes on."""
