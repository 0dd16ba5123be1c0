"""Small helpers that scripts written for vLLM import from it."""

from __future__ import annotations

import enum
import gc
import inspect
import logging
import os
import resource
import socket
import typing
import uuid
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from headrace.ipc.failure import HeadraceError, InvalidRequestError


class UsageContext(enum.Enum):
    """What vLLM's usage reports say of the caller. Headrace reports nothing to anybody."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def is_usage_stats_enabled() -> bool:
    """False: nothing is reported."""
    return False


class Counter:
    """Numbers from `start` on, one for each `next`."""

    def __init__(self, start: int = 0) -> None:
        self.counter = start

    def __iter__(self) -> Counter:
        return self

    def __next__(self) -> int:
        self.counter += 1
        return self.counter - 1


def random_uuid() -> str:
    """32 hexadecimal digits, for a request's id."""
    return uuid.uuid4().hex


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """What vLLM's scripts call after `del llm`: here the engine's process has ended then, with all that it held.

    Collects garbage, for an LLM that something refers to in a circle still has its engine. Raises InvalidRequestError
    for shutdown_ray: the Ray of others is theirs to stop.
    """
    if shutdown_ray:
        raise InvalidRequestError(
            "cleanup_dist_env_and_memory: shutdown_ray is refused: ray.shutdown() detaches from Ray"
        )
    gc.collect()


def destroy_model_parallel() -> None:
    """Nothing: this process is in no group of ranks. Those of an engine's processes end with it."""


def destroy_distributed_environment() -> None:
    """Nothing, as above."""


def set_ulimit(target_soft_limit: int = 65535) -> None:
    """Lets this process have so many files and connections open, or as many as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = target_soft_limit if hard == resource.RLIM_INFINITY else min(target_soft_limit, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def get_open_port() -> int:
    """A port that is free at this moment."""
    with socket.socket() as listening:
        listening.bind(("", 0))
        port: int = listening.getsockname()[1]
        return port


def get_ip() -> str:
    """The address by which other hosts reach this one, as VLLM_HOST_IP or the route to the world says."""
    if given := os.environ.get("VLLM_HOST_IP"):
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # which sends nothing
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def get_tokenizer(tokenizer_name: str, *args: Any, **kwargs: Any) -> Any:
    """transformers' own tokenizer. Raises InvalidRequestError where it is not installed, or has none there."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise InvalidRequestError(
            "get_tokenizer gives transformers' tokenizer, and transformers is not installed: pip install "
            "'transformers', or use LLM.get_tokenizer(), which needs none"
        ) from error
    kwargs = {name: value for name, value in kwargs.items() if value is not None and name != "tokenizer_mode"}
    try:
        return AutoTokenizer.from_pretrained(tokenizer_name, *args, **kwargs)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise InvalidRequestError(f"transformers has no tokenizer for {tokenizer_name}: {first_line}") from error


def cached_tokenizer_from_config(model_config: Any, **kwargs: Any) -> Any:
    """transformers' own tokenizer of an engine's model; None where the engine has none. Raises as `get_tokenizer`."""
    if getattr(model_config, "skip_tokenizer_init", False):
        return None
    return get_tokenizer(model_config.model, **kwargs)


def hf_api() -> Any:
    """The client of Hugging Face's Hub."""
    from huggingface_hub import HfApi

    return HfApi(library_name="headrace")


class TokenizerToAwait:
    """What `AsyncLLM.get_tokenizer()` gives: `await` finds the tokenizer, all else asks the one that is here.

    EngineClient of vLLM had `await get_tokenizer()` for years, and has `get_tokenizer()` now; scripts have either.
    """

    def __init__(self, find: Callable[[], Coroutine[Any, Any, Any]], here: Callable[[], Any] | None) -> None:
        """here: gives the tokenizer without waiting, or raises HeadraceError; None where that cannot be."""
        self._find = find
        self._here = here

    def __await__(self) -> Generator[Any, None, Any]:
        return self._find().__await__()

    def _now(self) -> Any:
        if self._here is None:
            raise HeadraceError("this tokenizer is read from files: await get_tokenizer(hf=True)")
        return self._here()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._now()(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._now())


class EngineSignature:
    """A class's `__signature__` with every engine option by name: made from the declarations when it is asked for."""

    def __init__(self, *first: str) -> None:
        """`first` are parameters of the class's own, by which the signature begins."""
        self._first = first

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        from headrace.core.options.engine_options import Options
        from headrace.core.options.values import option_specs

        own = inspect.signature(owner.__init__, eval_str=False).parameters  # type: ignore[misc]
        parameters = [own[name] for name in self._first]
        kind = inspect.Parameter.KEYWORD_ONLY
        hints = typing.get_type_hints(Options)
        for name, spec in option_specs().items():
            if name not in self._first:
                parameters.append(inspect.Parameter(name, kind, default=spec.default, annotation=hints[name]))
        return inspect.Signature(parameters)
