"""When a draft token is worth its time: what a step costs, as the ranks' results tell, beside what it yields.

A step's seconds are taken to grow by the same amount with each token beyond a first cost (reading the weights once).
Both are fitted to the last steps by least squares. Steps that compute a token more than they would, for which the
result is right with probability p, yield more tokens per second if p exceeds

    seconds of one more token  *  tokens per second so far

On a GPU, or with weights of 16 bits, a few more tokens cost next to nothing and any draft is worth trying; with packed
weights on a CPU, arithmetic is dear, and the more rows a step has, the surer a draft must be.
"""

from __future__ import annotations

from headrace.ipc.step import StepResult

MEMORY = 0.98
"""What an observation counts for after the next one: about the last 50 steps decide."""
MOST_NEEDED = 0.95
"""Drafts that are surer than this are always tried, so that what they cost stays known."""
MOST_BETWEEN = 100
"""Of more repeated decodes in a row, so many count: what was known before them counts for little already."""
SHORTEST_S = 0.0005
"""Shorter steps do not count: they are the host's time, of which each step takes the same."""
_LEAST_SPREAD = 0.5
"""Least variance of the steps' numbers of tokens from which on the cost of one token can be told."""


class StepCosts:
    """Decayed sums over steps that only decode. Times come from results, so this uses no clock. Of repeated decodes,
    whose results it does not see, it knows their number and how long they took together."""

    def __init__(self) -> None:
        self._planned: dict[int, int] = {}  # step -> its number of tokens
        self._weight = self._tokens = self._squares = self._seconds = self._products = self._yielded = 0.0
        self._token_s = 0.0
        self._last_step, self._last_ended_s, self._last_rows = -1, 0.0, 0  # of the last result

    def planned(self, step: int, num_tokens: int) -> None:
        """A step computes `num_tokens` tokens: the last of each row, and drafts."""
        self._planned[step] = num_tokens

    def take(self, result: StepResult) -> None:
        """Sees results in the order of steps; those of repeated decodes may be left out."""
        while self._planned and next(iter(self._planned)) < result.step:
            del self._planned[next(iter(self._planned))]
        num_tokens = self._planned.pop(result.step, None)
        # What lies between two steps is a part of the second one's cost.
        num_between = result.step - self._last_step - 1
        began_s = result.began_s if num_between else self._last_ended_s
        if num_tokens is not None and result.ended_s - began_s >= SHORTEST_S:
            if num_between and self._last_rows:
                seconds = (result.began_s - self._last_ended_s) / num_between
                for _ in range(min(num_between, MOST_BETWEEN)):
                    self._count(self._last_rows, self._last_rows, seconds)
            self._count(num_tokens, len(result.token_ids), result.ended_s - began_s)
        self._last_step, self._last_ended_s, self._last_rows = result.step, result.ended_s, len(result.rows)

    def _count(self, num_tokens: int, num_yielded: int, seconds: float) -> None:
        self._weight = MEMORY * self._weight + 1
        self._tokens = MEMORY * self._tokens + num_tokens
        self._squares = MEMORY * self._squares + num_tokens * num_tokens
        self._seconds = MEMORY * self._seconds + seconds
        self._products = MEMORY * self._products + num_tokens * seconds
        self._yielded = MEMORY * self._yielded + num_yielded
        mean = self._tokens / self._weight
        spread = self._squares / self._weight - mean * mean
        if spread >= _LEAST_SPREAD:
            covariance = self._products / self._weight - mean * self._seconds / self._weight
            self._token_s = max(0.0, covariance / spread)

    @property
    def least_likely(self) -> float:
        """The least probability with which a draft token must be right to be worth its time. 0 while nothing is
        known."""
        if not self._seconds:
            return 0.0
        return min(MOST_NEEDED, self._token_s * self._yielded / self._seconds)
