"""How fast engines are: what each was measured to take, what of that is noise, and what a larger batch costs them.

    seconds per token of a row  = base of the engine x (1 + per_row x rows that run there)
    seconds to a first token    = what a step takes + prompt_token_s x tokens of the prompt that are computed

`per_row` and `prompt_token_s` are of a group of engines (`Pace`), by decayed least squares: they are learnt from how
each engine's own times vary with its own load and with its prompts, so engines of different speed do not blur them. The
base is of each engine; one that was not measured, or differs from the group's usual within noise, has the usual.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

_FIRST_TOKEN_S = 0.02
_FIRST_PROMPT_TOKEN_S = 1 / 4000
_WEIGHT = 0.2
"""Of the newest in a running mean."""
_OLDER = 0.98
"""What remains of the sums of least squares with each new point."""
_PRIOR_ROWS_2, _PRIOR_TOKENS_2 = 16.0, 256.0**2
"""How much variation of the load, and of prompts' lengths, weighs as much as the assumption from before any."""
_LEAST_NOISE, _FIRST_NOISE = 0.1, 0.5
_OUTLIER = 4.0
"""A time so many times off what was expected is no news of the batch's size: the engine itself has changed."""
_NEWS = 0.05
"""By so much the pace has to change before all engines of a group are weighed anew."""


class _Line:
    """Decayed sums of points, from which the slope of a line through them follows."""

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y", "covariance", "variance")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self.covariance = self.variance = 0.0
        """Of y with x, and of x: sums, not means."""

    def add(self, x: float, y: float) -> None:
        n, of_x, of_y = _OLDER * self._n + 1.0, _OLDER * self._x + x, _OLDER * self._y + y
        xx, xy = _OLDER * self._xx + x * x, _OLDER * self._xy + x * y
        self._n, self._x, self._y, self._xx, self._xy = n, of_x, of_y, xx, xy
        self.covariance, self.variance = xy - of_x * of_y / n, max(0.0, xx - of_x * of_x / n)


class Pace:
    """What the engines of a group have in common."""

    def __init__(self) -> None:
        self.token_s: float | None = None
        """The usual base: the median of those that were measured, of two the less."""
        self.per_row = 0.0
        """Share of a token's time that each row adds."""
        self.prompt_token_s = _FIRST_PROMPT_TOKEN_S
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
        bases_s = [each.base_s(self.per_row) for each in measured]
        if not measured:
            return False
        usual_s = self.token_s or statistics.median_low(bases_s)
        of_rows, rows_2 = _PRIOR_ROWS_2 * self._prior, _PRIOR_ROWS_2
        of_tokens, tokens_2 = _PRIOR_TOKENS_2 * _FIRST_PROMPT_TOKEN_S, _PRIOR_TOKENS_2
        for each, base_s in zip(measured, bases_s, strict=True):
            of_rows += each.times.covariance / base_s
            rows_2 += each.times.variance
            of_tokens += each.prompts.covariance * usual_s / base_s
            tokens_2 += each.prompts.variance
        self.num_measured = len(measured)
        self.per_row = min(1.0, max(0.0, of_rows / rows_2))  # 1: each row costs as much as the first
        self.prompt_token_s = max(0.0, of_tokens / tokens_2)
        self.token_s = statistics.median_low(each.base_s(self.per_row) for each in measured)
        now = (self.per_row, self.token_s, self.prompt_token_s)
        if self._told and all(abs(new - old) <= _NEWS * old for new, old in zip(now, self._told, strict=True)):
            return False
        self._told = now
        return True


class Speed:
    """What one engine was measured to take."""

    __slots__ = ("noise", "num_times", "prompts", "rows", "times", "token_s")

    def __init__(self) -> None:
        self.token_s = self.rows = 0.0
        """Running means of the last: seconds per token of a row, and rows that ran meanwhile."""
        self.noise = _FIRST_NOISE
        """By what share times differ from what was expected."""
        self.num_times = 0
        self.times, self.prompts = _Line(), _Line()
        """Of times per token over rows, and of times to a first token over what was computed for it."""

    @property
    def is_measured(self) -> bool:
        return self.num_times > 0

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
                self.times = _Line()
        self.num_times += 1
        self.times.add(rows, token_s)

    def note_prompt(self, num_tokens: int, seconds: float) -> None:
        """Computed so many, and then brought the first token, in so long."""
        self.prompts.add(num_tokens, seconds)

    def believed(self, pace: Pace) -> float:
        """Its base seconds per token: the usual, but for what its own differs from that by more than noise."""
        usual_s = pace.token_s
        if usual_s is None:
            return _FIRST_TOKEN_S
        if not self.num_times:
            return usual_s
        ratio, margin = self.base_s(pace.per_row) / usual_s, 1.0 + max(_LEAST_NOISE, self.noise)
        return usual_s * (max(1.0, ratio / margin) if ratio > 1.0 else min(1.0, ratio * margin))
