"""Steps whose results the host has not read yet, and what it makes of them when it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.executor.gpu.device_state import Device, Mark
from headrace.executor.gpu.steps import BEST, NUM_RESULTS, RAW_BEST, TOKEN
from headrace.executor.sampling.logprobs import padded
from headrace.executor.sampling.sampler import ALL_FORBIDDEN, Sampled, find_problems, row_failure
from headrace.ipc.messages import LogprobRows
from headrace.ipc.step import PromptLogprobRun, StepPlan, StepResult
from headrace.kernels.reference.sampling import TokenLogprobs

ReportLogprobs = Callable[[Tensor, Tensor, int], TokenLogprobs]
"""A version of the op `token_logprobs`."""


class LogprobsInFlight:
    """Log-probabilities on their way to the host: num_rows rows of 1 + width tokens each."""

    def __init__(
        self, device: Device, logits: Tensor, own_ids: Tensor, counts: np.ndarray, report: ReportLogprobs
    ) -> None:
        """logits [num_rows, vocab_size] float32; own_ids [num_rows] int64; counts [num_rows] `limited`."""
        self._counts = counts
        found = report(logits, own_ids, int(counts.max(initial=0)))
        finite = logits.amax(1).isfinite().all()
        flat = torch.cat(
            (found.token_ids.flatten(), found.logprobs.flatten().view(torch.int32), found.ranks, finite.int()[None])
        )
        self._shape = found.token_ids.shape
        self._host = device.host_buffer(len(flat))
        device.to_host(self._host, flat)

    def rows(self, kept: np.ndarray | slice = slice(None)) -> LogprobRows:
        """Those that `kept` [num_rows] bool marks, as wide as they need. After the step's event."""
        num_rows, columns = self._shape
        words = self._host.numpy()[: num_rows * (2 * columns + 1)]
        ids, values, ranks = np.split(words, [num_rows * columns, 2 * num_rows * columns])
        ids, values = ids.reshape(num_rows, columns), values.view(np.float32).reshape(num_rows, columns)
        return padded(ids[kept], values[kept], ranks[kept], self._counts[kept])

    @property
    def finite(self) -> bool:
        """Every row's highest logit was. After the step's event."""
        num_rows, columns = self._shape
        return bool(self._host[num_rows * (2 * columns + 1)])


@dataclass(eq=False)
class StepInFlight:
    """A submitted step. `host` is pinned memory that the device writes before `done` passes."""

    plan: StepPlan
    rows: np.ndarray  # [num_sampled] int32
    columns: np.ndarray  # [num_sampled] int32: where in its row each sampled token goes
    generations: np.ndarray  # [num_sampled]: which occupant of the row it was sampled for
    host: Tensor  # [at least num_sampled * NUM_RESULTS] int32
    began: Mark
    done: Mark
    changed: bool = False
    """Logits were changed before the choice; RAW_BEST then has their highest before that."""
    reporting: np.ndarray | None = None  # [num_logprob_rows], ascending: indices of rows with log-probabilities
    logprobs: LogprobsInFlight | None = None
    prompt_runs: list[tuple[int, int, LogprobsInFlight]] = field(default_factory=list)
    """Row, first position told of, and the log-probabilities."""
    sampled: Sampled | None = None
    """Chosen on the host instead, or read from the device already."""
    began_s: float = 0.0
    ended_s: float = 0.0

    def settle(self) -> Sampled:
        """Waits for the device; the tokens and what went wrong. Log-probabilities are not part of it."""
        if self.sampled is None:
            self.done.synchronize()
            results = self.host.numpy()[: len(self.rows) * NUM_RESULTS].reshape(-1, NUM_RESULTS)
            best = results[:, BEST].copy().view(np.float32)
            if self.changed:
                problems = find_problems(results[:, RAW_BEST].copy().view(np.float32))
                for index in np.flatnonzero(np.isneginf(best)):
                    problems.setdefault(int(index), ALL_FORBIDDEN)
            else:
                problems = find_problems(best)
            self.sampled = Sampled(results[:, TOKEN].copy(), problems)
        return self.sampled

    def result(self) -> StepResult:
        """What the core is told, once `done` has passed. A row with a problem is a failure, and none of its numbers are
        reported."""
        sampled = self.settle()
        runs, problems = self._prompt_logprobs()
        for index, why in sampled.problems.items():
            problems.setdefault(int(self.rows[index]), why)
        good = ~np.isin(self.rows, list(problems))
        reporting, logprobs = sampled.logprob_indices, sampled.logprobs
        if self.reporting is not None and self.logprobs is not None:
            kept = good[self.reporting]
            reporting, logprobs = self.reporting[kept], self.logprobs.rows(kept)
        if reporting is not None:
            # Indices move up past the failed rows before them.
            reporting = (np.cumsum(good) - 1)[reporting].astype(np.int32)
        return StepResult(
            step=self.plan.step,
            rows=self.rows[good],
            token_ids=sampled.token_ids[good],
            logprob_indices=reporting if reporting is not None and len(reporting) else None,
            logprobs=logprobs if reporting is not None and len(reporting) else None,
            prompt_logprobs=runs,
            failures=tuple(row_failure(row, why) for row, why in problems.items()),
            **self._times(),
        )

    def _prompt_logprobs(self) -> tuple[tuple[PromptLogprobRun, ...], dict[int, str]]:
        """What is told of prompts, and why nothing more can be told of some rows."""
        runs: list[PromptLogprobRun] = []
        problems: dict[int, str] = {}
        for row, start, logprobs in self.prompt_runs:
            if row not in problems and not logprobs.finite:
                problems[row] = "the model's logits for the prompt are not finite: its computation overflowed"
            if row not in problems:
                runs.append(PromptLogprobRun(row=row, start=start, rows=logprobs.rows()))
        return tuple(runs), problems

    def _times(self) -> dict[str, Any]:
        return {"began_s": self.began_s, "ended_s": self.ended_s} if self.ended_s else {}
