"""Makes the `Plan` from the options and the model's description, with a reason for each decision."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.core.options.adapters import adapters_of
from headrace.core.options.engine_options import Options
from headrace.core.options.plan import Decision, ModelDescription, Plan
from headrace.core.options.quantization_names import BY_DEVICE, TO_FORMS, check_name
from headrace.core.options.reasoning import reasoning_of
from headrace.core.options.speculation import CPU_STEP_TOKENS, Speculation, speculation_of
from headrace.core.options.structured_outputs import WHY, structured_outputs_of
from headrace.ipc.failure import OptionError
from headrace.ipc.messages import Sampling
from headrace.ipc.ranges import model_defaults
from headrace.ipc.row_inputs import PROMPT_EMBEDS

DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_MAX_NUM_SEQS = 256
LARGE_GPU_BYTES = 70 << 30
"""GPUs with at least this memory get the defaults of vLLM's server on an H100: smaller steps leave them partly idle."""
LARGE_GPU_MAX_NUM_BATCHED_TOKENS = 8192
LARGE_GPU_MAX_NUM_SEQS = 1024
_FLOAT_DTYPES = ("float32", "float16", "bfloat16")
_DTYPE_NAMES = {"half": "float16", "float": "float32"}
FP8_CACHES = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""Values of `kv_cache_dtype`."""
_GROUP_SIZES = (32, 64, 128)

TOKEN_IDS = ("stop_token_ids", "eos_token_id")
"""Keys of `override_generation_config`: stop_token_ids are added to a request's own, and eos_token_id replaces the
model's end-of-sequence tokens."""
MOST_NEW_TOKENS = "max_new_tokens"
"""Key of `override_generation_config`, and of a generation_config.json that `generation_config` names: the default of
`max_tokens` and, over HTTP, the most tokens of any output, as in vLLM."""


def resolve(options: Options, model: ModelDescription, draw_seed: Callable[[], int] | None = None) -> Plan:
    """Makes the plan. A pure function except for `draw_seed`, which is called only if options.seed is None.

    Raises OptionError, with the numbers, if options contradict each other or the model.
    """
    decisions: list[Decision] = []

    def decide(name: str, value: Any, reason: str) -> Any:
        decisions.append(Decision(name=name, value=str(value), reason=reason))
        return value

    if options.enable_prompt_embeds and PROMPT_EMBEDS not in model.row_inputs:
        why = model.why_no_row_inputs or "its executor reads none"
        raise OptionError(f"enable_prompt_embeds: {model.name} takes no embeddings in the place of tokens: {why}")
    dtype = decide("dtype", *_dtype(options, model))
    adapters = adapters_of(options, dtype, in_device_memory=bool(model.device_bytes))
    if adapters is not None and model.why_no_adapters:
        raise OptionError(f"enable_lora: {model.name} takes no adapters: {model.why_no_adapters}")
    max_model_len = decide("max_model_len", *_max_model_len(options, model))
    tokens, tokens_reason = _max_num_batched_tokens(options, model, max_model_len)
    max_num_seqs = decide("max_num_seqs", *_max_num_seqs(options, model, tokens))
    decide("max_num_batched_tokens", tokens, tokens_reason)
    names = options.served_model_name or (model.name,)
    weight_bits, weight_groups, bits_reason = _weight_bits(options, model)
    if options.quantization is not None:
        decide("quantization", options.quantization, bits_reason)
    packed = bool(model.stored_as) or (options.dtype == "auto" and model.checkpoint_dtype not in _FLOAT_DTYPES)
    kv_cache_dtype, kv_reason = _kv_cache_dtype(options, dtype, packed, model.rounds_inputs)
    if kv_cache_dtype != dtype or options.kv_cache_dtype != "auto":
        with_scales = "" if model.kv_rows_per_token else ", with the checkpoint's scales of each layer"
        decide("kv_cache_dtype", kv_cache_dtype, kv_reason + with_scales)
    decide("served_model_name", ", ".join(names), _asked(bool(options.served_model_name), "the model's own name"))
    if options.seed is None:
        seed = decide("seed", (draw_seed or _draw_seed)(), "drawn at random, as asked; give it to repeat this run")
    else:
        seed = options.seed
    max_logprobs = options.max_logprobs
    if max_logprobs == -1 or max_logprobs > model.vocab_size:
        max_logprobs = decide("max_logprobs", model.vocab_size, "the whole vocabulary")
    defaults, eos_token_ids, defaults_reason = _generation_defaults(options, model)
    if defaults:
        decide("sampling defaults", msgspec.json.encode(defaults).decode(), defaults_reason)
    if eos_token_ids != model.eos_token_ids:
        decide("eos_token_id", ", ".join(map(str, eos_token_ids)) or "none", defaults_reason)
    speculation = _speculation(options, model, max_num_seqs)
    if speculation is not None:
        decide("speculative_config", *speculation.described)
    structured_outputs = structured_outputs_of(options.structured_outputs_config)
    asked = options.structured_outputs_config.get("backend") or "auto"
    libraries = ", then ".join(structured_outputs.backends)
    decide("structured_outputs_config", libraries, WHY.get(asked, f"for backend {asked}"))
    prefix_caching = options.enable_prefix_caching
    if prefix_caching and model.why_no_prefix_caching:
        prefix_caching = decide("enable_prefix_caching", False, model.why_no_prefix_caching)
    return Plan(
        options=options,
        model=msgspec.structs.replace(model, generation_defaults=defaults, eos_token_ids=eos_token_ids),
        most_new_tokens=_most_new_tokens(options, model),
        served_model_names=names,
        dtype=dtype,
        weights_stay_packed=packed,
        weight_bits=weight_bits,
        weight_groups=weight_groups,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        max_model_len_is_fixed=options.max_model_len is not None,
        block_size=options.block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens,
        max_logprobs=max_logprobs,
        speculation=speculation,
        adapters=adapters,
        structured_outputs=structured_outputs,
        reasoning=reasoning_of(options.reasoning_config, structured_outputs.reasoning_parser),
        enable_prefix_caching=prefix_caching,
        seed=seed,
        decisions=tuple(decisions),
    )


def _speculation(options: Options, model: ModelDescription, max_num_seqs: int) -> Speculation | None:
    found = speculation_of(options.speculative_config, on_gpu=model.device_bytes > 0)
    if found is None:
        return None
    most = min(found.most_step_tokens, max(max_num_seqs, CPU_STEP_TOKENS))  # the limit that memory is measured for
    return msgspec.structs.replace(found, most_step_tokens=most)


def _dtype(options: Options, model: ModelDescription) -> tuple[str, str]:
    if options.dtype != "auto":
        asked = _DTYPE_NAMES.get(options.dtype, options.dtype)
        if model.checkpoint_dtype in _FLOAT_DTYPES:
            return asked, "asked for"
        return asked, f"asked for; weights of {model.checkpoint_dtype} are dequantised to it"
    if model.checkpoint_dtype in ("float16", "bfloat16"):
        return model.checkpoint_dtype, "the checkpoint's own"
    if model.checkpoint_dtype == "float32":
        return "bfloat16", "half the memory of the checkpoint's float32; ask for float32 to keep it"
    return "bfloat16", f"activations of a checkpoint of {model.checkpoint_dtype}; weights stay packed"


def _kv_cache_dtype(options: Options, dtype: str, packed: bool, rounds_inputs: bool) -> tuple[str, str]:
    if options.calculate_kv_scales and options.kv_cache_dtype not in FP8_CACHES:
        raise OptionError(
            f"calculate_kv_scales=True needs an fp8 cache, and kv_cache_dtype is {options.kv_cache_dtype}; set "
            "kv_cache_dtype=fp8, or leave it out"
        )
    if options.kv_cache_dtype != "auto":
        return options.named_kv_cache_dtype, "asked for"
    if packed and dtype == "bfloat16" and not rounds_inputs:
        # 8-bit inputs would err more than bfloat16, whose attention is faster.
        return "float16", "finer than bfloat16, as packed weights are; bfloat16 where the model runs op by op"
    return dtype, "dtype"


def check_stored_format(options: Options) -> None:
    """Raises OptionError for an unknown `quantization`, or for one that a local checkpoint is not stored in.

    Runs before anything is imported, downloaded or compiled, so it checks only what it can read without a framework.
    """
    asked, folder = options.quantization, Path(options.model)
    check_name(asked)
    if asked in (None, "gguf", *BY_DEVICE):
        return
    is_gguf = not options.model or folder.suffix.lower() == ".gguf"
    config, beside = folder / "config.json", folder / "hf_quant_config.json"
    if not is_gguf and (options.hf_overrides or beside.is_file() or not config.is_file()):
        return
    try:
        stored = {} if is_gguf else msgspec.json.decode(config.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return  # loading the checkpoint will report the problem
    is_stored_so = "quantization_config" in stored or "compression_config" in stored
    if not is_stored_so and (is_gguf or asked not in TO_FORMS):
        raise OptionError(
            f"quantization={asked} asks for a checkpoint that is stored so, and {options.model or 'the demo model'} "
            + ("is a GGUF file" if is_gguf else "has no quantization_config")
            + "; leave it out"
            + ("" if is_gguf else ", or quantise float weights as they are loaded with quantization=int8 or int4")
        )


def _weight_bits(options: Options, model: ModelDescription) -> tuple[int | None, tuple[int, ...], str]:
    """The bits to which float weights are quantised while they are loaded, or None; in which groups; and the reason."""
    asked, group = options.quantization, options.quantization_group_size
    if group not in (None, *_GROUP_SIZES):
        raise OptionError(f"quantization_group_size={group} is not supported; allowed: 32, 64 and 128")
    bits, reason = _bits_of_form(options, model)
    if bits is None:
        return None, (), reason
    rounds_inputs = asked == "int8" and model.whole_prompts
    # Half as many sums to scale, which is what products of rounded inputs take most of their time for; all-MiniLM-L6's
    # vectors have cosines of at least 0.9991 with those of float32, and of 0.9993 with groups of 32.
    groups = (group,) if group is not None else (64, 32) if rounds_inputs else (32,)
    inputs = ", and each token's inputs too" if rounds_inputs else ""
    return bits, groups, f"{reason} in groups of {groups[0]}{inputs}"


def _bits_of_form(options: Options, model: ModelDescription) -> tuple[int | None, str]:
    """As `_weight_bits`, without the groups."""
    asked, group = options.quantization, options.quantization_group_size
    stored = model.stored_as or model.checkpoint_dtype
    if asked not in ("int8", "int4"):
        if group is not None:
            raise OptionError(
                f"quantization_group_size={group} says how int8 and int4 quantise; ask for quantization=int8 or int4, "
                "or leave it out"
            )
        if asked == "gguf" and stored in _FLOAT_DTYPES:
            raise OptionError(
                f"quantization=gguf asks for a quantised GGUF file, and the weights of {model.name} are {stored}; "
                "leave it out, or quantise them as they are loaded with quantization=int8 or int4"
            )
        if model.stored_as and asked is not None:  # the format was checked when the checkpoint was found
            if model.quantised_as_loaded:
                return None, f"asked for; the {model.checkpoint_dtype} weights become so as they are loaded"
            return None, f"the checkpoint is computed as it is stored: {stored}"
        if asked not in (None, "gguf", "fp8"):
            raise OptionError(
                f"quantization={asked} asks for a checkpoint that is stored so, and the weights of {model.name} are "
                f"{stored}; leave it out, or quantise them as they are loaded with quantization=int8 or int4"
            )
        if asked != "fp8":
            return None, "the checkpoint is computed as it is stored"
    if stored not in _FLOAT_DTYPES:
        raise OptionError(
            f"quantization={asked} quantises float weights as they are loaded, and those of {model.name} are "
            f"quantised already ({stored}); leave it out"
        )
    if asked == "fp8":
        return None, f"asked for; the {stored} weights of the layers' matrices, with a scale for each row"
    return (8 if asked == "int8" else 4), f"asked for; the {stored} weights"


def _max_model_len(options: Options, model: ModelDescription) -> tuple[int, str]:
    asked = options.max_model_len
    if asked is None:
        return model.max_model_len, "the longest context that the model takes"
    if asked > model.max_model_len:
        raise OptionError(
            f"max_model_len={asked} is more than the {model.max_model_len} tokens that {model.name} takes "
            f"here; ask for at most {model.max_model_len}, or raise the model's own limit with "
            f'hf_overrides={{"max_position_embeddings": {asked}}} and expect worse answers beyond it'
        )
    return asked, f"asked for; the model takes {model.max_model_len}"


def _max_num_batched_tokens(options: Options, model: ModelDescription, max_model_len: int) -> tuple[int, str]:
    """The token budget of a step, and the reason. Without chunked prefill it must hold the longest prompt."""
    asked, seqs = options.max_num_batched_tokens, options.max_num_seqs
    whole = model.whole_prompts or not options.enable_chunked_prefill
    if asked is None:
        default, reason = _default(model, DEFAULT_MAX_NUM_BATCHED_TOKENS, LARGE_GPU_MAX_NUM_BATCHED_TOKENS)
        tokens = max(default, seqs or 0, max_model_len if whole else 0)
        if tokens == default:
            return tokens, reason
        return tokens, "one token for each running request" if tokens == seqs else "the longest prompt in one piece"
    if seqs is not None and asked < seqs:
        raise OptionError(
            f"max_num_batched_tokens={asked} is less than max_num_seqs={seqs}, but each running request takes a "
            f"token of every step; raise the one to {seqs} or lower the other to {asked}"
        )
    if whole and asked < max_model_len:
        why, or_else = "with enable_chunked_prefill off", "raise the one, lower the other, or leave chunked prefill on"
        if model.whole_prompts:
            why, or_else = f"as tokens of {model.name} attend to those after them", "raise the one or lower the other"
        raise OptionError(
            f"{why} a prompt is computed in one step, so max_num_batched_tokens={asked} must be at least "
            f"max_model_len, {max_model_len}; {or_else}"
        )
    return asked, "asked for"


def _max_num_seqs(options: Options, model: ModelDescription, tokens: int) -> tuple[int, str]:
    if options.max_num_seqs is not None:
        return options.max_num_seqs, "asked for"
    default, reason = _default(model, DEFAULT_MAX_NUM_SEQS, LARGE_GPU_MAX_NUM_SEQS)
    if tokens < default:
        return tokens, "max_num_batched_tokens: each running request takes a token of every step"
    return default, reason


def _default(model: ModelDescription, default: int, of_large_gpu: int) -> tuple[int, str]:
    if model.device_bytes >= LARGE_GPU_BYTES:
        return of_large_gpu, f"the default of a GPU of {model.device_bytes >> 30} GiB"
    return default, "the default"


def _generation_defaults(options: Options, model: ModelDescription) -> tuple[dict[str, Any], tuple[int, ...], str]:
    """The sampling defaults, the end-of-sequence tokens, and the reason."""
    check_sampling_defaults(options.override_generation_config, model.vocab_size)
    own = {} if options.generation_config == "vllm" else model.generation_defaults
    override = dict(options.override_generation_config)
    if MOST_NEW_TOKENS in override:
        override.setdefault("max_tokens", override.pop(MOST_NEW_TOKENS))
    reason = "override_generation_config" if override else "the model's generation config"
    for name in override.keys() & set(TOKEN_IDS):
        override[name] = list(dict.fromkeys(_listed(override[name])))
    eos_token_ids = override.pop("eos_token_id", model.eos_token_ids)
    return {**own, **override}, tuple(eos_token_ids), reason


def _most_new_tokens(options: Options, model: ModelDescription) -> int | None:
    """The most tokens of any output over HTTP. None: only the request's `max_tokens` limits it."""
    of_folder = model.generation_defaults if options.generation_config not in ("auto", "vllm") else {}
    most: int | None = options.override_generation_config.get(MOST_NEW_TOKENS, of_folder.get("max_tokens"))
    return most


def _asked(was_asked: bool, otherwise: str) -> str:
    return "asked for" if was_asked else otherwise


def _draw_seed() -> int:
    return secrets.randbits(63)


class Capacity(Protocol):
    """The part of an Executor that `steps_in_flight` reads; see executor/placement/base.py."""

    @property
    def max_steps_in_flight(self) -> int: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def async_by_default(self) -> bool: ...


class InFlight(msgspec.Struct, frozen=True):
    depth: int
    """Most steps in flight; with 1, each step is planned after the previous one's outputs are sent."""
    rows_run_ahead: bool
    """A row may be in several steps in flight."""
    reason: str


def steps_in_flight(options: Options, executor: Capacity) -> InFlight:
    """How many steps may be in flight. Raises OptionError if async_scheduling is asked for but the executor cannot
    hold one step more than its pipeline stages."""
    stages, most = executor.num_stages, executor.max_steps_in_flight
    asked = options.async_scheduling
    if asked and most <= stages:
        raise OptionError(
            f"async_scheduling=True cannot apply: {type(executor).__name__} holds {most} steps and needs "
            f"{stages + 1} to plan ahead; leave it out"
        )
    ahead = (executor.async_by_default if asked is None else asked) and most > stages
    why = "asked for" if asked is not None else "the next step is planned while one runs" if ahead else "the default"
    if stages > 1:
        depth = min(most, stages + ahead)
        return InFlight(depth, False, f"{why}; {stages} pipeline stages" + (" and one step waiting" if ahead else ""))
    return InFlight(2 if ahead else 1, True, why)


def check_sampling_defaults(override: Mapping[str, Any], vocab_size: int | None = None) -> None:
    """Raises OptionError for unknown keys of `override_generation_config` and for invalid values."""
    known = model_defaults(Sampling)
    settable = (*known, *TOKEN_IDS, MOST_NEW_TOKENS)
    unknown = [name for name in override if name not in settable]
    if unknown:
        raise OptionError(
            f"override_generation_config cannot set {', '.join(unknown)}; it can set {', '.join(settable)}"
        )
    for name, value in override.items():
        if name in TOKEN_IDS:
            expected = _token_ids_problem(value, vocab_size)
        else:
            _, kind, allowed = known["max_tokens" if name == MOST_NEW_TOKENS else name]
            is_number = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
            whole = "whole " if kind is int else ""
            expected = "" if is_number and value in allowed else f"a {whole}number, {allowed.words()}"
        if expected:
            raise OptionError(f"override_generation_config sets {name}={value!r:.100}: it must be {expected}")


def _token_ids_problem(value: Any, vocab_size: int | None) -> str:
    """What is expected instead of the value; empty if the value is valid."""
    ids = _listed(value)
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in ids):
        return "a token id or a list of them"
    if vocab_size is not None and any(each >= vocab_size for each in ids):
        return f"a token id or a list of them, each below {vocab_size}, the model's vocabulary"
    return ""


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)
