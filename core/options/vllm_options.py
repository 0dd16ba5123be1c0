"""vLLM's option names that are not Headrace's: which are taken over, which pass silently, which are refused and why.

One rule: a foreign option passes silently at a value that asks for nothing, that is, at vLLM's own default or at
what Headrace does anyway (`neutral`; None always is). Every other value is refused by name with the reason. A
script that spells out defaults then runs unchanged, and none believes it got something it did not.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from typing import Any

import msgspec


class Foreign(msgspec.Struct, frozen=True):
    neutral: tuple[Any, ...]
    reason: str
    """Ends the sentence 'NAME=VALUE is refused: ...'."""

    @property
    def is_flag(self) -> bool:
        return all(isinstance(value, bool) for value in self.neutral) and bool(self.neutral)


def _rows(reason: str, **neutral: tuple[Any, ...]) -> dict[str, Foreign]:
    return {name: Foreign(values, reason) for name, values in neutral.items()}


OTHER_PARALLELISM = "not supported yet, ranks share a model by tensor and pipeline parallelism alone; leave it out"
QUANTIZED = "not supported yet; a GGUF file is recognised without it, and other checkpoints are read unquantised"
ADAPTERS = "LoRA adapters are not supported yet; merge the adapter into the model's weights"
SPECULATION = "speculative decoding is not supported yet; leave it out, outputs are the same without it"
MULTIMODAL = "multimodal input is not supported yet; models run on text alone"
STRUCTURED = "structured outputs are not supported yet"
COMPILED = "not supported: there is no compiler to configure; cudagraph_capture_sizes and enforce_eager set graphs"
TOOLS = "not supported yet: tools reach the chat template, and the answer is its text, not parsed into tool calls"
REASONING = "not supported yet: reasoning is part of the answer's text"
SERVER = "an option of the HTTP server, which is not part of the engine"
EXTENSION = "not supported: vLLM's plug-in classes and platform settings do not fit this engine; leave it out"
OBSERVED = "not supported yet; the engine logs its load every 10 s unless disable_log_stats is set"
FAIRNESS = "not supported: pending prefills share each step's budget evenly; max_num_batched_tokens sets that budget"
OFF = (False,)
EITHER = (True, False)

FOREIGN: Mapping[str, Foreign] = types.MappingProxyType(
    {
        **_rows(
            OTHER_PARALLELISM,
            data_parallel_size=(1,),
            data_parallel_size_local=(1,),
            data_parallel_rank=(0,),
            data_parallel_start_rank=(0,),
            data_parallel_address=(),
            data_parallel_rpc_port=(),
            data_parallel_backend=("mp",),
            data_parallel_hybrid_lb=OFF,
            data_parallel_external_lb=OFF,
            prefill_context_parallel_size=(1,),
            decode_context_parallel_size=(1,),
            dcp_kv_cache_interleave_size=(1,),
            cp_kv_cache_interleave_size=(1,),
            enable_expert_parallel=OFF,
            enable_eplb=OFF,
            eplb_config=({},),
            expert_placement_strategy=("linear",),
            all2all_backend=(),
            enable_dbo=OFF,
            ubatch_size=(0,),
            dbo_decode_token_threshold=(32,),
            dbo_prefill_token_threshold=(512,),
            disable_nccl_for_dp_synchronization=EITHER,
            ray_workers_use_nsight=OFF,
            worker_use_ray=OFF,
            engine_use_ray=OFF,
        ),
        **_rows(
            QUANTIZED,
            quantization_param_path=(),
            qlora_adapter_name_or_path=(),
            calculate_kv_scales=OFF,
            override_attention_dtype=(),
        ),
        **_rows(COMPILED, compilation_config=({}, 0), optimization_level=()),
        **_rows(COMPILED, cudagraph_metrics=OFF),
        **_rows("retired: it sized CUDA graphs", max_seq_len_to_capture=(8192,), max_context_len_to_capture=(8192,)),
        **_rows(
            "not supported: the engine chooses the attention kernel itself",
            attention_backend=("auto",),
            attention_config=({},),
        ),
        **_rows(
            ADAPTERS,
            enable_lora=OFF,
            enable_lora_bias=OFF,
            max_loras=(1,),
            max_lora_rank=(16,),
            max_cpu_loras=(),
            lora_dtype=("auto",),
            lora_extra_vocab_size=(256,),
            long_lora_scaling_factors=(),
            fully_sharded_loras=OFF,
            lora_modules=(),
            prompt_adapters=(),
            default_mm_loras=(),
            enable_prompt_adapter=OFF,
            max_prompt_adapters=(1,),
            max_prompt_adapter_token=(0,),
        ),
        **_rows(
            SPECULATION,
            speculative_config=(),
            speculative_model=(),
            num_speculative_tokens=(),
            num_lookahead_slots=(0,),
            speculative_model_quantization=(),
            speculative_draft_tensor_parallel_size=(),
            speculative_max_model_len=(),
            speculative_disable_by_batch_size=(),
            speculative_disable_mqa_scorer=EITHER,
            ngram_prompt_lookup_max=(),
            ngram_prompt_lookup_min=(),
            spec_decoding_acceptance_method=("rejection_sampler",),
            typical_acceptance_sampler_posterior_threshold=(),
            typical_acceptance_sampler_posterior_alpha=(),
            disable_logprobs_during_spec_decoding=EITHER,
        ),
        **_rows(
            MULTIMODAL,
            limit_mm_per_prompt=({},),
            enable_mm_embeds=OFF,
            media_io_kwargs=({},),
            mm_processor_kwargs=({},),
            mm_processor_cache_gb=(0, 4),
            mm_processor_cache_type=("lru",),
            mm_shm_cache_max_object_size_mb=(128,),
            mm_encoder_tp_mode=("weights",),
            mm_encoder_attn_backend=(),
            interleave_mm_strings=OFF,
            skip_mm_profiling=EITHER,
            video_pruning_rate=(0,),
            disable_mm_preprocessor_cache=EITHER,
            disable_chunked_mm_input=EITHER,
            image_input_type=(),
            image_token_id=(),
            image_input_shape=(),
            image_feature_size=(),
            image_processor=(),
            image_processor_revision=(),
            disable_image_processor=EITHER,
            allowed_local_media_path=("",),
            allowed_media_domains=(),
        ),
        **_rows(
            STRUCTURED,
            guided_decoding_backend=("auto", "xgrammar"),
            structured_outputs_config=({},),
            logits_processor_pattern=(),
            logits_processors=(),
        ),
        **_rows(REASONING, reasoning_parser=("",), reasoning_parser_plugin=("",), enable_reasoning=OFF),
        **_rows(TOOLS, enable_auto_tool_choice=OFF, tool_call_parser=(), tool_parser_plugin=("",), tool_server=()),
        **_rows(
            "only generation is supported so far",
            task=("auto", "generate"),
            runner=("auto", "generate"),
            convert=("auto", "none"),
            pooler_config=(),
            override_pooler_config=(),
            enable_prompt_embeds=OFF,
        ),
        **_rows(
            "not supported: preempted requests are recomputed, never swapped out; kv_cache_memory_bytes gives the "
            "cache more room",
            swap_space=(0, 4),
            preemption_mode=("recompute",),
        ),
        **_rows(
            "not supported yet: weights and cache must fit the device's memory",
            kv_offloading_size=(),
            kv_offloading_backend=("native",),
        ),
        **_rows(
            "not supported yet: an engine keeps its cache to itself",
            kv_transfer_config=(),
            kv_events_config=(),
            ec_transfer_config=(),
            kv_sharing_fast_prefill=OFF,
        ),
        **_rows(
            FAIRNESS,
            max_num_partial_prefills=(1,),
            max_long_partial_prefills=(1,),
            long_prefill_token_threshold=(0,),
            scheduler_delay_factor=(0,),
        ),
        **_rows("retired: there is one block manager", use_v2_block_manager=EITHER),
        **_rows("not supported yet: all layers share one cache layout", disable_hybrid_kv_cache_manager=EITHER),
        **_rows("retired: a step computes one token of each running request", num_scheduler_steps=(1,)),
        **_rows("retired: every step streams", multi_step_stream_outputs=EITHER),
        **_rows("retired: outputs never hold up the next step", disable_async_output_proc=EITHER),
        **_rows("not supported yet: the sliding window is the model's own", disable_sliding_window=OFF),
        **_rows(
            "not supported yet: models have attention layers only",
            mamba_cache_dtype=("auto",),
            mamba_ssm_cache_dtype=("auto",),
            mamba_block_size=(),
        ),
        **_rows("not supported yet: log-probabilities are raw_logprobs", logprobs_mode=("raw_logprobs",)),
        **_rows("not supported: the fast tokenizer is the only kind", tokenizer_mode=("auto", "hf")),
        **_rows(
            "retired: tokenising runs in the frontend",
            tokenizer_pool_size=(0,),
            tokenizer_pool_type=("ray",),
            tokenizer_pool_extra_config=(),
        ),
        **_rows(
            "not supported: set HF_TOKEN in the environment, so that no token stands in a command line", hf_token=()
        ),
        **_rows(
            "not supported: a model's config and code come from the model's own folder and revision",
            hf_config_path=(),
            code_revision=(),
            config_format=("auto", "hf"),
            model_impl=("auto",),
        ),
        **_rows(
            "not supported: the loader needs no settings",
            model_loader_extra_config=({},),
            ignore_patterns=(["original/**/*"], "original/**/*", []),
            pt_load_map_location=("cpu",),
        ),
        **_rows(
            EXTENSION,
            io_processor_plugin=(),
            additional_config=({},),
            override_neuron_config=({},),
        ),
        **_rows(
            OBSERVED,
            otlp_traces_endpoint=(),
            collect_detailed_traces=(),
            show_hidden_metrics_for_version=(),
            kv_cache_metrics=OFF,
            kv_cache_metrics_sample=(0.01,),
            enable_layerwise_nvtx_tracing=OFF,
            enable_mfu_metrics=OFF,
            aggregate_engine_logging=OFF,
        ),
        **_rows("not supported: the engine never logs requests", enable_log_requests=OFF, disable_log_requests=(True,)),
        **_rows("not supported: the server logs no accesses", disable_uvicorn_access_log=EITHER),
        **_rows(
            "not supported: HEADRACE_LOG_LEVEL in the environment sets how much is logged", uvicorn_log_level=("info",)
        ),
        **_rows("not supported: the server runs no code of others; put a proxy before it", middleware=()),
        **_rows(SERVER, disable_frontend_multiprocessing=OFF, max_log_len=()),
    }
)

RENAMED: Mapping[str, str] = types.MappingProxyType(
    {
        "kv_cache_memory": "kv_cache_memory_bytes",
        "rope_scaling": "hf_overrides",
        "rope_theta": "hf_overrides",
    }
)
"""Retired names and the options that took over."""

SHORT_NAMES: Mapping[str, str] = types.MappingProxyType(
    {
        "-tp": "tensor_parallel_size",
        "-pp": "pipeline_parallel_size",
        "-dp": "data_parallel_size",
        "-q": "quantization",
    }
)


def rename(name: str, value: Any) -> tuple[str, Any, str]:
    """The successor of a retired name, the value in its form, and a sentence for the user. Raises ValueError."""
    successor = RENAMED[name]
    if successor == "hf_overrides":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ValueError(f"{name}={value}: it must be JSON ({error})") from None
        value = None if value is None else {name: value}
        return successor, value, f"{name} is retired; use hf_overrides={json.dumps({name: '...'})}"
    return successor, value, f"{name} is now called {successor}"


def check_foreign(name: str, value: Any, spelled: str) -> list[str]:
    """The problem with giving a foreign option this value, if any."""
    foreign = FOREIGN[name]
    if value is None or any(_same(value, neutral) for neutral in foreign.neutral):
        return []
    return [f"{spelled}={value} is refused: {foreign.reason}"]


def _same(value: Any, neutral: Any) -> bool:
    """Equal, also when the value is text from a command line or a config file."""
    if isinstance(value, bool) != isinstance(neutral, bool) and not isinstance(value, str):
        return False
    if isinstance(value, str) and not isinstance(neutral, str):
        return value.lower() == json.dumps(neutral) or value.lower() == "none"
    return bool(value == neutral)
