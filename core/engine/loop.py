"""The busy loop: take messages, schedule, execute, advance, send outputs. Blocks when there is nothing to do.

    depth 1   plan N, submit N, collect N, answer N, plan N+1 ...          the model is idle in between
    depth 2   plan N+1, submit N+1, collect N, answer N, plan N+2 ...      while N+1 runs, N is answered and N+2 planned

Steps in flight are in a queue, oldest first, each with the events that its planning caused.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from headrace.core.adapters.keeper import AdapterKeeper
from headrace.core.adapters.loader import AdapterLoaded, AdapterLoader
from headrace.core.engine.admission import Admission, signed
from headrace.core.engine.control import Controller
from headrace.core.engine.followers import PrefixFollowers
from headrace.core.engine.gates import GateFailed, GateOpened, Gates
from headrace.core.engine.outputs import (
    OutputBuilder,
    StepEvents,
    drop_departed,
    finish_of,
    finish_of_ended,
    gather_prompt_logprobs,
    gather_vectors,
    only_finished,
    partial_outputs,
)
from headrace.core.engine.sampling_checks import SamplingChecks
from headrace.core.engine.sessions import (
    ClientGone,
    ExecutorFailed,
    Inbox,
    InboxMessage,
    PeerStep,
    StopRequest,
    Undecodable,
)
from headrace.core.engine.statistics import Statistics
from headrace.core.engine.step_notes import StepNotes, note_results
from headrace.core.engine.step_work import WorkMeter
from headrace.core.engine.timeline import Stages
from headrace.core.options.engine_options import Options
from headrace.core.options.plan import Facts, Plan
from headrace.core.options.resolve import Capacity, steps_in_flight
from headrace.core.schedule.block_residency import BlockResidency
from headrace.core.schedule.features.chosen import features_of
from headrace.core.schedule.features.drafts import drafting_of
from headrace.core.schedule.features.grammar_masks import GrammarMasks
from headrace.core.schedule.requests import Request, State
from headrace.core.schedule.scheduler import Advance, Scheduler, SchedulerConfig
from headrace.core.structured_output.backends import Backends
from headrace.core.structured_output.compiler import GrammarCompiler
from headrace.ipc.adapters import AdapterFacts, AdapterInfo, Adapters
from headrace.ipc.control import (
    AdapterCommand,
    DrainEngine,
    LoadAdapter,
    PauseGeneration,
    PinAdapter,
    Sleep,
    WorkerAnswer,
    WorkerCommand,
)
from headrace.ipc.failure import SHUT_DOWN, EngineDeadError, Failure, InconsistentError, InvalidRequestError
from headrace.ipc.messages import (
    Abort,
    AddRequest,
    Admitted,
    Control,
    CoreMessage,
    Draining,
    EngineFailed,
    EngineStats,
    Finish,
    FinishReason,
    FollowPrefixes,
    Generate,
    GetStats,
    Load,
    Reply,
    ResetPrefixCache,
)
from headrace.ipc.plugins import load_class
from headrace.ipc.process.gc_pauses import gc_watched
from headrace.ipc.process.resources import give_back_freed_memory
from headrace.ipc.ranges import out_of_range
from headrace.ipc.step import Drafts, StepPlan, StepResult

logger = logging.getLogger(__name__)
IDLE_CHECK_AFTER_S = 1.0
"""After this idle time the accounting of blocks and rows is audited. A request that arrives interrupts the audit."""
MESSAGES_BESIDE_STEPS = 32
"""Most messages handled between two steps of running requests; they take a few milliseconds."""


class Port(Protocol):
    """How the loop reaches clients. Sending never blocks and never fails: a lost client is reported as `ClientGone`."""

    address: str

    def send(self, client: int, message: CoreMessage) -> None: ...
    def send_all(self, message: CoreMessage) -> None:
        """To all clients, those included that are being welcomed. Draining also goes to those that come later."""

    def set_load(self, load: Load, busy_clients: frozenset[int]) -> None: ...
    @property
    def clients(self) -> list[int]: ...


class StepExecutor(Capacity, Protocol):
    """The part of an Executor that the loop and what it owns use."""

    def submit(self, plan: StepPlan) -> None: ...
    def collect(self) -> StepResult: ...
    def idle(self) -> bool: ...
    def agree(self, count: int) -> int: ...
    def take_part(self) -> None: ...
    def may_leave(self) -> bool: ...
    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]: ...
    def load_adapter(self, slot: int, path: str, *, is_3d: bool = False) -> AdapterFacts: ...
    def drop_adapter(self, slot: int) -> None: ...


class Loop:
    """Owns the scheduler and the request table. Everything here runs on one thread."""

    def __init__(self, plan: Plan, facts: Facts, executor: StepExecutor, port: Port, inbox: Inbox) -> None:
        options = plan.options
        self._executor, self._port, self._inbox = executor, port, inbox
        in_flight = steps_in_flight(options, executor)
        self.scheduler: Scheduler = scheduler_class(options)(
            SchedulerConfig(
                num_blocks=facts.num_blocks,
                block_size=plan.block_size,
                cache_groups=plan.model.cache_groups,
                max_model_len=facts.max_model_len,
                max_num_seqs=plan.max_num_seqs,
                max_num_batched_tokens=plan.max_num_batched_tokens,
                eos_token_ids=plan.model.eos_token_ids,
                vocab_size=plan.model.vocab_size,
                prompt_logprobs_cost=plan.model.prompt_logprobs_cost,
                policy=options.scheduling_policy,
                chunked_prefill=options.enable_chunked_prefill and not plan.model.whole_prompts,
                prefix_caching=plan.enable_prefix_caching,
                hash_algorithm=options.prefix_caching_hash_algo,
                max_steps_in_flight=in_flight.depth,
                rows_run_ahead=in_flight.rows_run_ahead,
            )
        )
        if options.kv_cache_metrics:
            self.scheduler.pool.residency = BlockResidency(options.kv_cache_metrics_sample)
        self._work = WorkMeter(plan, facts) if options.enable_mfu_metrics else None
        self._drafting = drafting_of(plan)
        for feature in (self._drafting, *features_of(plan)):
            self.scheduler.add_feature(feature)
        self._output_builder = OutputBuilder(self.scheduler)
        logger.info("up to %d steps in flight: %s", in_flight.depth, in_flight.reason)
        self._depth = in_flight.depth
        self.stages = Stages(self.scheduler.schedule, executor.submit, executor.collect, self._deliver)
        self._in_flight: deque[tuple[StepPlan, StepEvents]] = deque()
        self._held: deque[tuple[int, InboxMessage]] = deque()  # messages held until `Runs.agree` lets them be handled
        self._next_turn: list[GateOpened] = []  # gates with more requests to admit after the next step
        self.gates = Gates()
        """Gatekeepers register here, before the loop runs."""
        self._admission = Admission(plan, facts)
        self._controller = Controller(plan, facts, executor, self.scheduler, port.send)
        self._pause = self._controller.pause
        self._followers = PrefixFollowers(self.scheduler, port.send)
        self._statistics = Statistics(self.scheduler, log_stats=not options.disable_log_stats)
        self._step_notes = StepNotes()
        self._requests: dict[int, dict[int, Request]] = {}  # client -> slot -> request that has not finished
        self._load_changed = True
        """The load may differ from the one reported last."""
        self.load = Load(num_running=0, num_waiting=0)
        """The load reported last. Any thread may read it."""
        self.on_stopping: Callable[[], None] = lambda: None
        """Called when the loop begins to stop and refuses new requests."""
        self.on_first_idle: Callable[[], None] = lambda: None
        """Called when no message has come for IDLE_CHECK_AFTER_S, for the first time."""
        self._stop_at_s: float | None = None
        self._audited_steps = 0
        """The number of steps at the last complete audit."""
        self._compiler: GrammarCompiler | None = None
        self._sampling_checks = SamplingChecks(
            executor,
            report=lambda news: inbox.put((0, news)),
            refusal=self._admission.refusal,
            is_computing=lambda: bool(self._in_flight),
        )
        if plan.model.checks_sampling:
            self.gates.register(self._sampling_checks)
        self.adapters = self._adapter_keeper(plan)
        """None without enable_lora."""
        if self.adapters is not None:
            self.gates.register(self.adapters)

    def _adapter_keeper(self, plan: Plan) -> AdapterKeeper | None:
        if plan.adapters is None:
            return None
        return AdapterKeeper(
            plan.adapters,
            AdapterLoader(self._executor, lambda news: self._inbox.put((0, news))),
            report=lambda news: self._inbox.put((0, news)),
            in_flight=self._steps_in_flight,
            base_names=plan.served_model_names,
        )

    def _steps_in_flight(self) -> tuple[int, int] | None:
        """The numbers of the first and the last one."""
        return (self._in_flight[0][0].step, self._in_flight[-1][0].step) if self._in_flight else None

    def use_grammars(self, backend: Backends, *, prepares: bool) -> None:
        """Allows structured outputs. Call before the loop runs. prepares: prepare the library in the background now
        instead of at the first such request."""
        self._compiler = GrammarCompiler(backend, lambda news: self._inbox.put((0, news)))
        self.gates.register(self._compiler)
        if prepares:
            self._compiler.prepare()
        most_step_tokens = self._drafting.most_step_tokens
        self.scheduler.add_feature(
            GrammarMasks(backend, self.scheduler.config.vocab_size, most_step_tokens=most_step_tokens)
        )

    def on_weights_changed(self, heard: Callable[[str], None], heard_path: Callable[[str], None]) -> None:
        """Registers callbacks for reloaded weights: with `WorkerAnswer.weights`, and with their path."""

        def changed(weights: str) -> None:
            self._admission.use_weights(weights)
            heard(weights)

        self._controller.on_weights, self._controller.on_weights_path = changed, heard_path

    def reload_weights(self, path: str) -> None:
        """Before `run`: carries out what a ReloadWeights would. Raises HeadraceError."""
        self._controller.reload_weights(path)

    def run(self) -> None:
        """Runs until a StopRequest is carried out. If the executor fails, sends the failure to every client and
        re-raises the error."""
        try:
            with gc_watched(self._statistics.gc_pause):
                while not self._stopped():
                    self.turn()
        except BaseException as error:
            failure = Failure.of(error, process="engine-core", phase="step")
            self._port.send_all(EngineFailed(failure=failure))
            raise
        finally:
            if self._compiler is not None:
                self._compiler.stop()
            if self.adapters is not None:
                self.adapters.stop()
        self._fail_unfinished()

    def turn(self) -> None:
        """Handles the messages that have come (waits for one if there is no work), submits a step if fewer than the
        depth are in flight, and takes the oldest step's result unless another step can be submitted first."""
        self._take_messages()
        if self.gates:
            self._end_expired()
        submitted = len(self._in_flight) < self._depth and self._submit()
        if self._in_flight and not (submitted and len(self._in_flight) < self._depth):
            self._collect()
        if self._pause.is_awaited and not self.has_work and self._controller.can_compute:
            self._pause.reach()
        if self.gates and self._sampling_checks.is_due():
            self._drain()
            self._sampling_checks.ask()
        if self.adapters is not None and self.adapters.is_due:
            self.adapters.go_on()

    @property
    def is_stopping(self) -> bool:
        return self._stop_at_s is not None

    @property
    def has_work(self) -> bool:
        """A step is in flight, or can be planned."""
        return bool(self._in_flight) or (not self._controller.stands_still and self.scheduler.has_work)

    # --- messages -----------------------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        """Handles all messages, or MESSAGES_BESIDE_STEPS of them while requests run. Waits for one if there is no
        work."""
        if not self.has_work:
            self._report_load()
            self._followers.tell()
            self._statistics.idle()
            message = self._held.popleft() if self._held else self._next_message()
            if message is not None:
                self._handle(*message)
            if not self.has_work:
                return
        # In most turns there is no message.
        num_held = 0 if self._inbox.empty() and not self._held else self._sort_inbox()
        num_agreed = self._executor.agree(num_held)
        while self._held and (num_agreed or not isinstance(self._held[0][1], AddRequest | Abort)):
            num_agreed -= isinstance(self._held[0][1], AddRequest | Abort)
            self._handle(*self._held.popleft())
        while self._next_turn:
            self._inbox.put((0, self._next_turn.pop()))

    def _most_messages(self) -> int:
        return MESSAGES_BESIDE_STEPS if self.scheduler.num_running else sys.maxsize

    def _sort_inbox(self) -> int:
        """Holds AddRequest and Abort messages, and later messages of the same clients; handles all others. Returns how
        many AddRequest and Abort messages are held."""
        held_clients = {client for client, _ in self._held}
        # Running requests continue even while thousands of requests arrive.
        most = self._most_messages()
        while not self._inbox.empty() and (most := most - 1) >= 0:
            client, content = self._inbox.get()
            # Messages of one client are handled in the order in which they were sent.
            if isinstance(content, AddRequest | Abort) or client in held_clients:
                held_clients.add(client)
                self._held.append((client, content))
            else:
                self._handle(client, content)
        return sum(isinstance(each, AddRequest | Abort) for _, each in self._held)

    def _next_message(self) -> tuple[int, InboxMessage] | None:
        """Waits for a message and does idle work meanwhile. None if a gate's time-out or the stop deadline is first."""
        while self._inbox.empty() and self._executor.idle():
            pass
        try:
            return self._inbox.get(timeout=IDLE_CHECK_AFTER_S)
        except queue.Empty:
            self._audit()
            on_idle, self.on_first_idle = self.on_first_idle, lambda: None
            on_idle()
        deadlines_s = [each for each in (self.gates.next_deadline_s(), self._stop_at_s) if each is not None]
        try:
            return self._inbox.get(timeout=max(0.0, min(deadlines_s) - time.monotonic()) if deadlines_s else None)
        except queue.Empty:
            return None

    def _audit(self) -> None:
        """Audits the scheduler once after the last step, while no message comes, and returns freed memory to the
        system.

        An inconsistency is logged, and the accounting of blocks starts afresh as after a start: no request runs, so no
        answer can be wrong, and ending the engine would only lose waiting requests. Inconsistent rows cannot be
        repaired; they end the engine.
        """
        if self._audited_steps == self._statistics.num_steps:
            return
        try:
            for _ in self.scheduler.audit():
                if not self._inbox.empty():
                    return  # a request does not wait for it
        except InconsistentError as error:
            logger.error("the audit of the idle engine found: %s; the prefix cache is cleared", error)
            self.scheduler.forget_blocks()
            self.scheduler.check()
        self._audited_steps = self._statistics.num_steps
        if self._inbox.empty():
            give_back_freed_memory()

    def _handle(self, client: int, message: InboxMessage) -> None:
        self._load_changed = True
        match message:
            case AddRequest():
                self._add(client, message)
            case Abort():
                self._abort(client, message.slots)
            case Undecodable():
                for slot in message.slots:
                    self._refuse(client, slot, self._admission.refusal(message.why))
            case ClientGone():
                self._followers.forget(client)
                for request in self._requests.pop(client, {}).values():
                    self._drop(request)
                if self._controller.has_prepared_for(client):
                    self._drain()
                    self._controller.forget_weights_of(client)
            case FollowPrefixes():
                self._followers.add(client)
            case GetStats():
                self._port.send(client, Reply(call=message.call, result=self.stats()))
            case ResetPrefixCache():
                self.scheduler.pool.reset_cache()
                self._port.send(client, Reply(call=message.call))
            case Control():
                self._control(client, message)
            case GateOpened() | GateFailed() | AdapterLoaded():
                self._go_on_with(message)
            case PeerStep():
                self._executor.take_part()
            case ExecutorFailed():
                raise EngineDeadError(failure=message.failure)
            case StopRequest():
                self._begin_stop(message.deadline_s)

    def _go_on_with(self, news: GateOpened | GateFailed | AdapterLoaded) -> None:
        """What requests wait for is there, or will never be."""
        if isinstance(news, AdapterLoaded):
            assert self.adapters is not None, "nothing else loads any"
            self.adapters.loaded(news)
            return
        if isinstance(news, GateFailed):
            for request in self.gates.fail(news.gate):
                self._end_gated(request, news.failure)
            return
        ready, leaves_some = self.gates.open(news.gate, self._most_messages())
        for request, priority in ready:
            self.scheduler.add(request, priority)
        if leaves_some:
            self._next_turn.append(news)

    def _add(self, client: int, message: AddRequest) -> None:
        live = self._requests.setdefault(client, {})
        if self._stop_at_s is not None:
            failure: Failure | None = self._admission.shutting_down()
        elif message.slot in live:
            failure = self._admission.refusal(f"slot {message.slot} is in use by a request that has not finished")
        elif self._num_waiting >= self._admission.max_waiting:
            failure = self._admission.queue_full(self._statistics.seconds_per_request() * self._num_waiting)
        elif len(live) >= self._admission.max_of_client:
            failure = self._admission.too_many(self._statistics.seconds_per_request())
        elif self._controller.asleep and (message.adapters or not message.num_resumed_tokens):
            failure = self._admission.asleep()  # but one that another engine began is kept here as it was there
        else:
            failure = self._admission.check(message)
            if failure is None and self.adapters is not None:
                failure = self.adapters.check(message)
        if failure is not None:
            self._refuse(client, message.slot, failure)
            return
        request = self._admission.request(client, message)
        live[message.slot] = request
        if message.notes_steps:
            self._step_notes.add(request)
        if not self.gates.hold(request, message):
            self.scheduler.add(request, message.priority)

    def _refuse(self, client: int, slot: int, failure: Failure) -> None:
        """Answers an AddRequest that is not taken: with its Finish, unless the slot's own is still to come."""
        if slot in self._requests.get(client, ()):
            self._port.send(client, self._admission.protocol_error(failure))
            return
        finish = Finish(slot=slot, reason=FinishReason.REJECTED, failure=failure)
        self._port.send(client, only_finished(self._statistics.num_steps, [finish]))

    def _drop(self, request: Request) -> None:
        """Ends a gated, waiting or running request and frees what it holds."""
        self._leave_adapters(request)
        if self.gates.remove(request):
            request.state = State.FINISHED
        else:
            self.scheduler.drop(request)

    def _end_expired(self) -> None:
        """Fails requests that waited too long for a gate."""
        for request, failure in self.gates.expired():
            self._end_gated(request, failure)

    def _leave_adapters(self, request: Request) -> None:
        if self.adapters is not None:
            self.adapters.leave(request)

    def _end_gated(self, request: Request, failure: Failure) -> None:
        self._leave_adapters(request)
        del self._requests[request.client][request.slot]
        request.state = State.FINISHED
        finish = finish_of(request, FinishReason.FAILED, failure=failure)
        self._port.send(request.client, only_finished(self._statistics.num_steps, [finish]))

    def _abort(self, client: int, slots: tuple[int, ...]) -> None:
        """Aborts a client's requests. A slot that is not live has already had its Finish, so it gets no answer."""
        live = self._requests.get(client, {})
        requests = [live.pop(slot) for slot in slots if slot in live]
        for request in requests:
            self._drop(request)
        if requests:
            finished = [finish_of(request, FinishReason.ABORT) for request in requests]
            self._port.send(client, partial_outputs(self._statistics.num_steps, requests, finished))

    def _control(self, client: int, message: Control) -> None:
        """Carries out a command, with no step in flight unless it is of adapters. A command that fails changes nothing;
        its answer has the reason."""
        command = message.command
        if (problem := out_of_range(command)) is not None:
            failure = Failure(
                message=problem, type=InvalidRequestError.__name__, process="engine-core", phase="control"
            )
            self._port.send(client, Reply(call=message.call, failure=failure))
            return
        if isinstance(command, AdapterCommand):
            self._control_adapters(client, message.call, command)
            return
        if isinstance(command, PauseGeneration | Sleep):
            if command.mode != "wait":
                self._drain()
            if command.mode == "abort":
                for each, live in list(self._requests.items()):
                    self._abort(each, tuple(live))
            self._pause.ask(client, message.call, command)  # answered by `turn`, when the pause is reached
            return
        if isinstance(command, DrainEngine):
            self._port.send(client, Reply(call=message.call))
            self._begin_stop(command.deadline_s)
            return
        self._drain()
        self._controller.carry_out(client, message.call, command)
        self.stages.record(self._controller.timeline)  # the command may have started or stopped a profile

    def _control_adapters(self, client: int, call: int, command: AdapterCommand) -> None:
        def answer(result: AdapterInfo | Adapters | None, failure: Failure | None) -> None:
            self._port.send(client, Reply(call=call, result=result, failure=failure))

        if self.adapters is None:
            answer(None, self._admission.refusal("this engine takes no adapters: start it with enable_lora"))
        elif "weights" in self._controller.asleep and isinstance(command, LoadAdapter | PinAdapter):
            answer(None, self._admission.asleep())
        else:
            self.adapters.carry_out(command, answer)

    def _begin_stop(self, deadline_s: float) -> None:
        num_left = self.scheduler.num_running + self._num_waiting
        if num_left and deadline_s > 0:
            logger.warning(
                "shutting down: %d requests have up to %g s to finish; a second signal ends them now",
                num_left,
                deadline_s,
            )
        self._stop_at_s = min(time.monotonic() + deadline_s, self._stop_at_s or float("inf"))
        self._port.send_all(Draining(deadline_s=deadline_s))
        self.on_stopping()

    def _stopped(self) -> bool:
        if self._stop_at_s is None:
            return False
        if time.monotonic() >= self._stop_at_s:
            return True
        return not (self.has_work or self.gates) and self._controller.can_compute and self._executor.may_leave()

    def _fail_unfinished(self) -> None:
        """Fails all unfinished requests with the reason, so that no cut answer looks like a complete one."""
        said = "the engine was shut down before this request was finished"
        failure = Failure(message=said, type=SHUT_DOWN, process="engine-core", pid=os.getpid(), phase="serve")
        for client, live in self._requests.items():
            for request in live.values():
                self._drop(request)
            finished = [finish_of(request, FinishReason.FAILED, failure=failure) for request in live.values()]
            if finished:
                self._port.send(client, only_finished(self._statistics.num_steps, finished))
        self._requests.clear()

    # --- steps --------------------------------------------------------------------------------------------------

    def _submit(self) -> bool:
        """Plans and submits a step. False if nothing can be computed now."""
        if self._controller.stands_still:
            return False
        planned_s = time.monotonic() if self._step_notes else 0.0
        plan = self.stages.schedule()
        if plan is None:
            if not self._in_flight and self.scheduler.has_work:
                raise InconsistentError("requests are waiting and nothing can run")
            return False
        events = StepEvents()
        if plan.new_rows:
            self._note_admitted(plan, events)
        elif plan.released_rows.size:
            self._load_changed = True
        if planned_s:
            events.noted = self._step_notes.submitted(plan, planned_s)
        self.stages.submit(plan)
        self._in_flight.append((plan, events))
        return True

    def _note_admitted(self, plan: StepPlan, events: StepEvents) -> None:
        self._load_changed, now_s = True, time.monotonic()
        for new in plan.new_rows:
            request = self.scheduler.rows.requests[new.row]
            if request is None:
                raise InconsistentError(f"row {new.row} was admitted without a request")
            if not request.first_scheduled_s:
                request.first_scheduled_s = now_s
                drawn = isinstance(request.task, Generate) and request.sampling.seed is None
                seed = signed(request.seed) if drawn else None
                admitted = Admitted(
                    slot=request.slot,
                    num_cached_tokens=new.num_computed_tokens,
                    seed=seed,
                    adapters=() if self.adapters is None else self.adapters.identities(request),
                )
                events.admitted.setdefault(request.client, []).append(admitted)

    def _collect(self) -> None:
        """Takes the oldest step's result and sends its outputs to clients."""
        plan, events = self._in_flight.popleft()
        result = self.stages.collect()
        if events.noted:
            note_results(events.noted, result)
        if self._controller.timeline is not None:
            self._controller.timeline.step(plan, result)
        current = result
        if self._depth > 1:  # else no request can have ended since the step was planned
            current = drop_departed(result, self.scheduler.rows)
            for client, sent in events.admitted.items():
                sent[:] = [admitted for admitted in sent if admitted.slot in self._requests.get(client, ())]
        now_s = time.monotonic()
        advance = self.stages.answer(plan, current, events, now_s)
        num_prompt_tokens = plan.total_tokens - len(result.rows)
        if (drafts := plan.get(Drafts)) is not None:
            num_prompt_tokens -= len(drafts.token_ids)
        self._statistics.step(result, advance, num_prompt_tokens, now_s)
        if self._work is not None:
            self._work.step(plan)
        if self._load_changed:
            self._report_load()
        if now_s >= self._followers.due_s:
            self._followers.tell(now_s)

    def _drain(self) -> None:
        """Collects all steps in flight."""
        while self._in_flight:
            self._collect()

    def _deliver(self, plan: StepPlan, result: StepResult, events: StepEvents, now_s: float) -> Advance:
        """Advances the scheduler by a step's result and sends the step's outputs to clients."""
        scheduler = self.scheduler
        table = scheduler.rows
        for row_failure in result.failures:
            request = table.requests[row_failure.row]
            if request is None:
                raise InconsistentError(f"the executor failed row {row_failure.row}, which is empty")
            scheduler.drop(request, forget_blocks=True)
            self._end(events, request, finish_of(request, FinishReason.FAILED, failure=row_failure.failure))
        if result.prompt_logprobs:
            gather_prompt_logprobs(events, result, table)
        if result.vectors is not None:
            gather_vectors(events, result.vectors, table)
        advance = scheduler.advance(result)
        for request in advance.first:
            request.first_token_s = now_s
        failed = scheduler.take_failed()
        for ended in advance.ended:
            if ended.request not in failed:
                self._end(events, ended.request, finish_of_ended(ended))
        for request, why in failed.items():
            self._fail(events, request, why)
        for client, message in self._output_builder.messages(plan, result, advance, events):
            self._port.send(client, message)
        return advance

    def _fail(self, events: StepEvents, request: Request, why: str) -> None:
        """Fails a request that runs, waits or has just ended, unless it has been aborted."""
        if self._requests.get(request.client, {}).get(request.slot) is request:
            self.scheduler.drop(request, forget_blocks=True)
            failure = Failure(message=why, process="engine-core", pid=os.getpid(), phase="step")
            self._end(events, request, finish_of(request, FinishReason.FAILED, failure=failure))

    def _end(self, events: StepEvents, request: Request, finish: Finish) -> None:
        del self._requests[request.client][request.slot]
        self._leave_adapters(request)
        self._statistics.ended(request)
        self._load_changed = True
        events.finished.setdefault(request.client, []).append(finish)

    # --- load and statistics -----------------------------------------------------------------------------------

    @property
    def _num_waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self.gates)

    def _report_load(self) -> None:
        self._load_changed = False
        self.load = load = Load(
            num_running=self.scheduler.num_running,
            num_waiting=self._num_waiting,
            is_paused=self._pause.is_asked,
        )
        self._port.set_load(load, frozenset(client for client, live in self._requests.items() if live))

    def stats(self) -> EngineStats:
        scheduler, drafts = self.scheduler, self._drafting.counts
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=self._num_waiting,
            num_clients=len(self._port.clients),
            num_blocks=scheduler.pool.num_blocks - 1,
            num_free_blocks=scheduler.pool.num_available,
            num_cached_blocks=scheduler.pool.num_cached,
            steps=self._statistics.num_steps,
            num_finished=self._statistics.num_finished,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_prompt_tokens=scheduler.num_cached_prompt_tokens,
            num_generated_tokens=self._statistics.num_generated_tokens,
            num_step_gaps=self._statistics.gaps.count,
            step_gap_s=self._statistics.gaps.gap_s,
            forward_s=self._statistics.gaps.forward_s,
            paused=self._pause.is_asked,
            sleep_level=self._controller.sleep_level,
            times=self._statistics.times(),
            num_drafts=drafts.num_drafts,
            num_draft_tokens=drafts.num_draft_tokens,
            num_accepted_tokens=drafts.num_accepted_tokens,
            num_accepted_tokens_per_pos=tuple(drafts.accepted_per_position),
            num_waiting_by_reason={"capacity": len(scheduler.waiting), **self.gates.waiting_by_reason()},
            expert_balance=self._statistics.expert_balance,
            adapters=None if self.adapters is None else self.adapters.stats(),
            block_times=None if scheduler.pool.residency is None else scheduler.pool.residency.times(),
            work=None if self._work is None else self._work.work(),
        )


def scheduler_class(options: Options) -> Any:
    """Scheduler, or the derived class that the options name. Raises OptionError if that class cannot be loaded."""
    return load_class("scheduler_cls", options.scheduler_cls, Scheduler) if options.scheduler_cls else Scheduler
