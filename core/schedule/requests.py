"""Requests, the waiting queue, and the row table: numpy columns with one row per running request.

                 admit                     finish, abort, fail
    WAITING --------------> RUNNING ------------------------------> FINISHED
       ^                       |                                        ^
       +-----------------------+        abort, reject                   |
       |       preempt                                                  |
       +----------------------------------------------------------------+

Values that a step touches for every running request are columns, so that they cost a few nanoseconds per request;
values that are used once per request are attributes of `Request`.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from headrace.core.schedule.block_hashes import BlockHash
from headrace.ipc.adapters import RowAdapter
from headrace.ipc.failure import InconsistentError
from headrace.ipc.messages import Generate, Sampling, Task
from headrace.ipc.prefix_names import NO_KEY

if TYPE_CHECKING:
    from headrace.core.structured_output.backend import Matcher


_NO_SAMPLING = Sampling(max_tokens=1)


class State(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """One request of one client. The scheduler owns `state`, `row`, tokens and hashes; the loop owns the times."""

    __slots__ = (
        "adapters",
        "arrival",
        "arrived_s",
        "block_hashes",
        "client",
        "first_scheduled_s",
        "first_token_s",
        "gated_s",
        "matcher",
        "num_given_tokens",
        "num_passed",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_sent",
        "order",
        "output_interval",
        "prefix_key",
        "request_id",
        "row",
        "sampling",
        "seed",
        "slot",
        "state",
        "step_times",
        "stop_token_ids",
        "task",
        "token_ids",
    )

    def __init__(
        self, *, client: int, slot: int, request_id: str, token_ids: np.ndarray, task: Task, seed: int
    ) -> None:
        """`token_ids` is the prompt, [num_prompt_tokens] int32."""
        self.client, self.slot, self.request_id = client, slot, request_id
        # The prompt, and the output so far after a preemption or if another engine generated it. Stale while RUNNING:
        # the row table has the tokens then.
        self.token_ids = token_ids
        # Given tokens are those that the request arrived with: the prompt, and output of another engine.
        self.num_given_tokens = self.num_prompt_tokens = len(token_ids)
        self.task, self.seed = task, seed
        self.sampling = sampling = task.sampling if isinstance(task, Generate) else _NO_SAMPLING
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        self.matcher: Matcher | None = None  # state of its grammar after the last known token
        self.prefix_key = NO_KEY
        self.adapters: tuple[RowAdapter, ...] = ()  # no two of the same slot
        self.arrival = 0  # a sequence number
        self.order: tuple[int, ...] = ()  # sort key: the smallest is served first
        self.state = State.WAITING
        self.row = -1
        self.block_hashes: list[BlockHash] = []  # of its known full blocks; empty without prefix caching
        self.num_preemptions = 0
        self.num_passed = 0  # steps that admitted others while it waited beside the queue
        self.output_interval = 1  # number of tokens sent together
        self.num_sent = (
            self.num_prompt_tokens
        )  # with output_interval > 1: tokens that were sent (the prompt counts as sent)
        self.num_prompt_logprobs = max(1, sampling.prompt_logprob_start)  # positions sent; position 0 has no logprob
        self.arrived_s = self.first_scheduled_s = self.first_token_s = 0.0
        self.gated_s = 0.0  # how long it waited for gates, such as the one of its grammar
        self.step_times: list[tuple[float, ...]] = []  # of its steps, if they are noted


class WaitingQueue:
    """A heap of waiting requests by `Request.order`. Removal is lazy: a removed request is skipped later.

    The first element of an order is the queue's `era` at the request's arrival, which counts calls of `hold`. So
    requests that arrive after a `hold` sort behind all earlier ones, and can be held back.

    Requests that cannot run beside those that run are set aside, so that the ones behind them get their turn.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], int, Request]] = []
        self._size = 0
        self.era = self._open_era = 0
        self.aside: list[Request] = []
        """The requests that are set aside, in the order in which they were. Few, so that removing one is quick."""

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests, in no particular order."""
        in_heap = (request for _, _, request in self._heap if request.state is State.WAITING)
        return itertools.chain(self.aside, in_heap)

    def push(self, request: Request) -> None:
        request.state = State.WAITING
        heapq.heappush(self._heap, (request.order, request.arrival, request))
        self._size += 1

    def hold(self) -> None:
        """Requests that arrive from now on wait until `release`."""
        self.era += 1

    def release(self) -> None:
        self._open_era = self.era

    def head(self) -> Request | None:
        """The request to serve next. None if no request waits, or if that request is held back."""
        while self._heap and self._heap[0][2].state is not State.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap and self._heap[0][0][0] <= self._open_era else None

    def pop(self) -> Request:
        request = self.head()
        if request is None:
            raise InconsistentError("pop from an empty queue")
        heapq.heappop(self._heap)
        self._size -= 1
        return request

    def set_aside(self) -> None:
        """Sets the head aside."""
        self.aside.append(self.pop())
        self._size += 1

    def take_back(self) -> None:
        """Puts what was set aside back into its place."""
        aside, self.aside = self.aside, []
        self._size -= len(aside)
        for request in aside:
            self.push(request)

    def remove(self, request: Request) -> None:
        """Marks a waiting request as finished and takes it out of the queue."""
        request.state = State.FINISHED
        self._size -= 1
        if request in self.aside:
            self.aside.remove(request)
        if len(self._heap) > 2 * self._size + 64:  # else a head that cannot run keeps all removed ones
            self._heap = [entry for entry in self._heap if entry[2].state is State.WAITING]
            heapq.heapify(self._heap)


class RowTable:
    """Columns with one row per running request. Inactive rows hold stale values."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        rows = max_num_seqs
        self.requests: list[Request | None] = [None] * rows
        self.free = list(range(rows - 1, -1, -1))
        self.active = np.zeros(rows, bool)
        # np.zeros maps memory lazily: only the pages of tokens that exist are ever touched.
        self.token_ids = np.zeros((rows, max_model_len), np.int32)
        self.planned = np.zeros((2, rows), np.int32)  # the two columns that every step advances, in one operation
        self.num_tokens = self.planned[0]  # prompt and output, including tokens of steps in flight
        self.num_computed_tokens = self.planned[1]  # tokens whose keys and values are computed or planned
        self.num_known_tokens = np.zeros(rows, np.int32)  # num_tokens without the tokens of steps in flight
        self.num_prompt_tokens = np.zeros(rows, np.int32)
        self.num_given_tokens = np.zeros(rows, np.int32)  # the prompt, and output of another engine
        self.max_tokens_total = np.zeros(rows, np.int32)  # the request ends when num_tokens reaches it
        self.min_tokens_total = np.zeros(rows, np.int32)  # stop tokens are ignored until there are more tokens
        self.generates = np.zeros(rows, bool)  # the request's task is to generate tokens
        self.stops_at_eos = np.zeros(rows, bool)
        self.has_stop_token_ids = np.zeros(rows, bool)
        self.has_matcher = np.zeros(rows, bool)
        self.client = np.zeros(rows, np.int32)
        self.slot = np.zeros(rows, np.int32)
        self.output_interval = np.ones(rows, np.int32)
        self.num_sent = np.zeros(rows, np.int32)
        self.entered_step = np.zeros(rows, np.int64)  # the first step that could compute the row for this request

    def enter(self, request: Request, max_model_len: int, step: int) -> int:
        """Assigns a free row to a request; `step` is the first that can compute it. The caller sets the blocks and
        num_computed_tokens."""
        row = self.free.pop()
        sampling, tokens = request.sampling, request.token_ids
        self.requests[row] = request
        self.active[row] = True
        self.token_ids[row, : len(tokens)] = tokens
        self.num_tokens[row] = len(tokens)
        self.num_known_tokens[row] = len(tokens)
        self.entered_step[row] = step
        self.num_computed_tokens[row] = 0
        self.num_prompt_tokens[row], self.num_given_tokens[row] = request.num_prompt_tokens, request.num_given_tokens
        self.max_tokens_total[row] = min(request.num_prompt_tokens + sampling.max_tokens, max_model_len)
        self.min_tokens_total[row] = min(request.num_prompt_tokens + sampling.min_tokens, max_model_len)
        self.generates[row] = isinstance(request.task, Generate)
        self.stops_at_eos[row] = not sampling.ignore_eos
        self.has_stop_token_ids[row] = bool(request.stop_token_ids)
        self.has_matcher[row] = request.matcher is not None
        self.client[row], self.slot[row] = request.client, request.slot
        self.output_interval[row], self.num_sent[row] = request.output_interval, request.num_sent
        request.row, request.state = row, State.RUNNING
        return row

    def leave(self, row: int) -> Request:
        """Frees the row; the request keeps its known tokens."""
        request = self.requests[row]
        if request is None:
            raise InconsistentError(f"row {row} is not in use")
        request.token_ids = self.token_ids[row, : self.num_known_tokens[row]].copy()
        request.num_sent = int(self.num_sent[row])
        request.row = -1
        self.requests[row] = None
        self.active[row] = False
        self.free.append(row)
        return request

    def num_missing(self, row: int) -> int:
        """The number of the row's tokens that are not computed yet."""
        return int(self.num_tokens[row] - self.num_computed_tokens[row])

    def last_served(self) -> int:
        """The row of the running request that is last in the order of service."""
        return max(self.active.nonzero()[0].tolist(), key=lambda row: self.requests[row].order)  # type: ignore[union-attr]

    def still_there(self, rows: np.ndarray, step: int) -> np.ndarray:
        """[num_rows] bool: which rows still hold the request that they held when `step` was planned."""
        return self.active[rows] & (self.entered_step[rows] <= step)
