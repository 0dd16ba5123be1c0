"""The engine's decisions in the form of vLLM's config objects, for scripts that read those; taken from its Welcome."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.frontend.api.parameters.sampling_params import SamplingParams
from headrace.frontend.api.unsupported import CONFIG_FIELDS, DECISIONS, no_attribute
from headrace.ipc.messages import Welcome


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """A struct whose AttributeError says where to find a field of vLLM's that it lacks."""

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(type(self).__name__, name, CONFIG_FIELDS, None if name.startswith("_") else DECISIONS)


class ModelConfig(Explained, frozen=True, kw_only=True):
    """vLLM's ModelConfig, as `LLM.llm_engine.model_config` and `AsyncLLM.model_config` return it."""

    model: str
    served_model_name: str
    max_model_len: int
    dtype: str
    """As the option dtype is written: bfloat16, for example."""
    max_logprobs: int
    vocab_size: int
    generation_defaults: dict[str, Any]
    skip_tokenizer_init: bool
    runner_type: str = "generate"
    is_multimodal_model: bool = False

    def get_vocab_size(self) -> int:
        return self.vocab_size

    def get_diff_sampling_param(self) -> dict[str, float | int | list[int]]:
        """The sampling fields that the model's generation config sets."""
        return dict(self.generation_defaults)

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.generation_defaults)


class CacheConfig(Explained, frozen=True, kw_only=True):
    block_size: int
    num_gpu_blocks: int
    enable_prefix_caching: bool


class SchedulerConfig(Explained, frozen=True, kw_only=True):
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class EngineConfig(Explained, frozen=True, kw_only=True):
    """vLLM's VllmConfig, as `LLMEngine.vllm_config` and `AsyncLLM.vllm_config` return it."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig


def engine_config(welcome: Welcome) -> EngineConfig:
    model = ModelConfig(
        model=welcome.model,
        served_model_name=(welcome.served_model_names or (welcome.model,))[0],
        max_model_len=welcome.max_model_len,
        dtype=welcome.dtype,
        max_logprobs=welcome.max_logprobs,
        vocab_size=welcome.vocab_size,
        generation_defaults=welcome.generation_defaults,
        skip_tokenizer_init=welcome.tokenizer is None,
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
