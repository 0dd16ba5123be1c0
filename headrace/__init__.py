"""Headrace: a high-throughput, memory-efficient LLM inference and serving engine.

    from headrace import LLM
    print(LLM().generate("Hello")[0].outputs[0].text)

Names are loaded on first use, so importing this package costs almost nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from headrace.frontend.vllm import modules as vllm_modules

if TYPE_CHECKING:
    from headrace.executor.models.registry import ModelRegistry
    from headrace.frontend.api.async_llm import AsyncLLM
    from headrace.frontend.api.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from headrace.frontend.api.llm import LLM, connect
    from headrace.frontend.request.lora_request import LoRARequest
    from headrace.frontend.request.outputs import CompletionOutput, Logprob, RequestOutput
    from headrace.frontend.request.parameters.pooling_params import PoolingParams
    from headrace.frontend.request.parameters.repetition import RepetitionDetectionParams
    from headrace.frontend.request.parameters.sampling_params import RequestOutputKind, SamplingParams
    from headrace.frontend.request.parameters.structured_outputs import GuidedDecodingParams, StructuredOutputsParams
    from headrace.frontend.request.pooling_outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from headrace.frontend.request.prompts import PromptType, TextPrompt, TokensPrompt
    from headrace.frontend.vllm.llm_engine import AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine
    from headrace.ipc.failure import (
        EngineAsleepError,
        EngineDeadError,
        EngineStartError,
        Failure,
        HeadraceError,
        InvalidRequestError,
        ModelError,
        OptionError,
        QueueFullError,
        RequestFailedError,
    )

    __version__: str
    __version_tuple__: tuple[int | str, ...]

_HOMES = {
    "AsyncEngineArgs": "frontend.vllm.llm_engine",
    "AsyncLLM": "frontend.api.async_llm",
    "AsyncLLMEngine": "frontend.vllm.llm_engine",
    "BeamSearchOutput": "frontend.api.beam_search",
    "BeamSearchParams": "frontend.api.beam_search",
    "BeamSearchSequence": "frontend.api.beam_search",
    "ClassificationOutput": "frontend.request.pooling_outputs",
    "ClassificationRequestOutput": "frontend.request.pooling_outputs",
    "CompletionOutput": "frontend.request.outputs",
    "EmbeddingOutput": "frontend.request.pooling_outputs",
    "EmbeddingRequestOutput": "frontend.request.pooling_outputs",
    "EngineArgs": "frontend.vllm.llm_engine",
    "EngineAsleepError": "ipc.failure",
    "EngineDeadError": "ipc.failure",
    "EngineStartError": "ipc.failure",
    "Failure": "ipc.failure",
    "GuidedDecodingParams": "frontend.request.parameters.structured_outputs",
    "HeadraceError": "ipc.failure",
    "InvalidRequestError": "ipc.failure",
    "LLM": "frontend.api.llm",
    "LLMEngine": "frontend.vllm.llm_engine",
    "LoRARequest": "frontend.request.lora_request",
    "Logprob": "frontend.request.outputs",
    "ModelError": "ipc.failure",
    "ModelRegistry": "executor.models.registry",
    "OptionError": "ipc.failure",
    "PoolingOutput": "frontend.request.pooling_outputs",
    "PoolingParams": "frontend.request.parameters.pooling_params",
    "PoolingRequestOutput": "frontend.request.pooling_outputs",
    "PromptType": "frontend.request.prompts",
    "QueueFullError": "ipc.failure",
    "RepetitionDetectionParams": "frontend.request.parameters.repetition",
    "RequestFailedError": "ipc.failure",
    "RequestOutput": "frontend.request.outputs",
    "RequestOutputKind": "frontend.request.parameters.sampling_params",
    "SamplingParams": "frontend.request.parameters.sampling_params",
    "ScoringOutput": "frontend.request.pooling_outputs",
    "ScoringRequestOutput": "frontend.request.pooling_outputs",
    "StructuredOutputsParams": "frontend.request.parameters.structured_outputs",
    "TextPrompt": "frontend.request.prompts",
    "TokensPrompt": "frontend.request.prompts",
    "connect": "frontend.api.llm",
}

__all__ = [  # noqa: RUF022 - the first few are what people come for
    "LLM",
    "AsyncLLM",
    "SamplingParams",
    "connect",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineAsleepError",
    "EngineDeadError",
    "EngineStartError",
    "Failure",
    "GuidedDecodingParams",
    "HeadraceError",
    "InvalidRequestError",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "ModelError",
    "ModelRegistry",
    "OptionError",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "QueueFullError",
    "RepetitionDetectionParams",
    "RequestFailedError",
    "RequestOutput",
    "RequestOutputKind",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "PromptType",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "__version_tuple__",
]


__path__ = vllm_modules.ModulePath(__path__)


def home_of(name: str) -> str | None:
    """The module, below headrace, that defines a name of this package; None for other names."""
    return _HOMES.get(name)


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("headrace")
    except PackageNotFoundError:  # a source tree that is on the path, and not installed
        return "0+unknown"


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if name in ("__version__", "__version_tuple__"):
        globals()["__version__"] = version = _installed_version()
        parts = version.replace("+", ".").split(".")
        globals()["__version_tuple__"] = tuple(int(part) if part.isdigit() else part for part in parts)
        return globals()[name]
    if home is None and name in vllm_modules.MODULES:
        return importlib.import_module(f"headrace.{name}")
    if home is None and name in vllm_modules.OF_PACKAGE:
        return importlib.import_module("headrace.frontend.vllm.unsupported").refused_class(name)
    if home is None:
        missing = importlib.import_module("headrace.frontend.vllm.unsupported")
        error = missing.no_attribute("headrace", name, missing.PACKAGE, missing.reason_of(name))
        raise ImportError(str(error)) if name in missing.PACKAGE else error
    try:
        value = globals()[name] = getattr(importlib.import_module(f"headrace.{home}"), name)
    except AttributeError as error:  # `from headrace import ...` would not pass it on: a json.py beside a script
        raise ImportError(f"headrace.{name} cannot be imported: {error}") from error
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


if os.environ.get("HEADRACE_AS_VLLM") and "vllm" not in sys.modules:
    importlib.import_module("headrace.as_vllm")
