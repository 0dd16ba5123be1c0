"""Common to the ranks of all devices: describing the model, its tokeniser, and control commands."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from headrace.core.options.cache_groups import CacheGroup
from headrace.core.options.engine_options import Options
from headrace.core.options.memory import DTYPE_BYTES
from headrace.core.options.plan import ModelDescription, Plan
from headrace.core.options.resolve import FP8_CACHES
from headrace.executor.adapters.heads import HeadTable
from headrace.executor.checkpoints.checkpoint import Checkpoint, open_checkpoint
from headrace.executor.checkpoints.identity import weights_identity
from headrace.executor.checkpoints.load_formats import options_of_another
from headrace.executor.models import kv_cache
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.heads import HeadLayer
from headrace.executor.models.implementations import FoundModel, find_model
from headrace.executor.models.reading import fail_by_name
from headrace.executor.models.sizes import prompt_logprobs_cost, step_work
from headrace.executor.models.state_pages import state_layout
from headrace.executor.parallel.divisibility import check_experts, check_shares
from headrace.executor.parallel.expert_exchange import ExpertExchange
from headrace.executor.parallel.rank_place import Collectives, RankCoordinates
from headrace.executor.parallel.rendezvous import Rendezvous
from headrace.executor.pooling.head import Head
from headrace.executor.pooling.pooler import Pooler
from headrace.executor.rank import Rank, Report, reader_of
from headrace.executor.sampling.logits_processors import looks_at_params, make_processors, processor_classes, refusal_of
from headrace.executor.step.batch import BatchState
from headrace.executor.step.handlers import RankParts, installed_handlers
from headrace.executor.step.step_times import StepTimes
from headrace.ipc.control import (
    ASLEEP,
    CallExtension,
    CheckSampling,
    DescribeEngine,
    DoIdleWork,
    PrepareWeights,
    Sleep,
    StartProfile,
    StopProfile,
    UseWeights,
    WakeUp,
    WorkerAnswer,
    WorkerCommand,
)
from headrace.ipc.failure import EngineDeadError, HeadraceError, ModelError, OptionError, let_interrupts_pass
from headrace.ipc.messages import Sampling, TokenizerBundle
from headrace.ipc.plugins import load_class
from headrace.ipc.process.private_files import make_private
from headrace.ipc.row_inputs import kinds_of
from headrace.ipc.struct_types import threadsafe
from headrace.ipc.wait import BoundedCalls, WaitTimeoutError

T = TypeVar("T")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
STATES_ON_GPUS = (
    "short convolutions (LFM2), Mamba 2's recurrence and linear attention (Qwen3-Next, Qwen3.5, Kimi-Linear)"
)
CACHE_DTYPES = {**DTYPES, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}


@dataclass(frozen=True)
class OpenedAgain:
    """A checkpoint whose weights will replace those in use."""

    checkpoint: Checkpoint
    path: str
    """As `reload_weights` takes it; empty for the model's own."""
    weights: str
    """Their identity."""
    heads: Mapping[str, Head]
    """The layers behind the pooling, by name."""


class ModelRank(Rank):
    """A rank that computes its part of a model from a checkpoint.

    Subclasses, one per device, define how the part is loaded and run, and how commands replace its weights or put them
    to sleep.
    """

    def __init__(self, options: Options, place: RankCoordinates, device: torch.device) -> None:
        self._options, self._place, self._device = options, place, device
        self._found: FoundModel | None = None
        self._cache_scales: tuple[kv_cache.LayerScales, ...] = ()
        """Per layer of the model; empty unless the checkpoint's cache scales are used."""
        self._plan: Plan | None = None
        self._profile = WorkerProfile(options.profiler_config.get("torch_profiler_dir"), place.rank)
        self._bounded = BoundedCalls(options.control_timeout)
        self._processor_classes = processor_classes(options.logits_processors)
        self._extension = Extension(options.worker_extension_cls, self)
        self._handlers = installed_handlers()
        self.reads |= {handler.kind for _, handler in self._handlers}
        self._pooler: Pooler | None = None
        self._head_tables: Mapping[str, HeadTable] = {}  # what adapters change of the layers behind the pooling
        self._weights = ""  # the identity of those in use
        self._path = ""  # of their checkpoint; empty: the model's own
        self._opened: OpenedAgain | None = None
        """The checkpoint whose weights will replace those in use. Set once it has been read: a call that hangs may
        still end long after its weights were given up."""

    @property
    def place(self) -> RankCoordinates:
        return self._place

    @property
    def found(self) -> FoundModel:
        assert self._found is not None, "describe comes first"
        return self._found

    @property
    def plan(self) -> Plan:
        assert self._plan is not None, "load comes first"
        return self._plan

    def bind_packages(self, batch: BatchState, cache: Any) -> None:
        """Lets handlers and row inputs of other packages take part in steps, before the first one. Raises
        OptionError."""
        batch.inputs.bind(self.found.spec.embedding_width, self.plan.dtype, self._place)
        batch.handlers.install(self._handlers, RankParts(batch, cache, self._place))

    def set_up(self, batch: BatchState) -> Pooler | None:
        """Sets how rows are sampled and pooled besides their own parameters, before the first row. Returns the pooler
        that it adds to the columns, if rows may pool. Raises OptionError."""
        batch.sampling.logprobs_mode = self.plan.options.logprobs_mode
        batch.sampling.logits_processors = make_processors(self._processor_classes, self.plan, self._device)
        if self.plan.model.pooling is None:
            return None
        self._pooler = Pooler(self.found.tasks.outputs, self._heads(self.found), self.found.spec.logit_scale)
        batch.columns["pooling"] = self._pooler
        return self._pooler

    def _heads(self, found: FoundModel) -> dict[str, Head]:
        """The layers behind the pooling, by kind of result. Raises ModelError."""
        made, heads = dict[tuple[HeadLayer, ...], Head](), dict[str, Head]()
        for kind, output in found.tasks.outputs.items():
            if (layers := output.layers) and layers not in made:
                weights = None if all(each.folder for each in layers) else found.checkpoint.weights(place=self._place)
                made[layers] = Head(layers, weights, found.spec.names.prefixes, self._token_id, self._head_tables)
            if layers:
                heads[kind] = made[layers]
        return heads

    def describe(self, report: Report) -> ModelDescription:
        report("find model")
        checkpoint = replace(open_checkpoint(self._options), on_read=reader_of(report))
        self._found = found = find_model(checkpoint, self._options)
        try:
            return self._describe(found)
        except BaseException as error:
            blocks = [block for layer in found.spec.layers for block in (layer.mixer, layer.ffn)]
            if others := {each for block in blocks if not (each := type(block).__module__).startswith("headrace.")}:
                fail_by_name(f"{found.spec.architecture}, with blocks of {', '.join(sorted(others))},", error)
            raise

    def _describe(self, found: FoundModel) -> ModelDescription:
        checkpoint, spec = found.checkpoint, found.spec
        if found.config is not None and self._device.type != "cpu":
            raise ModelError(f"{spec.architecture} is computed by transformers' code, for which there is a CPU alone")
        check_shares(spec, self._place)
        check_experts(spec, self._options)
        if self._options.enable_eplb and self._device.type != "cpu":
            raise OptionError(
                f"enable_eplb moves experts between ranks on CPUs, not on {self._device.type}: leave it out, and "
                "expert_placement_strategy=round_robin spreads neighbours"
            )
        self._weights = weights_identity(checkpoint)
        if spec.cpu_alone and self._device.type != "cpu":
            raise ModelError(
                f"{spec.architecture} has {spec.cpu_alone}, which a CPU alone computes so far: use device=cpu. Of "
                f"layers that keep a state per sequence, GPUs compute {STATES_ON_GPUS}"
            )
        groups = kv_cache.cache_groups(
            spec,
            self._options.max_model_len,
            self._place.tp_size,
            self._options.block_size,
            windows_apart=not self._options.disable_hybrid_kv_cache_manager,
            element_bytes=DTYPE_BYTES.get(self._options.named_kv_cache_dtype, kv_cache.USUAL_ELEMENT_BYTES),
        )
        share = own_share(spec, self._place, groups)
        if self._options.kv_cache_dtype in FP8_CACHES and not self._options.calculate_kv_scales:
            self._cache_scales = checkpoint.cache_scales(spec)
        if self._cache_scales:
            share["kv_rows_per_token"] = 0
        return ModelDescription(
            name=checkpoint.name,
            architecture=spec.architecture,
            checkpoint_dtype=checkpoint.dtype_name,
            weights=self._weights,
            stored_as=checkpoint.stored_as,
            quantised_as_loaded=checkpoint.as_loaded is not None,
            rounds_inputs=checkpoint.quantisation is not None and checkpoint.quantisation.rounds_inputs,
            max_model_len=min(spec.max_positions, found.tasks.max_tokens or spec.max_positions),
            vocab_size=spec.vocab_size,
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            **share,
            cache_groups=groups,
            eos_token_ids=self._ends(checkpoint, spec),
            generation_defaults=dict(checkpoint.generation_config),
            prompt_logprobs_cost=prompt_logprobs_cost(spec),
            checks_sampling=looks_at_params(self._processor_classes),
            generates=found.tasks.generates,
            pooling=found.tasks.pooling,
            whole_prompts=not spec.is_causal,
            why_no_prefix_caching=_why_no_prefix_caching(spec),
            row_inputs=() if _why_no_row_inputs(spec) else kinds_of(spec.architecture, checkpoint.config),
            why_no_row_inputs=_why_no_row_inputs(spec),
            input_width=spec.embedding_width,
            step_work=step_work(spec),
        )

    def _ends(self, checkpoint: Checkpoint, spec: ArchSpec) -> tuple[int, ...]:
        """The tokens that end an answer: the tokenizer's own eos, then those of the configs, as in vLLM."""
        from headrace.executor.checkpoints.tokenizers.tokenizer import end_of_tokenizer

        own = end_of_tokenizer(checkpoint, self._options)
        ends = (*(() if own is None else (own,)), *checkpoint.eos_token_ids)
        return tuple(each for each in dict.fromkeys(ends) if each < spec.vocab_size)

    def _token_id(self, token: str) -> int | None:
        import tokenizers

        from headrace.executor.checkpoints.tokenizers.tokenizer import load_bundle

        bundle = load_bundle(self.found.checkpoint, self._options)
        if bundle is None:
            return None
        found: int | None = tokenizers.Tokenizer.from_buffer(bundle.tokenizer_json).token_to_id(token)
        return found

    def tokenizer(self) -> TokenizerBundle | None:
        if self._options.skip_tokenizer_init:
            return None
        from headrace.executor.checkpoints.tokenizers.tokenizer import load_bundle  # may bring in transformers

        return load_bundle(self.found.checkpoint, self._options)

    def join(self, rendezvous: Rendezvous) -> None:
        self._place = self._place.with_collectives(self._link(rendezvous))

    def _link(self, rendezvous: Rendezvous) -> Collectives:
        return rendezvous.link()

    def share_experts(self, exchange: ExpertExchange) -> None:
        """Called before `load` if engine cores share the experts. Raises OptionError where that is not supported."""
        raise OptionError(
            f"enable_expert_parallel with data_parallel_size divides experts among engines on a CPU, not on "
            f"{self._device.type}: with tensor_parallel_size=2 or more they are divided among an engine's ranks"
        )

    def compute_for_others(self) -> None:
        """Takes part in a step in which this core has no tokens, but other cores that share its experts do."""
        raise NotImplementedError

    def control(self, command: WorkerCommand) -> WorkerAnswer:
        answer = WorkerAnswer(rank=self._place.rank)
        match command:
            case StartProfile():
                self._profile.start(command.prefix)
            case StopProfile():
                self._profile.stop()
                path = self._bounded.run("writing the profile", self._profile.write)
                return msgspec.structs.replace(answer, files=(path,))
            case DescribeEngine():
                return msgspec.structs.replace(answer, facts=self.facts())
            case CallExtension():
                return msgspec.structs.replace(answer, payload=self._call_extension(command))
            case CheckSampling():
                asked = [msgspec.msgpack.decode(each, type=threadsafe(Sampling)) for each in command.sampling]
                refusals = tuple(refusal_of(self._processor_classes, params) for params in asked)
                return msgspec.structs.replace(answer, refusals=refusals)
            case DoIdleWork():
                return msgspec.structs.replace(answer, did_something=self.idle())
            case PrepareWeights():
                self.prepare_weights(command.path)
                return msgspec.structs.replace(answer, can_compute=self.can_compute)
            case UseWeights():
                self.use_weights(command.prepared)
                if not command.prepared:
                    self._opened = None
                elif self._opened is not None and self._pooler is not None:
                    self._pooler.use(self._opened.heads)
                return self._with_weights(answer)
            case Sleep():
                self._sleep_in_time(command.level)
            case WakeUp():
                self.wake_up(frozenset(command.tags) or ASLEEP)
                return self._with_weights(answer)
        return answer

    def _with_weights(self, answer: WorkerAnswer) -> WorkerAnswer:
        """Adds the weights' identity to the answer; weights that were read again are in use from now on."""
        if self._opened is not None:
            self._weights, self._path, self._opened = self._opened.weights, self._opened.path, None
        return msgspec.structs.replace(answer, weights=self._weights)

    def _in_time(self, what: str, read: Callable[..., T], *arguments: Any) -> T:
        """Reads weights while the old ones stay in use. Turns any error into a HeadraceError: nothing has changed."""
        try:
            return self._bounded.run(what, read, *arguments)
        except HeadraceError:
            raise
        except BaseException as error:
            let_interrupts_pass(error)
            raise ModelError(f"{what} failed: {type(error).__name__}: {error}") from error

    def _sleep_in_time(self, level: int) -> None:
        """Raises EngineDeadError if it hangs: what is still in memory is unknown then, and must not be touched."""
        try:
            self._bounded.run("going to sleep", self.sleep, level)
        except WaitTimeoutError as error:
            said = f"going to sleep did not end within {self._options.control_timeout:g} s (control_timeout)"
            raise EngineDeadError(f"{said}, and what it has moved of weights and cache is not known") from error

    def _call_extension(self, command: CallExtension) -> dict[str, Any]:
        return self._bounded.run("the call of the worker extension", self._extension.call, command)

    def facts(self) -> dict[str, Any]:
        """Facts about this worker, for DescribeEngine."""
        return {
            "pid": os.getpid(),
            "device": str(self._device),
            "threads": torch.get_num_threads(),
            "weight_bytes": self.weight_bytes,
        }

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Size of the weights in use; 0 while there are none."""

    @abstractmethod
    def prepare_weights(self, path: str) -> None:
        """Reads the checkpoint at `path`, or the model's own if empty, to replace the weights.

        Raises HeadraceError, with everything unchanged, if it does not fit or cannot be read.
        """

    @abstractmethod
    def use_weights(self, prepared: bool) -> None:
        """Uses the prepared weights from the next step on; if not `prepared`, drops them and keeps the old ones."""

    @property
    def can_compute(self) -> bool:
        """Weights are there, after `prepare_weights` too."""
        return True

    @abstractmethod
    def sleep(self, level: int) -> None:
        """Frees the cache's memory, and that of the weights as `level` says (`ipc.control.Sleep`)."""

    @abstractmethod
    def wake_up(self, tags: frozenset[str]) -> None:
        """Restores the parts that `tags` names: `weights`, `kv_cache`."""

    def stop(self) -> None:
        for link in (self._place.collectives, self._place.exchange):
            if link is not None:
                link.close()
        self._found = None

    def _open_again(self, path: str | None) -> OpenedAgain:
        """Opens the checkpoint at `path`, or the model's own if empty, to replace the one in use; None: that one again.

        Raises ModelError if it is missing, or if its config or dtype differs.
        """
        options, spec, model = self._options, self.found.spec, self.plan.model
        path = self._path if path is None else path
        if path:
            options = options_of_another(options, path)
        checkpoint = open_checkpoint(options)
        found = find_model(checkpoint, options)
        if (other := found.spec) != spec:
            differing = [name for name in spec.__dataclass_fields__ if getattr(spec, name) != getattr(other, name)]
            raise ModelError(
                f"the weights of {checkpoint.name} cannot replace those of {model.name}: their configs differ in "
                f"{', '.join(differing)}"
            )
        if checkpoint.dtype_name != model.checkpoint_dtype:
            raise ModelError(
                f"the weights of {checkpoint.name} are {checkpoint.dtype_name}, and those of {model.name} "
                f"{model.checkpoint_dtype}: they must be of one type"
            )
        heads = {} if self._pooler is None else self._heads(found)
        return OpenedAgain(checkpoint, path, weights_identity(checkpoint), heads)


class Extension:
    """A user's class (option worker_extension_cls): created once, with the rank, and called between steps.

    Its methods are called by name, with plain data. `handle`, if it has one, takes a dict of plain data and returns
    one. As with vLLM's extensions, its constructor need not take the rank.
    """

    def __init__(self, name: str, rank: Rank) -> None:
        """`name` is empty if there is none. Raises OptionError if the class cannot be imported or constructed."""
        self._name = name
        self._instance: Any = None
        if name:
            cls = load_class("worker_extension_cls", name)
            try:
                self._instance = cls() if cls.__init__ is object.__init__ else cls(rank)
            except BaseException as error:
                let_interrupts_pass(error)
                raise OptionError(
                    f"worker_extension_cls={name} cannot be made: {type(error).__name__}: {error}"
                ) from error

    def call(self, command: CallExtension) -> dict[str, Any]:
        """Raises HeadraceError if there is no extension or method, it fails, or its answer is not plain data."""
        if self._instance is None:
            raise HeadraceError("there is no worker extension: start the engine with worker_extension_cls=module:Class")
        if not command.method and not callable(getattr(self._instance, "handle", None)):
            raise HeadraceError(
                f"the worker extension {self._name} has no method handle(payload: dict) -> dict: collective_rpc calls "
                "its methods by name"
            )
        try:
            answer = self._call_method(command) if command.method else self._instance.handle(command.payload)
            if not isinstance(answer, dict):
                raise TypeError(f"handle gave a {type(answer).__name__}, and must give a dict")
            plain: dict[str, Any] = msgspec.to_builtins(answer, str_keys=True)
            msgspec.msgpack.encode(plain)  # fails for what messages cannot hold: over 64 bits, lone surrogates
        except BaseException as error:
            let_interrupts_pass(error)
            raise HeadraceError(f"the worker extension {self._name} failed: {type(error).__name__}: {error}") from error
        return plain

    def _call_method(self, command: CallExtension) -> dict[str, Any]:
        cls, name = type(self._instance), command.method
        if name.startswith("_") or not callable(getattr(cls, name, None)):
            public = [each for each in vars(cls) if not each.startswith("_") and callable(getattr(cls, each))]
            raise AttributeError(f"it has no method {name}; it has {', '.join(public)}")
        payload = command.payload
        return {"result": getattr(self._instance, name)(*payload.get("args", ()), **payload.get("kwargs", {}))}


class WorkerProfile:
    """Torch's profiler for this process, with the runner's phases as ranges. Records one profile at a time.

    With CUDA the ranges are NVTX ranges too, so that Nsight Systems shows them beside the kernels.
    """

    def __init__(self, folder: str | None, rank: int, times: StepTimes | None = None) -> None:
        """folder: profiler_config's torch_profiler_dir; times: the step times whose phases become ranges."""
        self._folder, self._rank, self._times = folder, rank, times
        self._profiler: torch.profiler.profile | None = None
        self._prefix = ""

    def start(self, prefix: str = "") -> None:
        """Raises HeadraceError without a folder, or if a profile is already being recorded."""
        if self._folder is None:
            raise HeadraceError("there is no folder for profiles: profiler_config has no torch_profiler_dir")
        if self._profiler is not None:
            raise HeadraceError("a profile is being recorded already; stop it first")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._prefix = f"{prefix}-" if prefix else ""
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        if self._times is not None:
            self._times.as_ranges = True

    def stop(self) -> None:
        """Raises HeadraceError if no profile is being recorded. `write` comes next."""
        if self._profiler is None:
            raise HeadraceError("no profile is being recorded; start one first")
        if self._times is not None:
            self._times.as_ranges = False
        self._profiler.stop()

    def write(self) -> str:
        """Writes the stopped profile and returns its path. Raises HeadraceError if it cannot be written."""
        assert self._profiler is not None, "stop comes first"
        assert self._folder is not None, "start comes first"
        profiler, self._profiler = self._profiler, None
        path = Path(self._folder).absolute() / f"{self._prefix}rank{self._rank}-{os.getpid()}.json"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            make_private(path)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise HeadraceError(f"the profile {path} cannot be written: {error}") from error
        return str(path)


def own_share(spec: ArchSpec, place: RankCoordinates, groups: Sequence[CacheGroup]) -> dict[str, Any]:
    """What this rank's part of the cache keeps: fields of a `ModelDescription`.

    Summed over the ranks this may exceed what one rank alone would keep: if there are fewer key/value heads than ranks,
    and if pipeline stages have unequal numbers of a group's layers.
    """
    layout = kv_cache.Layout.of(spec, place, groups)
    return {
        "kv_elements_per_token": layout.elements,
        "kv_rows_per_token": layout.rows,
        "kv_entry_elements": layout.entry_elements,
        "state_page_bytes": state_layout(spec, place, groups).page_bytes,
    }


def cache_dtype(plan: Plan, *, is_program: bool) -> torch.dtype:
    """The dtype of cached keys and values. Only the CPU program uses the finer type that packed weights imply."""
    if plan.options.kv_cache_dtype == "auto" and not is_program:
        return DTYPES[plan.dtype]
    return CACHE_DTYPES[plan.kv_cache_dtype]


def _why_no_prefix_caching(spec: ArchSpec) -> str:
    if spec.uses_prompt_lens:
        return "the model's dynamic rotary scaling makes keys depend on the length of their prompt"
    if not spec.is_causal:
        return "the model's tokens attend to the tokens after them"
    return ""


def _why_no_row_inputs(spec: ArchSpec) -> str:
    has_table = spec.lookback > 0 or (spec.stream is not None and spec.stream.table is not None)
    reads_ids = has_table or any(layer.ffn.reads_token_ids for layer in spec.layers)
    return "its layers read the token ids, too" if reads_ids else ""
