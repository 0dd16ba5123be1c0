"""Division of the device's memory: computes the number of KV blocks from the plan and a memory reading, without I/O.

All cache groups draw from one pool, so a request takes the sum of the blocks that it holds in each group.
"""

from __future__ import annotations

from headrace.core.options.cache_groups import CacheGroup, longest_request, page_bytes, request_blocks
from headrace.core.options.engine_options import Options
from headrace.core.options.plan import Facts, MemoryReading, Plan
from headrace.ipc.failure import OptionError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
SCALE_BYTES = 4
"""Size of the float32 scale of each row in an fp8 or int8 cache."""
CPU_CACHE_BYTES = 4 << 30
"""Default size of the cache on a CPU, whose memory other programs share."""
STEPS_IN_FLIGHT = 2
"""Most steps whose rows hold blocks at once."""
NULL_BLOCKS = 1
"""Block 0 never holds a token (see blocks.py)."""


def block_bytes(plan: Plan) -> int:
    """Size of one KV block, over all layers of a group."""
    model, element_bytes = plan.model, DTYPE_BYTES[plan.kv_cache_dtype]
    scale_bytes = SCALE_BYTES * model.kv_rows_per_token if element_bytes == 1 else 0
    of_tokens = plan.block_size * (model.kv_elements_per_token * element_bytes + scale_bytes)
    entry_bytes = plan.block_size * model.kv_entry_elements * element_bytes
    return page_bytes(of_tokens, model.state_page_bytes, entry_bytes)


def blocks_for(num_tokens: int, plan: Plan) -> int:
    """Blocks that hold one request of this many tokens while its prompt is computed."""
    return request_blocks(plan.model.cache_groups, num_tokens, plan.block_size, plan.max_num_batched_tokens)


def decode_blocks_for(num_tokens: int, plan: Plan) -> int:
    """Blocks that hold one request of this many tokens while it decodes."""
    return request_blocks(plan.model.cache_groups, num_tokens, plan.block_size)


def requests_at_once(num_blocks: int, num_tokens: int, plan: Plan) -> float:
    """How many requests of this many tokens fit into num_blocks (which include the null block) if one computes its
    prompt while the others decode. More prompts at once need no more blocks, as they share the step's tokens."""
    return 1 + (num_blocks - NULL_BLOCKS - blocks_for(num_tokens, plan)) / decode_blocks_for(num_tokens, plan)


def fit_cache(plan: Plan, reading: MemoryReading) -> Facts:
    """Decides the number of blocks and the longest request that they can hold.

    The number is the one that the options ask for (num_gpu_blocks_override, then kv_cache_memory_bytes), else what fits
    into the share of memory, but never more than max_num_seqs requests of max_model_len could use. A max_model_len that
    not even one request can reach is shortened with a warning, or refused if the user named it.

    Raises OptionError with the numbers if a request of one token does not fit, or the named max_model_len does not.
    """
    options, size = plan.options, block_bytes(plan)
    # The engines of one machine have a GPU each, or share the host's memory.
    num_sharing = max(1, options.num_engines_here) if reading.device == "cpu" else 1
    usable = max(0, reading.room_bytes(options.gpu_memory_utilization) // num_sharing)
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
    groups, step_tokens = plan.model.cache_groups, plan.max_num_batched_tokens
    holds = longest_request(groups, num_blocks - NULL_BLOCKS, plan.block_size, step_tokens, plan.max_model_len)
    if holds < 1:
        raise OptionError(
            f"no room for a KV cache: {_room(source, num_blocks * size, options, reading)}, and the least is "
            f"{(blocks_for(1, plan) + NULL_BLOCKS) * size:,} bytes; {_remedy(source, options, reading)}"
        )
    warnings: tuple[str, ...] = ()
    max_model_len = plan.max_model_len
    if max_model_len > holds:
        needed = (blocks_for(max_model_len, plan) + NULL_BLOCKS) * size
        text = (
            f"one request of max_model_len={max_model_len} tokens needs {needed:,} bytes of KV cache, and "
            f"{_room(source, num_blocks * size, options, reading)}, enough for {holds} tokens"
        )
        if plan.max_model_len_is_fixed:
            raise OptionError(f"{text}; lower max_model_len to {holds}, or {_remedy(source, options, reading)}")
        remedy = _remedy(source, options, reading)
        warnings = (f"max_model_len is shortened to {holds}: {text}; to have more, {remedy}",)
        max_model_len = holds
    return Facts(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        memory=reading,
        kv_cache_bytes=num_blocks * size,
        warnings=warnings,
    )


def cache_size(facts: Facts, plan: Plan) -> tuple[int, float]:
    """How many tokens the cache holds, and how many requests of max_model_len."""
    groups = plan.model.cache_groups
    requests = requests_at_once(facts.num_blocks, facts.max_model_len, plan)
    if [group.kind for group in groups] != ["full"]:
        return int(requests * facts.max_model_len), requests
    return (facts.num_blocks - NULL_BLOCKS) * plan.block_size, requests


def ledger(facts: Facts, plan: Plan) -> str:
    """A small table of the memory's use."""
    reading, length = facts.memory, facts.max_model_len
    tokens, requests = cache_size(facts, plan)
    rows = [
        ("weights", reading.weights_bytes, plan.model.name),
        ("activations", reading.activation_bytes, f"peak of a step of {plan.max_num_batched_tokens} tokens"),
        (
            "KV cache",
            facts.kv_cache_bytes,
            f"{facts.num_blocks} blocks of {plan.block_size} tokens in {plan.kv_cache_dtype}: {tokens} tokens, "
            f"{requests:.1f} requests of {length}",
        ),
    ]
    if reading.device != "cpu":
        rows.insert(
            2, ("row state", reading.state_bytes, f"{plan.max_num_seqs} rows' block tables and counts of tokens")
        )
        rows.insert(3, ("graphs", reading.graph_bytes, "of decode steps, captured while requests are served"))
    total = sum(count for _, count, _ in rows)
    rows += _group_rows(facts, plan)
    rows.append(("total", total, f"of {_human(reading.total_bytes)} on the {reading.device}"))
    return "\n".join(f"{name:<12}{_human(count):>12}  {what}" for name, count, what in rows)


def _group_rows(facts: Facts, plan: Plan) -> list[tuple[str, int, str]]:
    """Rows with the cache size that a request of max_model_len needs in each kind of layers; none if all are alike."""
    kinds: dict[str, list[CacheGroup]] = {}
    for group in plan.model.cache_groups:
        what = "one state" if group.pages else f"a window of {group.window} tokens" if group.window else "all tokens"
        kinds.setdefault(what, []).append(group)
    if [*kinds] == ["all tokens"]:
        return []
    rows = []
    for what, groups in kinds.items():
        blocks = request_blocks(groups, facts.max_model_len, plan.block_size)
        layers = sum(len(group.layers) for group in groups)
        text = f"of it, a request's in {layers} layers of {what}: {blocks} blocks in {len(groups)} groups"
        rows.append(("  request", blocks * block_bytes(plan), text))
    return rows


def _useful_blocks(plan: Plan, reading: MemoryReading) -> int:
    """The most blocks that can be in use at once, with two kept states for each request. On a CPU also at most
    CPU_CACHE_BYTES, but enough for one request of max_model_len. Prompts that are computed whole leave with their
    step."""
    one = blocks_for(plan.max_model_len, plan)
    if plan.model.whole_prompts:
        return STEPS_IN_FLIGHT * (plan.max_num_batched_tokens // plan.block_size + plan.max_num_seqs) + NULL_BLOCKS
    useful = one + (plan.max_num_seqs - 1) * decode_blocks_for(plan.max_model_len, plan) + NULL_BLOCKS
    useful += 2 * plan.max_num_seqs * sum(group.pages for group in plan.model.cache_groups)
    if reading.device == "cpu":
        return min(useful, max(CPU_CACHE_BYTES // block_bytes(plan), one + NULL_BLOCKS))
    return useful


def _most(source: str, available: int, size: int) -> str:
    return f"{available // size} blocks" if source == "num_gpu_blocks_override" else f"{available:,} bytes"


def _room(source: str, num_bytes: int, options: Options, reading: MemoryReading) -> str:
    if source == "gpu_memory_utilization":
        return f"{_share_ledger(options.gpu_memory_utilization, reading)}, which leaves room for {num_bytes:,}"
    if source == "kv_cache_memory_bytes":  # the given value: whole blocks may take fewer bytes, or none
        return f"{source} gives it {options.kv_cache_memory_bytes:,}"
    return f"{source} gives it {num_bytes:,}"


def _share_ledger(share: float, reading: MemoryReading) -> str:
    """Text: the bound that limits the cache, and what else has to fit into it."""
    step = f"a step needs {_human(reading.step_bytes)}"
    if _is_short_of_free(share, reading):
        return f"{_human(reading.available_bytes)} are free of {_human(reading.total_bytes)}, and {step}"
    return (
        f"gpu_memory_utilization={share:g} of {_human(reading.total_bytes)} is "
        f"{_human(int(share * reading.total_bytes))}, the weights take {_human(reading.weights_bytes)} of it and {step}"
    )


def _is_short_of_free(share: float, reading: MemoryReading) -> bool:
    return reading.available_bytes < int(share * reading.total_bytes) - reading.weights_bytes


def _remedy(source: str, options: Options, reading: MemoryReading) -> str:
    if source != "gpu_memory_utilization":
        return f"raise {source}"
    if _is_short_of_free(options.gpu_memory_utilization, reading):
        return "free memory, lower max_num_batched_tokens or use a smaller dtype"
    return "raise gpu_memory_utilization, or use a smaller dtype"


def _human(count: int) -> str:
    """A number of bytes as text with a binary unit."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
