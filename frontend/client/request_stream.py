"""A request on the client's side: turns the core's messages into outputs when they are read.

A step only appends to lists and wakes the reader once; text, log-probabilities and output objects are made on
reading, so a slow reader gets fewer and larger pieces. Only stop strings require making text at each step.

    StepOutputs --> SequenceState (one per slot, n of them) --> RequestStream --> RequestOutput
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.frontend.client.one_process import OneProcess
from headrace.frontend.request.checks import CheckedRequest
from headrace.frontend.request.outputs import (
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    LogprobsOfPosition,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    SampleLogprobs,
)
from headrace.frontend.request.parameters.repetition import STOP_REASON
from headrace.frontend.request.parameters.sampling_params import RequestOutputKind
from headrace.frontend.text.detokenizer import REPLACEMENT, Detokenizer, StopChecker
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.codec import Tensor
from headrace.ipc.failure import HeadraceError, let_interrupts_pass
from headrace.ipc.messages import Finish, Generate, LogprobRows, Sampling, Task

if TYPE_CHECKING:
    from headrace.frontend.client.request_metrics import RequestMeter
    from headrace.frontend.client.request_table import RequestTable

logger = logging.getLogger(__name__)

LogprobRow = tuple[list[int], list[float], int]
"""Token ids (the position's own token first), their log-probabilities, and the rank of the own token."""
_DROPPED_AT_ONCE = 1024


class SequenceState:
    """One output of a request in progress."""

    __slots__ = (
        "_end_read",
        "_logprobs",
        "_new_text",
        "_num_read",
        "_text",
        "adapter_identities",
        "cumulative_logprob",
        "detokenizer",
        "finish_reason",
        "index",
        "logprob_rows",
        "looks_for_stop",
        "min_tokens",
        "num_text_tokens",
        "seed",
        "slot",
        "stop_reason",
        "stops",
        "stream",
        "token_ids",
    )  # fmt: skip

    def __init__(self, stream: RequestStream, index: int, detokenizer: Detokenizer | None) -> None:
        params = stream.params
        self.stream, self.index, self.detokenizer = stream, index, detokenizer
        self.slot = -1  # none yet; each engine's table gives it one
        self.stops: StopChecker | None = None
        if params.stop and detokenizer is not None:
            self.stops = StopChecker(params.stop_strings, include_in_output=params.include_stop_str_in_output)
        self.looks_for_stop = self.stops is not None or params.repetition_detection is not None
        self.min_tokens = params.min_tokens
        self.token_ids: list[int] = []
        self.num_text_tokens = 0
        """How many of the tokens the detokeniser has processed."""
        self.seed: int | None = None
        """The seed that the core drew, if the request had none."""
        self.adapter_identities: tuple[str, ...] = ()
        """The versions of the prompt's adapters that the core uses, once it has started."""
        self.logprob_rows: list[tuple[LogprobRows, int]] = []
        """For each token, its step's log-probabilities and its row in them, if they were requested."""
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._new_text: list[str] = []
        self._text = ""
        self._logprobs: SampleLogprobs = FlatLogprobs() if params.flat_logprobs else []
        self._num_read = 0
        self._end_read = False

    def find_stop(self) -> bool:
        """Checks the newest token; True if a stop string is complete or the output repeats itself, so it must end."""
        repetition = self.stream.params.repetition_detection
        repeats = repetition is not None and len(self.token_ids) > self.min_tokens and repetition.found(self.token_ids)
        if self.stops is None:
            return repeats
        text = self.detokenizer.extend(self.token_ids[self.num_text_tokens :]) if self.detokenizer else ""
        self.num_text_tokens = len(self.token_ids)
        text = self.stops.add(text, counts=self.num_text_tokens > self.min_tokens)
        self._new_text.append(text)
        return repeats or self.stops.matched is not None

    def found_stop(self) -> tuple[str, str]:
        """The finish_reason and stop_reason of an output for which `find_stop` returned True."""
        if self.stops is not None and self.stops.matched is not None:
            return "stop", self.stops.matched
        return "repetition", STOP_REASON

    def finish(self, reason: str, stop_reason: int | str | None, *, silent_last_token: bool = False) -> None:
        """Ends the output. silent_last_token: leave out the text of the token that ended it."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self.detokenizer is None:
            return
        if self.stops is None or self.stops.matched is None:
            end = len(self.token_ids) - silent_last_token
            text, rest = self.detokenizer.extend(self.token_ids[self.num_text_tokens : end]), self.detokenizer.finish()
            if self.stream.params.structured_outputs is not None and reason == "length":
                rest = rest.rstrip(REPLACEMENT)  # otherwise the text would not be a prefix of any valid answer
            text += rest
            self.num_text_tokens = end
            if self.stops is not None:
                text = self.stops.add(text, counts=len(self.token_ids) > self.min_tokens) + self.stops.finish()
                if self.stops.matched is not None:
                    self.finish_reason, self.stop_reason = "stop", self.stops.matched
            self._new_text.append(text)

    def read(self, *, delta: bool, tokenizer: Tokenizer | None) -> CompletionOutput:
        """The whole output so far, or with `delta` only what is new since the last call."""
        start = self._num_read if delta else 0
        text = self.read_text()
        if not delta:
            self._text = text = self._text + text
        logprobs = None
        if self.stream.params.logprobs is not None:
            rows = self.logprob_rows[len(self._logprobs) : len(self.token_ids)]
            are_ranked = not self.stream.params.logprob_token_ids
            for rows_of_step, nth in rows:
                row = nth_row(rows_of_step, nth)
                self.cumulative_logprob += row[1][0]
                self._logprobs.append(logprobs_of_position(row, tokenizer, are_ranked=are_ranked))
            logprobs = self._logprobs[start:]
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[start:],
            cumulative_logprob=None if logprobs is None else self.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            lora_request=self.stream.prompt.lora_request,
        )

    def read_text(self) -> str:
        """The text that is new since the last call: `read` for who needs nothing else."""
        text, token_ids = "", self.token_ids
        if self._new_text:
            text = "".join(self._new_text)
            self._new_text.clear()
        if self.finish_reason is not None:
            self._end_read = True
        elif self.stops is None and self.detokenizer is not None:
            text += self.detokenizer.extend(token_ids[self.num_text_tokens :])
            self.num_text_tokens = len(token_ids)
        self._num_read = len(token_ids)
        return text

    @property
    def logprobs_read(self) -> SampleLogprobs:
        """The log-probabilities of the tokens that were read, in the user's form."""
        return self._logprobs

    def has_news(self) -> bool:
        """Whether there is enough to return: the first token, `stream_interval` more, or the end."""
        num_new = len(self.token_ids) - self._num_read
        if num_new >= self.stream.interval or (num_new and not self._num_read):
            return True
        return self.finish_reason is not None and not self._end_read


class RequestListener:
    """Hears of a request as it runs, in the client's loop: for readers that must not wait for a task switch. An error
    of a listener ends its request, and no other."""

    def on_step(self, stream: RequestStream, now_s: float) -> None:
        """After each step with outputs of the request, whatever the output kind. now_s: monotonic seconds."""

    def on_done(self, stream: RequestStream) -> None:
        """Once, when the request has ended, successfully or not: before the last `on_step`, if there is one."""


class RequestStream(OneProcess):
    """A submitted request: an async iterator of its outputs, for one reader, in the client's loop."""

    def __init__(self, request: CheckedRequest, tokenizer: Tokenizer | None) -> None:
        self.request_id, self.prompt, self.params = request.name, request.prompt, request.params
        self.priority, self.pooling_task = request.priority, request.pooling_task
        self.max_tokens, self.tokenized = request.max_tokens, request.tokenized
        prompt, params = request.prompt, request.params
        self.tokenizer = tokenizer if params.detokenize else None
        prompt_token_ids = prompt.token_ids or ()
        if prompt.inputs:
            prompt_token_ids = prompt_token_ids[prompt.text_start :]
        self.sequences: list[SequenceState] = []
        for index in range(params.n):
            detokenizer = None
            if self.tokenizer is not None:
                detokenizer = self.tokenizer.detokenizer(
                    skip_special_tokens=params.skip_special_tokens,
                    spaces_between_special_tokens=params.spaces_between_special_tokens,
                    prompt_token_ids=prompt_token_ids,
                )
            self.sequences.append(SequenceState(self, index, detokenizer))
        self.num_unfinished = params.n
        self.num_cached_tokens: int | None = None
        self._prompt_logprobs: PromptLogprobs | None = None
        self._prompt_rows: list[LogprobRows] = []  # received, and not yet converted to the user's form
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = FlatLogprobs() if params.flat_logprobs else []
            for _ in range(max(1, min(params.prompt_logprob_start, len(prompt.token_ids or ())))):
                self._prompt_logprobs.append(None)
        self.num_prompt_logprobs = len(self._prompt_logprobs or ())
        """For how many prompt positions they have arrived."""
        self.metrics = RequestMetrics(arrival_time=time.time())
        self.listener: RequestListener | None = None
        """Whoever submitted the request, if it hears of each step: then the iterator gives the last output alone."""
        self.client: RequestListener | None = None
        """The pool of engines that the request was submitted to, which hears of its end first."""
        self.meter: RequestMeter | None = None
        """Times it; the next four are what it knows of the request."""
        self.last_step_s: float | None = None
        """When the last outputs arrived (monotonic seconds)."""
        self.is_first_token_counted = False
        self.num_timed_tokens = self.num_timed_moves = 0
        self.trace = request.trace
        """Exports its times at its end."""
        self.touched = False
        """Whether the current step has outputs of this request."""
        self.interval = 1
        """How many new tokens of an output to return together."""
        self.table: RequestTable | None = None
        """The table of the engine that runs it; None while it moves between engines."""
        self.route: Any = None
        """The router's record of it (frontend/fleet/decisions.py:RoutedRequest), if there is a router."""
        self._submitted_s = time.monotonic()
        self.done = False
        self.error: HeadraceError | None = None
        """What ended the request, if it ended with an error."""
        self._waiter: asyncio.Future[None] | None = None
        self._news = False
        self._final_given = False

    def task_of(self, sequence: SequenceState) -> Task:
        """What the engine is asked for: to generate the rest of one output."""
        sampling = self.params.to_wire(self.max_tokens, sequence.index, self.tokenized)
        if sequence.seed is not None or sequence.token_ids or self._prompt_logprobs is not None:
            sampling = _resumed(sampling, sequence)
        return Generate(sampling=sampling)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all outputs so far."""
        count = 0
        for each in self.sequences:
            count += len(each.token_ids)
        return count

    @property
    def first_token_s(self) -> float | None:
        """Seconds from submission to the first token."""
        return self.metrics.first_token_latency

    def unfinished_slots(self) -> Sequence[int]:
        return [each.slot for each in self.sequences if each.finish_reason is None]

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output, of several steps if the reader is slow. Raises the error that ended the request, and
        HeadraceError while another task waits for it."""
        while not self._news:
            if self._final_given:
                raise StopAsyncIteration
            if self.error is not None:
                raise self.error
            if self._waiter is not None and not self._waiter.done():
                raise HeadraceError(
                    f"request {self.request_id:.80}: another task waits for its next output, and each goes to one task"
                )
            self._waiter = waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                if self._waiter is waiter:
                    self._waiter = None
        return self._read()

    async def get(self) -> RequestOutput:
        """The next output, under the name that vLLM's collectors use."""
        return await anext(self)

    async def final(self) -> RequestOutput:
        """The last output. Raises the error that ended the request."""
        while not (output := await anext(self)).finished:
            pass
        return output

    @property
    def has_last_output(self) -> bool:
        """Whether its last output is there and was not read."""
        return self.done and self.error is None and not self._final_given

    def abort(self) -> None:
        """Ends it with finish_reason `abort`; does nothing once it has ended."""
        if self.table is not None:
            self.table.abort_stream(self)

    def notify(self, now_s: float) -> None:
        """Called at the end of a step with outputs of this request: wakes the reader if there is something to read."""
        self.touched = False
        if self.done:
            return  # it failed or was aborted in this step, and its reader knows
        if self.metrics.first_token_latency is None and self.num_tokens:
            self.metrics.first_token_latency = now_s - self._submitted_s
        if self.num_unfinished == 0:
            self._end(now_s)
        elif (
            self.listener is None
            and self.params.output_kind is not RequestOutputKind.FINAL_ONLY
            and any(each.has_news() for each in self.sequences)
        ):
            self._wake()
        if self.meter is not None:
            self.meter.on_step(self, now_s)
        if self.listener is not None:
            self.listener.on_step(self, now_s)

    def fail(self, error: HeadraceError) -> None:
        """Ends the request with an error, unless it has ended already."""
        if not self.done:
            self.error = error
            self.done = True
            self._news = False
            self._wake(news=False)
            self._report_done()

    def note_finish(self, finish: Finish) -> None:
        """Records the core's times; of several outputs the longest count."""
        metrics = self.metrics
        metrics.gated_s = max(metrics.gated_s, finish.gated_s)
        metrics.queued_s = max(metrics.queued_s or 0.0, finish.queued_s)
        metrics.prefill_s = max(metrics.prefill_s or 0.0, finish.prefill_s)
        metrics.decode_s = max(metrics.decode_s or 0.0, finish.decode_s)
        metrics.num_preemptions += finish.num_preemptions
        if finish.steps is not None and self.trace is not None:
            self.trace.note_steps(finish.steps)

    def add_prompt_logprobs(self, rows: LogprobRows) -> None:
        """Stores them unconverted: converting a step's rows takes long enough to delay other requests."""
        self._prompt_rows.append(rows)
        self.num_prompt_logprobs += len(rows.ranks)

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """For each prompt position so far, in the user's form; None unless they were requested."""
        if self._prompt_logprobs is not None and self._prompt_rows:
            taken, self._prompt_rows = self._prompt_rows, []
            for rows in taken:
                for nth in range(len(rows.ranks)):
                    self._prompt_logprobs.append(logprobs_of_position(nth_row(rows, nth), self.tokenizer))
        return self._prompt_logprobs

    def drop_logprobs(self) -> None:
        """Call once they have been read. Frees in pieces: freeing hundreds of thousands at once blocks all threads."""
        self._prompt_rows.clear()
        for told in (self._prompt_logprobs, *(each.logprobs_read for each in self.sequences)):
            while isinstance(told, list) and told:
                del told[-_DROPPED_AT_ONCE:]

    def _end(self, now_s: float) -> None:
        self.done = True
        self.metrics.total_s = now_s - self._submitted_s
        self.metrics.set_timestamps()
        self.metrics.num_generation_tokens = self.num_tokens
        self._wake()
        self._report_done()

    def _wake(self, *, news: bool = True) -> None:
        self._news = news
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _report_done(self) -> None:
        for each in (self.client, self.meter, self.trace, self.listener):
            if each is None:
                continue
            try:
                each.on_done(self)
            except BaseException as error:  # the others must know too
                let_interrupts_pass(error)
                logger.exception("request %s: its end could not be told to a listener", self.request_id)

    def _read(self) -> RequestOutput:
        self._news = False
        self._final_given = self.done
        delta = self.params.output_kind is RequestOutputKind.DELTA
        outputs = []
        for each in self.sequences:
            if not delta or each.has_news():
                outputs.append(each.read(delta=delta, tokenizer=self.tokenizer))
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids or [],  # type: ignore[arg-type]  # packed only where nobody reads it
            prompt_logprobs=None if self._prompt_logprobs is None else self.prompt_logprobs,
            outputs=outputs,
            finished=self.done,
            lora_request=self.prompt.lora_request,
            metrics=self.metrics if self.done else None,
            num_cached_tokens=self.num_cached_tokens,
        )


def _resumed(sampling: Sampling, sequence: SequenceState) -> Sampling:
    """Adds the seed that the core drew, and leaves out the prompt log-probabilities that have already arrived."""
    seed = sequence.seed if sampling.seed is None else sampling.seed
    sampling = msgspec.structs.replace(sampling, seed=seed)
    if sampling.prompt_logprobs is None:
        return sampling
    num_come = sequence.stream.num_prompt_logprobs
    if num_come < len(sequence.stream.prompt.token_ids or ()):
        return msgspec.structs.replace(sampling, prompt_logprob_start=num_come)
    return msgspec.structs.replace(sampling, prompt_logprobs=None, prompt_logprob_start=0)


def nth_row(rows: LogprobRows, nth: int) -> LogprobRow:
    """The row of one position, without the padding at its end."""
    width = rows.token_ids.shape[1]
    first, end = nth * width, (nth + 1) * width
    ids = rows.token_ids.data.cast("i")[first:end].tolist()
    used = ids.index(-1) if ids[-1] == -1 else width
    logprobs: list[float] = rows.logprobs.data.cast("f")[first : first + used].tolist()  # type: ignore[assignment]
    return ids[:used], logprobs, rows.ranks.data.cast("i")[nth]


def one_row(row: LogprobRow) -> LogprobRows:
    """One row in the form that the core sends."""
    token_ids, logprobs, rank = row
    shape = (1, len(token_ids))
    return LogprobRows(
        token_ids=Tensor("int32", shape, Tensor.of("int32", token_ids).data),
        logprobs=Tensor("float32", shape, Tensor.of("float32", logprobs).data),
        ranks=Tensor.of("int32", [rank]),
    )


def logprobs_of_position(
    row: LogprobRow, tokenizer: Tokenizer | None, *, are_ranked: bool = True
) -> LogprobsOfPosition:
    """The user's form: the position's own token with its rank, then the others, the most likely first."""
    token_ids, logprobs, own_rank = row
    decode: Callable[[int], str | None] = tokenizer.decode_token if tokenizer is not None else _no_text
    result = {token_ids[0]: Logprob(logprobs[0], own_rank, decode(token_ids[0]))}
    for rank in range(1, len(token_ids)):
        token_id = token_ids[rank]
        if token_id != token_ids[0]:
            result[token_id] = Logprob(logprobs[rank], rank if are_ranked else None, decode(token_id))
    return result


def _no_text(_: int) -> None:
    return None
