"""Decisions as plain data: the `Plan`, made from options and the model's description, and `Facts` found at run time."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.options.adapters import AdapterLimits
from headrace.core.options.cache_groups import ONE_GROUP, CacheGroup
from headrace.core.options.engine_options import Options
from headrace.core.options.reasoning import Reasoning
from headrace.core.options.speculation import CPU_STEP_TOKENS, FORCED_CPU_STEP_TOKENS, GPU_STEP_TOKENS, Speculation
from headrace.core.options.structured_outputs import StructuredOutputs
from headrace.ipc.messages import Pooling
from headrace.ipc.row_inputs import PROMPT_EMBEDS


class StepWork(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks together compute for a token: estimates from the model's config."""

    token_flops: float
    """Of the layers' matrices, with the experts that one token chooses."""
    output_flops: float
    """Of the head, for each token that is sampled."""
    attention: tuple[AttentionWork, ...]
    """Of the layers by how far back they attend."""
    expert_share: float = 0.0
    """The part of the weights that experts are."""
    chosen_share: float = 1.0
    """The part of the experts that compute one token."""


class AttentionWork(msgspec.Struct, frozen=True, kw_only=True):
    """Of all layers with one window."""

    window: int | None
    """The most tokens that a token attends to; None: all before it."""
    pair_flops: float
    """For each pair of a token and one that it attends to."""
    cached_elements: int
    """That each token adds to the cache."""


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The core's description of a model. The executor reads it from the checkpoint before any weights."""

    name: str
    """The name that the user gave."""
    architecture: str
    """As in the config's `architectures`, for example LlamaForCausalLM."""
    checkpoint_dtype: str
    """float32, float16, bfloat16, or a quantised type's name."""
    weights: str = ""
    """Identity of the weights (executor/checkpoints/identity.py): equal for equal weights. Empty if unknown; then the
    name is used."""
    max_model_len: int
    """Length that the model was trained for, including rope scaling."""
    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    kv_elements_per_token: int
    """Elements of keys and values per token in a block, over all layers of a cache group (all layers of the model if
    there is only one group)."""
    kv_rows_per_token: int
    """Number of vectors of head_dim elements that these form. A quantised cache has a scale for each. 0 if the cache
    uses the checkpoint's scales, which are per layer."""
    kv_entry_elements: int = 0
    """Elements per token of what kernels address as one entry of a block, where a block may also hold a part of a
    sequence's state: it is then a whole number of entries. 0: no layer caches tokens."""
    state_page_bytes: int = 0
    """Size of a block that the state of one sequence needs at least, so that it fits into the pages of its cache group;
    0: no layer keeps a state."""
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, Any]
    """Values of generation_config.json, under SamplingParams' names."""
    cache_groups: tuple[CacheGroup, ...] = ONE_GROUP
    """The layers, grouped by the tokens that they keep; see cache_groups.py."""
    device_bytes: int = 0
    """Memory of the GPU that runs the model, or of the smallest of several; 0 on a CPU."""
    stored_as: str = ""
    """Quantised format whose matrices stay packed whatever `dtype` is asked for, as in a checkpoint's
    quantization_config. Empty for floats, and for GGUF files, which an explicit `dtype` dequantises."""
    quantised_as_loaded: bool = False
    """Float weights are quantised to `stored_as` while they are loaded."""
    rounds_inputs: bool = False
    """The format requires inputs of matrices to be rounded to 8 bits."""
    prompt_logprobs_cost: float = 0.0
    """Additional cost, in prompt tokens, of a prompt token whose log-probabilities are reported."""
    checks_sampling: bool = False
    """The user's logits processors check each request's parameters before it is admitted (CheckSampling)."""
    row_inputs: tuple[str, ...] = ()
    """The kinds of row inputs that the ranks can compute (ipc/row_inputs.py); `why_no_row_inputs` says why none."""
    why_no_row_inputs: str = ""
    input_width: int = 0
    """The number of values that take the place of a token's embedding."""
    num_rank_drafts: int = 0
    """Most tokens that a model in the rank drafts for each row after a step; 0: there is no such model."""
    generates: bool = True
    """Whether requests may generate tokens. If not, the model has no head in memory."""
    pooling: Pooling | None = None
    """How requests for vectors are carried out; None: there can be none."""
    whole_prompts: bool = False
    """A prompt is computed in one step, since its tokens attend to the tokens after them."""
    why_no_prefix_caching: str = ""
    """Why a token's key may depend on more than the tokens before it, so that blocks cannot be shared; else empty."""
    why_no_adapters: str = "its executor reads none"
    """Why requests can have no adapters; empty if they can."""
    step_work: StepWork | None = None
    """None where it is not known, as of models that run through transformers' code."""


class Decision(msgspec.Struct, frozen=True):
    name: str
    value: str
    reason: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Every value that the engine runs with. `decisions` has the reason for each value that was decided."""

    options: Options
    model: ModelDescription
    served_model_names: tuple[str, ...]
    dtype: str
    """float32, float16 or bfloat16"""
    max_model_len: int
    max_model_len_is_fixed: bool
    """The user set max_model_len, so it is an error if it does not fit into memory; else it would be shortened."""
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int
    enable_prefix_caching: bool
    seed: int
    decisions: tuple[Decision, ...]
    speculation: Speculation | None = None
    """How requests get draft tokens. None: without drafts."""
    adapters: AdapterLimits | None = None
    """How requests may have adapters. None: they may not."""
    attachments: tuple[str, ...] = ()
    """Kinds of attachments that steps may carry; a rank that does not read one refuses the plan."""
    structured_outputs: StructuredOutputs = StructuredOutputs()
    """How grammars of requests are applied."""
    reasoning: Reasoning = Reasoning()
    """Format and markers of answers' reasoning."""
    most_new_tokens: int | None = None
    """Limit of any output over HTTP, in addition to the request's max_tokens. None: no further limit."""
    weights_stay_packed: bool = False
    """Quantised weights are kept as the checkpoint stores them, and computed in that form if the device can."""
    weight_bits: int | None = None
    """8 or 4: float weights are quantised while they are loaded."""
    weight_groups: tuple[int, ...] = ()
    """Then: sizes of groups of consecutive weights that share a scale. A matrix has the first that divides its rows."""
    kv_cache_dtype: str = "bfloat16"
    """float32, float16, bfloat16, fp8_e4m3, fp8_e5m2 or int8; the last three with a float32 scale for each row.

    If packed weights are not computed in packed form and the user set no type, keys and values have `dtype` instead.
    """

    @property
    def row_inputs(self) -> tuple[str, ...]:
        """The kinds of row inputs that requests may have."""
        return tuple(
            kind for kind in self.model.row_inputs if kind != PROMPT_EMBEDS or self.options.enable_prompt_embeds
        )

    def model_version(self, weights: str) -> str:
        """Identifies weights and the form in which they and the cache are stored. Engines with equal versions produce
        the same tokens."""
        form = "packed" if self.weights_stay_packed else f"{self.weight_bits} bits" if self.weight_bits else "whole"
        form = f"{self.model.stored_as} {form}".strip()
        return f"{weights or self.model.name} {form} {self.dtype} {self.kv_cache_dtype}"

    @property
    def most_drafts(self) -> int:
        """The most draft tokens of a row in a step; without speculation, those that grammars force."""
        if self.speculation is not None:
            return max(self.speculation.num_speculative_tokens, self.model.num_rank_drafts)
        return self.model.num_rank_drafts or self.most_forced_drafts

    @property
    def most_forced_drafts(self) -> int:
        """The most draft tokens of a step that grammars force, without speculation."""
        return min(CPU_STEP_TOKENS if self.model.device_bytes else FORCED_CPU_STEP_TOKENS, self.max_logits)

    @property
    def max_logits(self) -> int:
        """The most rows of logits that a step samples from: one per request and one per draft token."""
        if self.speculation is None and not self.model.num_rank_drafts:
            return self.max_num_seqs
        most = GPU_STEP_TOKENS if self.model.device_bytes else CPU_STEP_TOKENS
        if self.speculation is not None:
            most = self.speculation.most_step_tokens
        return min(max(self.max_num_seqs, most), self.max_num_batched_tokens)


class MemoryReading(msgspec.Struct, frozen=True, kw_only=True):
    """The device's memory after the weights are loaded, in bytes."""

    total_bytes: int
    available_bytes: int
    """Memory that this process can still allocate; the weights are already in memory."""
    weights_bytes: int
    activation_bytes: int
    """Peak use of a step of max_num_batched_tokens, measured or estimated; not allocated yet."""
    device: str = "cpu"
    """cpu, or a GPU's name."""
    graph_bytes: int = 0
    """Memory of all decode graphs; not allocated yet."""
    state_bytes: int = 0
    """Memory of a GPU's state of each row besides the cache; not allocated yet."""

    @property
    def step_bytes(self) -> int:
        """Memory that steps need besides weights and cache."""
        return self.activation_bytes + self.graph_bytes + self.state_bytes

    def room_bytes(self, share: float) -> int:
        """Memory for a cache if the engine may use `share` of the total, within what is free. Negative if there is
        none."""
        within_share = int(share * self.total_bytes) - self.weights_bytes
        return min(within_share, self.available_bytes) - self.step_bytes

    @staticmethod
    def tightest(readings: list[MemoryReading], share: float) -> MemoryReading:
        """The reading with the least room, among ranks that each have their own memory: all get equally many blocks."""
        return min(readings, key=lambda reading: reading.room_bytes(share))


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Values found at run time, after the plan is made."""

    num_blocks: int
    """Number of blocks including block 0, which never holds a token."""
    max_model_len: int
    memory: MemoryReading
    kv_cache_bytes: int
    startup_s: dict[str, float] = {}
    """Duration of each phase of the start; they sum to the whole."""
    ranks_startup_s: tuple[dict[str, float], ...] = ()
    """The same for each worker process, from its own start until it was ready."""
    warnings: tuple[str, ...] = ()
    """Sentences for the user about defaults that could not be kept."""
