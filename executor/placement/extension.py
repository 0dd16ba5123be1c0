"""A class of the user's own that lives in each worker and answers `call_extension` (option worker_extension_cls)."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.executor.placement.base import Executor
from headrace.ipc.failure import HeadraceError, OptionError
from headrace.ipc.plugins import load_class


class Extension:
    """Made with the worker's executor, once; called between steps, with a dict of plain data, and answers with one."""

    def __init__(self, name: str, executor: Executor) -> None:
        """`name` is empty when there is none. Raises OptionError when the class cannot be had or made."""
        self._name = name
        self._instance: Any = None
        if name:
            cls = load_class("worker_extension_cls", name)
            if not callable(getattr(cls, "handle", None)):
                raise OptionError(f"worker_extension_cls={name} has no method handle(payload: dict) -> dict")
            try:
                self._instance = cls(executor)
            except Exception as error:
                raise OptionError(
                    f"worker_extension_cls={name} cannot be made: {type(error).__name__}: {error}"
                ) from error

    def call(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Raises HeadraceError when there is no extension, it fails, or its answer is no plain data."""
        if self._instance is None:
            raise HeadraceError("there is no worker extension: start the engine with worker_extension_cls=module:Class")
        try:
            answer = self._instance.handle(payload)
            if not isinstance(answer, dict):
                raise TypeError(f"handle gave a {type(answer).__name__}, and must give a dict")
            plain: dict[str, Any] = msgspec.to_builtins(answer, str_keys=True)
        except Exception as error:
            raise HeadraceError(f"the worker extension {self._name} failed: {type(error).__name__}: {error}") from error
        return plain
