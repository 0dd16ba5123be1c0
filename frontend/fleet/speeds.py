"""How fast engines are: what each was measured to take, what of that is noise, and what a larger batch costs them.

    seconds per token of a row = base of the engine x (1 + per_row x rows that run there)

`per_row` is one for a group of engines (`Pace`), by decayed least squares of the times over the rows: it is learnt from
how each engine's own times vary with its own load, so engines of different speed do not blur it. The base is of each
engine; one that was not measured, or differs from the group's usual by no more than its noise, has the usual.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

_FIRST_TOKEN_S = 0.02
_FIRST_PROMPT_RATE = 4000.0
_WEIGHT = 0.2
"""Of the newest in a running mean."""
_OLDER = 0.98
"""What remains of the sums of least squares with each new time."""
_PRIOR_ROWS_2 = 16.0
"""How much variation of the load, in squared rows, weighs as much as the assumption from before any."""
_LEAST_NOISE, _FIRST_NOISE = 0.1, 0.5
_OUTLIER = 4.0
"""A time so many times off what was expected is no news of the batch's size: the engine itself has changed."""
_NEWS = 0.05
"""By so much the pace has to change before all engines of a group are weighed anew."""
_LEAST_PROMPT_TOKENS = 64
"""A shorter prompt takes about a step, which says nothing of a rate."""


class Pace:
    """What the engines of a group have in common."""

    def __init__(self) -> None:
        self.token_s: float | None = None
        """The usual base: the median of those that were measured, of two the less."""
        self.prompt_rate: float | None = None
        self.per_row = 0.0
        """Share of a token's time that each row adds."""
        self.num_measured = 0
        self._prior = 0.0
        self._told: tuple[float, ...] = ()

    def expect(self, capacity: int) -> None:
        """An engine of this capacity is there. Until more is known its tokens take twice as long at an eighth of it: a
        batch costs little more than one row while reading the weights takes longest."""
        prior = 1.0 / max(1.0, capacity / 8)
        self._prior = min(self._prior, prior) if self._prior else prior
        if not self.num_measured:
            self.per_row = self._prior

    def learn(self, speeds: Iterable[Speed]) -> bool:
        """From all that were measured. Whether it has changed by so much that all are to be weighed anew."""
        measured = [each for each in speeds if each.is_measured]
        rates = [each.rate for each in measured if each.rate is not None]
        covariance, variance = _PRIOR_ROWS_2 * self._prior, _PRIOR_ROWS_2
        for each in measured:
            covariance += each.covariance / each.base_s(self.per_row)
            variance += each.variance
        self.num_measured = len(measured)
        self.per_row = min(1.0, max(0.0, covariance / variance))  # 1: each row costs as much as the first
        self.token_s = statistics.median_low(each.base_s(self.per_row) for each in measured) if measured else None
        self.prompt_rate = statistics.median_high(rates) if rates else None
        now = (self.per_row, self.token_s or 0.0, self.prompt_rate or 0.0)
        if self._told and all(abs(new - old) <= _NEWS * old for new, old in zip(now, self._told, strict=True)):
            return False
        self._told = now
        return True


class Speed:
    """What one engine was measured to take."""

    __slots__ = (
        "covariance", "noise", "num_times", "rate_noise", "rows", "seconds", "sums", "token_s", "tokens", "variance",
    )  # fmt: skip

    def __init__(self) -> None:
        self.token_s = self.rows = 0.0
        """Running means of the last: seconds per token of a row, and rows that ran meanwhile."""
        self.noise = self.rate_noise = _FIRST_NOISE
        """By what share times differ from what was expected."""
        self.num_times = 0
        self.tokens = self.seconds = 0.0
        """Running means of prompts."""
        self.sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        """Of least squares: how many, rows, times, rows squared, rows by times."""
        self.covariance = self.variance = 0.0
        """Of times with rows, and of rows: sums, not means."""

    @property
    def is_measured(self) -> bool:
        return self.num_times > 0

    @property
    def rate(self) -> float | None:
        """Tokens of prompts per second."""
        return self.tokens / self.seconds if self.seconds else None

    def base_s(self, per_row: float) -> float:
        """Seconds that a token would take if nothing ran."""
        return self.token_s / (1.0 + per_row * self.rows)

    def note_token_time(self, token_s: float, rows: float, per_row: float) -> None:
        if not self.num_times:
            self.token_s, self.rows = token_s, rows
        else:
            off = token_s / (self.base_s(per_row) * (1.0 + per_row * rows))
            self.noise += _WEIGHT * (min(1.0, abs(off - 1.0)) - self.noise)
            self.token_s += _WEIGHT * (token_s - self.token_s)
            self.rows += _WEIGHT * (rows - self.rows)
            if not 1 / _OUTLIER < off < _OUTLIER:
                self.sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self.num_times += 1
        n, x, y, xx, xy = (_OLDER * each for each in self.sums)
        n, x, y, xx, xy = n + 1.0, x + rows, y + token_s, xx + rows * rows, xy + rows * token_s
        self.sums = n, x, y, xx, xy
        self.covariance, self.variance = xy - x * y / n, max(0.0, xx - x * x / n)

    def note_prompt(self, num_tokens: int, seconds: float) -> None:
        """Computed in so long, beside what else ran."""
        if num_tokens < _LEAST_PROMPT_TOKENS or seconds <= 0.0:
            return
        if (rate := self.rate) is None:
            self.tokens, self.seconds = float(num_tokens), seconds
            return
        self.rate_noise += _WEIGHT * (min(1.0, abs(seconds * rate / num_tokens - 1.0)) - self.rate_noise)
        self.tokens += _WEIGHT * (num_tokens - self.tokens)
        self.seconds += _WEIGHT * (seconds - self.seconds)

    def believed(self, pace: Pace) -> tuple[float, float]:
        """Its base seconds per token, and its tokens of prompts per second."""
        base_s = _beyond_noise(self.base_s(pace.per_row) if self.num_times else None, pace.token_s, self.noise)
        rate = _beyond_noise(self.rate, pace.prompt_rate, self.rate_noise)
        return base_s or _FIRST_TOKEN_S, rate or _FIRST_PROMPT_RATE


def _beyond_noise(own: float | None, usual: float | None, noise: float) -> float | None:
    """The usual, but for what one's own differs from it by more than noise."""
    if own is None or usual is None:
        return own if usual is None else usual
    ratio, margin = own / usual, 1.0 + max(_LEAST_NOISE, noise)
    return usual * (max(1.0, ratio / margin) if ratio > 1.0 else min(1.0, ratio * margin))
