"""Turns a step's result, which is by row, into one StepOutputs per client, by slot.

In the common case no Python code runs per token.
"""

from __future__ import annotations

import os
import time

import msgspec
import numpy as np

from headrace.core.engine.step_notes import Noted, told_steps
from headrace.core.schedule.requests import Request, RowTable
from headrace.core.schedule.scheduler import Advance, Ended, Scheduler
from headrace.ipc.codec import Tensor
from headrace.ipc.failure import Failure, InconsistentError
from headrace.ipc.messages import Admitted, Finish, FinishReason, LogprobRows, PromptLogprobs, StepOutputs, Vectors
from headrace.ipc.step import PooledRows, StepPlan, StepResult, nth_of_each, select_logprobs


class StepEvents:
    """A step's outputs other than tokens, by client: requests admitted and finished, prompt log-probabilities, and
    vectors."""

    def __init__(self) -> None:
        self.admitted: dict[int, list[Admitted]] = {}
        self.finished: dict[int, list[Finish]] = {}
        self.prompt_logprobs: dict[int, list[PromptLogprobs]] = {}
        self.vectors: dict[int, Vectors] = {}
        self.noted: list[Noted] = []
        """Requests of the step whose steps are noted."""

    @property
    def is_any(self) -> bool:
        return bool(self.admitted or self.finished or self.prompt_logprobs or self.vectors)

    def clients(self) -> set[int]:
        return {*self.admitted, *self.finished, *self.prompt_logprobs, *self.vectors}


def drop_departed(result: StepResult, table: RowTable) -> StepResult:
    """Removes from a result the rows whose request finished or was aborted after the step was planned."""
    return result.only(lambda rows: table.still_there(rows, result.step))


LogprobsOfTokens = tuple[np.ndarray | None, LogprobRows | None]
"""Token index of each row of log-probabilities, [num_rows] int32 ascending; and the rows."""
NO_LOGPROBS: LogprobsOfTokens = (None, None)


def logprobs_of_kept(result: StepResult, kept: np.ndarray | None) -> LogprobsOfTokens:
    """A result's log-probabilities for the tokens in `kept`, [num_tokens] bool, with token indices among those kept.
    kept None: all tokens."""
    if kept is None:
        return result.logprob_indices, result.logprobs
    return select_logprobs(result.logprob_indices, result.logprobs, kept)


def finish_of(
    request: Request, reason: FinishReason, *, stop_token: int | None = None, failure: Failure | None = None
) -> Finish:
    """The request's Finish message, with its times until now."""
    now_s = time.monotonic()
    scheduled_s = request.first_scheduled_s or now_s
    token_s = request.first_token_s or now_s
    return Finish(
        slot=request.slot,
        reason=reason,
        stop_token=stop_token,
        failure=failure,
        gated_s=request.gated_s,
        queued_s=scheduled_s - request.arrived_s,
        prefill_s=token_s - scheduled_s,
        decode_s=now_s - token_s,
        num_preemptions=request.num_preemptions,
        steps=told_steps(request),
    )


def finish_of_ended(ended: Ended) -> Finish:
    """The Finish message of a request that a step ended."""
    failure = None
    if ended.problem:
        failure = Failure(
            message=f"the request cannot go on: {ended.problem}",
            type="InvalidRequestError",
            process="engine-core",
            pid=os.getpid(),
            phase="step",
        )
    finish = finish_of(ended.request, ended.reason, stop_token=ended.stop_token, failure=failure)
    return msgspec.structs.replace(finish, with_last_token=True) if ended.with_last_token else finish


def only_finished(step: int, finished: list[Finish]) -> StepOutputs:
    """A message for requests that ended outside a step: no tokens."""
    none = Tensor.of("int32", [])
    return StepOutputs(step=step, slots=none, token_ids=none, finished=tuple(finished))


def partial_outputs(step: int, requests: list[Request], finished: list[Finish]) -> StepOutputs:
    """A message for aborted requests, with their tokens that have not been sent yet."""
    unsent = [request.token_ids[request.num_sent :] if request.output_interval > 1 else () for request in requests]
    slots = [request.slot for request, tokens in zip(requests, unsent, strict=True) for _ in tokens]
    token_ids = [int(token) for tokens in unsent for token in tokens]
    return StepOutputs(
        step=step, slots=Tensor.of("int32", slots), token_ids=Tensor.of("int32", token_ids), finished=tuple(finished)
    )


def gather_prompt_logprobs(events: StepEvents, result: StepResult, table: RowTable) -> None:
    """Adds a result's prompt log-probabilities to `events`, except for positions already sent: a preempted request
    computes its prompt again."""
    for run in result.prompt_logprobs:
        request = table.requests[run.row]
        if request is None:
            raise InconsistentError(f"the executor read the prompt of row {run.row}, which is empty")
        start = max(run.start, request.num_prompt_logprobs)
        end = run.start + len(run.rows.token_ids)
        if start >= end:
            continue
        request.num_prompt_logprobs = end
        rows = run.rows if start == run.start else run.rows.select(slice(start - run.start, None))
        part = PromptLogprobs(slot=request.slot, start=start, rows=rows)
        events.prompt_logprobs.setdefault(request.client, []).append(part)


def gather_vectors(events: StepEvents, vectors: PooledRows, table: RowTable) -> None:
    """Adds a result's vectors to `events`, by client."""
    client_of = table.client[vectors.rows]
    clients = set(client_of.tolist())
    for client in clients:
        mine = vectors if len(clients) == 1 else vectors.select(client_of == client)
        events.vectors[client] = Vectors(
            slots=Tensor.from_numpy(table.slot[mine.rows]),
            counts=Tensor.from_numpy(mine.counts),
            widths=Tensor.from_numpy(mine.widths),
            values=Tensor.from_numpy(mine.values),
        )


class OutputBuilder:
    """Makes one message for each client that a step has outputs for."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._table = scheduler, scheduler.rows
        self._rows = np.zeros(0, np.int32)
        self._shares: list[_Share] = []  # shares of `_rows`, reused while steps have the same rows
        self._holds_back = False
        """Some of `_rows` send several tokens at once (output_interval > 1)."""
        self._quiet_steps = 0
        """How many further steps of `_rows` send nothing."""

    def messages(
        self, plan: StepPlan, result: StepResult, advance: Advance, events: StepEvents
    ) -> list[tuple[int, StepOutputs]]:
        rows, token_ids = advance.rows, advance.token_ids
        if not len(rows):  # a step of prompts alone
            self._rows, self._shares, self._holds_back, self._quiet_steps = rows, [], False, 0
        elif rows is not self._rows or advance.counts is not None:
            counts, row_of = advance.counts, rows
            self._rows, self._quiet_steps = rows, 0
            if counts is not None:
                self._rows = _NO_ROWS  # not reusable: the same rows may have other counts in the next step
                row_of = np.repeat(rows, counts)
            self._holds_back = bool(np.maximum.reduce(self._table.output_interval[rows], initial=1) > 1)
            self._shares = self._shares_of(row_of, None)
        shares, brings_events = self._shares, events.is_any
        if self._holds_back:
            if self._quiet_steps and not brings_events:
                self._quiet_steps -= 1
                return []
            shares, token_ids = self._due(advance)
        if brings_events:
            without_tokens = events.clients() - {share.client for share in shares}
            shares = [*shares, *(_Share(client, _NOBODY, _NOBODY, _NO_SLOTS) for client in without_tokens)]
        elif result.logprobs is None:
            return [(share.client, _only_tokens(plan, token_ids, share)) for share in shares]
        logprobs = NO_LOGPROBS if result.logprobs is None else logprobs_of_kept(result, advance.kept)
        return [(share.client, _outputs(plan, token_ids, logprobs, events, share)) for share in shares]

    def _due(self, advance: Advance) -> tuple[list[_Share], np.ndarray]:
        """What to send after this step: the shares and the token ids, [num_tokens].

        Counts those tokens as sent, and sets how many further steps of the same rows send nothing.
        """
        self._scheduler.settle()
        table, rows = self._table, advance.rows
        new = np.ones(len(rows), np.int32) if advance.counts is None else advance.counts
        every, known = table.output_interval[rows], table.num_known_tokens[rows]
        sent = np.where(every > 1, table.num_sent[rows], known - new)
        is_first = sent == table.num_prompt_tokens[rows]
        due = (is_first | ~table.active[rows] | (known - sent >= every)).nonzero()[0]
        counts = (known - sent)[due]
        owners = np.repeat(due, counts)
        from_end = np.repeat(counts, counts) - nth_of_each(counts)  # 1 for a row's last token
        token_ids = table.token_ids[rows[owners], known[owners] - from_end]
        sources = np.where(from_end <= new[owners], np.cumsum(new)[owners] - from_end, -1)
        sent[due] = known[due]
        table.num_sent[rows] = sent
        self._quiet_steps = int((sent + every - known).min()) - 1
        return self._shares_of(rows[owners], sources), token_ids

    def _shares_of(self, row_of: np.ndarray, sources: np.ndarray | None) -> list[_Share]:
        """Divides tokens among clients. row_of: the row of each token; sources: as in `_Share`."""
        client_of, slots = self._table.client[row_of], self._table.slot[row_of]
        clients = set(client_of.tolist())
        if len(clients) == 1:
            return [_Share(clients.pop(), None, sources, Tensor.from_numpy(slots))]
        chosen = [(client, np.flatnonzero(client_of == client)) for client in clients]
        return [
            _Share(client, mine, mine if sources is None else sources[mine], Tensor.from_numpy(slots[mine]))
            for client, mine in chosen
        ]


class _Share(msgspec.Struct, frozen=True):
    """One client's part of the tokens that are sent after a step."""

    client: int
    chosen: np.ndarray | None
    """Indices of the client's tokens among all that are sent. None: all."""
    sources: np.ndarray | None
    """Index of each of the client's tokens in the step's tokens; -1 for a token of an earlier step, which has no
    log-probabilities. None: the client's tokens are exactly the step's tokens."""
    slots: Tensor


_NO_ROWS = np.zeros(0, np.int32)
_NOBODY = np.zeros(0, np.int64)
_NO_SLOTS = Tensor.of("int32", [])


def _only_tokens(plan: StepPlan, token_ids: np.ndarray, share: _Share) -> StepOutputs:
    mine = token_ids if share.chosen is None else token_ids[share.chosen]
    token_tensor = Tensor.from_numpy(mine.astype(np.int32, copy=False))
    return StepOutputs(step=plan.step, slots=share.slots, token_ids=token_tensor)


def _outputs(
    plan: StepPlan, token_ids: np.ndarray, sent: LogprobsOfTokens, events: StepEvents, share: _Share
) -> StepOutputs:
    tokens = _only_tokens(plan, token_ids, share)
    indices, logprobs = (None, None) if sent is NO_LOGPROBS else _logprobs_of(sent, share.sources)
    return StepOutputs(
        step=tokens.step,
        slots=tokens.slots,
        token_ids=tokens.token_ids,
        logprob_indices=indices,
        logprobs=logprobs,
        prompt_logprobs=tuple(events.prompt_logprobs.get(share.client, ())),
        admitted=tuple(events.admitted.get(share.client, ())),
        finished=tuple(events.finished.get(share.client, ())),
        vectors=events.vectors.get(share.client),
    )


def _logprobs_of(sent: LogprobsOfTokens, sources: np.ndarray | None) -> tuple[Tensor | None, LogprobRows | None]:
    """Log-probabilities of one client's tokens, and the indices of those tokens in its message. sources: as in
    `_Share`."""
    indices, logprobs = sent
    if indices is None or logprobs is None:
        return None, None
    if sources is None:
        return Tensor.from_numpy(indices.astype(np.int32)), logprobs
    place = np.full(max(int(indices[-1]), int(sources.max(initial=-1))) + 2, -1, np.int32)
    place[sources] = np.arange(len(sources), dtype=np.int32)  # index -1 writes to the unused last element
    of_token = place[indices]
    mine = np.flatnonzero(of_token >= 0)
    if len(mine) == 0:
        return None, None
    return Tensor.from_numpy(of_token[mine]), logprobs.select(mine)
