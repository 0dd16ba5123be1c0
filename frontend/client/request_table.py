"""The unfinished outputs of one session, and the distribution of each step's tokens to them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from headrace.frontend.client.pooling_stream import PoolingStream
from headrace.frontend.client.request_stream import RequestStream, SequenceState
from headrace.frontend.request.parameters.sampling_params import RequestOutputKind
from headrace.ipc.adapters import AdapterUse
from headrace.ipc.codec import Tensor
from headrace.ipc.failure import (
    SHUT_DOWN,
    EngineAsleepError,
    EngineDeadError,
    Failure,
    HeadraceError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    let_interrupts_pass,
)
from headrace.ipc.messages import (
    MOST_PROMPTS,
    Abort,
    AddPrompts,
    AddRequest,
    ClientMessage,
    Finish,
    FinishReason,
    StepOutputs,
    Vectors,
)

logger = logging.getLogger(__name__)

UNREAD_TOKENS = 32
"""Tokens that are sent together if only the final output is read: at most this many are missing after an abort."""
_OTHERS_MAY_TAKE = (SHUT_DOWN, QueueFullError.__name__, EngineAsleepError.__name__)
"""Failure types that concern only this core: another engine may accept the request."""
_REASON_NAMES = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


class RequestTable:
    """Requests from submission to end. Once a slot has ended here, later messages about it are ignored."""

    def __init__(
        self,
        send: Callable[[ClientMessage], None],
        takes_over: Callable[[RequestStream, Failure], bool] = lambda stream, failure: False,
    ) -> None:
        """takes_over: called with a request that the core refuses, or gives up as it shuts down, and that was removed
        from this table. Returns True if another engine continues it."""
        self._send_now, self._takes_over = send, takes_over
        self._unsent: list[AddRequest] = []
        """What this turn of the event loop has brought so far that may be sent as few messages."""
        self._sequences: dict[int, SequenceState] = {}  # by slot
        self._streams: dict[str, RequestStream] = {}  # by request id
        self._next_slot = 0
        self._aborted: dict[int, None] = {}  # slots whose Finish is still to come
        self.stream_interval = 1
        """The engine's stream_interval, from its Welcome."""
        self.adapters: Mapping[str, str] = {}
        """The adapters that are registered in the engine: each name's path."""
        self.num_tokens_after_abort = 0
        """Tokens that arrived for requests after they were aborted."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def __len__(self) -> int:
        return len(self._streams)

    def send(self, message: ClientMessage) -> None:
        """Sends a message after those of the calls before."""
        if self._unsent:
            self.flush()
        self._send_now(message)

    def flush(self) -> None:
        """Sends the requests of this turn of the event loop."""
        if not self._unsent:
            return
        unsent, self._unsent = self._unsent, []
        for alike in _runs(unsent):
            try:
                self._send_now(alike[0] if len(alike) == 1 else AddPrompts.of(alike))
            except BaseException as error:
                let_interrupts_pass(error)
                failed = RequestFailedError(f"the request cannot be sent: {error}")
                for each in alike:
                    sequence = self._sequences.pop(each.slot, None)
                    if sequence is not None:
                        del self._streams[sequence.stream.request_id]
                        sequence.stream.fail(failed)

    def add(self, stream: RequestStream) -> None:
        """Sends a request, in one slot per output (`n`) that is not finished.

        Requests that pool, differ in their tokens alone and come in one turn of the event loop are sent as one message,
        after the turn; one that cannot be sent then ends with the error. For others raises InvalidRequestError if a
        value is one that no message can hold; nothing of the request is left then.
        """
        stream.interval = stream.params.stream_interval or self.stream_interval
        first, self._next_slot = self._next_slot, self._next_slot + stream.params.n
        self._streams[stream.request_id] = stream
        stream.table = self
        for sequence in stream.sequences:
            sequence.slot = first + sequence.index
            if sequence.finish_reason is None:
                self._sequences[sequence.slot] = sequence
        try:
            for message in _messages_of(stream, self.adapters):
                if stream.pooling_task is not None and message.is_plain:
                    if not self._unsent:
                        asyncio.get_running_loop().call_soon(self.flush)
                    self._unsent.append(message)
                    continue
                if self._unsent:
                    self.flush()
                self._send_now(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            self._drop(stream)
            if isinstance(error, InvalidRequestError):
                raise
            raise InvalidRequestError(f"the request cannot be sent: {error}") from error
        except BaseException:
            self._drop(stream)
            raise

    def adopt(self, stream: RequestStream) -> None:
        """Takes over a request that another table has released; this core continues it where the other stopped."""
        try:
            self.add(stream)
        except BaseException as error:
            let_interrupts_pass(error)
            why = "no memory to move" if isinstance(error, MemoryError) else "it was not possible to move"
            stream.fail(RequestFailedError(f"{why} the request to another engine: {error}"))

    def release(self, stream: RequestStream) -> None:
        """Removes a request without ending it, and aborts it in the core."""
        self._drop(stream)
        stream.table = None

    def release_all(self) -> list[RequestStream]:
        """Removes all requests without aborting them in the core, which is gone."""
        streams = list(self._streams.values())
        self._streams.clear()
        self._sequences.clear()
        self._aborted.clear()
        self._unsent.clear()
        for stream in streams:
            stream.table = None
        return streams

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends these requests; ids that are not running are ignored."""
        for request_id in tuple(request_ids):
            if request_id in self._streams:
                self.abort_stream(self._streams[request_id])

    def abort_all(self) -> None:
        self.abort(self._streams)

    def abort_stream(self, stream: RequestStream) -> None:
        """Ends it with finish_reason `abort` and its output so far; does nothing once it has ended."""
        if stream.done:
            return
        self._drop(stream)
        try:
            for sequence in stream.sequences:
                if sequence.finish_reason is None:
                    sequence.finish("abort", None)
            stream.num_unfinished = 0
            stream.notify(time.monotonic())
        except BaseException as error:
            self._fail(stream, error)

    def fail_all(self, failure: Failure, error: type[HeadraceError]) -> None:
        """Ends every request with this error; nothing is sent to the core."""
        for stream in self.release_all():
            stream.fail(error.from_failure(failure))

    def on_step(self, step: StepOutputs) -> None:
        """Distributes one step's outputs to all requests. The loop over tokens is the hot path of a frontend.

        An error in the work for one request, such as its detokeniser's, ends that request alone.
        """
        sequences = self._sequences
        slots, token_ids = step.slots.tolist(), step.token_ids.tolist()
        touched: list[RequestStream] = []
        if step.admitted or step.prompt_logprobs or step.logprobs is not None:
            self._take_details(step, slots)
        if step.vectors is not None:
            self._take_vectors(step.vectors)
        # A token that only marks the end of an output comes together with its Finish, and no stop is looked for in it.
        silent = set[int]()
        for finish in step.finished:
            if finish.reason is FinishReason.STOP and self._is_silent(finish):
                silent.add(finish.slot)
        for position, (slot, token_id) in enumerate(zip(slots, token_ids, strict=True)):
            sequence = sequences.get(slot)
            if sequence is None:
                self.num_tokens_after_abort += slot in self._aborted
                continue  # it has ended here already: aborted, or by a stop string
            sequence.token_ids.append(token_id)
            stream = sequence.stream
            if not stream.touched:
                stream.touched = True
                touched.append(stream)
            if sequence.looks_for_stop and not (slot in silent and slot not in slots[position + 1 :]):
                self._look_for_stop(sequence)
        for finish in step.finished:
            sequence = sequences.get(finish.slot)
            if sequence is not None:
                if not sequence.stream.touched:
                    sequence.stream.touched = True
                    touched.append(sequence.stream)
                try:
                    self._on_finish(sequence, finish)
                except BaseException as error:
                    self._fail(sequence.stream, error)
            self._aborted.pop(finish.slot, None)
        now_s = time.monotonic()
        for stream in touched:
            try:
                stream.notify(now_s)
            except BaseException as error:  # raised by a listener, which has not got what the step brought
                self._fail(stream, error)

    def _look_for_stop(self, sequence: SequenceState) -> None:
        """Ends the output if its newest token completes a stop string or a repetition."""
        try:
            if not sequence.find_stop():
                return
            self._finish(sequence, *sequence.found_stop())
        except BaseException as error:
            self._fail(sequence.stream, error)
        self.send(Abort(slots=(sequence.slot,)))

    def _fail(self, stream: RequestStream, error: BaseException) -> None:
        """Ends one request with an error that was raised here in the work for it. Call from its handler: interrupts of
        the program are raised again. (A panic in a library written in Rust is a BaseException.)"""
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        logger.error("request %s: its output could not be made or passed on", stream.request_id, exc_info=error)
        self._drop(stream)
        stream.fail(RequestFailedError.from_failure(Failure.of(error, process="client", phase="read")))

    def _take_details(self, step: StepOutputs, slots: list[int]) -> None:
        for admitted in step.admitted:
            sequence = self._sequences.get(admitted.slot)
            if sequence is None:
                continue
            if sequence.seed is None:
                sequence.seed = admitted.seed
            sequence.adapter_identities = admitted.adapters
            if sequence.index == 0 and not sequence.token_ids:
                sequence.stream.num_cached_tokens = admitted.num_cached_tokens
        for run in step.prompt_logprobs:
            sequence = self._sequences.get(run.slot)
            if sequence is not None:
                sequence.stream.add_prompt_logprobs(run.rows)
        if step.logprobs is not None and step.logprob_indices is not None:
            for nth, position in enumerate(step.logprob_indices.tolist()):
                sequence = self._sequences.get(slots[position])
                if sequence is not None:
                    sequence.logprob_rows.append((step.logprobs, nth))

    def _take_vectors(self, vectors: Vectors) -> None:
        """Gives requests that pool their vectors, which come with their Finish."""
        values, first = vectors.values.data.cast("f"), 0
        sizes = zip(vectors.slots.tolist(), vectors.counts.tolist(), vectors.widths.tolist(), strict=True)
        for slot, count, width in sizes:
            sequence, end = self._sequences.get(slot), first + count * width
            if sequence is not None and isinstance(sequence.stream, PoolingStream):
                sequence.stream.take(values[first:end], width)
            first = end

    def _is_silent(self, finish: Finish) -> bool:
        """Whether the last token of an output that a token ended only marks its end, and is not part of the answer."""
        sequence = self._sequences.get(finish.slot)
        if finish.with_last_token or sequence is None:
            return False
        return not sequence.stream.params.include_stop_str_in_output

    def _on_finish(self, sequence: SequenceState, finish: Finish) -> None:
        stream: RequestStream = sequence.stream
        stream.note_finish(finish)
        reason = _REASON_NAMES.get(finish.reason)
        if reason is None:
            del self._sequences[sequence.slot]  # the core has ended this slot; the others are aborted
            self._drop(stream)
            stream.touched = False
            failure = finish.failure
            if failure is not None and failure.type in _OTHERS_MAY_TAKE and self._takes_over(stream, failure):
                return
            stream.fail(_error_of(finish))
            return
        is_silent = finish.reason is FinishReason.STOP and self._is_silent(finish)
        self._finish(sequence, reason, finish.stop_token, silent_last_token=is_silent)

    def _finish(
        self, sequence: SequenceState, reason: str, stop_reason: int | str | None, *, silent_last_token: bool = False
    ) -> None:
        """Ends one output here and forgets its slot, so that later messages about it are ignored."""
        del self._sequences[sequence.slot]
        sequence.finish(reason, stop_reason, silent_last_token=silent_last_token)
        stream = sequence.stream
        stream.num_unfinished -= 1
        if stream.num_unfinished == 0:
            del self._streams[stream.request_id]

    def _drop(self, stream: RequestStream) -> None:
        """Removes a request, and aborts its unfinished slots in the core."""
        slots = [slot for slot in stream.unfinished_slots() if self._sequences.pop(slot, None) is not None]
        self._streams.pop(stream.request_id, None)
        if slots:
            self._aborted.update(dict.fromkeys(slots))
            self.send(Abort(slots=tuple(slots)))


def _runs(requests: Sequence[AddRequest]) -> Iterator[Sequence[AddRequest]]:
    """Parts of these plain requests that one message may hold."""
    first = 0
    for index in range(1, len(requests) + 1):
        is_end = index == len(requests) or index - first == MOST_PROMPTS
        if is_end or not requests[index].goes_on(requests[index - 1]):
            yield requests[first:index]
            first = index


def _messages_of(stream: RequestStream, registered: Mapping[str, str]) -> list[AddRequest]:
    """One message per unfinished output of the request. registered: the paths of the engine's adapters, by name."""
    prompt, params, request_id = stream.prompt, stream.params, stream.request_id
    interval, notes_steps = stream.interval, stream.trace is not None and stream.trace.wants_steps
    if params.stop or params.repetition_detection is not None:
        interval = 1  # each token must be looked at at once
    elif params.output_kind is RequestOutputKind.FINAL_ONLY:
        interval = UNREAD_TOKENS
    prompt_token_ids = Tensor.of("int32", prompt.token_ids or ())
    messages = []
    for sequence in stream.sequences:
        if sequence.finish_reason is not None:
            continue
        token_ids = prompt_token_ids
        if sequence.token_ids:
            token_ids = Tensor.of("int32", [*(prompt.token_ids or ()), *sequence.token_ids])
        messages.append(
            AddRequest(
                slot=sequence.slot,
                request_id=request_id if params.n == 1 else f"{request_id}#{sequence.index}",
                prompt_token_ids=token_ids,
                task=stream.task_of(sequence),
                priority=stream.priority,
                cache_salt=prompt.cache_salt,
                output_interval=interval,
                num_resumed_tokens=len(sequence.token_ids),
                inputs=prompt.inputs,
                notes_steps=notes_steps,
                adapters=_uses(prompt.adapters, sequence.adapter_identities, registered) if prompt.adapters else (),
            )
        )
    return messages


def _uses(
    uses: Sequence[AdapterUse], identities: Sequence[str], registered: Mapping[str, str]
) -> tuple[AdapterUse, ...]:
    """The adapters as this engine is asked for them: of the versions that an earlier engine used, and with their paths
    where it does not have them under these names. A path that came with a request after an unload would register the
    adapter again."""
    asked = []
    for nth, use in enumerate(uses):
        identity = identities[nth] if nth < len(identities) else ""
        path = "" if registered.get(use.name) == use.path else use.path
        asked.append(msgspec.structs.replace(use, path=path, identity=identity))
    return tuple(asked)


def _error_of(finish: Finish) -> HeadraceError:
    failure = finish.failure or Failure(message="the engine gave no reason", process="engine-core")
    if failure.type == SHUT_DOWN:
        return (
            EngineDeadError.from_failure(failure)
            if finish.reason is FinishReason.REJECTED
            else (RequestFailedError.from_failure(failure))
        )
    if finish.reason is FinishReason.FAILED and failure.type != InvalidRequestError.__name__:
        return RequestFailedError.from_failure(failure)
    if failure.retry_after_s > 0:
        return QueueFullError.from_failure(failure)
    if failure.type == EngineAsleepError.__name__:
        return EngineAsleepError.from_failure(failure)
    return InvalidRequestError.from_failure(failure)
