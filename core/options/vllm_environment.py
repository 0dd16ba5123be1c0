"""vLLM's environment variables: supported ones set Headrace's; one warning names all others that are set."""

from __future__ import annotations

import os
import types
from collections.abc import Mapping, MutableMapping
from decimal import Decimal, InvalidOperation
from typing import Any

from headrace.ipc.failure import OptionError

STANDS_FOR: Mapping[str, str] = types.MappingProxyType(
    {
        "VLLM_API_KEY": "HEADRACE_API_KEY",
        "VLLM_LOGGING_LEVEL": "HEADRACE_LOG_LEVEL",
        "VLLM_LOGGING_CONFIG_PATH": "HEADRACE_LOG_CONFIG",
        "VLLM_CACHE_ROOT": "HEADRACE_CACHE",
        "VLLM_SERVER_DEV_MODE": "HEADRACE_SERVER_DEV_MODE",
        "VLLM_HOST_IP": "HEADRACE_HOST",
        "VLLM_LOG_STATS_INTERVAL": "HEADRACE_LOG_STATS_INTERVAL",
        "VLLM_USE_MODELSCOPE": "HEADRACE_USE_MODELSCOPE",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "HEADRACE_ALLOW_RUNTIME_LORA_UPDATING",
        "VLLM_LORA_RESOLVER_CACHE_DIR": "HEADRACE_LORA_RESOLVER_CACHE_DIR",
        "VLLM_LORA_RESOLVER_HF_REPO_LIST": "HEADRACE_LORA_RESOLVER_HF_REPO_LIST",
    }
)
CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""GiB of KV cache on a CPU."""
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
NEEDLESS = frozenset(
    {
        "VLLM_NO_USAGE_STATS",  # Headrace never sends usage data
        "VLLM_DO_NOT_TRACK",
        "VLLM_USAGE_SOURCE",
        "VLLM_USE_V1",
        "VLLM_WORKER_MULTIPROC_METHOD",  # workers are started as programs, neither by fork nor by multiprocessing
        "VLLM_CONFIGURE_LOGGING",
        "VLLM_TARGET_DEVICE",
    }
)
"""Variables without effect, because Headrace always does what they ask for."""
INSTEAD: Mapping[str, str] = types.MappingProxyType(
    {
        "VLLM_PORT": "--master-port and --port",
        "VLLM_CPU_OMP_THREADS_BIND": "taskset, which engines keep to",
        "VLLM_ATTENTION_BACKEND": "nothing: the engine chooses its kernels",
        "VLLM_PLUGINS": "worker_cls, scheduler_cls and distributed_executor_backend",
    }
)


_FLAGS = ("VLLM_SERVER_DEV_MODE", "VLLM_USE_MODELSCOPE", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", BATCH_INVARIANT)
_TRUE = ("1", "true", "yes", "on")


def variable(name: str) -> Any:
    """The value of one of vLLM's variables, for a script that reads `vllm.envs`: typed as there, or the default.

    Raises AttributeError, with what to use instead, for one that does nothing here.
    """
    text = os.environ.get(name)
    if name in _FLAGS:
        return (text or "").lower() in _TRUE
    if name == "VLLM_LOG_STATS_INTERVAL":
        return float(text or 10)
    if name in _DEFAULTS:
        return _DEFAULTS[name] if text is None else text
    instead = f"; use {INSTEAD[name]}" if name in INSTEAD else ""
    raise AttributeError(f"headrace.envs has no {name!r}: this variable of vLLM's does nothing here{instead}")


def take_vllm_variables(environment: MutableMapping[str, str]) -> str:
    """Sets Headrace's variables from vLLM's where they are not set. Returns a warning that names vLLM's variables
    without effect, or ""."""
    for theirs, ours in STANDS_FOR.items():
        if environment.get(theirs):
            environment.setdefault(ours, environment[theirs])
    known = {*STANDS_FOR, CACHE_SPACE, BATCH_INVARIANT, *NEEDLESS}
    others = sorted(name for name in environment if name.startswith("VLLM_") and name not in known)
    if not others:
        return ""
    named = ", ".join(f"{name} (use {INSTEAD[name]})" if name in INSTEAD else name for name in others)
    return f"these variables of vLLM's do nothing here: {named}"


_DEFAULTS: Mapping[str, Any] = types.MappingProxyType(
    {
        "VLLM_API_KEY": None,
        "VLLM_CACHE_ROOT": os.path.join("~", ".cache", "headrace"),
        "VLLM_CONFIGURE_LOGGING": True,
        "VLLM_CPU_KVCACHE_SPACE": None,
        "VLLM_HOST_IP": "",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_USAGE_SOURCE": "",
        "VLLM_USE_V1": True,
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
)
"""What a variable of vLLM's that does something here, or asks for what happens anyway, is where it is not set."""


def options_from_variables(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Options that vLLM reads from its environment. Raises OptionError for an invalid value."""
    options: dict[str, Any] = {}
    flag = environment.get(BATCH_INVARIANT, "")
    if flag not in ("", "0", "1"):
        raise OptionError(f"{BATCH_INVARIANT}={flag}: it must be 0 or 1")
    if flag == "1":
        options["batch_invariant"] = True
    text = environment.get(CACHE_SPACE, "")
    if text in ("", "0"):  # vLLM's default: choose the size automatically
        return options
    try:
        size = int(Decimal(text) * (1 << 30))
    except (InvalidOperation, ValueError, OverflowError):
        size = 0
    if size < 1:
        raise OptionError(f"{CACHE_SPACE}={text}: it must be the cache's size in GiB")
    return options | {"kv_cache_memory_bytes": size}
