"""vLLM's module names as a table: `from headrace.engine.arg_utils import EngineArgs` works, and so on for each row.

The modules have no files: the package's `__path__` leads to a finder that creates one when it is imported. Its names
are those of `headrace`, or are defined where HOMES says, and are loaded on first use. For a name or module of vLLM that
Headrace lacks, an error states the reason (frontend/vllm/unsupported.py): on import, or for classes, which scripts
often import without using them, on construction.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.machinery
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence

_OWN = ("core", "executor", "frontend", "ipc", "kernels")
"""Headrace's own packages."""
_NEAR = 0.8
"""Minimum similarity for suggesting a name that the user may have meant."""
PROMPTS = (
    *("EmbedsInput", "EmbedsPrompt", "EngineInput", "PromptType", "SingletonPrompt", "TextPrompt", "TokensInput"),
    *("TokensPrompt", "embeds_input", "tokens_input"),
)
OUTPUTS = (
    *("ClassificationOutput", "ClassificationRequestOutput", "CompletionOutput", "EmbeddingOutput"),
    *("EmbeddingRequestOutput", "PoolingOutput", "PoolingRequestOutput", "RequestOutput", "ScoringOutput"),
    "ScoringRequestOutput",
)
OF_PACKAGE = (*OUTPUTS, "PoolingParams")
"""Classes that vLLM's package itself exports, most of which Headrace lacks."""
SAMPLING = (
    *("BeamSearchParams", "RepetitionDetectionParams", "RequestOutputKind", "SamplingParams", "SamplingType"),
    "StructuredOutputsParams",
)
ERRORS = ("EngineDeadError", "EngineGenerateError")
EXCEPTIONS = (
    *("GenerationError", "QueueOverflowError", "VLLMClientError", "VLLMError", "VLLMServerError"),
    "VLLMValidationError",
)
COMPILATION = (
    *("CompilationConfig", "CompilationMode", "CUDAGraphMode", "DynamicShapesConfig", "DynamicShapesType"),
    "PassConfig",
)
CONFIG_DICTS = (
    *("EPLBConfig", "PoolerConfig", "ProfilerConfig", "ReasoningConfig", "SpeculativeConfig"),
    "StructuredOutputsConfig",
)
CONFIGS = (
    *("AttentionConfig", "CacheConfig", *COMPILATION, *CONFIG_DICTS, "DeviceConfig", "KVEventsConfig"),
    *("KVTransferConfig", "KernelConfig", "LoRAConfig", "LoadConfig", "LogprobsMode", "ModelConfig"),
    "MultiModalConfig",
    *("ObservabilityConfig", "ParallelConfig", "PoolerConfig", "SchedulerConfig", "SpeechToTextConfig"),
    *("SpeechToTextParams", "VllmConfig", "WatermarkConfig", "WeightTransferConfig", "get_current_vllm_config"),
    "set_current_vllm_config",
)
CONFIG_MODULES: Mapping[str, Sequence[str]] = types.MappingProxyType(
    {
        "attention": ("AttentionConfig",),
        "cache": ("CacheConfig",),
        "compilation": COMPILATION,
        "device": ("DeviceConfig",),
        "kernel": ("KernelConfig",),
        "kv_events": ("KVEventsConfig",),
        "kv_transfer": ("KVTransferConfig",),
        "load": ("LoadConfig",),
        "lora": ("LoRAConfig",),
        "model": ("LogprobsMode", "ModelConfig"),
        "multimodal": ("MultiModalConfig",),
        "observability": ("ObservabilityConfig",),
        "parallel": ("EPLBConfig", "ParallelConfig"),
        "pooler": ("PoolerConfig",),
        "profiler": ("ProfilerConfig",),
        "reasoning": ("ReasoningConfig",),
        "scheduler": ("SchedulerConfig",),
        "speculative": ("SpeculativeConfig",),
        "structured_outputs": ("StructuredOutputsConfig",),
        "vllm": ("VllmConfig", "get_current_vllm_config", "set_current_vllm_config"),
        "watermarking": ("WatermarkConfig",),
        "weight_transfer": ("WeightTransferConfig",),
    }
)
"""vLLM's modules below `config`, with the names that each defines."""
LOGPROBS = ("FlatLogprobs", "Logprob", "LogprobsOnePosition", "PromptLogprobs", "SampleLogprobs")
TOKENIZERS = ("TokenizerLike", "cached_get_tokenizer", "cached_tokenizer_from_config", "get_tokenizer")
PROCESSORS = (
    *("AdapterLogitsProcessor", "BatchUpdate", "LogitsProcessor", "MoveDirectionality", "RequestLogitsProcessor"),
)
OWN_PROCESSORS = ("LogitBiasLogitsProcessor", "MinPLogitsProcessor", "MinTokensLogitsProcessor")
DATASETS = ("BenchmarkDataset", "CustomDataset", "RandomDataset", "SampleRequest", "ShareGPTDataset", "SonnetDataset")
GROUPS = ("cleanup_dist_env_and_memory", "destroy_distributed_environment", "destroy_model_parallel")
NETWORK = ("get_ip", "get_open_port")

MODULES: Mapping[str, Sequence[str]] = types.MappingProxyType(
    {
        "benchmarks": (),
        "benchmarks.datasets": DATASETS,
        "beam_search": ("BeamSearchOutput", "BeamSearchSequence"),
        "config": CONFIGS,
        **{f"config.{name}": names for name, names in CONFIG_MODULES.items()},
        "distributed": GROUPS,
        "distributed.parallel_state": GROUPS,
        "engine": (),
        "engine.arg_utils": ("AsyncEngineArgs", "EngineArgs"),
        "engine.async_llm_engine": ("AsyncEngineArgs", "AsyncLLMEngine"),
        "engine.llm_engine": ("EngineArgs", "LLMEngine"),
        "engine.protocol": ("EngineClient", "StreamingInput"),
        "entrypoints": (),
        "entrypoints.chat_utils": ("resolve_hf_chat_template",),
        "entrypoints.cli": (),
        "entrypoints.cli.main": ("main",),
        "entrypoints.launchers": (),
        "entrypoints.launchers.api_server": (),
        "entrypoints.launchers.api_server.entry": (),
        "entrypoints.llm": ("LLM",),
        "entrypoints.openai": (),
        "entrypoints.openai.api_server": ("build_app", "init_app_state", "run_server"),
        "entrypoints.openai.models": (),
        "entrypoints.openai.models.protocol": ("LoRAModulePath",),
        "entrypoints.openai.run_batch": (),
        "envs": (),
        "exceptions": EXCEPTIONS,
        "inputs": PROMPTS,
        "inputs.data": PROMPTS,
        "logger": ("init_logger",),
        "logprobs": LOGPROBS,
        "lora": (),
        "lora.request": ("LoRARequest",),
        "lora.resolver": ("LoRAResolver", "LoRAResolverRegistry"),
        "outputs": (*OUTPUTS, "Logprob", "RequestMetrics"),
        "platforms": ("current_platform",),
        "plugins": (),
        "plugins.lora_resolvers": (),
        "plugins.lora_resolvers.filesystem_resolver": ("FilesystemResolver",),
        "plugins.lora_resolvers.hf_hub_resolver": ("HfHubResolver",),
        "pooling_params": ("LateChunkingParams", "LateInteractionParams", "PoolingParams"),
        "renderers": (),
        "renderers.hf": ("resolve_chat_template",),
        "sampling_params": (*SAMPLING, "GuidedDecodingParams"),
        "sequence": ("Logprob", "RequestMetrics"),
        "tokenizers": TOKENIZERS,
        "tokenizers.registry": TOKENIZERS,
        "transformers_utils": (),
        "transformers_utils.repo_utils": ("hf_api",),
        "transformers_utils.tokenizer": ("get_tokenizer",),
        "usage": (),
        "usage.usage_lib": ("UsageContext", "is_usage_stats_enabled"),
        "utils": ("Counter", "FlexibleArgumentParser", *NETWORK, "random_uuid"),
        "utils.argparse_utils": ("FlexibleArgumentParser",),
        "utils.network_utils": NETWORK,
        "utils.system_utils": ("set_ulimit",),
        "utils.torch_utils": ("async_tensor_h2d", "set_random_seed"),
        "v1": (),
        "v1.engine": ("FinishReason", "PauseMode"),
        "v1.engine.async_llm": ("AsyncEngineArgs", "AsyncLLM"),
        "v1.engine.exceptions": ERRORS,
        "v1.engine.llm_engine": ("EngineArgs", "LLMEngine"),
        "v1.metrics": (),
        "v1.metrics.loggers": (
            "AggregateStatLoggerBase",
            "AggregatedLoggingStatLogger",
            "LoggingStatLogger",
            "PrometheusStatLogger",
            "StatLoggerBase",
            "StatLoggerFactory",
        ),
        "v1.metrics.reader": ("Counter", "Gauge", "Histogram", "Metric", "Vector"),
        "v1.metrics.stats": ("FinishedRequestStats", "IterationStats", "PrefixCacheStats", "SchedulerStats"),
        "v1.sample": (),
        "v1.sample.logits_processor": (*PROCESSORS, *OWN_PROCESSORS),
        "v1.sample.logits_processor.builtin": (*OWN_PROCESSORS, "process_dict_updates"),
        "v1.sample.logits_processor.interface": PROCESSORS,
        "version": ("__version__", "__version_tuple__"),
    }
)
"""The names of each module. A name without a home is refused with its reason."""

PROGRAMS: Mapping[str, str] = types.MappingProxyType(
    {
        "entrypoints.cli.main.__main__": "headrace",
        "entrypoints.launchers.api_server.entry.__main__": "openai_server",
        "entrypoints.openai.api_server.__main__": "openai_server",
        "entrypoints.openai.run_batch.__main__": "run_batch",
    }
)
"""What `python -m` runs for a module: a function of headrace/programs.py."""

HOMES: Mapping[str, str] = types.MappingProxyType(
    {
        "CacheConfig": "frontend.vllm.engine_config:CacheConfig",
        "entrypoints.cli.main.main": "frontend.cli.main:main",
        "EngineClient": "frontend.api.async_llm:AsyncLLM",
        "EngineGenerateError": "ipc.failure:RequestFailedError",
        "FlatLogprobs": "frontend.request.outputs:FlatLogprobs",
        "FilesystemResolver": "frontend.adapters.folder_resolver:FilesystemResolver",
        "HfHubResolver": "frontend.adapters.hub_resolver:HfHubResolver",
        "LoRAModulePath": "frontend.adapters.lora_modules:LoRAModulePath",
        "LoRAResolver": "frontend.adapters.resolver:LoRAResolver",
        "LoRAResolverRegistry": "frontend.adapters.resolver:LoRAResolverRegistry",
        "LogprobsMode": "core.options.model_options:LogprobsMode",
        "LogprobsOnePosition": "frontend.request.outputs:LogprobsOfPosition",
        "PromptLogprobs": "frontend.request.outputs:PromptLogprobs",
        "SampleLogprobs": "frontend.request.outputs:SampleLogprobs",
        "EngineInput": "frontend.request.prompts:PromptType",
        "FinishReason": "frontend.vllm.stat_loggers:FinishReason",
        "PauseMode": "frontend.client.control:PauseMode",
        "SingletonPrompt": "frontend.request.prompts:PromptType",
        "StatLoggerFactory": "frontend.vllm.stat_loggers:Factory",
        "EmbedsInput": "frontend.request.prompts:EmbedsInput",
        "EmbedsPrompt": "frontend.request.prompts:EmbedsPrompt",
        "TokensInput": "frontend.request.prompts:TokensInput",
        "embeds_input": "frontend.request.prompts:embeds_input",
        "VLLMServerError": "ipc.failure:RequestFailedError",
        "tokens_input": "frontend.request.prompts:tokens_input",
        "FlexibleArgumentParser": "core.options.parsing:OptionParser",
        "GenerationError": "ipc.failure:RequestFailedError",
        "ModelConfig": "frontend.vllm.engine_config:ModelConfig",
        "PromptType": "frontend.request.prompts:PromptType",
        "QueueOverflowError": "ipc.failure:QueueFullError",
        "RequestMetrics": "frontend.request.outputs:RequestMetrics",
        "SchedulerConfig": "frontend.vllm.engine_config:SchedulerConfig",
        "StreamingInput": "frontend.api.streaming_input:StreamingInput",
        "TokenizerLike": "frontend.text.tokenizer:Tokenizer",
        "UsageContext": "frontend.vllm.helpers:UsageContext",
        "VLLMClientError": "ipc.failure:InvalidRequestError",
        "VLLMError": "ipc.failure:HeadraceError",
        "VLLMValidationError": "ipc.failure:InvalidRequestError",
        "VllmConfig": "frontend.vllm.engine_config:EngineConfig",
        "cached_get_tokenizer": "frontend.vllm.helpers:get_tokenizer",
        "SamplingType": "frontend.request.parameters.sampling_params:SamplingType",
        "process_dict_updates": "executor.sampling.logits_processors:process_dict_updates",
        "current_platform": "frontend.vllm.platform:current_platform",
        "resolve_hf_chat_template": "frontend.vllm.helpers:resolve_chat_template",
        "utils.Counter": "frontend.vllm.helpers:Counter",
        **{name: f"frontend.vllm.helpers:{name}" for name in (
            *GROUPS, *NETWORK, "async_tensor_h2d", "cached_tokenizer_from_config", "get_tokenizer", "hf_api",
            "init_logger", "is_usage_stats_enabled", "random_uuid", "resolve_chat_template", "set_random_seed",
            "set_ulimit",
        )},
        **{name: f"frontend.vllm.config_objects:{name}" for name in (*COMPILATION, *CONFIG_DICTS)},
        **{name: f"frontend.vllm.stat_loggers:{name}" for name in (
            "AggregateStatLoggerBase", "AggregatedLoggingStatLogger", "FinishedRequestStats", "IterationStats",
            "LoggingStatLogger", "PrefixCacheStats", "SchedulerStats", "StatLoggerBase",
        )},
        **{name: f"executor.sampling.logits_processors:{name}" for name in PROCESSORS},
        **{f"v1.metrics.reader.{name}": f"frontend.client.engine_metrics:{name}" for name in (
            "Counter", "Gauge", "Histogram", "Metric", "Vector"
        )},
    }
)  # fmt: skip
"""`module:name` of names that `headrace` itself does not export. A name with two meanings is keyed by module too."""


ANSWERED: Mapping[str, str] = types.MappingProxyType({"envs": "core.options.vllm_environment:variable"})
"""Modules whose constants are asked of a function, `module:name`, each time they are read."""


class VllmModule(types.ModuleType):
    """The module of one row of the table."""

    def __getattr__(self, name: str) -> object:
        row = self.__name__.removeprefix("headrace.")
        if f"{row}.{name}" in MODULES:
            return importlib.import_module(f"{self.__name__}.{name}")
        value = find(row, name)
        if row not in ANSWERED:
            vars(self)[name] = value
        return value

    def __dir__(self) -> Iterable[str]:
        return sorted({*vars(self), *MODULES[self.__name__.removeprefix("headrace.")]})


def find(row: str, name: str) -> object:
    """The object `name` of a row. Raises ImportError for a name of vLLM's that Headrace lacks, else AttributeError."""
    import headrace
    from headrace.frontend.vllm.unsupported import PACKAGE, no_attribute, reason_of, refused_class

    if (answers := ANSWERED.get(row)) is not None and name.isupper():
        module, _, attribute = answers.partition(":")
        answer: object = getattr(importlib.import_module(f"headrace.{module}"), attribute)(name)
        return answer
    home = HOMES.get(f"{row}.{name}") or HOMES.get(name)
    if name in MODULES[row] and home is not None:
        module, _, attribute = home.partition(":")
        found: object = getattr(importlib.import_module(f"headrace.{module}"), attribute)
        return found
    if name in MODULES[row] and name in headrace.__all__:
        offered: object = getattr(headrace, name)
        return offered
    if name in MODULES[row] and is_refused_class(name):
        return refused_class(name)
    is_special = name.startswith("__")  # Python itself looks up such names
    error = no_attribute(f"headrace.{row}", name, PACKAGE, None if is_special else reason_of(row))
    if name in MODULES[row] or name in PACKAGE:
        raise ImportError(str(error))
    raise error


def is_refused_class(name: str) -> bool:
    """Whether `name` is a class of vLLM that Headrace lacks."""
    from headrace.frontend.vllm.unsupported import PACKAGE

    return name in PACKAGE and name[0].isupper()


def tell_why_not(package: str, row: str) -> None:
    """Raises ModuleNotFoundError with the reason, for a module of vLLM that Headrace lacks.

    This is also called for `from headrace.config import NAME` if NAME is not an attribute. Python swallows an error
    whose `name` is that module's, so this one has none.
    """
    if row.partition(".")[0] in _OWN:
        return  # asked for where it lies elsewhere than this package, and below it without end in an uninstalled clone
    from headrace.frontend.vllm.unsupported import reason_of

    if (reason := reason_of(row)) is not None:
        parent, _, last = row.rpartition(".")
        near = difflib.get_close_matches(last, MODULES.get(parent, ()), 1, _NEAR)
        meant = f". Did you mean {near[0]}?" if near else ""
        raise ModuleNotFoundError(f"Headrace has no '{package}.{row}': {reason}{meant}")


class ModulePath(list[str]):
    """The `__path__` of the package and of its modules that the table names: the last entry stands for the table.

    Python asks a finder of the entry, which it keeps in a cache, so nothing is added to `sys.meta_path` or
    `sys.path_hooks`.
    """

    def __init__(self, folders: Iterable[str] = ()) -> None:
        super().__init__([*folders, __file__])

    def __iter__(self) -> Iterator[str]:
        sys.path_importer_cache[__file__] = _FINDER  # each time, as others may clear the cache
        return super().__iter__()


class TableFinder:
    """Finds and loads the modules of the table. All are packages, as others may be below them."""

    def find_spec(self, fullname: str, target: object = None) -> importlib.machinery.ModuleSpec | None:
        package, _, row = fullname.partition(".")
        if not (row in MODULES or row in PROGRAMS):
            tell_why_not(package, row)
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=__file__)  # type: ignore[arg-type]
        if row in MODULES:
            spec.submodule_search_locations = ModulePath()
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> VllmModule:
        return VllmModule(spec.name, f"vLLM's module name for what Headrace has of it (row of {__name__}).")

    def exec_module(self, module: VllmModule) -> None:
        module.__all__ = [  # type: ignore[attr-defined]
            name for name in MODULES[module.__name__.removeprefix("headrace.")] if _exists(module.__name__, name)
        ]

    def get_code(self, fullname: str) -> types.CodeType:
        """The code of `python -m headrace.entrypoints.openai.api_server`, and the like, under either package's name."""
        program = PROGRAMS[fullname.partition(".")[2]]
        run = f"import sys\nfrom headrace.programs import {program}\nsys.exit({program}())"
        return compile(run, f"<{fullname}>", "exec")


def _exists(module: str, name: str) -> bool:
    import headrace

    row = module.removeprefix("headrace.")
    return f"{row}.{name}" in HOMES or name in HOMES or name in headrace.__all__


_FINDER = TableFinder()
