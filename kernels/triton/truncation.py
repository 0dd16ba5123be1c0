"""Truncation by min_p, top_k and top_p: a search over values among the few tokens that can be kept at all.

A row of logits is long, and a search reads its range many times. So the row is read once, and the highest logit and the
mass of each part of it are stored (`part_kernel`). They give a bound below which no token is kept; the tokens above it
are gathered and searched. If there is no bound, or too many tokens are above it, the search reads the row itself.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.common import ordered, value_of

NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
LOG2_E = tl.constexpr(1.4426950408889634)
NO_BOUND = tl.constexpr(-0x80000000)
"""Below every `ordered` key."""
ALL_OF_THEM = tl.constexpr(1e18)
"""A number larger than the tokens of any row."""
BISECTIONS = tl.constexpr(20)
"""Steps of the search for the bound, which need not be exact: it only determines how many tokens are gathered."""


@triton.jit
def part_kernel(
    logits,  # [num_rows, vocab_size] float32
    temperatures,  # [num_rows] float32
    part_best,  # [num_rows, num_parts] float32: the highest tempered logit of PART tokens
    part_mass,  # [num_rows, num_parts] float32: the sum of their weights, the heaviest's being 1
    vocab_size,
    row_stride,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (num_rows, ceil(vocab_size / BLOCK)). Of greedy rows nothing is written."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(logits + row * row_stride + ids, mask=ids < vocab_size, other=NEGATIVE_INFINITY)
        tempered = tl.reshape(tl.div_rn(values, temperature + tl.zeros_like(values)), [BLOCK // PART, PART])
        highest = tl.max(tempered, 1)
        shift = tl.where(highest == NEGATIVE_INFINITY, 0.0, highest)
        mass = tl.sum(tl.exp2((tempered - shift[:, None]) * LOG2_E), 1)
        parts = tl.program_id(1) * (BLOCK // PART) + tl.arange(0, BLOCK // PART)
        num_parts = tl.num_programs(1) * (BLOCK // PART)
        tl.store(part_best + row * num_parts + parts, highest)
        tl.store(part_mass + row * num_parts + parts, mass)


@triton.jit
def mass_below(bound, first, maxima, masses, PART: tl.constexpr):
    """At most so much mass lies below `bound`, by what is known of the parts. float32; a weight of 1 is at `first`.

    A part whose highest is above has all but that one below it, each lighter than the bound.
    """
    most_of_rest = (PART - 1) * tl.exp2((bound - first) * LOG2_E)
    rest = tl.minimum(masses - tl.exp2((maxima - first) * LOG2_E), most_of_rest)
    return tl.sum(tl.where(maxima < bound, masses, rest), 0)


@triton.jit
def bound_of_kept(first, total, maxima, masses, top_k, top_p, min_p, least_key, vocab_size, PART: tl.constexpr):
    """An `ordered` key below which nothing is kept, or NO_BOUND. least_key: min_p's.

    top_k: so many parts have a token above it. top_p: what lies below it is less than what may be cut.
    """
    bound = least_key
    high = first
    if (top_k > 0) & (top_k < vocab_size):
        low = tl.min(tl.where(maxima > NEGATIVE_INFINITY, maxima, first), 0)
        if tl.sum((maxima >= low).to(tl.int32), 0) >= top_k:
            for _ in range(BISECTIONS):
                middle = 0.5 * (low + high)
                is_enough = tl.sum((maxima >= middle).to(tl.int32), 0) >= top_k
                low = tl.where(is_enough, middle, low)
                high = tl.where(is_enough, high, middle)
            bound = tl.maximum(bound, ordered(low))
    elif (top_p < 1) & (min_p <= 0):
        # The sums are of float32.
        spared = ((1 - top_p) * total - 2e-6 * total).to(tl.float32)
        low = first - 64.0
        if mass_below(low, first, maxima, masses, PART) <= spared:
            for _ in range(BISECTIONS):
                middle = 0.5 * (low + high)
                fits = mass_below(middle, first, maxima, masses, PART) <= spared
                low = tl.where(fits, middle, low)
                high = tl.where(fits, high, middle)
            bound = ordered(low)
    return bound


@triton.jit
def gather(
    row_logits,
    temperature,
    bound,
    maxima,
    values_out,  # [CAPACITY] float32: tempered logits
    ids_out,  # [CAPACITY] int32, ascending
    parts_out,  # [PARTS] int32
    vocab_size,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many tokens are not below the bound. The first CAPACITY of them are written, in the order of their ids."""
    holds_some = ordered(maxima) >= bound
    numbers = tl.cumsum(holds_some.to(tl.int32), 0) - 1
    num_parts = tl.sum(holds_some.to(tl.int32), 0)
    tl.store(parts_out + numbers, tl.arange(0, PARTS), mask=holds_some)
    tl.debug_barrier()  # what one thread wrote another reads
    count = tl.zeros([], tl.int32)
    at = tl.arange(0, BLOCK)
    if num_parts <= CAPACITY:
        for start in range(0, num_parts * PART, BLOCK):
            number = (start + at) // PART
            part = tl.load(parts_out + number, mask=number < num_parts, other=0)
            ids = part * PART + at % PART
            inside = (number < num_parts) & (ids < vocab_size)
            values = tl.load(row_logits + ids, mask=inside, other=NEGATIVE_INFINITY)
            tempered = tl.div_rn(values, temperature + tl.zeros_like(values))
            is_kept = inside & (ordered(tempered) >= bound)
            places = count + tl.cumsum(is_kept.to(tl.int32), 0) - 1
            fits = is_kept & (places < CAPACITY)
            tl.store(values_out + places, tempered, mask=fits)
            tl.store(ids_out + places, ids, mask=fits)
            count += tl.sum(is_kept.to(tl.int32), 0)
        tl.debug_barrier()
    else:
        count += num_parts
    return count


@triton.jit
def tempered_block(source, divisor, start, count, BLOCK: tl.constexpr):
    """Whether there are elements start + [0, BLOCK) of source's `count`, and they over the divisor."""
    at = start + tl.arange(0, BLOCK)
    values = tl.load(source + at, mask=at < count, other=NEGATIVE_INFINITY)
    return at < count, tl.div_rn(values, divisor + tl.zeros_like(values))


@triton.jit
def count_and_mass(source, divisor, first, low, step, least_key, count, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """For the three thresholds low + step, + 2 step, + 3 step: how many tokens (or what mass) are not below each.

    Thresholds are `ordered` keys as uint32 with the sign bit turned; tokens below least_key do not count. float64.
    """
    one = tl.zeros([], tl.float64)
    two = tl.zeros([], tl.float64)
    three = tl.zeros([], tl.float64)
    for start in range(0, count, BLOCK):
        inside, tempered = tempered_block(source, divisor, start, count, BLOCK)
        signed = ordered(tempered)
        keys = signed.to(tl.uint32, bitcast=True) ^ 0x80000000
        weights = tl.where(inside & (signed >= least_key), 1.0, 0.0)
        if MASS:
            weights *= tl.exp2((tempered - first) * LOG2_E)
        one += tl.sum(tl.where(keys >= low + step, weights, 0.0), 0).to(tl.float64)
        two += tl.sum(tl.where(keys >= low + 2 * step, weights, 0.0), 0).to(tl.float64)
        three += tl.sum(tl.where(keys >= low + 3 * step, weights, 0.0), 0).to(tl.float64)
    return one, two, three


@triton.jit
def largest_key(source, divisor, first, least_key, wanted, count, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest `ordered` key such that tokens not below it are `wanted` or more, and what those above it are.

    Two bits a turn, from the highest down.
    """
    low = tl.zeros([], tl.uint32)
    step = tl.full([], 0x40000000, tl.uint32)
    above = tl.zeros([], tl.float64)
    for _ in range(16):
        one, two, three = count_and_mass(source, divisor, first, low, step, least_key, count, MASS, BLOCK)
        above = tl.where(three >= wanted, above, tl.where(two >= wanted, three, tl.where(one >= wanted, two, one)))
        turns = (one >= wanted).to(tl.uint32) + (two >= wanted).to(tl.uint32) + (three >= wanted).to(tl.uint32)
        low += turns * step
        step = step >> 2
    return (low ^ 0x80000000).to(tl.int32, bitcast=True), above


@triton.jit
def heavier_and_ties(source, divisor, first, key, count, BLOCK: tl.constexpr):
    """The mass of tokens above `key`, and how many are at it. float64."""
    heavier = tl.zeros([], tl.float64)
    ties = tl.zeros([], tl.float64)
    for start in range(0, count, BLOCK):
        inside, tempered = tempered_block(source, divisor, start, count, BLOCK)
        keys = ordered(tempered)
        weights = tl.exp2((tempered - first) * LOG2_E)
        heavier += tl.sum(tl.where(inside & (keys > key), weights, 0.0), 0).to(tl.float64)
        ties += tl.sum((inside & (keys == key)).to(tl.float32), 0).to(tl.float64)
    return heavier, ties


@triton.jit
def place_of_last(source, divisor, key, of_last, count, BLOCK: tl.constexpr):
    """Where in `source` the of_last-th token at `key` is; 0x7FFFFFFF where there are fewer."""
    place = tl.full([], 0x7FFFFFFF, tl.int32)
    taken = tl.zeros([], tl.float64)
    for start in range(0, count, BLOCK):
        inside, tempered = tempered_block(source, divisor, start, count, BLOCK)
        is_last = inside & (ordered(tempered) == key)
        found = tl.sum(is_last.to(tl.int32), 0).to(tl.float64)
        if (taken < of_last) & (taken + found >= of_last):
            numbers = tl.cumsum(is_last.to(tl.int32), 0)
            is_it = is_last & (numbers == (of_last - taken).to(tl.int32))
            place = tl.max(tl.where(is_it, start + tl.arange(0, BLOCK), -1), 0)
        taken += found
    return place


@triton.jit
def threshold_kernel(
    logits,  # [num_rows, vocab_size] float32
    temperatures,  # [num_rows] float32
    top_ks,  # [num_rows]
    top_ps,  # [num_rows] float64 or float32
    min_ps,  # [num_rows] float64 or float32
    part_best,  # [num_rows, num_parts] float32, as `part_kernel` writes them
    part_mass,
    values,  # [num_rows, CAPACITY] float32 and int32: room for the tokens above the bound
    ids,
    parts,  # [num_rows, num_parts] int32: room for the numbers of the parts that hold them
    kept_keys,  # [num_rows] int32: `ordered` of the last tempered logit kept
    kept_ids,  # [num_rows] int32: the last token kept of those with that logit
    vocab_size,
    num_parts,
    row_stride,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    GATHER_BLOCK: tl.constexpr,
):
    """What min_p, top_k and top_p keep of each row: a beginning of the total order. Grid (num_rows)."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row).to(tl.int32)
    top_p = tl.load(top_ps + row).to(tl.float64)
    min_p = tl.load(min_ps + row).to(tl.float64)
    last_key = tl.full([], NO_BOUND, tl.int32)
    last_id = tl.full([], 0x7FFFFFFF, tl.int32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        source = logits + row * row_stride
        divisor = temperature
        count = vocab_size
        at_part = tl.arange(0, PARTS)
        in_row = at_part < num_parts
        maxima = tl.load(part_best + row * num_parts + at_part, mask=in_row, other=NEGATIVE_INFINITY)
        masses = tl.load(part_mass + row * num_parts + at_part, mask=in_row, other=0.0)
        first = tl.max(maxima, 0)
        masses *= tl.exp2((maxima - first) * LOG2_E)
        total = tl.sum(masses.to(tl.float64), 0)
        if min_p > 0:
            # The smallest float32 that is not below the exact bound: the nearest one or the next.
            exact = first.to(tl.float64) + tl.log(min_p)
            nearest = exact.to(tl.float32)
            last_key = ordered(nearest) + (nearest.to(tl.float64) < exact).to(tl.int32)
        bound = bound_of_kept(first, total, maxima, masses, top_k, top_p, min_p, last_key, vocab_size, PART)
        is_gathered = False
        if bound != NO_BOUND:
            found = gather(
                source, temperature, bound, maxima, values + row * CAPACITY, ids + row * CAPACITY,
                parts + row * num_parts, vocab_size, PART, PARTS, CAPACITY, GATHER_BLOCK,
            )  # fmt: skip
            if found <= CAPACITY:
                is_gathered = True
                source = values + row * CAPACITY
                divisor = tl.full([], 1.0, tl.float32)
                count = found
        # How many of those with the last key are kept; more than there are keeps them all.
        of_last = tl.full([], ALL_OF_THEM, tl.float64)
        is_whole = min_p <= 0
        if (top_k > 0) & (top_k < vocab_size):
            is_whole = False
            found_key, above = largest_key(source, divisor, first, last_key, top_k.to(tl.float64), count, False, BLOCK)
            # Where min_p leaves fewer than top_k, the search finds nothing and ends at the bottom.
            if found_key >= last_key:
                last_key = found_key
                of_last = top_k.to(tl.float64) - above
        if top_p < 1:
            heavier, ties = heavier_and_ties(source, divisor, first, last_key, count, BLOCK)
            last_weight = tl.exp2((value_of(last_key) - first) * LOG2_E).to(tl.float64)
            last_weight = tl.where(ties > 0, last_weight, 0.0)
            mass = tl.where(is_whole, total, heavier + tl.minimum(of_last, ties) * last_weight)
            # Never nothing, which no token at all would reach.
            wanted = tl.maximum(top_p * mass, 1e-300)
            if heavier >= wanted:
                last_key, heavier = largest_key(source, divisor, first, last_key + 1, wanted, count, True, BLOCK)
                of_last = tl.full([], ALL_OF_THEM, tl.float64)
                last_weight = tl.exp2((value_of(last_key) - first) * LOG2_E).to(tl.float64)
            if last_weight > 0:
                of_last = tl.minimum(of_last, tl.maximum(tl.ceil((wanted - heavier) / last_weight), 1.0))
        if is_gathered & (last_key < bound):
            # By rounding, what is above the bound has just not the mass that it must have.
            last_key = bound
            of_last = tl.full([], ALL_OF_THEM, tl.float64)
        place = place_of_last(source, divisor, last_key, of_last, count, BLOCK)
        last_id = place
        if is_gathered & (place != 0x7FFFFFFF):
            last_id = tl.load(ids + row * CAPACITY + place)
    tl.store(kept_keys + row, last_key)
    tl.store(kept_ids + row, last_id)
