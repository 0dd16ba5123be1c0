"""Small helpers that scripts written for vLLM import."""

from __future__ import annotations

import contextlib
import enum
import gc
import inspect
import logging
import os
import random
import resource
import socket
import typing
import uuid
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any

from headrace.ipc.failure import HeadraceError, InvalidRequestError, ModelError, OptionError


class UsageContext(enum.StrEnum):
    """The kind of caller in vLLM's usage reports. Headrace sends none."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def is_usage_stats_enabled() -> bool:
    """Always False: Headrace sends no usage reports."""
    return False


class Counter:
    """An iterator over the integers from `start` on."""

    def __init__(self, start: int = 0) -> None:
        self.counter = start

    def __iter__(self) -> Counter:
        return self

    def __next__(self) -> int:
        self.counter += 1
        return self.counter - 1


def random_uuid() -> str:
    """32 random hexadecimal digits, for a request's id."""
    return uuid.uuid4().hex


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collects garbage, which closes an LLM that is part of a reference cycle. vLLM's scripts call it after `del llm`;
    here the engine's process has usually ended by then and freed its memory.

    Raises InvalidRequestError for shutdown_ray: Headrace does not stop a Ray cluster.
    """
    if shutdown_ray:
        raise InvalidRequestError(
            "cleanup_dist_env_and_memory: shutdown_ray is refused: ray.shutdown() detaches from Ray"
        )
    gc.collect()


def destroy_model_parallel() -> None:
    """Does nothing: this process belongs to no group of ranks; an engine's groups end with its processes."""


def destroy_distributed_environment() -> None:
    """Does nothing, for the reason given at `destroy_model_parallel`."""


def set_ulimit(target_soft_limit: int = 65535) -> None:
    """Raises this process's soft limit of open files to target_soft_limit, or to the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = target_soft_limit if hard == resource.RLIM_INFINITY else min(target_soft_limit, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def get_open_port() -> int:
    """A TCP port that is free at this moment."""
    with socket.socket() as listening:
        listening.bind(("", 0))
        port: int = listening.getsockname()[1]
        return port


def get_ip() -> str:
    """This host's address: VLLM_HOST_IP if set, else that of the interface with the default route, else 127.0.0.1."""
    if given := os.environ.get("VLLM_HOST_IP"):
        return given
    for family, somewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        # Connecting a datagram socket sends nothing.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((somewhere, 9))
            address: str = probe.getsockname()[0]
            return address
    return "127.0.0.1"


def set_random_seed(seed: int | None) -> None:
    """Seeds the generators of this process: Python's, and numpy's and torch's where they are installed. None does
    nothing.

    Sampling does not depend on them: SamplingParams and the option seed have seeds of their own.
    """
    if seed is None:
        return
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed(seed % 2**32)
    with contextlib.suppress(ImportError):
        import torch

        torch.manual_seed(seed)


def resolve_chat_template(
    tokenizer: Any, chat_template: str | None, tools: Sequence[Any] | None, **others: Any
) -> str | None:
    """The template that renders a conversation: `chat_template` itself, or else the tokenizer's; None if it has none.

    others: model_config or trust_remote_code, by vLLM's version; neither decides anything here.
    """
    if unknown := others.keys() - {"model_config", "trust_remote_code"}:
        raise TypeError(f"resolve_chat_template: unknown arguments {', '.join(sorted(unknown))}")
    if chat_template is not None:
        return chat_template
    try:
        found: str = tokenizer.get_chat_template(None, tools=tools)
    except (AttributeError, ValueError):  # a tokenizer without templates, or one of several is to be named
        return None
    return found


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def get_tokenizer(
    tokenizer_name: str | os.PathLike[str],
    *args: Any,
    tokenizer_mode: str | None = "auto",
    revision: str | None = None,
    download_dir: str | None = None,
    **kwargs: Any,
) -> Any:
    """The tokenizer of the transformers library, for a local folder or a model of the Hugging Face Hub (of ModelScope
    if the environment asks for it). tokenizer_mode: as the engine option; mistral gives one based on mistral-common.
    kwargs: passed to `from_pretrained`.

    Raises InvalidRequestError for an unknown mode, and when a library or the tokenizer is missing.
    """
    mode = _checked_mode(tokenizer_mode)
    try:
        import transformers
    except ImportError as error:
        raise InvalidRequestError(
            "get_tokenizer gives transformers' tokenizer, and transformers is not installed: pip install "
            "'transformers', or use LLM.get_tokenizer(), which needs none"
        ) from error
    from headrace.executor.checkpoints.hub.sources import first_line

    name, where = os.fspath(tokenizer_name), {"revision": revision, "cache_dir": download_dir}
    folder = _from_model_scope(name, revision, download_dir, bool(kwargs.get("trust_remote_code")))
    if folder is not None:
        name, where = folder, {}
    given = {key: value for key, value in {**where, **kwargs}.items() if value is not None}
    wanted = "AutoTokenizer" if mode == "auto" else "MistralCommonBackend"
    reader: Any = getattr(transformers, wanted, None)
    if reader is None:
        said = f"transformers {transformers.__version__} has no {wanted}, which versions from 5 on have"
        raise InvalidRequestError(f"get_tokenizer: tokenizer_mode={mode}: {said}")
    try:
        return reader.from_pretrained(name, *args, **given)
    except (ImportError, OSError, ValueError) as error:
        raise InvalidRequestError(f"transformers has no tokenizer for {tokenizer_name}: {first_line(error)}") from error


def tokenizer_of_engine(options: Mapping[str, Any], model: str) -> Any:
    """`get_tokenizer` for an engine that was started with these options. Raises InvalidRequestError."""
    return get_tokenizer(
        options.get("tokenizer") or model,
        tokenizer_mode=options.get("tokenizer_mode"),
        revision=options.get("tokenizer_revision") or options.get("revision"),
        download_dir=options.get("download_dir"),
        trust_remote_code=options.get("trust_remote_code"),
    )


def _checked_mode(asked: str | None) -> str:
    """auto or mistral, checked as the engine option tokenizer_mode. Raises InvalidRequestError."""
    from headrace.core.options.values import convert, option_specs

    try:
        mode: str = convert(option_specs()["tokenizer_mode"], asked)
    except ValueError as error:
        raise InvalidRequestError(f"get_tokenizer: tokenizer_mode={asked!r:.100}: {error}") from None
    return mode


def _from_model_scope(name: str, revision: str | None, download_dir: str | None, with_code: bool) -> str | None:
    """Downloads a model's files, without weights, from ModelScope, and returns their folder. None if ModelScope is not
    asked for, or if `name` is a local path. Raises InvalidRequestError."""
    from headrace.executor.checkpoints.hub import HubChoice, locate
    from headrace.executor.checkpoints.hub.model_scope import is_asked_for

    try:
        if not is_asked_for() or os.path.exists(name):
            return None
        return str(locate(name, HubChoice(revision, download_dir, load_format="dummy", with_code=with_code)))
    except (ModelError, OptionError) as error:
        raise InvalidRequestError(f"get_tokenizer: {error}") from error


def cached_tokenizer_from_config(model_config: Any, **kwargs: Any) -> Any:
    """The transformers tokenizer of an engine's model; None if the engine has none. Raises as `get_tokenizer`."""
    if getattr(model_config, "skip_tokenizer_init", False):
        return None
    return get_tokenizer(model_config.model, **kwargs)


def async_tensor_h2d(data: Any, device: Any = None, dtype: Any = None, out: Any = None) -> Any:
    """A list, array or tensor of the host as a tensor of `device`, or in `out`; copied without waiting where the device
    can. Logits processors of vLLM's authors use it."""
    import torch

    there = torch.as_tensor(data, dtype=dtype or (None if out is None else out.dtype))
    if out is not None:
        return out.copy_(there, non_blocking=True)
    if device is None:
        raise InvalidRequestError("async_tensor_h2d needs a device, or out: the tensor to copy into")
    if torch.device(device).type == "cuda":
        there = there.pin_memory()
    return there.to(device, non_blocking=True)


def hf_api() -> Any:
    """The client of Hugging Face's Hub."""
    from huggingface_hub import HfApi

    return HfApi(library_name="headrace")


class TokenizerToAwait:
    """The result of `AsyncLLM.get_tokenizer()`: awaiting it gives the tokenizer once the engine has started, and any
    other use is passed to the tokenizer if it is available already.

    vLLM's EngineClient had `await get_tokenizer()` for years, and has `get_tokenizer()` now; scripts use either.
    """

    def __init__(self, find: Callable[[], Coroutine[Any, Any, Any]], here: Callable[[], Any] | None) -> None:
        """find: waits for the tokenizer. here: returns it without waiting, or raises HeadraceError; None if it can only
        be awaited."""
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
    """A descriptor for a class's `__signature__` that lists every engine option, and vLLM's that are taken at some
    values, built when it is read."""

    def __init__(self, *first: str) -> None:
        """first: names of `__init__` parameters that come before the options."""
        self._first = first

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        from headrace.core.options.engine_options import Options
        from headrace.core.options.values import option_specs
        from headrace.core.options.vllm_options import taken_options
        from headrace.frontend.tracing.options import NAMES as OF_TRACES

        own = inspect.signature(owner.__init__, eval_str=False).parameters  # type: ignore[misc]
        parameters = [own[name] for name in self._first]
        kind = inspect.Parameter.KEYWORD_ONLY
        hints = typing.get_type_hints(Options)
        for name, spec in option_specs().items():
            if name not in self._first:
                parameters.append(inspect.Parameter(name, kind, default=spec.default, annotation=hints[name]))
        parameters += [inspect.Parameter(name, kind, default=None, annotation=str | None) for name in OF_TRACES]
        known = {each.name for each in parameters}
        parameters += [
            inspect.Parameter(name, kind, default=default, annotation=Any)
            for name, default in taken_options().items()
            if name not in known
        ]
        return inspect.Signature(parameters)
