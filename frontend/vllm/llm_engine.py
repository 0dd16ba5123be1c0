"""`EngineArgs`, `LLMEngine` and `AsyncLLMEngine`, under vLLM's names, for scripts that step the engine themselves.

engine = LLMEngine.from_engine_args(EngineArgs(model="HuggingFaceTB/SmolLM2-135M-Instruct"))
engine.add_request("0", "Hello", SamplingParams(max_tokens=8))
while engine.has_unfinished_requests():
    for output in engine.step():
        ...
"""

from __future__ import annotations

import argparse
import queue
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import Field, dataclass, field, fields, make_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, Unpack

from headrace.core.options import compilation_config
from headrace.core.options.parsing import add_options, fill_namespaces, options_from_arguments, parse_options
from headrace.core.options.values import option_specs
from headrace.core.options.vllm_options import unsupported_options
from headrace.frontend.api.async_llm import AsyncLLM
from headrace.frontend.api.llm import LLM
from headrace.frontend.api.sync_stream import Pump
from headrace.frontend.client.control import Controls
from headrace.frontend.client.one_process import OneProcess
from headrace.frontend.fleet.requests import id_in_use
from headrace.frontend.request.checks import checked_id
from headrace.frontend.request.lora_request import LoRARequest
from headrace.frontend.request.outputs import RequestOutput
from headrace.frontend.request.parameters.sampling_params import SamplingParams
from headrace.frontend.request.prompts import tokenization_of
from headrace.frontend.tracing.options import NAMES as OF_TRACES
from headrace.frontend.tracing.options import take_traces
from headrace.frontend.vllm.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    asked_config,
    engine_config,
)
from headrace.frontend.vllm.stat_loggers import Factory, StatLoggers
from headrace.frontend.vllm.unsupported import DECISIONS, METHODS, check_arguments, no_attribute

if TYPE_CHECKING:
    from headrace.core.options.engine_options import Options
    from headrace.frontend.vllm.engine_keywords import EngineOptions

P = TypeVar("P", bound=argparse.ArgumentParser)


class _Defaults(type):
    """Makes `EngineArgs.max_num_seqs` the option's default, which scripts pass to their own argument parsers."""

    def __getattr__(cls, name: str) -> Any:
        if name not in option_specs():
            raise no_attribute(cls.__name__, name, {})
        return copy(option_specs()[name].default)


def _parsed(given: Mapping[str, Any]) -> Options:
    """The engine's options of those given. Raises OptionError."""
    of_engine = {**given}
    take_traces(of_engine)
    return parse_options(**of_engine)


class EngineArgs(metaclass=_Defaults):
    """An engine's options as an object. `vars` holds those that were given; the others read as their defaults.

    `LLM(**vars(args))` and `LLMEngine.from_engine_args(args)` start an engine with them. Raises OptionError for an
    unknown or bad option.
    """

    def __init__(self, model: str | None = None, **options: Unpack[EngineOptions]) -> None:
        given: dict[str, Any] = {**options} if model is None else {"model": model, **options}
        _parsed(given)
        vars(self).update(given)

    if TYPE_CHECKING:  # every option is an attribute, which a script may set

        def __setattr__(self, name: str, value: Any) -> None: ...

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]] = {
        each.name: each
        for each in fields(
            make_dataclass(
                "Fields", [(n, Any, field(default_factory=partial(copy, s.default))) for n, s in option_specs().items()]
            )
        )
    }
    """Every option as a dataclass field, so that dataclasses.asdict, fields and replace work."""

    def __getattr__(self, name: str) -> Any:
        if name in OF_TRACES:
            return vars(self).get(name)
        if name not in option_specs():
            if name in compilation_config.DEFAULTS:
                return copy(compilation_config.DEFAULTS[name])
            lacking = unsupported_options().get(name)
            if lacking is not None and lacking.passes:  # the value that describes what the engine does anyway
                return copy(lacking.passes[0])
            raise no_attribute("EngineArgs", name, {}, DECISIONS if name.startswith("create_") else None)
        value = getattr(_parsed(vars(self)), name)
        return None if name == "model" and value == "" else value  # LLM takes None, too, for no model

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def __eq__(self, other: object) -> bool:
        """Whether an engine would be started with the same options."""
        if not isinstance(other, EngineArgs):
            return NotImplemented
        return _parsed(vars(self)) == _parsed(vars(other))

    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # attributes may change

    @staticmethod
    def add_cli_args(parser: P, async_args_only: bool = False) -> P:
        """Adds every option and `--config FILE` to the parser, whose namespaces then hold all of them, typed and with
        their defaults. With async_args_only adds nothing: AsyncLLM has no options of its own."""
        if async_args_only:
            return parser
        add_options(parser)
        fill_namespaces(parser)
        return parser

    def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> EngineConfig:
        """The options in the form of vLLM's VllmConfig; see `asked_config`. A running engine's is `vllm_config`."""
        return asked_config(parse_options(**vars(self)))

    def create_model_config(self) -> ModelConfig:
        return self.create_engine_config().model_config

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """From the namespace of a parser that `add_cli_args` extended; other attributes in it are ignored."""
        options, defaults = options_from_arguments(args), parse_options()
        names = options.__struct_fields__
        return cls(**{n: getattr(options, n) for n in names if getattr(options, n) != getattr(defaults, n)})


AsyncEngineArgs = EngineArgs


@dataclass(eq=False)
class _Running:
    """One submission. Identifies its queued outputs: after an abort, a new request may have the same id."""

    request_id: str
    pump: Pump | None = None


_OF_LLM = frozenset({*(name for name in vars(Controls) if not name.startswith("_")), *("get_tokenizer", "engine")})


class LLMEngine(OneProcess):
    """Takes requests one by one; `step` returns new outputs. For one thread. The engine runs between steps too."""

    def __init__(self, llm: LLM) -> None:
        """Wraps an LLM, which may be attached to a running engine; `close` closes it."""
        self._llm = llm
        self._running: dict[str, _Running] = {}
        self._news: queue.SimpleQueue[tuple[_Running, RequestOutput | BaseException | None]] = queue.SimpleQueue()
        self._held: tuple[_Running, RequestOutput | BaseException | None] | None = None
        """What comes first in the next step."""

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, *, stat_loggers: Sequence[Factory] | None = None, **others: Any
    ) -> LLMEngine:
        """Starts an engine-core. Raises as `LLM(...)` does.

        stat_loggers: user-defined classes that record the engine's load, in the client's thread.
        `others` are vLLM's further arguments; each must be None or a value that has no effect.
        """
        check_arguments("from_engine_args", others)
        loggers = StatLoggers(stat_loggers)
        llm = LLM(**vars(engine_args))
        llm.start_stat_loggers(loggers)
        return cls(llm)

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        **others: Any,
    ) -> None:
        """Submits a request. Its outputs are cumulative unless `params.output_kind` says otherwise.

        Raises InvalidRequestError, also for an id that is in use.
        """
        check_arguments("add_request", others)
        request_id = checked_id(request_id)
        if request_id in self._running:
            raise id_in_use(request_id)
        running = _Running(request_id)

        def put(item: RequestOutput | BaseException | None) -> None:
            self._news.put((running, item))

        how = tokenization_of(tokenization_kwargs)
        running.pump = self._llm.start_request(request_id, prompt, params, priority, put, how, lora_request)
        self._running[request_id] = running

    def step(self) -> list[RequestOutput]:
        """Waits for new outputs and returns them, at most one of each request; returns an empty list when no request is
        unfinished.

        Raises the error that ended a request, once; the other requests go on.
        """
        outputs: dict[_Running, RequestOutput] = {}
        while self._running and (not outputs or not self._news.empty()):
            running, item = self._held or self._llm.take(self._news)
            self._held = None
            if self._running.get(running.request_id) is not running:
                continue  # aborted meanwhile
            if running in outputs or (outputs and isinstance(item, BaseException)):
                self._held = running, item
                break
            if item is None or isinstance(item, BaseException) or item.finished:
                del self._running[running.request_id]
            if isinstance(item, BaseException):
                raise item
            if item is not None:
                outputs[running] = item
                if running.pump is not None:
                    running.pump.taken()
        return list(outputs.values())

    def abort_request(self, request_ids: str | Iterable[str], internal: bool = False) -> None:
        """Aborts requests, which get no further output; ids that are not running are ignored. See AsyncLLM.abort."""
        for each in (request_ids,) if isinstance(request_ids, str) else tuple(request_ids):
            running = self._running.pop(each, None)
            if running is not None and running.pump is not None:
                running.pump.cancel()

    def do_log_stats(self) -> None:
        """The same as `LLM.do_log_stats`."""
        self._llm.do_log_stats()

    def has_unfinished_requests(self) -> bool:
        """Whether any request's last output is still to be returned by `step`."""
        return bool(self._running)

    def get_num_unfinished_requests(self) -> int:
        """Number of requests whose last output `step` has not returned yet."""
        return len(self._running)

    @property
    def tokenizer(self) -> Any:
        return self._llm.get_tokenizer()

    def get_supported_tasks(self) -> tuple[str, ...]:
        return self._llm.supported_tasks

    @property
    def vllm_config(self) -> EngineConfig:
        return engine_config(self._llm.engine)

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    def get_model_config(self) -> ModelConfig:
        return self.model_config

    @property
    def cache_config(self) -> CacheConfig:
        return self.vllm_config.cache_config

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return self.vllm_config.scheduler_config

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """As `LLM.add_lora`; the next three likewise."""
        return self._llm.add_lora(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        return self._llm.remove_lora(lora_id)

    def list_loras(self) -> set[int]:
        return self._llm.list_loras()

    def pin_lora(self, lora_id: int) -> bool:
        return self._llm.pin_lora(lora_id)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """LLM's control methods: get_tokenizer, start_profile, sleep, get_metrics, collective_rpc and so on."""
            if name in _OF_LLM:
                return getattr(self._llm, name)
            raise no_attribute("LLMEngine", name, METHODS)

    def close(self) -> None:
        """Aborts running requests, and stops the engine if this object started it."""
        self._llm.close()


class AsyncLLMEngine(AsyncLLM):
    """`AsyncLLM` under vLLM's older name."""
