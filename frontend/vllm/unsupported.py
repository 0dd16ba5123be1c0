"""vLLM's names that Headrace lacks, with what to use instead, for the error messages that ported scripts get."""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace.frontend.request.lists import asks_for_nothing
from headrace.frontend.request.parameters.sampling_fields import LIKELY
from headrace.ipc.failure import InvalidRequestError

ONLY_POOLING = "of pooling there are LLM.embed, classify, score, reward and encode"
ANY = object()
"""In ARGUMENTS: any value is accepted, because none has an effect."""
NO_PROMPT_ADAPTERS = "prompt adapters are not supported; a LoRARequest adapts the weights, and prompt_embeds the prompt"
DECISIONS = "what the engine decided is in `engine`, and its options in describe_engine()"

_FILE = "the model's config.json has it; vocab_size and max_model_len are here"
CONFIG_FIELDS = {**dict.fromkeys(("hf_config", "hf_text_config"), _FILE), "lora_config": DECISIONS}
METHODS = {
    "apply_model": "the model is in another process, and no code is sent to it; a worker extension "
    "(worker_extension_cls) and collective_rpc reach it",
    "from_vllm_config": "from_engine_args takes EngineArgs",
    "set_tokenizer": "the option tokenizer names the engine's, and prompts may be token ids of any",
    **dict.fromkeys(
        ("model_executor", "engine_core", "input_processor", "output_processor"), "the engine is a program of its own"
    ),
    **dict.fromkeys(
        (
            *("parallel_config", "speculative_config", "observability_config", "get_parallel_config"),
            *("get_decoding_config", "get_lora_config"),
        ),
        DECISIONS,
    ),
    "start_background_loop": "the engine runs from its start on",
    "shutdown_background_loop": "shutdown() and close() end the engine",
    "get_input_preprocessor": "get_tokenizer() makes tokens of texts",
    **dict.fromkeys(("log_requests", "log_stats"), "the engine logs no requests; do_log_stats() logs its load"),
    "preprocess_chat": "get_tokenizer().apply_chat_template renders a conversation",
    **dict.fromkeys(
        (
            *("init_weight_transfer_engine", "start_weight_update", "start_draft_weight_update", "update_weights"),
            *("finish_weight_update", "shutdown_weight_transfer_engine", "get_weight_version"),
            *("set_weight_version", "update_weight_version"),
        ),
        "reload_weights reads weights again from files, and nobody sends them",
    ),
    "get_world_size": "describe_engine() has the workers",
    "release_kv_cache_memory": "sleep gives the cache's memory back, and wake_up takes it again",
    "scale_elastic_ep": "`headrace serve` starts and stops engines: POST /scale_elastic_ep",
}
COMMANDS: Mapping[str, str] = types.MappingProxyType(
    {
        "download-kernels": "kernels are part of the package, and are compiled when they are first needed",
        "launch": "a server has an engine; its /tokenize renders prompts without generating",
        "preload": "the pages of weights stay in the system's cache between starts",
        "snapshot": "an engine's process is not stored and restored; sleep gives its memory back",
    }
)
"""vLLM's commands that `headrace` lacks, with the reason or the replacement."""
NO_MEDIA = "multimodal input is not supported yet; models run on text alone"
TOKENS = "give the prompt as token ids ({'prompt_token_ids': [...]}), made as you like with get_tokenizer()"
NO_TRACES = "traces are not supported yet"
ONE_CLIENT = "an AsyncLLM is one client, of all its engines"
ARGUMENTS: Mapping[str, tuple[str, tuple[Any, ...]]] = types.MappingProxyType(
    {
        "prompt_adapter_request": (NO_PROMPT_ADAPTERS, ()),
        "guided_options_request": ("SamplingParams(structured_outputs=...) asks for structured outputs", ()),
        "prompt_token_ids": (TOKENS, ()),
        "truncate_prompt_tokens": (TOKENS, ()),
        "prompt_text": ("a prompt's text goes with its tokens: {'prompt': ..., 'prompt_token_ids': [...]}", ()),
        "mm_processor_kwargs": (NO_MEDIA, ()),
        "media_io_kwargs": (NO_MEDIA, ()),
        "reasoning_ended": ("reasoning is not told apart from the answer", (False,)),
        "trace_headers": ("AsyncLLM.generate, encode and add_request take it", ()),
        "arrival_time": ("a request arrives when it is submitted", ()),
        "data_parallel_rank": ("the least busy engine takes each prompt; AsyncLLM.generate lets one be named", (0,)),
        "session_id": ("a request goes where its prefix is cached, without a name for it", (ANY,)),
        "kv_hints": ("the prefix cache decides by itself what it keeps", ()),
        "reasoning_parser_kwargs": ("reasoning is not told apart from the answer", ()),
        "start_engine_loop": ("the engine runs from its start on", (True,)),
        "usage_context": ("nothing is reported to anybody", (ANY,)),
        "enable_log_requests": ("the engine never logs requests", (False,)),
        "disable_log_requests": ("the engine never logs requests", (True, False)),
        "disable_log_stats": ("it is an option: EngineArgs(disable_log_stats=True)", (False, True)),
        "enable_multiprocessing": ("LLM(in_process=True) runs the engine in this process", (True,)),
        "client_addresses": ("AsyncLLM.connect(address) attaches to a running engine", ()),
        "client_count": (ONE_CLIENT, (1,)),
        "client_index": (ONE_CLIENT, (0,)),
        "executor_class": ("it is an option: distributed_executor_backend=module:Class", ()),
    }
)
"""Arguments of vLLM's methods that Headrace refuses: the reason, and the values, besides None and empty ones, that it
accepts because they have no effect."""


def no_argument(method: str, name: str, value: Any, others: str = "") -> InvalidRequestError:
    """The error for an unknown argument: also a TypeError, which Python raises for one. Tells fields of the parameters
    that the method takes, else `others`."""
    from headrace.frontend.request.parameters.pooling_params import PoolingParams
    from headrace.frontend.request.parameters.sampling_params import SamplingParams, UnknownFieldError

    params = PoolingParams if method in ("embed", "encode", "score") else SamplingParams
    near = difflib.get_close_matches(name, params.__struct_fields__, n=1, cutoff=LIKELY)
    hint = f"; give it as {params.__name__}({near[0]}={value!r:.100})" if near else others
    return UnknownFieldError(f"{method} has no argument {name!r}{hint}")


def check_arguments(method: str, given: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError for an unknown argument, and for a value that asks for an unsupported feature."""
    for name, value in given.items():
        if name not in ARGUMENTS:
            raise no_argument(method, name, value)
        reason, neutral = ARGUMENTS[name]
        if (
            value is None
            or asks_for_nothing(value)
            or any(each is ANY or (type(value) is type(each) and value == each) for each in neutral)
        ):
            continue
        raise InvalidRequestError(f"{method}: {name} is refused: {reason}")


_INSIDE = "the engine is a program of its own, and its parts are not vLLM's; docs/architecture.md maps them"
ABSENT_MODULES: Mapping[str, str] = types.MappingProxyType(
    {
        **dict.fromkeys(("assets", "multimodal"), NO_MEDIA),
        **dict.fromkeys(("config", "model_inspection", "tasks"), DECISIONS),
        "config.speech_to_text": NO_MEDIA,
        "benchmarks": "`headrace bench` measures, and `headrace bench serve --help` lists its data sets",
        "distributed": "ranks find each other by options (tensor_parallel_size, nnodes), not by calls of a script",
        "distributed.kv_transfer": "an engine keeps its cache to itself",
        "distributed.weight_transfer": "POST /reload_weights and LLM.reload_weights read weights again from files",
        "engine": "an engine takes EngineArgs, LLMEngine and AsyncLLM run it, and it is a program of its own",
        "entrypoints.openai": "the server is a program, `headrace serve`, whose types OpenAI's own package has",
        "entrypoints.pooling": ONLY_POOLING,
        "entrypoints": _INSIDE,
        "envs": "docs/server.md lists the variables of the environment that have an effect",
        "collect_env": "`headrace collect-env` prints what it collects",
        "exceptions": "all errors are HeadraceError or derive from it, and `headrace` has their names",
        "inputs": "a prompt is a text, token ids, {'prompt': ...} or {'prompt_token_ids': [...]}; images and "
        "sounds are not taken yet",
        "logger": "logs are Python's own, of the logger `headrace`; --log-level and HEADRACE_LOG_LEVEL set how much",
        "logits_process": "SamplingParams(bad_words=...) forbids words; processors of one's own derive from those of "
        "headrace.v1.sample.logits_processor",
        "logprobs": "the engine makes outputs' log-probabilities; the types of them are here",
        "outputs": f"an output is a RequestOutput with its CompletionOutputs; {ONLY_POOLING}",
        "pooling_params": ONLY_POOLING,
        "profiler": "start_profile and stop_profile record, with the option profiler_config",
        "sampling_params": "SamplingParams checks its fields by itself when it is made",
        "snapshot": "an engine's process is not stored and restored; sleep gives its memory back",
        "tokenizers": "an engine reads its model's tokenizer in every format; LLM.get_tokenizer() gives it",
        "tracing": NO_TRACES,
        "usage": "nothing is reported to anybody",
        "v1.metrics.loggers": "stat_loggers take classes that derive from StatLoggerBase; get_metrics() gives numbers",
        "v1.metrics.reader": "there is no registry of a process: get_metrics() of an LLM or AsyncLLM gives its metrics",
        "v1.metrics.stats": "stat loggers receive SchedulerStats and IterationStats, with the fields that this "
        "engine has",
        "version": "there are __version__ and __version_tuple__",
        "v1.sample.logits_processor": "processors derive from LogitsProcessor; the option logits_processors loads them",
        **dict.fromkeys(
            (
                *("_aiter_ops", "_custom_ops", "_version", "_xpu_ops", "attention", "beam_search", "compilation"),
                *("connections", "core", "device_allocator", "executor", "forward_context", "ir", "kernels"),
                *("model_executor", "models", "ray", "scalar_type", "sequence", "spec_decode", "third_party", "v1"),
                "worker",
            ),
            _INSIDE,
        ),
        "lora": "an adapter is a LoRARequest, found by a LoRAResolver; ranks compute it (executor/adapters/)",
        "platforms": "a script holds no device: the engine's process does, and describe_engine() says which",
        "plugins": "plug-ins are entry points of packages in headrace.plugins or vllm.general_plugins",
        **dict.fromkeys(("reasoning", "tool_parsers", "parser"), "formats are YAML files: frontend/text/formats"),
        "renderers": "get_tokenizer().apply_chat_template renders a conversation",
        "transformers_utils": "transformers reads configs; get_tokenizer(hf=True) gives its tokenizer",
        "triton_utils": "kernels import triton themselves",
        "utils.print_utils": "it only shortens vectors for printing",
        "utils": "of vLLM's helpers there are those of headrace.utils",
    }
)
"""Why a module of vLLM's, or a name in it, is missing here, by module name or its leading parts. The longest match
counts. An import of a submodule whose parent package is missing gets the parent's reason, since Python imports the
parent first."""


def reason_of(name: str) -> str | None:
    """Why a module of vLLM's, or a name in one, is missing here; None if vLLM does not have it either."""
    parts = name.split(".")
    begins = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((ABSENT_MODULES[begin] for begin in begins if begin in ABSENT_MODULES), None)


PACKAGE = {
    **dict.fromkeys(
        ("BenchmarkDataset", "CustomDataset", "RandomDataset", "SampleRequest", "ShareGPTDataset", "SonnetDataset"),
        "`headrace bench` measures, and `headrace bench serve --help` lists its data sets",
    ),
    **dict.fromkeys(("KVTransferConfig", "WeightTransferConfig"), "engines exchange neither cache nor weights yet"),
    **dict.fromkeys(
        ("AttentionConfig", "DeviceConfig", "KernelConfig", "LoRAConfig", "LoadConfig", "ObservabilityConfig"),
        f"its fields are options of the engine by name; {DECISIONS}",
    ),
    **dict.fromkeys(("MultiModalConfig", "SpeechToTextConfig", "SpeechToTextParams"), NO_MEDIA),
    "KVEventsConfig": "engines publish no events of their cache",
    "WatermarkConfig": "outputs are not watermarked",
    **dict.fromkeys(("get_current_vllm_config", "set_current_vllm_config"), _INSIDE),
    **dict.fromkeys(
        ("LogitBiasLogitsProcessor", "MinPLogitsProcessor", "MinTokensLogitsProcessor"),
        "the engine does what SamplingParams asks for without logits processors",
    ),
    "initialize_ray_cluster": "distributed_executor_backend=ray starts the workers on the Ray that RAY_ADDRESS names",
    "ParallelConfig": DECISIONS,
    **dict.fromkeys(("build_app", "init_app_state", "run_server"), "`headrace serve` is a program of its own"),
    "PrometheusStatLogger": "`headrace serve` has /metrics; get_metrics() gives the same numbers to a script",
    "ModelRegistry": "a package with an entry point in headrace.plugins brings a model family",
    **dict.fromkeys(
        ("LateChunkingParams", "LateInteractionParams"), "late chunking and late interaction are not computed yet"
    ),
}


@functools.cache
def refused_class(name: str) -> type:
    """A stand-in for a class of vLLM's in PACKAGE. Scripts may import it and use it in annotations and isinstance;
    constructing one raises InvalidRequestError with the reason."""

    def refuse(cls: type, *args: object, **fields: object) -> object:
        raise InvalidRequestError(f"{cls.__name__} is refused: {PACKAGE[name]}")

    return type(name, (), {"__doc__": f"Not here: {PACKAGE[name]}.", "__module__": "headrace", "__new__": refuse})


def no_attribute(owner: str, name: str, reasons: Mapping[str, str], others: str | None = None) -> AttributeError:
    """An AttributeError to raise when `owner` lacks `name`, with its reason in `reasons`, else with `others`."""
    reason = reasons.get(name, others)
    return AttributeError(f"{owner} has no {name!r}{f': {reason}' if reason else ''}")


class NamesWhatIsMissing:
    """A base class whose AttributeError gives the reason when one of vLLM's methods is missing."""

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> object:
            raise no_attribute(type(self).__name__, name, METHODS)
