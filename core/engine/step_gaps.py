"""How long the model stands still between two steps that follow each other: what planning and answering cost it."""

from __future__ import annotations

from headrace.ipc.step import StepResult


class StepGaps:
    """Sums over the engine's life, of steps whose executor tells when their forward pass began and ended."""

    def __init__(self) -> None:
        self.count = 0
        """Gaps: steps that followed another without a wait for work in between."""
        self.gap_s = 0.0
        self.forward_s = 0.0
        self._last_ended_s = 0.0  # 0 when the next step follows on nothing

    def step(self, result: StepResult) -> None:
        """The next step's result, in order."""
        if not result.ended_s:
            return
        if self._last_ended_s:
            self.count += 1
            self.gap_s += max(0.0, result.began_s - self._last_ended_s)
        # A pass may have begun while the one before still ran, in another stage.
        self.forward_s += result.ended_s - max(result.began_s, self._last_ended_s)
        self._last_ended_s = result.ended_s

    def idle(self) -> None:
        """Nothing was left to do: the time until the next step is nobody's gap."""
        self._last_ended_s = 0.0
