"""Decides what each step computes. Uses no clock, socket, torch or log: state in, `StepPlan` out.

There is no prefill mode and no decode mode. Each request has `num_tokens` and `num_computed_tokens`; a step divides its
token budget among the requests whose `num_computed_tokens` is smaller. Chunked prefill, prefix-cache hits, preemption
and resumption follow from that. `schedule` runs a short list of stages; `advance` takes the step's result.

Several plans may be in flight: a plan contains no token of a running row, so the next one can be made before the
previous step's tokens are known. `num_tokens` counts such a token from its planning on, `num_known_tokens` once the
step's result has come:

    schedule N        schedule N+1             advance(N)                        schedule N+2
    row 3 samples     row 3 computes that      its token is known; if it ends    row 3 is released; what step
    a token           token, samples another   the request, the row leaves       N+1 sampled for it is dropped

Every executor runs steps strictly in the order of submission. So released blocks and rows may be reused at once, though
a step in flight still writes to them: their next holder runs in a later step, and writes before it reads.

A user's scheduler (`--scheduler-cls`) derives from `Scheduler` and overrides stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from headrace.core.options.cache_groups import ONE_GROUP, CacheGroup, request_blocks
from headrace.core.schedule.block_hashes import BlockHash, BlockHasher
from headrace.core.schedule.block_tables import BlockTables
from headrace.core.schedule.blocks import BlockPool
from headrace.core.schedule.features.feature import Context, Followed, StepFeature, together
from headrace.core.schedule.groups.contained import CacheKindError
from headrace.core.schedule.groups.group import PrefixHit
from headrace.core.schedule.new_tokens import new_tokens
from headrace.core.schedule.plan_builder import PlanBuilder
from headrace.core.schedule.policies import PrefillLimits, in_turn, order_of, prefill_share
from headrace.core.schedule.refusal import Refusal
from headrace.core.schedule.repeated_decode import RepeatedDecode
from headrace.core.schedule.requests import Request, RowTable, State, WaitingQueue
from headrace.ipc.failure import InconsistentError
from headrace.ipc.messages import FinishReason
from headrace.ipc.step import StepPlan, StepResult

HASHED_AT_ONCE = 64
"""Blocks of a waiting prompt that are hashed before the prefix cache is asked whether it holds them."""
ADMITTED_BESIDE_DECODES = 16
"""Most requests that one step with decodes admits: admitting takes a few milliseconds, which delays the decodes."""
PASSED_OVER = 4
"""Most requests that a step passes over because a feature postpones them: each costs a look-up."""
LOOKED_PAST = 64
"""Most requests that wait beside the queue since they cannot run beside the present rows."""
MOST_STEPS_PASSED = 64
"""A request beside the queue is passed in at most so many steps; then none is admitted before it."""
_STAGES = ("_extend_decodes", "_extend_prefills", "_admit_waiting", "_top_up_prefills", "_propose", "_seal", "_extend")
"""Stages. A derived class that overrides one gets no repeated plans, so that its stages run in every step."""
_HOOKS = {name: default for name, default in vars(StepFeature).items() if callable(default)}


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The values from `Plan` and `Facts` that scheduling depends on."""

    num_blocks: int
    block_size: int
    cache_groups: tuple[CacheGroup, ...] = ONE_GROUP
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 0
    policy: str = "fcfs"
    chunked_prefill: bool = True
    prefix_caching: bool = True
    hash_algorithm: str = "sha256"
    max_steps_in_flight: int = 1
    rows_run_ahead: bool = True
    """A row may be in several steps in flight. If False, no plan contains a row whose last token is not known."""
    prompt_logprobs_cost: float = 0.0
    """Tokens of a step's budget that a prompt token with reported log-probabilities costs in addition to itself."""


class Ended(msgspec.Struct, frozen=True):
    """A request that a step ended."""

    request: Request
    reason: FinishReason
    stop_token: int | None
    with_last_token: bool = False
    """The token that ended the request is part of the answer."""
    problem: str = ""
    """The reason if the request FAILED, else empty."""


class Advance(msgspec.Struct, frozen=True):
    """The new tokens of a step and the requests that it ended. Row numbers stay valid until the next `schedule`."""

    rows: np.ndarray
    token_ids: np.ndarray
    """[num_tokens] int32, row after row"""
    counts: np.ndarray | None
    """[num_rows]: the number of new tokens of each row. None: one each."""
    ended: list[Ended]
    first: list[Request]
    """Requests that got the first token that this engine generated for them."""
    kept: np.ndarray | None = None
    """[num_tokens_of_the_result] bool: which tokens of the result are in `token_ids`; those after an end are not.
    None: all are."""


class Scheduler:
    """Owns the rows, the waiting queue and the blocks. Only one thread may use it."""

    def __init__(self, config: SchedulerConfig) -> None:
        blocks_of_one = request_blocks(
            config.cache_groups, config.max_model_len, config.block_size, config.max_num_batched_tokens
        )
        if config.num_blocks - 1 < blocks_of_one:
            raise ValueError(
                f"{config.num_blocks - 1} blocks of {config.block_size} tokens cannot hold one request of "
                f"max_model_len {config.max_model_len}; {blocks_of_one} are needed"
            )
        if config.max_num_batched_tokens < config.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {config.max_num_batched_tokens} is less than max_num_seqs "
                f"{config.max_num_seqs}: a step must have room for one token of each running request"
            )
        self.config = config
        self.rows = RowTable(config.max_num_seqs, config.max_model_len)
        self.waiting = WaitingQueue()
        self.pool = BlockPool(config.num_blocks)
        self.tables = BlockTables(
            self.pool,
            config.max_num_seqs,
            config.max_model_len,
            config.block_size,
            config.cache_groups,
            config.max_num_batched_tokens,
        )
        self.hasher = BlockHasher(config.hash_algorithm, config.block_size) if config.prefix_caching else None
        self._prefill_limits = PrefillLimits(config.max_num_batched_tokens, config.chunked_prefill)
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_prompt_tokens = 0
        self._arrivals = 0
        self._step = 0
        self.num_in_flight = 0
        """Plans whose result `advance` has not taken yet."""
        self._released: list[int] = []  # rows released since the last plan; the next plan reports them to the executor
        self._is_eos = np.zeros(max(config.vocab_size, max(config.eos_token_ids, default=0) + 1), bool)
        self._is_eos[list(config.eos_token_ids)] = True
        self._repeated: RepeatedDecode | None = None  # set while running the stages would only repeat the last plan
        self._has_own_stages = any(getattr(type(self), name) is not getattr(Scheduler, name) for name in _STAGES)
        self._refusal = Refusal(self.pool)
        self._is_provisional = np.zeros(config.max_num_seqs, bool)  # rows whose decode in flight a feature lengthened
        self._last_step = np.zeros(config.max_num_seqs, np.int64)  # the last step that computed each row, for `in_turn`
        self.features: list[StepFeature] = []
        """In the order in which their hooks are called."""
        self._hooks: dict[str, list[Callable[..., Any]]] = {name: [] for name in _HOOKS}
        """By name, those of the features that are in use and have it."""
        self._used: list[StepFeature] = []
        self._unused: list[StepFeature] = []
        """Features that no request has needed yet."""
        self._failed: dict[Request, str] = {}

    def add_feature(self, feature: StepFeature) -> None:
        """Call it before the first request is added."""
        self.features.append(feature)
        feature.bind(Context(self.rows, self.tables, self.features, self._hashes, self._failed.setdefault))
        self._use([*self._unused, feature] if type(feature).needed_by is not StepFeature.needed_by else self._unused)

    def _use(self, unused: list[StepFeature]) -> None:
        """Calls the hooks of all features but these from now on."""
        self._unused, self._used = unused, [each for each in self.features if each not in unused]
        self._hooks = {
            name: [getattr(each, name) for each in self._used if getattr(type(each), name) is not default]
            for name, default in _HOOKS.items()
        }

    # --- requests come and go -----------------------------------------------------------------------------------

    def add(self, request: Request, priority: int = 0) -> None:
        """Queues a request. The caller has checked that it fits max_model_len, so that it can run alone."""
        self._arrivals += 1
        request.arrival = self._arrivals
        has_begun = len(request.token_ids) > request.num_prompt_tokens
        order = order_of(self.config.policy, priority, request.arrival, has_begun=has_begun)
        request.order = (self.waiting.era, *order)
        for feature in self._unused:
            if feature.needed_by(request):
                self._use([each for each in self._unused if each is not feature])
        self.waiting.push(request)
        self.settle(ended=True)

    def drop(self, request: Request, *, forget_blocks: bool = False) -> None:
        """Ends a waiting or running request and frees its row and blocks.

        forget_blocks: remove its blocks from the prefix cache, since a failed computation may have written them.
        """
        if request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.RUNNING:
            self._leave(request.row)
            if forget_blocks:
                self.tables.forget(request.block_hashes)
            request.state = State.FINISHED

    def take_failed(self) -> dict[Request, str]:
        """The requests that features have failed since the last call, and why. The caller drops them."""
        failed = self._failed.copy()
        self._failed.clear()
        return failed

    @property
    def num_running(self) -> int:
        return self.config.max_num_seqs - len(self.rows.free)

    @property
    def has_work(self) -> bool:
        return len(self.rows.free) < self.config.max_num_seqs or self.waiting.head() is not None

    # --- one step -----------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step's plan. None when nothing can run: there is no request, or all wait for a step in flight.

        Decodes come first and always fit (one token each); prefills share the rest of the budget.
        """
        if self._repeated is not None:
            plan = self._repeated.next_plan(self._step + 1, self.num_in_flight)
            if plan is not None:
                self._step += 1
                self.num_in_flight += 1
                return plan
        self.settle(ended=True)
        builder = PlanBuilder(self.config.max_num_batched_tokens)
        while True:
            if not self._extend_decodes(builder):
                return None
            self._extend_prefills(builder)
            self._admit_waiting(builder)
            self._top_up_prefills(builder)
            self._propose(builder)
            if not builder.is_empty or not self.num_running or self.num_in_flight:
                break
            self.preempt(self.rows.last_served())  # partial prefills block each other: preempt the last in order
        if builder.is_empty:
            return None
        return self._seal(builder)

    def _extend_decodes(self, builder: PlanBuilder) -> bool:
        """Plans one token for each decode (a row that generates, with exactly one token to compute). If blocks run out,
        preempts the last running requests in order. If it would have to while a step is in flight, plans nothing and
        returns False: that step may end a request and free blocks, and a preemption would lose a token that is being
        computed."""
        table, tables = self.rows, self.tables
        if not self.num_running:
            return True
        while True:
            running = table.active.nonzero()[0]
            missing = table.num_tokens[running] - table.num_computed_tokens[running]
            decodes = running[(missing == 1) & table.generates[running]]
            if self.num_in_flight or not self.config.rows_run_ahead:
                # At its limit, a request only waits for the result that brings its last token.
                decodes = decodes[table.num_tokens[decodes] < table.max_tokens_total[decodes]]
            if not self.config.rows_run_ahead:
                is_pending = table.num_known_tokens[decodes] < table.num_tokens[decodes]
                last_step = self._last_step[decodes]
                decodes = decodes[in_turn(is_pending, last_step, self.config.max_steps_in_flight)]
            if self.num_in_flight:
                for waits in self._hooks["waits"]:
                    if (waiting := waits(decodes)) is not None:
                        decodes = decodes[~waiting]
            full = decodes[table.num_computed_tokens[decodes] >= tables.num_blocks[decodes] * tables.block_size]
            tables.give_back(full, table)
            if len(full) <= tables.num_free_to_grow():
                break
            if self.num_in_flight:
                return False
            self.preempt(self.rows.last_served())
        builder.add_decodes(decodes, *tables.extend_each(full))
        return True

    def _extend_prefills(self, builder: PlanBuilder) -> None:
        """Continues the prompts of running requests, in the order of service."""
        table = self.rows
        if not self.num_running:
            return
        running = table.active.nonzero()[0]
        missing = table.num_tokens[running] - table.num_computed_tokens[running]
        pending = running[missing > table.generates[running]].tolist()
        pending.sort(key=lambda row: table.requests[row].order)  # type: ignore[union-attr]
        for position, row in enumerate(pending):
            others_wait = position + 1 < len(pending) or len(self.waiting) > 0
            self._extend(
                builder,
                row,
                prefill_share(self.rows.num_missing(row), builder.budget, self._prefill_limits, others_wait),
            )

    def _admit_waiting(self, builder: PlanBuilder) -> None:
        """Admits requests in order, each only if its whole prompt finds blocks: partial prompts would block others."""
        table, block_size = self.rows, self.config.block_size
        postponed, postpone = list[Request](), self._hooks["postpones"]
        most = ADMITTED_BESIDE_DECODES if len(builder.decodes) else len(table.free)
        num_aside, num_passed, bars = len(self.waiting.aside), 0, self._hooks["bars"]
        if num_aside and any(request.num_passed >= MOST_STEPS_PASSED for request in self.waiting.aside):
            return
        while builder.budget > 0 and table.free and (request := self.waiting.head()) is not None:
            if most == 0 or self._refusal.stands(request, self.num_running):
                break
            if bars and any(bar(request) for bar in bars):
                if request.num_passed >= MOST_STEPS_PASSED or num_aside == LOOKED_PAST:
                    break
                self.waiting.set_aside()
                num_aside += 1
                continue
            most -= 1
            hit = self._look_up(request)
            # Without rows nothing goes on that could end it.
            if postpone and self.num_running and any(each(request, hit) for each in postpone):
                postponed.append(self.waiting.pop())
                if len(postponed) == PASSED_OVER:
                    break
                continue
            lacks_blocks = self._lacks_blocks(request, hit)
            if lacks_blocks and hit.num_blocks and not self.num_running:
                hit = self.tables.find([])  # alone it fits, though not beside a state that it would start from
                lacks_blocks = self._lacks_blocks(request, hit)
            if lacks_blocks:
                self._refusal.remember(request, hit.num_blocks, self.num_running)
                break
            num_cached = hit.num_blocks * block_size
            missing = len(request.token_ids) - num_cached
            count = prefill_share(missing, builder.budget, self._prefill_limits, others_wait=len(self.waiting) > 1)
            if count == 0:
                break
            self.waiting.pop()
            self._refusal.forget()
            row = table.enter(request, self.config.max_model_len, self._step + 1)
            self.tables.enter(row, hit)
            table.num_computed_tokens[row] = num_cached
            builder.admitted[row] = None
            num_passed = num_aside
            for enter in self._hooks["enter"]:
                enter(row)
            if request.num_preemptions == 0:
                self.num_prompt_tokens += len(request.token_ids)  # includes output of another engine, if it migrated
                self.num_cached_prompt_tokens += num_cached
            self._extend(builder, row, count)
        for request in postponed:
            self.waiting.push(request)
        for request in self.waiting.aside[:num_passed]:
            request.num_passed += 1

    def _lacks_blocks(self, request: Request, hit: PrefixHit) -> bool:
        try:
            missing = self.tables.num_missing(len(request.token_ids), hit)
        except CacheKindError as error:
            self._failed.setdefault(request, str(error))
            groups, size = self.config.cache_groups, self.config.block_size
            missing = request_blocks(groups, len(request.token_ids), size, self.config.max_num_batched_tokens)
        growth = self.num_running * self.tables.num_growing  # each may need one more block before this request ends
        return missing + growth > self.pool.num_available - self.pool.num_unheld(hit.all_blocks)

    def _top_up_prefills(self, builder: PlanBuilder) -> None:
        """Gives the rest of the budget to prompts that were limited to a share of it."""
        for row in list(builder.granted):
            if builder.budget <= 0:
                break
            rest = self.rows.num_missing(row) - builder.granted[row]
            if rest > 0:
                self._extend(builder, row, min(rest, builder.budget))

    def _propose(self, builder: PlanBuilder) -> None:
        """Lets features lengthen decodes."""
        for propose in self._hooks["propose"]:
            propose(builder)

    def _seal(self, builder: PlanBuilder) -> StepPlan:
        self._step += 1
        plan = builder.seal(self._step, self.rows, self.tables, self._released)
        self._released = []
        table = self.rows
        table.num_computed_tokens[plan.rows] += plan.num_tokens
        self._publish_full(builder.decodes)
        table.num_tokens[plan.rows[plan.sampled]] += 1
        self._is_provisional[builder.lengthened] = True
        for seal in self._hooks["seal"]:
            plan = seal(plan)
        if not self.config.rows_run_ahead:
            self._last_step[plan.rows] = self._step
        self.num_in_flight += 1
        # Those beside the queue are waiting for a row to leave, which ends the repetition.
        nothing_waits = len(self.waiting) == len(self.waiting.aside)
        decodes_alone = len(builder.decodes) == self.num_running == len(plan.rows) and nothing_waits
        if decodes_alone and self.config.rows_run_ahead and not self._has_own_stages:
            self._repeated = self._repeat(plan)
        return plan

    def _repeat(self, plan: StepPlan) -> RepeatedDecode | None:
        """Plans that repeat this one, which computed only decodes. None if a feature has something to do before."""
        quiet = [steps for hook in self._hooks["quiet_steps"] if (steps := hook(plan)) is not None]
        if 0 in quiet:
            return None
        repeated = [(feature, each) for feature in self._used if (each := feature.repeated(plan)) is not None]
        renewed = {kind for feature, _ in repeated for kind in feature.attaches}
        if not renewed.issuperset(map(type, plan.attachments)):  # something would be missing from the next plan
            return None
        parts = tuple(part for _, part in repeated)
        decode = RepeatedDecode(plan, self.rows, self.tables, self.config.eos_token_ids, self._publish_full, parts)
        decode.limit(min(quiet, default=None))
        return decode

    # --- results ------------------------------------------------------------------------------------------------

    def advance(self, result: StepResult) -> Advance:
        """Adds a result's tokens to their requests and ends the requests that are complete. Results must come in the
        order of their plans.

        The caller has dropped the requests of failed rows, and has removed from the result the rows whose request has
        ended since the step was planned (`outputs.drop_departed`).
        """
        self.num_in_flight -= 1
        table, rows, token_ids, followed = self.rows, result.rows, result.token_ids, None
        if self._repeated is not None:
            names_blocks = self.hasher is not None and self.num_in_flight
            if rows is self._repeated.rows and not names_blocks and self._repeated.take(token_ids):
                return Advance(rows, token_ids, None, [], [])
            followed = self._repeated.followed
            self.settle()
        if not len(rows):  # a step of prompts alone
            for take in self._hooks["take"]:
                take(result)
            pooled = [] if result.vectors is None else list(self._end_pooled(result.vectors.rows))
            return Advance(rows, token_ids, result.counts, pooled, [])
        known = table.num_known_tokens[rows]
        first = [each for row in rows[known == table.num_given_tokens[rows]].tolist() if (each := table.requests[row])]
        follow = self._follow if followed is None else lambda *_: followed
        new = new_tokens(result, known, table, self._is_eos, follow)
        table.token_ids[new.row_of, new.num_tokens - 1] = new.token_ids
        known_now = new.num_tokens if new.counts is None else known + new.counts
        table.num_known_tokens[rows] = known_now
        if result.counts is not None:
            self._roll_back(rows, known, known_now)
        for take in self._hooks["take"]:
            take(result)
        if self.hasher is not None and self.num_in_flight:
            # A step in flight computes the last token of these blocks. They can be named only now that it is known.
            full = (known_now % self.config.block_size == 0) & (table.num_computed_tokens[rows] >= known_now)
            for index in full.nonzero()[0].tolist():
                self._publish(int(rows[index]), int(known_now[index]) - 1, 1)
        ended = []
        for index in new.ends.nonzero()[0].tolist():
            request = self._leave(int(new.row_of[index]))
            request.state = State.FINISHED
            stop_token = int(new.token_ids[index]) if new.is_stop_token[index] else None
            reason, problem = (
                FinishReason.STOP if new.stops[index] else FinishReason.LENGTH,
                new.problems.get(index, ""),
            )
            if problem:
                reason = FinishReason.FAILED
            with_last_token = bool(new.completes[index])
            ended.append(Ended(request, reason, stop_token, with_last_token, problem))
        if result.vectors is not None:
            ended += self._end_pooled(result.vectors.rows)
        return Advance(rows, new.token_ids, new.counts, ended, first, new.kept)

    def _end_pooled(self, rows: np.ndarray) -> Iterator[Ended]:
        """Ends requests whose vectors a result has brought."""
        for row in dict.fromkeys(rows.tolist()):  # several parts may be of one row
            request = self._leave(row)
            request.state = State.FINISHED
            yield Ended(request, FinishReason.STOP, None)

    def _follow(self, row_of: np.ndarray, token_ids: np.ndarray, ends: np.ndarray) -> Followed | None:
        return together([follow(row_of, token_ids, ends) for follow in self._hooks["follow"]])

    def _roll_back(self, rows: np.ndarray, known: np.ndarray, known_now: np.ndarray) -> None:
        """Sets `num_tokens` and `num_computed_tokens` of rows whose decode a feature lengthened to what the result
        confirms. known, known_now: [num_rows], known tokens of each row before and after."""
        table, provisional = self.rows, self._is_provisional[rows]
        self._is_provisional[rows] = False
        table.num_tokens[rows[provisional]] = known_now[provisional]
        table.num_computed_tokens[rows[provisional]] = known_now[provisional] - 1
        if self.hasher is not None:
            for index in provisional.nonzero()[0].tolist():
                self._publish(int(rows[index]), int(known[index]) - 1, int(known_now[index] - known[index]))

    # --- parts of the stages ------------------------------------------------------------------------------------

    def _extend(self, builder: PlanBuilder, row: int, count: int) -> None:
        """Plans up to `count` more tokens of a row: as many as there are blocks for."""
        tables, block_size = self.tables, self.config.block_size
        start = int(self.rows.num_computed_tokens[row]) + builder.granted.get(row, 0)
        held = int(tables.num_blocks[row])
        tables.give_back([row], self.rows)
        room = (held + tables.num_free_to_grow()) * block_size - start
        if room < count and not self.config.chunked_prefill:
            return
        count, extra = min(count, room), 0
        if self.config.prompt_logprobs_cost and count > 0:
            count, extra = self._affordable(builder, row, start, count)
        if count <= 0:
            return
        builder.extend(row, count, *tables.extend(row, max(0, -(-(start + count) // block_size) - held)), extra)
        if self.hasher is not None:
            self._publish(row, start, count)

    def _affordable(self, builder: PlanBuilder, row: int, start: int, count: int) -> tuple[int, int]:
        """How many of a row's `count` tokens from `start` on the step can compute, and the extra budget that they use.
        Prompt log-probabilities cost extra: their logits make a step long. Each row gets at least one token."""
        request, cost = self.rows.requests[row], self.config.prompt_logprobs_cost
        if request is None:
            raise InconsistentError(f"row {row} is planned without a request")
        if request.sampling.prompt_logprobs is None:
            return count, 0
        unreported = max(0, min(count, request.sampling.prompt_logprob_start - 1 - start))
        if self.config.chunked_prefill:
            affordable = unreported + int((builder.budget - unreported) / (1 + cost))
            count = max(min(count, affordable), 0 if row in builder.granted else 1)
        return count, min(builder.budget - count, math.ceil(cost * max(0, count - unreported)))

    def _look_up(self, request: Request) -> PrefixHit:
        """The request's longest cached prefix. A request that another package's cache kind fails for fails, once a step
        has been planned."""
        try:
            return self._find(request)
        except CacheKindError as error:
            self._failed.setdefault(request, str(error))
            return self.tables.nothing

    def _find(self, request: Request) -> PrefixHit:
        usable_tokens = request.task.most_cached(len(request.token_ids))
        if self.hasher is None or not usable_tokens:
            return self.tables.find([])
        usable, hashes = usable_tokens // self.config.block_size, request.block_hashes
        # A long prompt is hashed only as far as the cache holds it; the rest is hashed when its tokens are planned.
        while len(hashes) < usable and self.tables.may_go_on(hashes):
            self.hasher.extend(hashes, request.prefix_key, request.token_ids, min(usable, len(hashes) + HASHED_AT_ONCE))
        return self.tables.find(hashes[:usable])

    def _publish(self, row: int, start: int, count: int) -> None:
        """Adds the blocks that this step fills by computing tokens [start, start + count) to the prefix cache.

        They are published before they are written. Even a request admitted in the same step may read them: in each
        layer, all of a step's keys and values are written before any is read.
        """
        block_size = self.config.block_size
        first, end = start // block_size, (start + count) // block_size
        if first != end:
            self.tables.publish(row, slice(first, end), self._hashes(row, end)[first:end])

    def _hashes(self, row: int, num_blocks: int) -> list[BlockHash]:
        """Hashes of at least the row's first num_blocks blocks, whose tokens must be known."""
        request = self.rows.requests[row]
        if request is None:
            raise InconsistentError(f"row {row} is planned without a request")
        hashes = request.block_hashes
        if self.hasher is not None and len(hashes) < num_blocks:
            self.hasher.extend(hashes, request.prefix_key, self.rows.token_ids[row], num_blocks)
        return hashes

    def _publish_full(self, rows: np.ndarray) -> None:
        """Publishes blocks that the planned tokens of these decodes fill if they are known; `advance` does the rest."""
        if self.hasher is None or not len(rows):
            return
        computed = self.rows.num_computed_tokens[rows]
        is_full = (computed % self.config.block_size == 0) & (self.rows.num_known_tokens[rows] >= computed)
        full = is_full.nonzero()[0]
        if len(full):
            rows, ends = rows[full], computed[full] // self.config.block_size
            each = zip(rows.tolist(), ends.tolist(), strict=True)
            self.tables.publish(rows, ends - 1, [self._hashes(row, end)[end - 1] for row, end in each])

    def preempt(self, row: int) -> None:
        """Preempts by recomputation: the request releases its row and blocks and waits in its old place in the queue.

        Must not be called while a step is in flight.
        """
        if self.num_in_flight:
            raise InconsistentError("a request was to be preempted while a step was in flight")
        request = self._leave(row)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(request)

    def _leave(self, row: int) -> Request:
        self.settle(ended=True)
        self._is_provisional[row] = False
        for leave in self._hooks["leave"]:
            leave(row)
        self.tables.release(row)
        self._released.append(row)
        self.waiting.take_back()
        return self.rows.leave(row)

    def settle(self, *, ended: bool = False) -> None:
        """Writes the steps of `RepeatedDecode` to the row table. ended: from now on the stages make the plans."""
        if self._repeated is not None:
            self._repeated.settle()
        if ended:
            self._repeated = None

    def audit(self) -> Iterator[None]:
        """Raises InconsistentError unless blocks and rows are consistent. A generator of short pieces of work; the
        state must not change between them."""
        active = np.flatnonzero(self.rows.active).tolist()
        if len(active) + len(self.rows.free) != self.config.max_num_seqs:
            raise InconsistentError("a row is lost")
        for row in active:
            request = self.rows.requests[row]
            if request is None:
                raise InconsistentError(f"row {row} is active without a request")
            if request.row != row:
                raise InconsistentError(f"row {row}'s request thinks it is in row {request.row}")
        held = self.tables.num_blocks.nonzero()[0].tolist()
        if not set(held) <= set(active):
            raise InconsistentError(f"of rows {held}, which hold blocks, only {active} are active")
        yield from self.pool.audit()

    def check(self) -> None:
        """All of `audit` at once."""
        for _ in self.audit():
            pass

    def forget_blocks(self) -> None:
        """Makes every block free, even if the accounting is inconsistent, and preempts all running requests, which
        recompute their keys and values. No step may be in flight."""
        self.tables.clear()
        for row in np.flatnonzero(self.rows.active).tolist():
            self.preempt(row)
