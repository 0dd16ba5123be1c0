"""From a step's result, by row, to what each client is told, by slot. No per-token Python in the common case."""

from __future__ import annotations

import time

import msgspec
import numpy as np

from headrace.core.requests import Request, RowTable
from headrace.core.scheduler import Advance
from headrace.ipc.codec import Tensor
from headrace.ipc.failure import Failure
from headrace.ipc.messages import Admitted, Finish, FinishReason, LogprobRows, PromptLogprobs, StepOutputs
from headrace.ipc.step import StepPlan, StepResult


class Addressed:
    """Small per-request news of one step, gathered by client."""

    def __init__(self) -> None:
        self.admitted: dict[int, list[Admitted]] = {}
        self.finished: dict[int, list[Finish]] = {}
        self.prompt_logprobs: dict[int, list[PromptLogprobs]] = {}

    @property
    def is_any(self) -> bool:
        return bool(self.admitted or self.finished or self.prompt_logprobs)

    def clients(self) -> set[int]:
        return {*self.admitted, *self.finished, *self.prompt_logprobs}


def drop_departed(result: StepResult, table: RowTable) -> StepResult:
    """Without what it tells of rows whose request left after the step was planned: it ended, or nobody wants it."""
    there = table.still_there(result.rows, result.step)
    if not result.prompt_logprobs and not result.failures and there.all():
        return result
    logprobs, indices = result.logprobs, result.logprob_indices
    if logprobs is not None and indices is not None:
        kept = there[indices]
        logprobs = select_rows(logprobs, kept) if kept.any() else None
        indices = (np.cumsum(there, dtype=np.int32) - 1)[indices[kept]].astype(np.int32)

    def is_there(row: int) -> bool:
        return bool(table.still_there(np.array([row]), result.step)[0])

    return msgspec.structs.replace(
        result,
        rows=result.rows[there],
        token_ids=result.token_ids[there],
        logprob_indices=indices,
        logprobs=logprobs,
        prompt_logprobs=tuple(run for run in result.prompt_logprobs if is_there(run.row)),
        failures=tuple(failure for failure in result.failures if is_there(failure.row)),
    )


def finish_of(
    request: Request, reason: FinishReason, *, stop_token: int | None = None, failure: Failure | None = None
) -> Finish:
    """The request's terminal answer, as of now."""
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


def only_finished(step: int, finished: list[Finish]) -> StepOutputs:
    """Ends of requests that no step brought."""
    none = Tensor.of("int32", [])
    return StepOutputs(step=step, slots=none, token_ids=none, finished=tuple(finished))


def gather_prompt_logprobs(news: Addressed, result: StepResult, table: RowTable) -> None:
    """Positions not told of before: a request that was preempted computes its prompt again."""
    for run in result.prompt_logprobs:
        request = table.requests[run.row]
        assert request is not None, f"the executor read the prompt of row {run.row}, which is empty"
        start = max(run.start, request.num_prompt_logprobs)
        end = run.start + len(run.rows.token_ids)
        if start >= end:
            continue
        request.num_prompt_logprobs = end
        rows = run.rows if start == run.start else select_rows(run.rows, slice(start - run.start, None))
        told = PromptLogprobs(slot=request.slot, start=start, rows=rows)
        news.prompt_logprobs.setdefault(request.client, []).append(told)


def select_rows(rows: LogprobRows, chosen: slice | np.ndarray) -> LogprobRows:
    return LogprobRows(
        token_ids=Tensor.from_numpy(rows.token_ids.numpy()[chosen]),
        logprobs=Tensor.from_numpy(rows.logprobs.numpy()[chosen]),
        ranks=Tensor.from_numpy(rows.ranks.numpy()[chosen]),
    )


class StepNews:
    """Makes one message for each client that has any news of a step."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._rows = np.zeros(0, np.int32)
        self._shares: list[_Share] = []  # of those rows: steps that repeat have them in common

    def messages(
        self, plan: StepPlan, result: StepResult, advance: Advance, news: Addressed
    ) -> list[tuple[int, StepOutputs]]:
        if advance.rows is not self._rows:
            self._rows, self._shares = advance.rows, self._shares_of(advance.rows)
        shares = self._shares
        if news.is_any:
            without_tokens = news.clients() - {share.client for share in shares}
            shares = [*shares, *(_Share(client, _NOBODY, _NO_SLOTS) for client in without_tokens)]
        return [(share.client, _outputs(plan, result, advance, news, share)) for share in shares]

    def _shares_of(self, rows: np.ndarray) -> list[_Share]:
        client_of, slots = self._table.client[rows], self._table.slot[rows]
        clients = set(client_of.tolist())
        if len(clients) == 1:
            return [_Share(clients.pop(), None, Tensor.from_numpy(slots))]
        chosen = [(client, np.flatnonzero(client_of == client)) for client in clients]
        return [_Share(client, mine, Tensor.from_numpy(slots[mine])) for client, mine in chosen]


class _Share(msgspec.Struct, frozen=True):
    """One client's part of a step's rows."""

    client: int
    chosen: np.ndarray | None
    """Indices into the rows; None for all of them."""
    slots: Tensor


_NOBODY = np.zeros(0, np.int64)
_NO_SLOTS = Tensor.of("int32", [])


def _outputs(plan: StepPlan, result: StepResult, advance: Advance, news: Addressed, share: _Share) -> StepOutputs:
    token_ids = advance.token_ids if share.chosen is None else advance.token_ids[share.chosen]
    if result.logprobs is None and not news.is_any:
        return StepOutputs(step=plan.step, slots=share.slots, token_ids=_int32(token_ids))
    indices, logprobs = _logprobs_of(result, share.chosen, len(advance.rows))
    return StepOutputs(
        step=plan.step,
        slots=share.slots,
        token_ids=_int32(token_ids),
        logprob_indices=indices,
        logprobs=logprobs,
        prompt_logprobs=tuple(news.prompt_logprobs.get(share.client, ())),
        admitted=tuple(news.admitted.get(share.client, ())),
        finished=tuple(news.finished.get(share.client, ())),
    )


def _int32(values: np.ndarray) -> Tensor:
    return Tensor.from_numpy(values.astype(np.int32, copy=False))


def _logprobs_of(
    result: StepResult, chosen: np.ndarray | None, num_tokens: int
) -> tuple[Tensor | None, LogprobRows | None]:
    """The log-probabilities of the chosen tokens, and their indices among those."""
    if result.logprobs is None or result.logprob_indices is None:
        return None, None
    if chosen is None:
        return Tensor.from_numpy(result.logprob_indices.astype(np.int32)), result.logprobs
    position = np.full(num_tokens, -1, np.int32)
    position[chosen] = np.arange(len(chosen), dtype=np.int32)
    of_token = position[result.logprob_indices]
    mine = np.flatnonzero(of_token >= 0)
    if len(mine) == 0:
        return None, None
    return Tensor.from_numpy(of_token[mine]), select_rows(result.logprobs, mine)
