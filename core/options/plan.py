"""What was decided: `Plan` from options and the model's description, `Facts` found at run time. All plain data."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.options.cache_groups import ONE_GROUP, CacheGroup
from headrace.core.options.engine_options import Options
from headrace.core.options.reasoning import Reasoning
from headrace.core.options.speculation import Speculation
from headrace.core.options.structured_outputs import StructuredOutputs


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What the core must know of a model; the executor reads it from the checkpoint before any weight."""

    name: str
    """What the user called it."""
    architecture: str
    """As in the config's `architectures`, for example LlamaForCausalLM."""
    checkpoint_dtype: str
    """float32, float16, bfloat16, or a quantised type's name."""
    weights: str = ""
    """Equal for equal weights (executor/checkpoints/identity.py); empty where nobody knows: the name stands for it."""
    max_model_len: int
    """What it was trained for, after rope scaling."""
    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    kv_elements_per_token: int
    """Keys and values of one token in a block, summed over the layers that have a place in it: where there is one cache
    group, over all."""
    kv_rows_per_token: int
    """Vectors of head_dim elements that those are: a quantised cache keeps a scale for each. 0 where it takes the
    checkpoint's scales, of which there is one for a layer."""
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, Any]
    """From generation_config.json, under SamplingParams' names."""
    cache_groups: tuple[CacheGroup, ...] = ONE_GROUP
    """Its layers by what they keep of a request; see cache_groups.py."""
    device_bytes: int = 0
    """Memory of the GPU that runs it, of the smallest among several; 0 on a CPU."""
    stored_as: str = ""
    """The quantised format whose matrices stay packed whatever `dtype` is asked for, as in a checkpoint's
    quantization_config; empty for floats, and for GGUF files, which `dtype` dequantises."""
    quantised_as_loaded: bool = False
    """Whether floats become `stored_as` as they are read."""
    rounds_inputs: bool = False
    """Whether that format means the inputs of matrices to be rounded to 8 bits."""
    prompt_logprobs_cost: float = 0.0
    """What a prompt token costs whose log-probabilities are reported, more than another, in prompt tokens."""
    checks_sampling: bool = False
    """Whether logits processors of the user's look at each request's parameters before it is taken (CheckSampling)."""
    why_no_prefix_caching: str = ""
    """Why a token's key may depend on more than the tokens before it, so that blocks cannot be shared; else empty."""


class Decision(msgspec.Struct, frozen=True):
    name: str
    value: str
    reason: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Every value the engine runs by. `decisions` gives one reason for each that was not simply asked for."""

    options: Options
    model: ModelDescription
    served_model_names: tuple[str, ...]
    dtype: str
    """float32, float16 or bfloat16"""
    max_model_len: int
    max_model_len_is_fixed: bool
    """The user named it, so not fitting the memory is an error rather than a reason to shorten it."""
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int
    enable_prefix_caching: bool
    seed: int
    decisions: tuple[Decision, ...]
    speculation: Speculation | None = None
    """How requests get draft tokens; None: they get none."""
    structured_outputs: StructuredOutputs = StructuredOutputs()
    """How the grammars of requests are followed."""
    reasoning: Reasoning = Reasoning()
    """How the reasoning of answers is set off."""
    most_new_tokens: int | None = None
    """Of any output over HTTP, whatever its max_tokens; None: no more than that."""
    weights_stay_packed: bool = False
    """Quantised weights are kept, and computed where the device can, as the checkpoint stores them."""
    weight_bits: int | None = None
    """8 or 4: float weights become blocks as they are loaded, in groups of options.quantization_group_size."""
    kv_cache_dtype: str = "bfloat16"
    """float32, float16, bfloat16, fp8_e4m3, fp8_e5m2 or int8; the last three with a float32 scale for each row.

    Where packed weights are not computed packed, and nobody asked for a type, keys and values are of `dtype` instead.
    """

    def model_version(self, weights: str) -> str:
        """Engines of the same give the same tokens: these weights, and the form in which they and the cache are."""
        form = "packed" if self.weights_stay_packed else f"{self.weight_bits} bits" if self.weight_bits else "whole"
        form = f"{self.model.stored_as} {form}".strip()
        return f"{weights or self.model.name} {form} {self.dtype} {self.kv_cache_dtype}"

    @property
    def max_logits(self) -> int:
        """Most rows of logits that a step is sampled from: one for each request, and one for each draft."""
        if self.speculation is None:
            return self.max_num_seqs
        return min(max(self.max_num_seqs, self.speculation.most_step_tokens), self.max_num_batched_tokens)


class MemoryReading(msgspec.Struct, frozen=True, kw_only=True):
    """The device's memory once the weights are loaded, in bytes."""

    total_bytes: int
    available_bytes: int
    """Still free for this process, weights already taken."""
    weights_bytes: int
    activation_bytes: int
    """Peak of a step of max_num_batched_tokens, measured or estimated; not yet taken."""
    device: str = "cpu"
    """cpu, or a GPU's name."""
    graph_bytes: int = 0
    """Of all decode graphs, not yet taken."""
    state_bytes: int = 0
    """Of what a GPU remembers of each row beside the cache, not yet taken."""

    @property
    def step_bytes(self) -> int:
        """What steps need besides weights and cache."""
        return self.activation_bytes + self.graph_bytes + self.state_bytes

    def room_bytes(self, share: float) -> int:
        """For a cache, of this share of all memory, within what is free. Less than 0 where there is none."""
        within_share = int(share * self.total_bytes) - self.weights_bytes
        return min(within_share, self.available_bytes) - self.step_bytes

    @staticmethod
    def tightest(readings: list[MemoryReading], share: float) -> MemoryReading:
        """Of ranks that have a memory each, the reading of the one with the least room: all have as many blocks."""
        return min(readings, key=lambda reading: reading.room_bytes(share))


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Found at run time, after the plan."""

    num_blocks: int
    """Including block 0, which never holds a token."""
    max_model_len: int
    memory: MemoryReading
    kv_cache_bytes: int
    startup_s: dict[str, float] = {}
    """How long each phase of the start took, which sum to the whole."""
    ranks_startup_s: tuple[dict[str, float], ...] = ()
    """The same of each worker process, from its own start until it was ready."""
    warnings: tuple[str, ...] = ()
    """Sentences for the user: what was asked for by default and could not be had."""
