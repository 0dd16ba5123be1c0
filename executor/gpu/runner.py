"""The host's side of a step on a GPU: turns a StepPlan into changes of the device's state and asynchronous work.

`submit` does not wait for the device, and `collect` waits for one event: the end of its step. So step N + 1 is started
before the host knows which tokens step N sampled; the device feeds them to it.

    submit(N)    deltas -> one copy, one scatter -> graph or eager step -> results -> pinned memory, event N
    submit(N+1)  the same, behind it in the stream
    collect(N)   waits for event N

There are two exceptions. A step with drafts runs eagerly, and the host waits to choose and verify tokens, since the
core plans its rows again only once it knows how many drafts were accepted. And `submit` waits for earlier steps where
the host samples, or where bad words depend on earlier tokens.

The host's copy of the rows (`BatchState`) already counts the tokens of steps in flight: it holds -1 in their places
until `collect` fills them in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.executor.gpu.device_clock import DeviceClock
from headrace.executor.gpu.device_state import (
    DecodeRows,
    DecodeStates,
    Deltas,
    Device,
    DeviceState,
    Staging,
    StateShape,
)
from headrace.executor.gpu.graphs import Capturer, DecodeGraphs, GraphKey
from headrace.executor.gpu.sampler import StepEnding, TokenStates, chooser, ending_for
from headrace.executor.gpu.steps import NUM_RESULTS, DeviceSteps, MixedInputs, StepInFlight
from headrace.executor.gpu.token_selection import TokenSelection
from headrace.executor.sampling.columns import CHANGES, ON_HOST_ALONE, Needs
from headrace.executor.sampling.sampler import sample
from headrace.executor.step.batch import BatchState
from headrace.executor.step.inputs import GivenRows, HiddenStateModel
from headrace.executor.step.pipeline import StepRows, append_pending
from headrace.executor.step.result import AddedTokens
from headrace.executor.step.step_times import StepTimes
from headrace.executor.step.verification import SampledPositions
from headrace.ipc.failure import InconsistentError
from headrace.ipc.messages import Generate
from headrace.ipc.step import Drafts, NewRow, StepPlan, StepResult, TokenMasks

STEPS_IN_FLIGHT = 2
STAGING_BUFFERS = 8 * (STEPS_IN_FLIGHT + 1)
"""A steady decode sends at most once a step; a step whose logits are changed and reported, up to eight times."""
ON_THE_DEVICE = (
    int(Needs.RANDOM | Needs.TRUNCATION | CHANGES | Needs.BAD_WORDS | Needs.LOGPROBS | Needs.PROMPT_LOGPROBS)
    & ~ON_HOST_ALONE
)
CHANGED_ON_THE_DEVICE = frozenset((TokenMasks,))
"""Attachments that change logits, and that the device heeds as it chooses."""


@dataclass(frozen=True)
class RunnerLimits:
    max_num_seqs: int
    max_model_len: int
    block_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    block_factors: tuple[int, ...] = (1,)
    """For each cache group with block tables; see `KVCache.factors`."""
    capture_sizes: tuple[int, ...] = ()
    """Batch sizes of decode graphs, ascending."""
    most_adapters: int = 0
    """Of one request; 0: the model's adapters have no slots."""
    state_pages: int = 0
    """Of the state of one sequence; 0: the model keeps none."""

    @property
    def state_shape(self) -> StateShape:
        max_blocks = -(-self.max_model_len // self.block_size)
        groups = len(self.block_factors)
        return StateShape(self.max_num_seqs, max_blocks, groups, self.most_adapters, self.state_pages)


class GpuRunner:
    """Owns the device's state and the host's copy of it, but not model and cache. Used from one thread."""

    chooses = True
    """Whether this rank's steps choose tokens, as the last stage's do."""

    def __init__(
        self,
        model: HiddenStateModel,
        kv_cache: Any,
        device: Device,
        limits: RunnerLimits,
        capturer: Capturer | None = None,
    ) -> None:
        """capturer: None to run every step eagerly."""
        self._device, self._limits = device, limits
        self.state = DeviceState(limits.state_shape, device.device)
        self.tokens = TokenStates(limits.max_num_seqs if self.chooses else 0, limits.vocab_size, device.device)
        self.steps = self._make_steps(model, kv_cache)
        self.graphs = DecodeGraphs(limits.capture_sizes, capturer, self._decode_nothing)
        self.batch = BatchState(
            limits.max_num_seqs,
            limits.max_model_len,
            limits.block_size,
            limits.eos_token_ids,
            limits.block_factors,
            limits.state_pages,
        )
        self.times = StepTimes()
        self._staging = Staging(device, STAGING_BUFFERS)
        self.deltas = Deltas(self.state, self._staging)
        self._decode_rows = DecodeRows(self.state, self.deltas)
        self._decode_states = DecodeStates(self.state, self.deltas) if limits.state_pages else None
        self.selection = TokenSelection(device, self._staging, self.batch, self.state, self.tokens, self.steps)
        # A result is read after the next step is submitted, so there is one buffer more than steps in flight.
        words = (limits.max_num_seqs + 1) * NUM_RESULTS
        self._buffers = deque(device.host_buffer(words) for _ in range(STEPS_IN_FLIGHT + 1))
        self._marks = deque((device.mark(), device.mark()) for _ in range(STEPS_IN_FLIGHT + 1))
        self._clock = DeviceClock(device)
        self._in_flight: deque[StepInFlight] = deque()
        self._num_computed = np.zeros(limits.max_num_seqs + 1, np.int32)

    def _make_steps(self, model: HiddenStateModel, kv_cache: Any) -> DeviceSteps:
        limits = self._limits
        choose = chooser(self._device.device, limits.vocab_size)
        return DeviceSteps(model, kv_cache, self.state, limits.block_size, choose)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Starts a step. Plans must come in the core's order; at most STEPS_IN_FLIGHT may be uncollected."""
        if len(self._in_flight) >= STEPS_IN_FLIGHT:
            raise InconsistentError(f"step {plan.step} is one too many in flight")
        with self.times.phase("prepare"):
            self._apply(plan)
            buffer, (began, done) = self._buffers[0], self._marks[0]
            self._buffers.rotate(-1)
            self._marks.rotate(-1)
            step = StepInFlight(plan, StepRows.of(plan, self.batch), buffer, began, done)
        began.record()
        if (drafts := plan.get(Drafts)) is not None:
            self._start_drafted(plan, SampledPositions(plan, drafts), step)
        elif len(plan.rows):
            self._start(plan, step)
        else:
            self.deltas.ship()
        done.record()
        self._in_flight.append(step)
        self.times.submitted()

    def collect(self) -> StepResult:
        """The result of the oldest submitted step. A row whose logits are not finite becomes a RowFailure."""
        step, waits = self._in_flight[0], not self._in_flight[0].done.query()
        with self.times.phase("wait"):
            self._settle(step)
            step.done.synchronize()
        with self.times.phase("result"):
            times = self._clock.times(step.began, step.done, waits)
            if len(step.plan.rows):
                step.times_s = times
            result = self.batch.ended(step.plan, self._in_flight.popleft().result())
        self.times.collected(result)
        return result

    def use(self, model: HiddenStateModel) -> None:
        """Replaces the model from the next step on, with none in flight. Rows stay; graphs are captured anew."""
        self.steps.use(model)
        self.graphs.forget()

    def has_result(self) -> bool:
        """Whether the oldest submitted step is done, so that `collect` need not wait."""
        step = self._in_flight[0]
        return step.new is not None or step.done.query()

    def idle(self) -> bool:
        """Captures a graph if no step is in flight; returns False when none is left to capture."""
        return not self._in_flight and self.graphs.is_one_left and self._capture()

    def _apply(self, plan: StepPlan) -> None:
        batch, deltas = self.batch, self.deltas
        batch.apply(plan)
        for new in plan.new_rows:
            self._enter(new)
        if plan.block_tables.size:
            order = np.argsort(plan.block_tables, kind="stable")
            tables = plan.block_tables[order]
            # Blocks are placed relative to the table's end: the last of its new blocks is its last block.
            from_last = np.searchsorted(tables, tables, "right") - np.arange(len(tables))
            numbers = batch.numbers_in_group(plan.block_tables, plan.block_ids)
            deltas.set_blocks(tables, batch.num_blocks[tables] - from_last, numbers[order])
        moved = self._num_computed[plan.rows] != plan.num_computed_tokens
        if moved.any():
            deltas.set("num_computed", plan.rows[moved], plan.num_computed_tokens[moved])
        self._num_computed[plan.rows] = plan.num_computed_tokens + plan.num_tokens

    def _enter(self, new: NewRow) -> None:
        row, at, deltas = new.row, np.array([new.row]), self.deltas
        if isinstance(new.task, Generate):
            deltas.enter(row, new.task.sampling, new.seed)
        if self._limits.most_adapters:
            deltas.set_adapters(row, self.batch.adapters.of_row(row))
        deltas.set("last_token", at, new.token_ids[-1:])
        deltas.set("prompt_len", at, np.array([new.num_prompt_tokens]))
        num_groups, num_rows = self.batch.num_groups, self._limits.max_num_seqs
        num_blocks = len(new.block_ids) // max(1, num_groups)
        tables = np.repeat(np.arange(num_groups) * num_rows + row, num_blocks)
        numbers = self.batch.numbers_in_group(tables, new.block_ids)
        deltas.set_blocks(tables, np.tile(np.arange(num_blocks), num_groups), numbers)
        if self.chooses and isinstance(new.task, Generate):
            self.tokens.enter(new, new.task.sampling, self.batch.sampling.rules.get(row), self._staging)

    def _start(self, plan: StepPlan, step: StepInFlight) -> None:
        needs = self.batch.sampling.all_needs(plan.rows)
        on_the_host = bool(needs & ~ON_THE_DEVICE) or not self.selection.can(step.rows)
        on_the_host |= self.batch.handlers.change_logits(plan, besides=CHANGED_ON_THE_DEVICE)
        logits = self._compute(plan, step, needs)
        num_sampled = len(step.rows)
        if logits is not None and num_sampled:
            with self.times.phase("sample"):
                if on_the_host or needs & Needs.BAD_WORDS:  # these read the tokens of the steps before
                    self._settle_earlier()
                choose = self._sample_on_host if on_the_host else self.selection.sample
                choose(logits[:num_sampled], step, needs)
        append_pending(self.batch, step.rows)
        if num_sampled and step.new is None:
            words = num_sampled * NUM_RESULTS
            self._device.to_host(step.host[:words], self.steps.results.view(-1)[:words])
        if step.new is not None:
            self._fill_in(step, step.new)

    def _start_drafted(self, plan: StepPlan, positions: SampledPositions, step: StepInFlight) -> None:
        """Computes a step with drafts, and samples tokens up to the first rejected draft."""
        batch, needs = self.batch, self.batch.sampling.all_needs(plan.rows)
        self._settle_earlier()
        logits = self._mixed(plan, step, needs, positions)
        assert logits is not None, "rows with drafts are sampled"
        with self.times.phase("sample"):
            num_tokens = batch.num_tokens[positions.row_of] + positions.nth
            sampled = sample(logits, batch, positions.row_of, num_tokens, batch.handlers.change_of(plan))
            step.new = new = AddedTokens.verified(positions, sampled)
            assert new.counts is not None, "verified tokens are counted"
            batch.append_sampled(new.rows, new.token_ids, new.counts)
            ends = np.cumsum(new.counts)
            self.deltas.set("last_token", new.rows, new.token_ids[ends - 1])
            if needs & Needs.PENALTIES:
                for nth in range(int(new.counts.max())):  # in each pass, rows are distinct
                    more = new.counts > nth
                    added = new.token_ids[(ends - new.counts)[more] + nth]
                    rows, token_ids = self._staging.send(new.rows[more], added.astype(np.int32))
                    self.tokens.add(rows.long(), token_ids.long())

    def _compute(self, plan: StepPlan, step: StepInFlight, needs: int) -> Tensor | None:
        """Starts the model and, if a decode includes it, the choice of tokens; otherwise returns the logits."""
        is_decode = plan.total_tokens == len(plan.rows) and bool(plan.sampled.all())
        states = self.batch.states_of_step
        is_decode = is_decode and not self.batch.inputs.placed(plan)
        is_decode = is_decode and (states is None or DecodeStates.can(states))
        if is_decode:  # every row is past its prompt, so no prompt logprobs are due
            needs &= ~int(Needs.PROMPT_LOGPROBS)
            ends_with_logits = needs & ~ON_THE_DEVICE or self.batch.handlers.change_logits(plan)
            return self._decode(plan, StepEnding.LOGITS if ends_with_logits else ending_for(needs))
        return self._mixed(plan, step, needs)

    def _decode(self, plan: StepPlan, ending: StepEnding) -> Tensor | None:
        """Starts a decode; returns the logits if it ends with them."""
        if self.graphs.due():
            self._capture()
        most_adapters = self._most_adapters(plan)
        graph = self.graphs.find(len(plan.rows), ending, most_adapters)
        size = graph.key.size if graph is not None else len(plan.rows)
        with self.times.phase("ship"):
            self._decode_rows.place(plan.rows, size)
            if self._decode_states is not None and self.batch.states_of_step is not None:
                self._decode_states.place(self.batch.states_of_step)
            self.deltas.ship()
        if graph is not None:
            with self.times.phase("replay"):
                graph.replay()
            logits: Tensor | None = graph.result
            return logits
        with self.times.phase("eager decode"):
            return self.steps.decode(size, ending, _num_blocks(plan, self._limits.block_size), most_adapters)

    def _most_adapters(self, plan: StepPlan) -> int:
        """Of a row, rounded up to a power of two, so that there are few kinds of graphs."""
        most = self.batch.adapters.most_of(plan.rows)
        return min(self._limits.most_adapters, 1 << (most - 1).bit_length()) if most else 0

    def _mixed(
        self, plan: StepPlan, step: StepInFlight, needs: int, positions: SampledPositions | None = None
    ) -> Tensor | None:
        """Starts a step that is not a plain decode; returns its logits. positions: the sampled ones of a plan with
        drafts, whose rows' tokens are all known to the host."""
        with self.times.phase("ship"):
            self.deltas.ship()
            arrays = self.batch.arrays(plan, positions)
            adapters = arrays.adapters
            uses = () if adapters is None else tuple(zip(adapters.slots, adapters.scales, strict=True))
            states, longest = arrays.states, int(plan.num_tokens.max())
            sent = MixedInputs.of(
                self._staging.send(
                    *(arrays.token_ids, arrays.positions, arrays.query_start),
                    *(arrays.seq_lens, plan.rows, arrays.logits_indices, step.rows),
                    *arrays.slot_mapping.astype(np.int32),
                    *(part for use in uses for part in use),
                    *(() if states is None else states.parts),
                ),
                GivenRows.of(arrays.given),
                len(arrays.slot_mapping),
                len(uses),
                longest,
            )
        with self.times.phase("mixed"):
            hidden, logits = self.steps.mixed(
                sent,
                _num_blocks(plan, self._limits.block_size),
                longest,
                feeds_back=positions is None,
            )
        if needs & Needs.PROMPT_LOGPROBS and self.chooses:
            step.prompts = self.selection.report_prompts(hidden, plan, arrays.query_start)
        return logits if len(step.rows) else None

    def _decode_nothing(self, key: GraphKey) -> Tensor | None:
        """The step that is captured: only padding rows, so that it changes no request's state when it really runs."""
        return self.steps.decode(key.size, key.ending, most_adapters=key.most_adapters)

    def _capture(self) -> bool:
        self._decode_rows.clear()
        with self.times.phase("capture"):
            return self.graphs.capture_next()

    def _sample_on_host(self, logits: Tensor, step: StepInFlight, needs: int) -> None:
        """Lets the host's sampler choose, for needs without an op on the device. Earlier steps must be settled."""
        sampled = sample(logits, self.batch, step.rows, change=self.batch.handlers.change_of(step.plan))
        step.new = AddedTokens.one_each(step.rows, sampled)
        rows, token_ids = self._staging.send(step.rows, sampled.token_ids.astype(np.int32))
        self.state.last_token[rows.long()] = token_ids
        if needs & Needs.PENALTIES:
            self.tokens.add(rows.long(), token_ids.long())

    def _settle_earlier(self) -> None:
        """Waits for the steps in flight. The current step's model has been started, so the device stays busy."""
        for earlier in self._in_flight:
            self._settle(earlier)

    def _settle(self, step: StepInFlight) -> None:
        """Waits for the step, and writes its tokens into the host's copy of the rows."""
        if step.new is None:
            self._fill_in(step, step.settle())

    def _fill_in(self, step: StepInFlight, new: AddedTokens) -> None:
        step.sampled_rows.put_pending(self.batch, new.token_ids)


def _num_blocks(plan: StepPlan, block_size: int) -> int:
    """How many columns of the block tables hold all blocks of the plan's rows."""
    return -(-int((plan.num_computed_tokens + plan.num_tokens).max()) // block_size)
