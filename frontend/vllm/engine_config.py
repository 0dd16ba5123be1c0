"""The engine's decisions in the form of vLLM's config objects, for scripts that read those; taken from its Welcome."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.options.engine_options import Options
from headrace.frontend.request.parameters.sampling_params import SamplingParams
from headrace.frontend.vllm.unsupported import CONFIG_FIELDS, DECISIONS, no_attribute
from headrace.ipc.messages import Welcome
from headrace.ipc.process.regular_files import read_file


class Explained:
    """A dataclass, as vLLM's are, whose AttributeError says where to find a field of vLLM's that it lacks."""

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(type(self).__name__, name, CONFIG_FIELDS, None if name.startswith("_") else DECISIONS)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Explained):
    """vLLM's ModelConfig, as `LLM.llm_engine.model_config` and `AsyncLLM.model_config` return it."""

    model: str
    served_model_name: str
    max_model_len: int | None
    """None before an engine has decided it, unless the model's config.json is at hand."""
    dtype: str
    """As the option dtype is written: bfloat16, for example; auto before an engine has decided."""
    max_logprobs: int
    vocab_size: int | None
    generation_defaults: dict[str, Any]
    skip_tokenizer_init: bool
    runner_type: str = "generate"
    is_multimodal_model: bool = False
    embedding_size: int | None = None
    """Values of an embedding; None of a model that has none, and before an engine has decided."""

    def get_vocab_size(self) -> int | None:
        return self.vocab_size

    def get_diff_sampling_param(self) -> dict[str, float | int | list[int]]:
        """The sampling fields that the model's generation config sets."""
        return dict(self.generation_defaults)

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.generation_defaults)


@dataclass(frozen=True, kw_only=True)
class CacheConfig(Explained):
    block_size: int
    num_gpu_blocks: int | None
    """None before an engine has decided it."""
    enable_prefix_caching: bool


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Explained):
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_model_len: int | None


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Explained):
    """vLLM's VllmConfig, as `LLMEngine.vllm_config` and `AsyncLLM.vllm_config` return it."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig


def tasks_of(welcome: Welcome) -> tuple[str, ...]:
    """The tasks that the engine carries out, under vLLM's names."""
    pooled = welcome.pooling.kinds if welcome.pooling is not None else ()
    return (*(("generate",) if welcome.generates else ()), *pooled)


def asked_config(options: Options) -> EngineConfig:
    """What the options ask for, before an engine has started.

    The context length and the vocabulary are those of config.json where the model is a local folder; what only an
    engine decides is None, or auto.
    """
    stored = _stored_config(options.model)
    asked_len = options.max_model_len if isinstance(options.max_model_len, int) and options.max_model_len > 0 else None
    max_model_len = asked_len or stored.get("max_position_embeddings")
    return EngineConfig(
        model_config=ModelConfig(
            model=options.model,
            served_model_name=(options.served_model_name or (options.model,))[0],
            max_model_len=max_model_len,
            dtype=options.dtype,
            max_logprobs=options.max_logprobs,
            vocab_size=stored.get("vocab_size"),
            generation_defaults=dict(options.override_generation_config),
            skip_tokenizer_init=options.skip_tokenizer_init,
        ),
        cache_config=CacheConfig(
            block_size=options.block_size,
            num_gpu_blocks=options.num_gpu_blocks_override,
            enable_prefix_caching=options.enable_prefix_caching,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=max_model_len,
        ),
    )


def _stored_config(model: str) -> dict[str, int]:
    """The numbers of a local folder's config.json, of its text part where it has one."""
    try:
        stored = json.loads(read_file(Path(model).expanduser() / "config.json"))
        text = stored.get("text_config") or stored
        return {name: value for name, value in text.items() if isinstance(value, int)}
    except (OSError, ValueError, AttributeError):
        return {}


def engine_config(welcome: Welcome) -> EngineConfig:
    pooling = welcome.pooling
    embeds = next((kind for kind in ("embed", "token_embed") if pooling is not None and kind in pooling.kinds), None)
    model = ModelConfig(
        model=welcome.model,
        served_model_name=(welcome.served_model_names or (welcome.model,))[0],
        max_model_len=welcome.max_model_len,
        dtype=welcome.dtype,
        max_logprobs=welcome.max_logprobs,
        vocab_size=welcome.vocab_size,
        generation_defaults=welcome.generation_defaults,
        skip_tokenizer_init=welcome.tokenizer is None,
        runner_type="generate" if welcome.generates else "pooling",
        embedding_size=None if embeds is None or pooling is None else pooling.width_of(embeds),
    )
    return EngineConfig(
        model_config=model,
        cache_config=CacheConfig(
            block_size=welcome.block_size,
            num_gpu_blocks=welcome.num_blocks,
            enable_prefix_caching=welcome.enable_prefix_caching,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=welcome.max_num_seqs,
            max_num_batched_tokens=welcome.max_num_batched_tokens,
            max_model_len=welcome.max_model_len,
        ),
    )
