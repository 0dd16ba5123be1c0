"""The busy loop: take messages, schedule, execute, advance, answer. Blocks when there is nothing to do."""

from __future__ import annotations

import logging
import queue
import time
from typing import Protocol

from headrace.core.desk import ClientGone, ExecutorFailed, Inbox, StopOrder
from headrace.core.intake import Intake
from headrace.core.outputs import Addressed, gather_prompt_logprobs, step_outputs
from headrace.core.plan import Facts, Plan
from headrace.core.requests import Request
from headrace.core.scheduler import Scheduler, SchedulerConfig
from headrace.core.throughput import Throughput
from headrace.ipc.codec import Tensor
from headrace.ipc.failure import EngineDeadError, Failure
from headrace.ipc.messages import (
    Abort,
    AddRequest,
    Admitted,
    ClientMessage,
    CoreMessage,
    Draining,
    EngineFailed,
    EngineStats,
    Finish,
    FinishReason,
    GetStats,
    Load,
    Reply,
    ResetPrefixCache,
    StepOutputs,
)
from headrace.ipc.step import StepPlan, StepResult

logger = logging.getLogger(__name__)
IDLE_CHECK_AFTER_S = 1.0
"""Once idle for this long, the books of blocks and rows are audited; a request in the meantime is not delayed."""


class Port(Protocol):
    """How the loop reaches clients. `send` never blocks and never fails: a client that is gone is reported later."""

    address: str

    def send(self, client: int, message: CoreMessage) -> None: ...
    def set_load(self, load: Load, busy_clients: frozenset[int]) -> None: ...
    @property
    def clients(self) -> list[int]: ...


class Runs(Protocol):
    """The part of an Executor that the loop uses."""

    def submit(self, plan: StepPlan) -> None: ...
    def collect(self) -> StepResult: ...


class Loop:
    """Owns the scheduler and the request table. Everything here runs on one thread."""

    def __init__(self, plan: Plan, facts: Facts, executor: Runs, port: Port, inbox: Inbox) -> None:
        options = plan.options
        self._executor, self._port, self._inbox = executor, port, inbox
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=facts.num_blocks,
                block_size=plan.block_size,
                max_model_len=facts.max_model_len,
                max_num_seqs=plan.max_num_seqs,
                max_num_batched_tokens=plan.max_num_batched_tokens,
                eos_token_ids=plan.model.eos_token_ids,
                vocab_size=plan.model.vocab_size,
                policy=options.scheduling_policy,
                chunked_prefill=options.enable_chunked_prefill,
                prefix_caching=plan.enable_prefix_caching,
                hash_algorithm=options.prefix_caching_hash_algo,
            )
        )
        self._intake = Intake(plan, facts)
        self._throughput = Throughput(log_stats=not options.disable_log_stats)
        self._requests: dict[int, dict[int, Request]] = {}  # client -> slot -> request that has not finished
        self._steps = self._num_finished = 0
        self._stop_at_s: float | None = None

    def run(self) -> None:
        """Until a StopOrder has been carried out. Raises what ended the executor, after telling every client."""
        try:
            while not self._stopped():
                self.turn()
        except BaseException as error:
            failure = Failure.of(error, process="engine-core", phase="step")
            for client in self._port.clients:
                self._port.send(client, EngineFailed(failure=failure))
            raise
        self._end_what_is_left()

    def turn(self) -> None:
        """Takes all messages that have come (waiting for one when there is no work), then runs one step if any."""
        self._take_messages()
        if self.scheduler.has_work:
            self._step()

    # --- messages -----------------------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        """All that have come; waits for one when there is no work."""
        if not self.scheduler.has_work:
            self._report_load()
            try:
                first = self._inbox.get(timeout=IDLE_CHECK_AFTER_S)
            except queue.Empty:
                self.scheduler.check()
                first = self._inbox.get()
            self._handle(*first)
        while not self._inbox.empty():
            self._handle(*self._inbox.get())

    def _handle(self, client: int, message: ClientMessage | ClientGone | StopOrder | ExecutorFailed) -> None:
        match message:
            case AddRequest():
                self._add(client, message)
            case Abort():
                self._abort(client, message.slots)
            case ClientGone():
                for request in self._requests.pop(client, {}).values():
                    self.scheduler.drop(request)
            case GetStats():
                self._port.send(client, Reply(call=message.call, result=self.stats()))
            case ResetPrefixCache():
                self.scheduler.pool.reset_cache()
                self._port.send(client, Reply(call=message.call))
            case ExecutorFailed():
                raise EngineDeadError(failure=message.failure)
            case StopOrder():
                self._begin_stop(message.deadline_s)

    def _add(self, client: int, message: AddRequest) -> None:
        live = self._requests.setdefault(client, {})
        if self._stop_at_s is not None:
            failure: Failure | None = self._intake.refusal("the engine is shutting down and takes no new requests")
        elif message.slot in live:
            failure = self._intake.refusal(f"slot {message.slot} is in use by a request that has not finished")
            self._port.send(client, self._intake.protocol_error(failure))  # its Finish is still to come
            return
        elif len(self.scheduler.waiting) >= self._intake.max_waiting:
            failure = self._intake.queue_full(self._throughput.seconds_per_request() * len(self.scheduler.waiting))
        else:
            failure = self._intake.check(message)
        if failure is not None:
            finish = Finish(slot=message.slot, reason=FinishReason.REJECTED, failure=failure)
            self._port.send(client, self._only_finished([finish]))
            return
        request = self._intake.request(client, message)
        live[message.slot] = request
        self.scheduler.add(request, message.priority)

    def _abort(self, client: int, slots: tuple[int, ...]) -> None:
        """A slot that is not live has had its Finish already, so there is nothing left to say about it."""
        live = self._requests.get(client, {})
        requests = [live.pop(slot) for slot in slots if slot in live]
        for request in requests:
            self.scheduler.drop(request)
        if requests:
            self._port.send(client, self._only_finished([self._finish(r, FinishReason.ABORT) for r in requests]))

    def _begin_stop(self, deadline_s: float) -> None:
        num_left = self.scheduler.num_running + len(self.scheduler.waiting)
        if num_left and deadline_s > 0:
            logger.warning(
                "shutting down: %d requests have up to %g s to finish; a second signal ends them now",
                num_left,
                deadline_s,
            )
        self._stop_at_s = min(time.monotonic() + deadline_s, self._stop_at_s or float("inf"))
        for client in self._port.clients:
            self._port.send(client, Draining(deadline_s=deadline_s))

    def _stopped(self) -> bool:
        if self._stop_at_s is None:
            return False
        return not self.scheduler.has_work or time.monotonic() >= self._stop_at_s

    def _end_what_is_left(self) -> None:
        """An answer cut short must not look like a whole one: it fails, and says why."""
        failure = self._intake.refusal("the engine was shut down before this request was finished")
        for client, live in self._requests.items():
            for request in live.values():
                self.scheduler.drop(request)
            finished = [self._finish(request, FinishReason.FAILED, failure=failure) for request in live.values()]
            if finished:
                self._port.send(client, self._only_finished(finished))
        self._requests.clear()

    # --- steps --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        plan = self.scheduler.schedule()
        assert plan is not None, "requests are waiting and nothing can run"
        now_s = time.monotonic()
        news = Addressed()
        for new in plan.new_rows:
            request = self.scheduler.rows.requests[new.row]
            assert request is not None, f"row {new.row} was admitted without a request"
            if not request.first_scheduled_s:
                request.first_scheduled_s = now_s
                admitted = Admitted(slot=request.slot, num_cached_tokens=new.num_computed_tokens)
                news.admitted.setdefault(request.client, []).append(admitted)
        self._executor.submit(plan)
        result = self._executor.collect()
        self._deliver(plan, result, news)
        self._steps += 1
        self._throughput.step(plan.total_tokens - len(result.rows), len(result.rows), self.scheduler)
        self._report_load()

    def _deliver(self, plan: StepPlan, result: StepResult, news: Addressed) -> None:
        scheduler, now_s = self.scheduler, time.monotonic()
        table = scheduler.rows
        for row_failure in result.failures:
            request = table.requests[row_failure.row]
            assert request is not None, f"the executor failed row {row_failure.row}, which is empty"
            scheduler.drop(request, forget_blocks=True)
            self._end(news, request, self._finish(request, FinishReason.FAILED, failure=row_failure.failure))
        first = (table.num_tokens[result.rows] == table.num_prompt_tokens[result.rows]).nonzero()[0]
        for row in result.rows[first].tolist():
            request = table.requests[row]
            assert request is not None, f"the executor sampled for row {row}, which is empty"
            request.first_token_s = now_s
        gather_prompt_logprobs(news, result, table)
        advance = scheduler.advance(result)
        for ended in advance.ended:
            self._end(news, ended.request, self._finish(ended.request, ended.reason, stop_token=ended.stop_token))
        for client, message in step_outputs(plan, result, advance, news, table):
            self._port.send(client, message)

    def _end(self, news: Addressed, request: Request, finish: Finish) -> None:
        del self._requests[request.client][request.slot]
        self._num_finished += 1
        self._throughput.finished()
        news.finished.setdefault(request.client, []).append(finish)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_token: int | None = None,
        failure: Failure | None = None,
    ) -> Finish:
        now_s = time.monotonic()
        scheduled_s = request.first_scheduled_s or now_s
        token_s = request.first_token_s or now_s
        return Finish(
            slot=request.slot,
            reason=reason,
            stop_token=stop_token,
            failure=failure,
            queued_s=scheduled_s - request.arrived_s,
            prefill_s=token_s - scheduled_s,
            decode_s=now_s - token_s,
            num_preemptions=request.num_preemptions,
        )

    # --- what others may know -----------------------------------------------------------------------------------

    def _only_finished(self, finished: list[Finish]) -> StepOutputs:
        none = Tensor.of("int32", [])
        return StepOutputs(step=self._steps, slots=none, token_ids=none, finished=tuple(finished))

    def _report_load(self) -> None:
        load = Load(num_running=self.scheduler.num_running, num_waiting=len(self.scheduler.waiting))
        self._port.set_load(load, frozenset(client for client, live in self._requests.items() if live))

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=len(scheduler.waiting),
            num_clients=len(self._port.clients),
            num_blocks=scheduler.pool.num_blocks - 1,
            num_free_blocks=scheduler.pool.num_available,
            num_cached_blocks=scheduler.pool.num_cached,
            steps=self._steps,
            num_finished=self._num_finished,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_prompt_tokens=scheduler.num_cached_prompt_tokens,
            num_generated_tokens=self._throughput.num_generated_tokens,
        )
