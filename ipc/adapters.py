"""Adapters (LoRA): what a request names, what an engine holds, and what a rank says of one that it has loaded.

    AddRequest.adapters: AdapterUse --> core/adapters/: a version, in a slot --> NewRow.adapters: RowAdapter
                                             |
                                             +--> PrefixKey.adapters: KeyAdapter (prefix_names.py)

An adapter is registered under a name, with a path. What was loaded from there is a *version*: reloading makes a new
one. A version's identity is a hash of its content (configuration and tensors), so equal content has equal identities in
every engine. A slot is a place for one version in the memory of every rank; the core assigns slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from headrace.ipc.ranges import FLOAT32, Longest, Range

CONFIG_NAME = "adapter_config.json"
MOST_CONFIG_BYTES = 16 << 20
"""Of that file."""
MOST_USED = 16
"""Most adapters of one request."""
MOST_NAME = 4096
AdapterName = Annotated[str, Longest(MOST_NAME)]
UseScale = Annotated[float, Range(-FLOAT32, FLOAT32)]
"""In addition to the adapter's own scaling. With 0 the adapter has no effect."""


class AdapterUse(msgspec.Struct, frozen=True, array_like=True, kw_only=True, omit_defaults=True):
    """One adapter of a request, whose product with the layer's input is scaled and added to that of the weights."""

    name: AdapterName
    scale: UseScale = 1.0
    path: AdapterName = ""
    """Empty: it must be registered under the name. Else the engine registers (name, path) if it does not know it. The
    same name with another path is another adapter."""
    identity: Annotated[str, Longest(128)] = ""
    """Empty: the current version. Else it must be this version: a request that goes on here after another engine was
    lost."""
    is_3d: bool = False
    """Of a `path` that is not known yet: see `LoadAdapter.is_3d`."""


class AdapterInfo(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """One registered adapter."""

    name: str
    path: str
    state: Literal["registered", "loaded"]
    """registered: it is not in memory now, and is loaded when a request needs it."""
    identity: str = ""
    """Of the version that was loaded last; empty before the first load. So are the fields below."""
    rank: int = 0
    num_bytes: int = 0
    """Memory of one rank's part."""
    pinned: bool = False
    base_model_name: str = ""
    """What LoadAdapter said that it was trained for; not checked."""
    invocation_tokens: tuple[int, ...] = ()
    """See AdapterFacts."""
    is_3d: bool = False
    """See LoadAdapter."""
    default_scale: float = 0.0
    """See ScaleAdapters."""
    task_name: str = ""
    """See AdapterFacts; so is the next."""
    prompt_prefix: str = ""


class Adapters(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """All registered adapters, in the order of registration: the reply to ListAdapters. Also sent to every client when
    one comes, leaves, is pinned or has other content; not when one only leaves the memory or returns to it."""

    adapters: tuple[AdapterInfo, ...] = ()


class AdapterFacts(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a rank says of an adapter that it has loaded."""

    identity: str
    """sha256, in hexadecimal, of the canonical configuration and of all tensors: the same from every rank."""
    rank: int
    """The largest rank of its matrices."""
    num_bytes: int
    """Memory of this rank's part."""
    invocation_tokens: tuple[int, ...] = ()
    """An activated adapter (aLoRA) applies from the last occurrence of these tokens in the prompt on. Empty: it applies
    to all tokens."""
    task_name: str = ""
    """As a GGUF file says, for lists of adapters: it changes nothing. So does the next."""
    prompt_prefix: str = ""


class RowAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter of a row."""

    slot: int
    scale: float
    from_position: int = 0
    """It applies to this token and those after it."""


class KeyAdapter(NamedTuple):
    """An adapter's part in the names of prefixes."""

    identity: str
    scale: float = 1.0
    from_position: int = 0


class AdapterStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A snapshot of an engine's adapters. Counters start at zero with the engine."""

    max_loras: int
    running: tuple[str, ...] = ()
    """Names of the adapters of running requests."""
    waiting: tuple[str, ...] = ()
    """Names of those of waiting requests alone."""
    num_registered: int = 0
    num_loaded: int = 0
    """Versions in memory."""
    num_loads: int = 0
    num_failed_loads: int = 0
    load_s: float = 0.0
    """Sum of the durations of all loads."""
    num_evictions: int = 0


def most_of_request(max_loras: int) -> int:
    """How many adapters with an effect one request may have, with this option."""
    return min(max_loras, MOST_USED)


def activation_start(prompt_token_ids: Any, invocation_tokens: Sequence[int]) -> int | None:
    """Where an activated adapter begins to apply: at the last occurrence of its invocation tokens in the prompt. None:
    they do not occur, and it does not apply. prompt_token_ids: [num_prompt_tokens] int32, as numpy, memoryview or list.
    """
    size, tokens = len(invocation_tokens), list(invocation_tokens)
    for start in range(len(prompt_token_ids) - size, -1, -1):
        if prompt_token_ids[start] == tokens[0] and list(prompt_token_ids[start : start + size]) == tokens:
            return start
    return None
