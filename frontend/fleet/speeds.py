"""Estimates how fast engines are: their measured times, the noise in those, and the cost of larger batches.

    seconds per token of a row  = base of the engine x (1 + per_row x rows that run there)
    seconds to a first token    = time of a step + prompt_token_s x tokens of the prompt that are computed

`per_row` and `prompt_token_s` belong to a group of engines (`Pace`) and are estimated by decayed least squares from how
each engine's times vary with its own load and prompts, so engines of different speed do not distort them. Each engine
has its own base; an engine not measured yet, or within noise of the group's median, has the median.

An engine that was slow gets few requests or none, so few measurements tell that it is fast again. Therefore a new time
weighs more the longer none was measured, and the estimate of an engine without requests approaches the median.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

_FIRST_TOKEN_S = 0.02
_FIRST_PROMPT_TOKEN_S = 1 / 4000
_WEIGHT = 0.2
"""Weight of the newest value in a running mean, at least."""
_OLDER = 0.98
"""Factor by which the least-squares sums decay with each new point."""
_PRIOR_ROWS_2, _PRIOR_TOKENS_2 = 16.0, 256.0**2
"""Weight of the initial assumption, as variation of the number of rows and of prompt lengths that equals it."""
_LEAST_NOISE, _FIRST_NOISE = 0.1, 0.5
_OUTLIER = 4.0
"""If a time is off by more than this factor, the engine itself has changed, and its former points are dropped."""
_BELIEVED_S, _BELIEVED_AT_MOST_S = 15.0, 60.0
"""How long an estimate is believed without measurements. Doubled, up to the second value, each time that an estimate
proves right after it has aged, so that bursts of requests need not find out again and again that an engine is slow."""
_HALVED_AFTER_S = 5.0
"""In each such time without a measurement, the weight of earlier ones beside the next is halved. In each such time in
which an estimate ages, its distance from the median (as a logarithm of their ratio) is halved."""
_AGED = 1.5
"""An estimate that has aged by less than this factor proves nothing."""
_NEWS = 0.05
"""Relative change of the pace from which the costs of all engines of a group are updated."""


class _Line:
    """Decayed sums over points, which give the slope of a line through them."""

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y", "covariance", "variance")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self.covariance = self.variance = 0.0
        """Covariance of y with x, and variance of x: as sums, not means."""

    def add(self, x: float, y: float) -> None:
        n, of_x, of_y = _OLDER * self._n + 1.0, _OLDER * self._x + x, _OLDER * self._y + y
        xx, xy = _OLDER * self._xx + x * x, _OLDER * self._xy + x * y
        self._n, self._x, self._y, self._xx, self._xy = n, of_x, of_y, xx, xy
        self.covariance, self.variance = xy - of_x * of_y / n, max(0.0, xx - of_x * of_x / n)


class Pace:
    """The estimates that the engines of a group share."""

    def __init__(self) -> None:
        self.token_s: float | None = None
        """Median base of the measured engines; with an even number, the lower middle one."""
        self.per_row = 0.0
        """Share of a token's time that each running row adds."""
        self.prompt_token_s = _FIRST_PROMPT_TOKEN_S
        self.num_measured = 0
        self._prior = 0.0
        self._told: tuple[float, ...] = ()

    def expect(self, capacity: int) -> None:
        """An engine of this capacity has joined. Until measured, a token is assumed to take twice as long at an eighth
        of the capacity: while reading the weights dominates, a batch takes little more time than one row."""
        prior = 1.0 / max(1.0, capacity / 8)
        self._prior = min(self._prior, prior) if self._prior else prior
        if not self.num_measured:
            self.per_row = self._prior

    def learn(self, speeds: Iterable[Speed]) -> bool:
        """Updates the estimates from all measured engines. Returns whether all their costs must be updated."""
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
    """The measured times of one engine."""

    __slots__ = ("_aged_by", "believed_s", "noise", "num_times", "prompts", "rows", "times", "token_s")

    def __init__(self) -> None:
        self.token_s = self.rows = 0.0
        """Running means: seconds per token of a row, and the number of rows that ran meanwhile."""
        self.noise = _FIRST_NOISE
        """Mean relative deviation of measured from expected times."""
        self.num_times = 0
        self._aged_by = 1.0
        """Factor by which ageing has lowered the estimate since the last measurement."""
        self.believed_s = _BELIEVED_S
        """How long the estimate is believed without measurements, before it ages."""
        self.times, self.prompts = _Line(), _Line()
        """Times per token over rows, and times to a first token over the tokens computed for it."""

    @property
    def is_measured(self) -> bool:
        return self.num_times > 0

    def base_s(self, per_row: float) -> float:
        """Seconds per token if no other row ran."""
        return self.token_s / (1.0 + per_row * self.rows)

    def note_token_time(self, token_s: float, rows: float, per_row: float, since_s: float) -> None:
        """since_s: seconds since the measurement before."""
        if not self.num_times:
            self.token_s, self.rows = token_s, rows
        else:
            off = token_s / (self.base_s(per_row) * (1.0 + per_row * rows))
            weight = 1.0 - (1.0 - _WEIGHT) * 0.5 ** (since_s / _HALVED_AFTER_S)
            self._note_age(off)
            self.noise += _WEIGHT * (min(1.0, abs(off - 1.0)) - self.noise)
            self.token_s += weight * (token_s - self.token_s)
            self.rows += weight * (rows - self.rows)
            if not 1 / _OUTLIER < off < _OUTLIER:
                self.times = _Line()
        self.num_times += 1
        self.times.add(rows, token_s)

    def _note_age(self, off: float) -> None:
        """Call for each measured time, which is `off` times the expected one: was the estimate right before it aged?"""
        if not 1 / _AGED < self._aged_by < _AGED:
            was_right = off * off > self._aged_by if self._aged_by > 1.0 else off * off < self._aged_by
            self.believed_s = min(2 * self.believed_s, _BELIEVED_AT_MOST_S) if was_right else _BELIEVED_S
        self._aged_by = 1.0

    def note_prompt(self, num_tokens: int, seconds: float) -> None:
        """A request's `num_tokens` prompt tokens were computed and its first token generated in `seconds`."""
        self.prompts.add(num_tokens, seconds)

    def age(self, seconds: float, pace: Pace) -> None:
        """Moves the estimate towards the group's median, by as much as befits this time without a measurement."""
        if self.num_times and pace.token_s is not None:
            ratio = self.base_s(pace.per_row) / pace.token_s
            factor = ratio ** (1.0 - 0.5 ** (seconds / _HALVED_AFTER_S))
            self.token_s /= factor
            self._aged_by *= factor

    def believed(self, pace: Pace) -> float:
        """Its base seconds per token: the group's median, corrected by as much as its own differs beyond noise."""
        usual_s = pace.token_s
        if usual_s is None:
            return _FIRST_TOKEN_S
        if not self.num_times:
            return usual_s
        ratio, margin = self.base_s(pace.per_row) / usual_s, 1.0 + max(_LEAST_NOISE, self.noise)
        return usual_s * (max(1.0, ratio / margin) if ratio > 1.0 else min(1.0, ratio * margin))
