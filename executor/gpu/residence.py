"""Where a GPU's weights and cache are: on it, put aside in the host's memory, or dropped.

    on the GPU --- sleep 1, or new weights are read ---> aside --- wake up, or they failed ---> on the GPU
    on the GPU --- sleep 2 -------------------------> dropped --- wake up: read again -------> on the GPU

New weights take the old ones' memory, as beside them and the cache there is seldom room for a second model. Whatever
is moved, graphs are captured anew.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol

import torch

from headrace.executor.gpu.device_state import Device
from headrace.executor.gpu.runner import GpuRunner
from headrace.executor.gpu.sleep import HostCopy, check_room, free, storages_of
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.kv_cache import KVCache
from headrace.ipc.control import ASLEEP, PrepareWeights, Sleep, UseWeights, WakeUp, WorkerCommand
from headrace.ipc.failure import HeadraceError, ModelError

Read = Callable[[], Decoder]
"""Reads a checkpoint that has been found fit. Raises ModelError, and RuntimeError for want of memory."""


class Memory(Protocol):
    """The part of `executor.gpu.Backend` that is of use here."""

    device: torch.device

    def host_side(self) -> Device: ...
    def memory(self) -> tuple[int, int]: ...


class WeightResidency:
    """Owns the model from `allocate` on. For one thread, with no step in flight."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, runner: GpuRunner, backend: Memory, find: Callable[[str], Read]
    ) -> None:
        """find: looks for the checkpoint at a path, empty for the model's own, and says how to read it."""
        self.decoder = decoder
        self._cache, self._runner, self._backend, self._find = cache, runner, backend, find
        self._asleep: frozenset[str] = frozenset()
        self._aside: HostCopy | None = None
        self._prepared: Decoder | None = None

    @property
    def is_awake(self) -> bool:
        return not self._asleep

    def carry_out(self, command: WorkerCommand) -> bool:
        """False for what is not of its business. Raises HeadraceError with everything as it was before."""
        match command:
            case Sleep():
                self._sleep(command.level)
            case WakeUp():
                self._wake_up(frozenset(command.tags) or ASLEEP)
            case PrepareWeights():
                self._prepare(command.path)
            case UseWeights():
                self._use_prepared(command.prepared)
            case _:
                return False
        return True

    def _sleep(self, level: int) -> None:
        self._put_aside("sleep level 1" if level == 1 else "")
        self._cache.release()
        self._asleep = ASLEEP
        self._backend.memory()  # back to the driver, for other processes

    def _wake_up(self, tags: frozenset[str]) -> None:
        for tag in sorted(tags & self._asleep, reverse=True):  # weights first
            if tag == "weights":
                self._wake_weights()
            else:
                check_room(self._cache.nbytes, self._backend.memory(), "waking the cache")
                self._cache.restore()
            self._asleep -= {tag}

    def _wake_weights(self) -> None:
        if self._aside is None:
            self._use(self._read_safely(self._find("")))
            return
        check_room(self._aside.nbytes, self._backend.memory(), "waking the weights")
        self._aside.restore()
        self._aside = None

    def _prepare(self, path: str) -> None:
        read = self._find(path)
        self._put_aside("to keep the old weights while new ones are read")
        assert self._aside is not None, "they have just been put aside"
        try:
            self._prepared = self._read_safely(read)
        except HeadraceError:
            self._use_prepared(False)
            raise

    def _use_prepared(self, is_wanted: bool) -> None:
        prepared, self._prepared = self._prepared, None
        aside, self._aside = self._aside, None
        if aside is None:
            return
        if is_wanted and prepared is not None:
            self._use(prepared)
            return
        prepared = None
        gc.collect()
        self._backend.memory()
        aside.restore()

    def _put_aside(self, why: str) -> None:
        """The weights' memory is free afterwards. Without a `why` they are lost."""
        storages = storages_of(self.decoder, self._backend.device)
        self._aside = HostCopy(storages, self._backend.host_side(), why) if why else None
        self._runner.graphs.forget()
        self._backend.memory()  # waits for whatever is under way
        free(storages)
        self._backend.memory()

    def _read_safely(self, read: Read) -> Decoder:
        """Raises HeadraceError, nothing of what was read remaining."""
        problem: HeadraceError
        try:
            return read()
        except HeadraceError as error:
            problem = error.with_traceback(None)
        except RuntimeError as error:  # the device's memory
            problem = ModelError(f"the weights could not be read: {str(error).partition(chr(10))[0]}")
        gc.collect()
        self._backend.memory()
        raise problem

    def _use(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._runner.use(decoder)
