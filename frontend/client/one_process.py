"""`OneProcess`: the base of objects with a connection to an engine, which are neither pickled nor copied."""

from __future__ import annotations

from typing import NoReturn


class OneProcess:
    """Stays in the process, and in the place, that made it: a copy would read from the same socket."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """What pickle, copy.copy and copy.deepcopy call. Raises TypeError."""
        raise TypeError(
            f"{type(self).__name__} is neither pickled nor copied: it is connected to an engine. Share the object "
            "between threads; in another process, attach to the same engine with headrace.connect(address) or "
            "AsyncLLM.connect(address)"
        )
