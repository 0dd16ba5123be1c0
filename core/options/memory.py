"""How the device's memory is divided: a pure function from plan and reading to the number of KV blocks."""

from __future__ import annotations

from headrace.core.options.engine_options import Options
from headrace.core.options.plan import Facts, MemoryReading, Plan
from headrace.ipc.failure import OptionError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "int8": 1}
SCALE_BYTES = 4
"""Of the float32 that goes with each row of a cache in fp8 or int8."""
CPU_CACHE_BYTES = 4 << 30
"""What the cache takes of a CPU's memory unless told otherwise: it is shared with everything else there."""
NULL_BLOCKS = 1
"""Block 0 never holds a token (see blocks.py)."""


def block_bytes(plan: Plan) -> int:
    """Bytes of one KV block over all layers."""
    model, element_bytes = plan.model, DTYPE_BYTES[plan.kv_cache_dtype]
    scale_bytes = SCALE_BYTES * model.kv_rows_per_token if element_bytes == 1 else 0
    return plan.block_size * (model.kv_elements_per_token * element_bytes + scale_bytes)


def blocks_for(num_tokens: int, plan: Plan) -> int:
    """Blocks that hold one request of this many tokens."""
    return -(-num_tokens // plan.block_size)


def fit_cache(plan: Plan, reading: MemoryReading) -> Facts:
    """How many blocks there are, and the longest request they can hold.

    The number is the one asked for (num_gpu_blocks_override, then kv_cache_memory_bytes), else what fits the share
    of memory, but never more than max_num_seqs requests of max_model_len could use. A max_model_len that one
    request alone could not reach is shortened with a warning, or refused when the user named it.

    Raises OptionError with the numbers when even one block does not fit, or the named max_model_len does not.
    """
    options, size = plan.options, block_bytes(plan)
    usable = max(0, reading.room_bytes(options.gpu_memory_utilization))
    if options.num_gpu_blocks_override is not None:
        num_blocks, source = options.num_gpu_blocks_override, "num_gpu_blocks_override"
    elif options.kv_cache_memory_bytes is not None:
        num_blocks, source = options.kv_cache_memory_bytes // size, "kv_cache_memory_bytes"
    else:
        num_blocks, source = min(usable // size, _useful_blocks(plan, reading)), "gpu_memory_utilization"
    available = max(0, reading.available_bytes - reading.step_bytes)
    if source != "gpu_memory_utilization" and num_blocks * size > available:
        raise OptionError(
            f"{source} asks for a KV cache of {num_blocks * size:,} bytes, but {available:,} are free once the "
            f"weights and a step's activations are in memory; ask for at most {_most(source, available, size)}"
        )
    holds = (num_blocks - NULL_BLOCKS) * plan.block_size
    if holds < 1:
        raise OptionError(
            f"no room for a KV cache: {_room(source, num_blocks * size, options)}, and the least is "
            f"{(1 + NULL_BLOCKS) * size:,} bytes; {_remedy(source)}"
        )
    warnings: tuple[str, ...] = ()
    max_model_len = plan.max_model_len
    if max_model_len > holds:
        needed = (blocks_for(max_model_len, plan) + NULL_BLOCKS) * size
        text = (
            f"one request of max_model_len={max_model_len} tokens needs {needed:,} bytes of KV cache, and "
            f"{_room(source, num_blocks * size, options)}, enough for {holds} tokens"
        )
        if plan.max_model_len_is_fixed:
            raise OptionError(f"{text}; lower max_model_len to {holds}, or {_remedy(source)}")
        warnings = (f"max_model_len is shortened to {holds}: {text}; to have more, {_remedy(source)}",)
        max_model_len = holds
    return Facts(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        memory=reading,
        kv_cache_bytes=num_blocks * size,
        warnings=warnings,
    )


def ledger(facts: Facts, plan: Plan) -> str:
    """Where the bytes go, as a small table."""
    tokens = (facts.num_blocks - NULL_BLOCKS) * plan.block_size
    reading = facts.memory
    rows = [
        ("weights", reading.weights_bytes, plan.model.name),
        ("activations", reading.activation_bytes, f"peak of a step of {plan.max_num_batched_tokens} tokens"),
        (
            "KV cache",
            facts.kv_cache_bytes,
            f"{facts.num_blocks} blocks of {plan.block_size} tokens in {plan.kv_cache_dtype}: {tokens} tokens, "
            f"{tokens / facts.max_model_len:.1f} requests of {facts.max_model_len}",
        ),
    ]
    if reading.device != "cpu":
        rows.insert(
            2, ("row state", reading.state_bytes, f"{plan.max_num_seqs} rows' block tables and counts of tokens")
        )
        rows.insert(3, ("graphs", reading.graph_bytes, "of decode steps, captured while requests are served"))
    total = sum(count for _, count, _ in rows)
    rows.append(("total", total, f"of {_human(reading.total_bytes)} on the {reading.device}"))
    return "\n".join(f"{name:<12}{_human(count):>12}  {what}" for name, count, what in rows)


def _useful_blocks(plan: Plan, reading: MemoryReading) -> int:
    """More could never be in use at once; on a CPU the default is modest too, but holds one longest request."""
    one = blocks_for(plan.max_model_len, plan)
    useful = plan.max_num_seqs * one + NULL_BLOCKS
    if reading.device == "cpu":
        return min(useful, max(CPU_CACHE_BYTES // block_bytes(plan), one + NULL_BLOCKS))
    return useful


def _most(source: str, available: int, size: int) -> str:
    return f"{available // size} blocks" if source == "num_gpu_blocks_override" else f"{available:,} bytes"


def _room(source: str, num_bytes: int, options: Options) -> str:
    if source == "gpu_memory_utilization":
        return f"the memory left has room for {num_bytes:,}"
    if source == "kv_cache_memory_bytes":  # as it was given: whole blocks may be fewer bytes, or none
        return f"{source} gives it {options.kv_cache_memory_bytes:,}"
    return f"{source} gives it {num_bytes:,}"


def _remedy(source: str) -> str:
    if source == "gpu_memory_utilization":
        return "raise gpu_memory_utilization, use a smaller dtype or free memory"
    return f"raise {source}"


def _human(count: int) -> str:
    """Bytes with a binary unit, four digits or so."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
