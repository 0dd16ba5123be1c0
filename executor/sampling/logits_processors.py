"""Users' logits processors, with vLLM's interface: classes that change a whole batch's logits.

A class is named by `--logits-processors` (module:Class) or by an entry point, and each sampling rank makes one
instance. Before `apply` gets a step's logits, `update_state` tells the instance which requests the rows belong to. A
request that moves to another row is added again, with its output so far; `moved` is never used.

When a processor raises for a batch, or leaves a row from which no token can be chosen, only the requests for which it
does so on their own fail: a new instance gets the same logits row by row, each row as a batch of its own, and replaces
the one that failed.
"""

from __future__ import annotations

import enum
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from headrace.core.options.plan import Plan
from headrace.executor.sampling.columns import SampledRows
from headrace.ipc.failure import OptionError, let_interrupts_pass
from headrace.ipc.messages import Sampling
from headrace.ipc.plugins import load_class, load_plugin, logits_processor_entries

logger = logging.getLogger(__name__)


class MoveDirectionality(enum.Enum):
    UNIDIRECTIONAL = enum.auto()
    SWAP = enum.auto()


AddedRequest = tuple[int, Sampling, list[int] | None, list[int]]
"""Row, parameters, prompt and output of a request; the output is a list that grows with every step."""


@dataclass(frozen=True)
class BatchUpdate:
    """Changes since the previous update, to be applied in this order: removed, added, moved."""

    batch_size: int
    removed: Sequence[int]
    added: Sequence[AddedRequest]
    moved: Sequence[tuple[int, int, MoveDirectionality]] = ()


class LogitsProcessor(ABC):
    """The base class of logits processors. An instance serves all requests of a rank."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises ValueError for parameters, including `extra_args`, that the class does not support. Called for each
        request before it is accepted, in every rank."""
        return

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:  # noqa: B027
        """vllm_config: has scheduler_config (max_num_seqs, max_num_batched_tokens), model_config (model, max_model_len,
        get_vocab_size()) and `plan`, the engine's Plan."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Changes logits [batch_size, vocab_size] float32, in place or not, and returns them."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether `apply` never changes which token has the highest logit. Then it is skipped for greedy requests and
        runs after the temperature; otherwise it runs before the penalties."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before `apply`; None if nothing but the outputs has changed."""


State = TypeVar("State")


def process_dict_updates(
    by_row: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[Sampling, list[int] | None, list[int]], State | None],
) -> bool:
    """Implements `update_state` for a class with a state per request; returns whether any state was added or removed.

    new_state: makes the state from a request's parameters, prompt and output; None if the class does nothing for it.
    """
    if batch_update is None:
        return False
    before = dict(by_row)
    for row in batch_update.removed:
        by_row.pop(row, None)
    for row, params, prompt, output in batch_update.added:
        by_row.pop(row, None)
        if (state := new_state(params, prompt, output)) is not None:
            by_row[row] = state
    for start, end, direction in batch_update.moved:
        moved, displaced = by_row.pop(start, None), by_row.pop(end, None)
        if moved is not None:
            by_row[end] = moved
        if displaced is not None and direction is MoveDirectionality.SWAP:
            by_row[start] = displaced
    return before.keys() != by_row.keys() or any(before[row] is not state for row, state in by_row.items())


RequestLogitsProcessor = Callable[..., Tensor]
"""(output_token_ids, logits [vocab_size]) or (prompt_token_ids, output_token_ids, logits) -> logits."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Makes a batch's processor from one function per request. A function that raises fails only its own request."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[Tensor], Tensor]] = {}
        self.failures: dict[int, BaseException] = {}
        """By row; read and emptied after each call."""

    @abstractmethod
    def new_req_logits_processor(self, params: Any) -> RequestLogitsProcessor | None:
        """The function for a request with these parameters, which have the fields of SamplingParams; None if it needs
        none."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.req_info.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self.req_info.pop(index, None)
            try:
                made = self.new_req_logits_processor(params)
            except BaseException as error:  # fails only this request
                let_interrupts_pass(error)
                self.failures[index] = error
                continue
            if made is not None:
                self.req_info[index] = _bound(made, prompt, output)

    def apply(self, logits: Tensor) -> Tensor:
        for index, process in self.req_info.items():
            try:
                _write(logits[index], process(logits[index]))
            except BaseException as error:  # fails only this request
                let_interrupts_pass(error)
                self.failures[index] = error
        return logits


def _write(place: Tensor, found: object) -> None:
    """Writes what a processor returned to `place`, of which it was given a view. Raises TypeError or ValueError unless
    that is logits of this shape: torch would repeat fewer of them, and take a mask of booleans for numbers."""
    if not isinstance(found, Tensor):
        raise TypeError(f"it returned {type(found).__name__}, and must return the logits")
    if not found.is_floating_point():
        raise TypeError(f"it returned {str(found.dtype).removeprefix('torch.')}, and logits are floating-point numbers")
    if found.shape != place.shape:
        raise ValueError(f"it returned logits of shape {list(found.shape)} for {list(place.shape)}")
    changed_in_place = found.dtype == place.dtype and found.data_ptr() == place.data_ptr()
    if not changed_in_place or found.stride() != place.stride():
        place.copy_(found.detach())


def is_usable(logits: Tensor, best: Tensor) -> Tensor:
    """[num_rows] bool: whether a token can be chosen from each row. best: [num_rows], the highest logits, NaN where a
    row has one. One infinite logit forces its token."""
    usable = best.isfinite()
    for index in torch.nonzero(best.isposinf())[:, 0].tolist():
        usable[index] = logits[index].isposinf().sum() == 1
    return usable


def _bound(made: RequestLogitsProcessor, prompt: list[int] | None, output: list[int]) -> Callable[[Tensor], Tensor]:
    if len(inspect.signature(made).parameters) == 3:
        return lambda logits: made(prompt, output, logits)
    return lambda logits: made(output, logits)


def processor_classes(names: Sequence[str]) -> list[type[LogitsProcessor]]:
    """The classes of installed packages, then the named ones. Raises OptionError for a class that cannot be loaded."""
    found = [load_plugin(entry) for entry in logits_processor_entries()] + [
        load_class("logits_processors", name) for name in names
    ]
    for each in found:
        lacking = [name for name in ("apply", "is_argmax_invariant", "update_state") if not hasattr(each, name)]
        if lacking:
            raise OptionError(
                f"logits_processors names {each!r}, which lacks {', '.join(lacking)}; derive it from "
                f"{LogitsProcessor.__module__}.{LogitsProcessor.__qualname__}"
            )
    return found


def looks_at_params(classes: Sequence[type[LogitsProcessor]]) -> bool:
    """Whether any class overrides `validate_params`."""
    takes_all = LogitsProcessor.validate_params.__func__  # type: ignore[attr-defined]
    return any(getattr(_validate_of(each), "__func__", None) is not takes_all for each in classes)


def refusal_of(classes: Sequence[type[LogitsProcessor]], params: Sampling) -> str:
    """Why a class refuses a request's parameters; "" if none does."""
    for each in classes:
        try:
            _validate_of(each)(params)
        except BaseException as error:  # any error is a refusal
            let_interrupts_pass(error)
            field = "SamplingParams.extra_args: " if params.extra_args else ""
            return f"{field}the logits processor {each.__name__} refuses the parameters: {error}"
    return ""


def _validate_of(kind: type[LogitsProcessor]) -> Callable[[Sampling], None]:
    """The class's `validate_params`; a class made for vLLM need not have one, nor derive from ours."""
    return getattr(kind, "validate_params", LogitsProcessor.validate_params)


def make_processors(
    classes: Sequence[type[LogitsProcessor]], plan: Plan, device: torch.device
) -> LogitsProcessors | None:
    """None without classes. Raises OptionError for a class that cannot be instantiated."""
    config = SimpleNamespace(
        plan=plan,
        scheduler_config=SimpleNamespace(
            max_num_seqs=plan.max_num_seqs, max_num_batched_tokens=plan.max_num_batched_tokens
        ),
        model_config=SimpleNamespace(
            model=plan.model.name, max_model_len=plan.max_model_len, get_vocab_size=lambda: plan.model.vocab_size
        ),
    )
    if not classes:
        return None
    return LogitsProcessors([partial(each, config, device, device.type == "cuda") for each in classes])


@dataclass(frozen=True)
class _Entered:
    """A request in a row of the batch state."""

    number: int
    """The request's number in the order of entry; see `SamplingColumns.entries`."""
    params: Sampling
    prompt: list[int]
    output: list[int]


class LogitsProcessors:
    """A rank's logits processors, and the requests in the batch's rows."""

    def __init__(self, makers: Sequence[partial[LogitsProcessor]]) -> None:
        """makers: make an instance of each class. Raises OptionError for one that cannot be made."""
        self._loaded = [_Loaded(make) for make in makers]
        self._entered: dict[int, _Entered] = {}
        self._saved: Tensor | None = None

    def begin(
        self, batch: SampledRows, rows: np.ndarray, num_tokens: np.ndarray | None, problems: dict[int, str]
    ) -> ProcessedBatch:
        """Begins a step. rows, num_tokens: as in `sampler.sample`; problems: index of a row -> why it failed; added
        to."""
        places, members = [], []
        for index, row in enumerate(rows.tolist()):
            if num_tokens is not None and num_tokens[index] > batch.num_tokens[row]:
                problems[index] = "logits processors take one token at a time"  # so the row ends before its first draft
                continue
            places.append(index)
            members.append(self._member(batch, row))
        step = ProcessedBatch(self, self._loaded, members, places, problems)
        step.update()
        return step

    def saved(self, logits: Tensor) -> Tensor:
        """A copy in a buffer that the next call overwrites."""
        if self._saved is None or len(self._saved) < len(logits):
            self._saved = torch.empty_like(logits)
        return self._saved[: len(logits)].copy_(logits)

    def _member(self, batch: SampledRows, row: int) -> _Entered:
        number, entered = batch.sampling.entries[row], self._entered.get(row)
        first, end = int(batch.num_prompt_tokens[row]), int(batch.num_tokens[row])
        if entered is None or entered.number != number:
            params = batch.sampling.params[row]
            assert params is not None, "the row is taken"
            prompt = batch.tokens[row, :first].tolist()
            entered = self._entered[row] = _Entered(number, params, prompt, [])
        entered.output.extend(batch.tokens[row, first + len(entered.output) : end].tolist())
        return entered


class ProcessedBatch:
    """A step's logits on their way through the processors."""

    def __init__(
        self,
        owner: LogitsProcessors,
        loaded: Sequence[_Loaded],
        members: list[_Entered],
        places: list[int],
        problems: dict[int, str],
    ) -> None:
        """members: the participating requests; places: their rows in the logits."""
        self._owner, self._loaded = owner, loaded
        self._members, self._places, self._problems = members, places, problems
        self._not_updated: dict[int, BaseException] = {}
        """Index of a class whose `update_state` raised for this step -> the error."""

    def update(self) -> None:
        for index, each in enumerate(self._loaded):
            try:
                each.update(self._members)
            except BaseException as error:  # its request is found when the rows are applied one by one
                let_interrupts_pass(error)
                each.discard()
                self._not_updated[index] = error
            else:
                self._take_failures(each, self._places)

    def apply(self, logits: Tensor, *, argmax_invariant: bool) -> None:
        """Applies the processors of one kind in place. logits: [num_rows, vocab_size] float32."""
        if not self._places or not self.has(argmax_invariant=argmax_invariant):
            return
        whole = len(self._places) == len(logits)
        part = logits if whole else logits[self._places]
        for index, each in enumerate(self._loaded):
            if each.is_argmax_invariant != argmax_invariant:
                continue
            self._apply(each, part, self._not_updated.get(index))
        if not whole:
            logits[self._places] = part

    def has(self, *, argmax_invariant: bool) -> bool:
        return any(each.is_argmax_invariant == argmax_invariant for each in self._loaded)

    def _apply(self, loaded: _Loaded, part: Tensor, cause: BaseException | None) -> None:
        """cause: the error of the class's `update_state` for this step."""
        best = part.amax(1)
        if not bool((usable := is_usable(part, best)).all()):  # the model or a rule is to blame, which is told already
            part[~usable & ~best.isneginf()] = 0  # which harms no class
        if cause is None:
            saved = self._owner.saved(part)
            try:
                loaded.apply(part)
                if bool((usable & ~is_usable(part, part.amax(1))).any()):
                    raise ValueError("it left rows from which no token can be chosen")
            except BaseException as error:  # any error of a user's class
                let_interrupts_pass(error)
                loaded.discard()
                part.copy_(saved)
                cause = error
            else:
                self._take_failures(loaded, self._places)
        if cause is not None:
            self._apply_by_rows(loaded, part, cause)

    def _apply_by_rows(self, loaded: _Loaded, part: Tensor, cause: BaseException) -> None:
        """Applies each row as a batch of its own, so that only the requests that the class fails for end."""
        innocent = True
        for index, member in enumerate(self._members):
            row = part[index : index + 1].clone()
            try:
                loaded.update([member])
                loaded.apply(row)
            except BaseException as error:  # fails only this request
                let_interrupts_pass(error)
                loaded.discard()
                self._fail(index, loaded.failed(error))
                innocent = False
                continue
            innocent &= not self._take_failures(loaded, self._places[index : index + 1])
            best = row.amax(1)
            can_choose = bool(is_usable(row, best))
            innocent &= can_choose
            if can_choose or bool(best.isneginf()):  # the sampler says why all may be forbidden
                part[index : index + 1] = row
            else:
                loaded.discard()
                self._fail(index, f"the logits processor {loaded.name} wrote {'NaN' if best.isnan() else 'infinities'}")
        if innocent:
            loaded.warn_once(len(part), cause)

    def _fail(self, index: int, why: str) -> None:
        self._problems.setdefault(self._places[index], why)

    def _take_failures(self, loaded: _Loaded, places: Sequence[int]) -> bool:
        """Moves the instance's failures of single requests to `problems`; returns whether there were any."""
        failures = loaded.failures()
        for index, failure in failures.items():
            self._problems.setdefault(places[index], loaded.failed(failure))
        found = bool(failures)
        failures.clear()
        return found


class _Loaded:
    """A class and its current instance; an instance that raised is not used again."""

    def __init__(self, make: partial[LogitsProcessor]) -> None:
        self._make = make
        self.name: str = make.func.__name__
        try:
            self._instance: LogitsProcessor | None = make()
            self.is_argmax_invariant = bool(self._instance.is_argmax_invariant())
        except BaseException as error:  # any error of a user's class
            let_interrupts_pass(error)
            raise OptionError(
                f"the logits processor {self.name} cannot be made: {type(error).__name__}: {error}"
            ) from error
        self._numbers: list[int] = []  # of the requests in the instance's rows, as it was last told
        self._has_warned = False

    def discard(self) -> None:
        self._instance, self._numbers = None, []

    def update(self, members: Sequence[_Entered]) -> None:
        """Tells the instance which requests its rows belong to."""
        instance = self._made()
        before, numbers = self._numbers, [each.number for each in members]
        self._numbers = numbers
        update = None
        if numbers != before:
            update = BatchUpdate(
                batch_size=len(members),
                removed=tuple(range(len(members), len(before))),
                added=tuple(
                    (index, each.params, each.prompt, each.output)
                    for index, each in enumerate(members)
                    if index >= len(before) or before[index] != each.number
                ),
            )
        instance.update_state(update)

    def apply(self, part: Tensor) -> None:
        """Applies in place. Raises the class's errors, and those of `_write`."""
        _write(part, self._made().apply(part.view(part.shape)))  # a view, as a class may change its tensor's shape

    def failures(self) -> dict[int, BaseException]:
        instance = self._instance
        return instance.failures if isinstance(instance, AdapterLogitsProcessor) else {}

    def failed(self, error: BaseException) -> str:
        return f"the logits processor {self.name} failed: {type(error).__name__}: {error}"

    def warn_once(self, num_requests: int, error: BaseException) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s, for a batch of %d requests and for none of them alone; they went through it one by one, as they "
                "will again without another warning",
                self.failed(error),
                num_requests,
            )

    def _made(self) -> LogitsProcessor:
        if self._instance is None:
            self._instance = self._make()
        return self._instance
