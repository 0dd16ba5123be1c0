"""`open_checkpoint` finds the model that the options name, fetches it if needed, and reads its config."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headrace.core.options.engine_options import Options
from headrace.core.options.memory import DTYPE_BYTES
from headrace.executor.checkpoints import demo_model
from headrace.executor.checkpoints.generation_keys import warn_of_what_is_not_applied
from headrace.executor.checkpoints.hub import HubChoice, cached_config, locate
from headrace.executor.checkpoints.load_formats import BITSANDBYTES, agreeing_formats, library_of
from headrace.executor.checkpoints.sentence_folder import model_folder
from headrace.executor.parallel.rank_place import SINGLE, RankCoordinates
from headrace.ipc.failure import ModelError, OptionError
from headrace.ipc.messages import Sampling
from headrace.ipc.process.regular_files import is_there, read_file, read_text
from headrace.ipc.ranges import model_defaults

if TYPE_CHECKING:
    from headrace.executor.checkpoints.formats import AsLoaded
    from headrace.executor.checkpoints.formats import Format as Quantisation
    from headrace.executor.checkpoints.formats.cache_scales import LayerScales
    from headrace.executor.checkpoints.progress import OnRead
    from headrace.executor.checkpoints.sources.gguf.file import GGUFFile
    from headrace.executor.checkpoints.sources.safetensors_weights import Strategy
    from headrace.executor.checkpoints.sources.tensorizer_file import TensorizerFile
    from headrace.executor.checkpoints.weights import Weights, WeightSource
    from headrace.executor.models.arch import ArchSpec

logger = logging.getLogger(__name__)
Format = Literal["safetensors", "pt", "gguf", "mistral", "sharded_state", "tensorizer", "dummy"]

SAFETENSORS_INDEX, TORCH_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
WHOLE = {SAFETENSORS_INDEX: "model.safetensors", TORCH_INDEX: "pytorch_model.bin"}
"""From an index to the file that has all weights where they are not divided; a folder written twice has both."""
BESIDE = ("quantize_config.json", "quant_config.json", "quantization_config.json")
"""Files in which AutoGPTQ, AutoAWQ and AutoRound write what a quantization_config has."""
SHARDED_STATE = "model-rank-*-part-0.safetensors"
MISTRAL_PARAMS, MISTRAL_FILES = "params.json", "consolidated*.safetensors"
MISTRAL_END = 2
"""The end-of-sequence token id of all of Mistral's tokenizers, which params.json does not give."""
FLOAT_TYPES = {
    **{name: name for name in ("float32", "float16", "bfloat16")},
    **{"float": "float32", "float64": "float32", "double": "float32", "half": "float16"},
}
"""From a config's `dtype` to the type in which the weights are computed."""
# Beginnings of the names of files beside the weights that hold none of the model's weights.
# Those of hidden files too, as macOS puts one beside each file on a disk of another system ("._model.safetensors").
NOT_WEIGHTS = (".", "adapter_model", "consolidated", "optimizer", "scheduler", "scaler", "training_args", "rng_state")
# generation_config.json's names -> SamplingParams'.
SAMPLING_FIELDS = {mark.stored_as: name for name, (mark, _, _) in model_defaults(Sampling).items() if mark.stored_as}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model on this machine: its config, and access to its weights. Opening it reads no weights."""

    name: str
    """The model's name in the options."""
    path: Path
    """The model's folder, or its .gguf file."""
    format: Format
    config: dict[str, Any]
    """The content of a Hugging Face config.json, with `hf_overrides` applied."""
    dtype_name: str
    """dtype of the weights: float32, float16, bfloat16, or the name of a quantised type."""
    generation_config: dict[str, Any]
    """The model's defaults of sampling fields, under SamplingParams' names."""
    eos_token_ids: tuple[int, ...]
    config_folder: Path | None = None
    """The folder of config.json if it is not that of the weights (hf_config_path)."""
    load_strategy: Strategy = "lazy"
    """How safetensors files are read."""
    library: str = ""
    """Load format of the library that reads safetensors files; empty: Headrace's own reader."""
    gguf: GGUFFile | None = field(default=None, repr=False)
    """The opened GGUF file; None for a folder."""
    tensorizer: TensorizerFile | None = None
    quantisation: Quantisation | None = field(default=None, repr=False)
    """The quantised format of a folder's weights; None for floats."""
    as_loaded: AsLoaded | None = None
    """How float weights are quantised while they load; None: not at all."""

    @property
    def stored_as(self) -> str:
        """Name of the quantised format in which matrices stay packed in memory; empty for floats and GGUF files."""
        if self.as_loaded is not None:
            return self.as_loaded.name
        return "" if self.quantisation is None else self.quantisation.names[0]

    @property
    def stored_bytes(self) -> int | None:
        """Memory of quantised weights as stored in the checkpoint; None for floats."""
        if self.quantisation is not None:
            return sum(file.stat().st_size for file in _weight_files(self.path))
        return None if self.gguf is None else self.gguf.kept_bytes

    def kept_bytes(self, spec: ArchSpec) -> int | None:
        """Memory of weights that stay packed: `stored_bytes`, or the size of floats quantised while they load; None for
        floats."""
        if self.as_loaded is None:
            return self.stored_bytes
        from headrace.executor.checkpoints.formats.as_loaded import bytes_as_loaded

        return bytes_as_loaded(self.as_loaded, spec, DTYPE_BYTES.get(self.dtype_name, 2))

    def cache_scales(self, spec: ArchSpec) -> tuple[LayerScales, ...]:
        """Scales of each layer's keys and values for an fp8 cache; empty if the checkpoint has none.

        Raises ModelError for a scale that is not a positive number.
        """
        if not _quantisation_in(self.config) or self.format not in ("safetensors", "pt"):
            return ()
        from headrace.executor.checkpoints.formats.cache_scales import cache_scales

        return cache_scales(_folder_weights(self.path, self.format), spec, _quantisation_in(self.config))

    @property
    def weight_files(self) -> list[Path]:
        """All local files from which weights are read."""
        if self.gguf is not None:
            return self.gguf.files
        if self.tensorizer is not None:
            return [self.tensorizer.path] if self.tensorizer.path is not None else []
        if self.path.is_file():
            return [self.path]
        return sorted(self.path.glob(MISTRAL_FILES)) if self.format == "mistral" else _weight_files(self.path)

    on_read: OnRead | None = field(default=None, repr=False)
    """Callback for the progress of reading weights."""

    def weights(self, shapes: Mapping[str, tuple[int, ...]] | None = None, place: RankCoordinates = SINGLE) -> Weights:
        """The weights as stored. `shapes`: of dummy weights; by default those of the config's model. `place`: the
        rank that reads them; of a sharded state it gets its own file only.

        Raises ModelError, naming the file, if one is missing, truncated or of another format.
        """
        from headrace.executor.checkpoints.weights import Weights

        weights = replace(Weights.of(self._source(shapes, place)), as_loaded=self.as_loaded)
        if self.config.get("lora_adaptations"):
            from headrace.executor.checkpoints.merged_tasks import with_task

            weights = with_task(weights, self.config)
        if self.on_read is None:
            return weights
        from headrace.executor.checkpoints.progress import watched
        from headrace.executor.models.families import spec_from_config

        layers = place.layers(spec_from_config(self.config).num_layers)
        return watched(weights, self.on_read, layers, self.stored_bytes)

    def _source(self, shapes: Mapping[str, tuple[int, ...]] | None, place: RankCoordinates) -> WeightSource:
        if self.format == "dummy":
            return _dummy(self.config, shapes)
        if self.gguf is not None:
            return self.gguf.weights()
        if self.format == "sharded_state":
            from headrace.executor.checkpoints.sources.sharded_state import ShardedWeights
            from headrace.executor.models.families import spec_from_config

            return ShardedWeights(self.path, place, spec_from_config(self.config).num_layers, self.load_strategy)
        if self.tensorizer is not None:
            return self.tensorizer.weights()
        stored = _folder_weights(self.path, self.format, self.load_strategy, place)
        if self.library:
            from headrace.executor.checkpoints.sources.library_readers import LibraryWeights

            stored = LibraryWeights(self.library, self.weight_files, stored)
        if self.quantisation is None and not _quantisation_in(self.config):
            return stored
        if self.quantisation is None:  # the cache alone is quantised
            from headrace.executor.checkpoints.formats.cache_scales import without_cache_scales

            return without_cache_scales(stored)
        from headrace.executor.checkpoints.formats.weights import quantised
        from headrace.executor.models.families import spec_from_config

        return quantised(stored, self.quantisation, spec_from_config(self.config))


def open_checkpoint(options: Options) -> Checkpoint:
    """Finds the model that the options name, fetches it if needed, and reads its config.

    Raises ModelError if it is missing, truncated or of an unknown format, and OptionError if load_format does not fit.
    """
    asked = options.load_format
    library, options = library_of(agreeing_formats(options))
    if not _names_demo_model(options):
        choice = HubChoice.of(options)
        name, path = options.model, locate(options.model, choice)
    else:
        name, path = demo_model.NAME, demo_model.fetch_demo_model()
    if path.is_dir():
        path, found = _folder_format(model_folder(path), options.load_format)
    else:
        found = "gguf"
    if found == "gguf" and options.config_format != "auto":
        raise OptionError(
            f"config_format={options.config_format} does not apply to {path}: a GGUF file has its config in itself; "
            "leave it out"
        )
    if options.load_format not in ("auto", "dummy", found):
        raise OptionError(f"load_format {asked} does not fit {path}, whose weights are {found}; use auto or {found}")
    if found == "mistral" and options.config_format == "hf":
        raise OptionError(f"config_format=hf: {path} has Mistral's own files alone, which params.json describes")
    wanted: Format = "dummy" if options.load_format == "dummy" else found
    strategy = options.safetensors_load_strategy
    if strategy != "lazy" and wanted not in ("safetensors", "mistral", "sharded_state"):
        raise OptionError(f"safetensors_load_strategy={strategy} does not apply to {path}, whose weights are {wanted}")
    if found == "gguf":
        return _open_gguf(name, path, wanted, options)
    checkpoint = replace(_open_folder(name, path, wanted, options), library=library)
    if asked == BITSANDBYTES and checkpoint.stored_as != BITSANDBYTES:
        raise OptionError(
            f"load_format={asked} is of weights that bitsandbytes quantised, and those of {path} are "
            f"{checkpoint.stored_as or checkpoint.dtype_name}; quantization={asked} quantises floats as they load"
        )
    return checkpoint


def _names_demo_model(options: Options) -> bool:
    """Whether the options name no model, or the demo model by its name."""
    return not options.model or (options.model == demo_model.NAME and not Path(options.model).exists())


def config_at_hand(options: Options) -> dict[str, Any] | None:
    """The config of the model that the options name, `hf_overrides` applied, if it is on this machine. Opens no weights
    and imports no torch. None if it is not here, or names no model. Raises ModelError if it cannot be read.
    """
    options = agreeing_formats(options)
    path = demo_model.demo_model_path() if _names_demo_model(options) else Path(options.model).expanduser()
    found: str | None = None
    if path.is_dir():
        path, found = _folder_format(model_folder(path), options.load_format)
    if found == "gguf" or (found is None and path.suffix == ".gguf"):
        if not path.is_file():
            return None
        from headrace.executor.checkpoints.sources.gguf.config import config_from_gguf
        from headrace.executor.checkpoints.sources.gguf.header import GGUFHeader

        return _asked_config(config_from_gguf(GGUFHeader(path)), options.hf_overrides)
    choice = HubChoice.of(options)
    if options.hf_config_path is not None:
        named = Path(options.hf_config_path).expanduser()
        file = named / "config.json" if named.is_dir() else cached_config(options.hf_config_path, choice)
    else:
        file = _config_file(path, options) if found is not None else _cached_config_file(options, choice)
    if file is None or not file.is_file():
        return None
    config = _asked_config(_read_config(file), options.hf_overrides)
    return config if config.get("architectures") or config.get("model_type") else None


def _cached_config_file(options: Options, choice: HubChoice) -> Path | None:
    return cached_config(options.model, choice, MISTRAL_PARAMS if _asks_for_params(options) else "config.json")


def _folder_format(folder: Path, load_format: str) -> tuple[Path, Format]:
    """(path, format) of a folder's model; the path is that of its one .gguf file if its format is gguf. Raises
    ModelError."""
    ggufs = [file for file in _files(folder, ("*.gguf",)) if "-of-" not in file.name or "-00001-of-" in file.name]
    if load_format == "gguf" or (load_format in ("auto", "dummy") and ggufs and not _weight_files(folder)):
        if len(ggufs) == 1:
            return ggufs[0], "gguf"
        held = ", ".join(file.name for file in ggufs)
        raise ModelError(
            f"{folder} holds several GGUF files; give the path of one, of {held}"
            if held
            else f"{folder} holds no GGUF file"
        )
    if load_format == "sharded_state" or (load_format == "auto" and any(folder.glob(SHARDED_STATE))):
        if not any(folder.glob(SHARDED_STATE)):
            raise ModelError(
                f"{folder} holds no sharded state, whose files are named {SHARDED_STATE}",
                hint="headrace save-sharded-state makes one of a model",
            )
        return folder, "sharded_state"
    if load_format == "mistral" or (load_format == "auto" and _is_mistral(folder) and not _weight_files(folder)):
        if not _is_mistral(folder):
            raise ModelError(f"{folder} holds no {MISTRAL_PARAMS} with {MISTRAL_FILES} beside it")
        return folder, "mistral"
    if load_format == "tensorizer":
        return folder, "tensorizer"
    if load_format == "pt" and (_torch_files(folder) or not _safetensors_files(folder)):
        return folder, "pt"
    if _safetensors_files(folder) or not _torch_files(folder):
        return folder, "safetensors"
    return folder, "pt"


def _open_gguf(name: str, path: Path, found: Format, options: Options) -> Checkpoint:
    from headrace.executor.checkpoints.sources.gguf.file import GGUFFile

    if options.hf_config_path is not None:
        raise OptionError(
            f"hf_config_path does not apply to {path}: a GGUF file has its config in itself; leave it out"
        )
    file = GGUFFile(path)
    config = _asked_config(file.config, options.hf_overrides)
    generation = _read_generation_config(None, options) or (
        file.generation_config if options.generation_config == "auto" else {}
    )
    return Checkpoint(
        name=name,
        path=path,
        format=found,
        config=config,
        dtype_name=file.dtype_name,
        generation_config=_sampling_defaults(generation, options, path),
        eos_token_ids=_eos_token_ids(generation, config),
        gguf=file,
    )


def _open_folder(name: str, folder: Path, found: Format, options: Options) -> Checkpoint:
    config_folder = None if options.hf_config_path is None else _config_folder(options)
    config_path = _config_file(config_folder or folder, options, found)
    if config_folder is None and options.config_format != "auto" and not is_there(config_path):
        raise ModelError(f"{folder} has no {config_path.name}, which config_format={options.config_format} reads")
    if config_folder is None and not is_there(config_path):
        held = sorted(each.name for each in folder.iterdir())
        shown = f", only {', '.join(held[:5])}" + (" ..." if len(held) > 5 else "") if held else ": it is empty"
        raise ModelError(
            f"{folder} is not a model: it has no config.json and no .gguf file{shown}",
            hint="the folder of a Hugging Face model holds config.json, tokenizer files and weights",
        )
    tensorized = None
    if found == "tensorizer":
        from headrace.executor.checkpoints.sources.tensorizer_file import tensorizer_file

        tensorized = tensorizer_file(folder, options.model_loader_extra_config)
    elif found not in ("dummy", "mistral") and not _weight_files(folder):
        raise ModelError(
            f"{folder} holds no weights: *.safetensors, pytorch_model*.bin or one .gguf file are looked for",
            hint="load_format dummy runs it with random weights",
        )
    config = _asked_config(_with_quantisation(_read_config(config_path), folder), options.hf_overrides)
    generation = _read_generation_config(folder, options)
    is_whole = found in ("safetensors", "pt") and any((folder / file).is_file() for file in WHOLE.values())
    if is_whole and (note := _listed_files(folder, found)[2]):
        logger.warning("%s: the index of the weights %s", folder, note)
    quantisation = to_become = None
    if options.quantization or _quantisation_in(config):
        from headrace.executor.checkpoints.formats import format_of, forms_as_loaded  # imports torch

        quantisation = format_of(config, options.quantization)
        to_become = forms_as_loaded().get(options.quantization or "") if quantisation is None else None
    if quantisation is not None and found not in ("safetensors", "pt"):
        raise OptionError(
            f"load_format {found} is of floats, and {folder} is stored as {quantisation.names[0]}; the hf_overrides "
            '{"quantization_config": null} leave that aside'
        )
    return Checkpoint(
        name=name,
        path=folder,
        format=found,
        config=config,
        dtype_name=_dtype_name(config, folder, found, tensorized, quantisation),
        generation_config=_sampling_defaults(generation, options, folder / "generation_config.json"),
        eos_token_ids=_eos_token_ids(generation, config),
        config_folder=config_folder,
        load_strategy=options.safetensors_load_strategy,
        quantisation=quantisation,
        as_loaded=to_become,
        tensorizer=tensorized,
    )


def _is_mistral(folder: Path) -> bool:
    return is_there(folder / MISTRAL_PARAMS) and any(folder.glob(MISTRAL_FILES))


def _asks_for_params(options: Options) -> bool:
    return "mistral" in (options.config_format, options.load_format)


def _config_file(folder: Path, options: Options, found: str = "") -> Path:
    """The folder's config file: Mistral's params.json if the options ask for it, if there is no config.json, or if the
    weights are Mistral's own; else config.json."""
    params, config = folder / MISTRAL_PARAMS, folder / "config.json"
    if options.config_format == "hf":
        return config
    alone = is_there(params) and not is_there(config)
    return params if _asks_for_params(options) or found == "mistral" or alone else config


def _read_config(file: Path) -> dict[str, Any]:
    """A config file's content in Hugging Face's form. Raises ModelError."""
    content = read_json(file)
    if file.name != MISTRAL_PARAMS:
        return content
    from headrace.executor.models.families.mistral_consolidated import ARCHITECTURE

    return {"architectures": [ARCHITECTURE], "eos_token_id": MISTRAL_END, **content}


def _config_folder(options: Options) -> Path:
    """The folder that hf_config_path names, fetched if needed. Raises ModelError if it has no config."""
    asked = options.hf_config_path
    assert asked is not None
    if not asked.strip():
        raise OptionError("hf_config_path is empty: give a folder or the name of a hub model, or leave it out")
    try:
        folder = locate(asked, HubChoice.of(options).beside())
    except ModelError as error:
        raise ModelError(f"hf_config_path={asked}: {error}", hint=error.hint) from None
    if not (file := _config_file(folder, options)).is_file():
        raise ModelError(f"hf_config_path={asked} has no {file.name}")
    return folder


def _with_quantisation(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config with the quantization of its text_config, or else of a file beside it, unless it has its own. Raises
    ModelError."""
    text = config.get("text_config")
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            return {**config, key: _with_method(config[key])}
        if isinstance(text, Mapping) and text.get(key):
            return {**config, key: _with_method(text[key])}
    for name in BESIDE:
        if is_there(folder / name):
            own = read_json(folder / name)
            return {**config, "quantization_config": {"quant_method": _method_of(own), **own}}
    file = folder / "hf_quant_config.json"
    if not is_there(file):
        return config
    beside = read_json(file)
    if not isinstance(beside.get("quantization"), Mapping):
        raise ModelError(f"{file} has no object named quantization")
    producer = beside.get("producer") or {"name": "modelopt"}
    return {**config, "quantization_config": _with_method({"producer": producer, **beside["quantization"]})}


def _with_method(stored: Any) -> Any:
    """A quantization_config, whose method is its producer where it names none, as in those of NVIDIA's ModelOpt."""
    producer = stored.get("producer") if isinstance(stored, Mapping) else None
    return {"quant_method": producer.get("name"), **stored} if isinstance(producer, Mapping) else stored


def _quantisation_in(config: Mapping[str, Any]) -> Any:
    return config.get("quantization_config") or config.get("compression_config")


def _method_of(stored: Mapping[str, Any]) -> str:
    """The method of a file that does not name it: AutoAWQ's keys differ from those of AutoGPTQ."""
    return "awq" if any(key in stored for key in ("w_bit", "q_group_size", "zero_point")) else "gptq"


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises ModelError if it cannot be read."""
    try:
        return read_file(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError if the file cannot be read or holds anything else."""
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}; a JSON object is expected")
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    """`read_json`, or {} where the file is missing."""
    return read_json(path) if is_there(path) else {}


def _asked_config(stored: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config with `hf_overrides` applied. Raises ModelError for names of architectures that are none, whereby
    another model than the one that is meant would be computed."""
    config = _overridden(stored, overrides)
    named = config.get("architectures")
    if named is not None and not (isinstance(named, list | tuple) and all(isinstance(each, str) for each in named)):
        raise ModelError(f"the config's architectures are {named!r:.100}; a list of names is expected")
    return config


def _overridden(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config with fields replaced; nested configs (text_config and the like) are merged field by field."""
    changed = dict(config)
    for name, value in overrides.items():
        old = config.get(name)
        nested = name.endswith("_config") and isinstance(old, dict) and isinstance(value, dict)
        changed[name] = _overridden(old, value) if nested and old is not None else value
    return changed


def _read_generation_config(folder: Path | None, options: Options) -> dict[str, Any]:
    """Content of generation_config.json; {} if there is none, or if the model's own cannot be read. The options may
    name another folder than the model's."""
    if options.generation_config not in ("auto", "vllm"):
        named = Path(options.generation_config).expanduser()
        if not is_there(named / "generation_config.json"):
            raise ModelError(
                f"generation_config names {named}, where there is no generation_config.json; auto is the model's own, "
                "and vllm sets no defaults"
            )
        return read_json(named / "generation_config.json")
    if folder is None:
        return {}
    try:
        return read_optional_json(folder / "generation_config.json")
    except ModelError as error:  # as peers, which serve the model without its defaults
        logger.warning("%s; the model is served without its defaults", error)
        return {}


def _check_default(name: str, value: Any, what: str) -> None:
    """Checks a sampling default. name: of the field in the file; what: its description. Raises ModelError."""
    _, kind, allowed = model_defaults(Sampling)[SAMPLING_FIELDS[name]]
    if value is None or (kind is int and value == -1):  # "all of them", as vLLM writes it
        return
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise ModelError(f"{what} is {value!r:.100}; a {'whole ' * (kind is int)}number is expected")
    if value not in allowed:
        raise ModelError(f"{what} is {value!r:.100}; it must be {allowed.words()}")


def _sampling_defaults(generation: Mapping[str, Any], options: Options, file: Path) -> dict[str, Any]:
    """The sampling fields that the generation config sets, under SamplingParams' names."""
    given = {} if options.generation_config == "vllm" else generation
    where = file if options.generation_config == "auto" else Path(options.generation_config) / "generation_config.json"
    warn_of_what_is_not_applied(where, given, (*SAMPLING_FIELDS, "eos_token_id"))
    known = {name: value for name, value in given.items() if name in SAMPLING_FIELDS}
    for name, value in known.items():
        _check_default(name, value, f"{where}: {name}")
    return {SAMPLING_FIELDS[name]: value for name, value in known.items() if value is not None}


def _eos_token_ids(generation: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence ids of the generation config, else the config, else its text_config. -1 stands for none.
    Raises ModelError for values that are not token ids."""
    text = config.get("text_config")
    sources = [generation, config, text if isinstance(text, Mapping) else {}]
    found = next((each["eos_token_id"] for each in sources if each.get("eos_token_id") is not None), ())
    ids = [each for each in (found if isinstance(found, list | tuple) else (found,)) if each != -1]
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**31 for each in ids):
        raise ModelError(f"eos_token_id is {found!r:.80}; a token id or a list of them is expected")
    return tuple(dict.fromkeys(ids))


def _dtype_name(
    config: Mapping[str, Any],
    folder: Path,
    found: Format,
    tensorized: TensorizerFile | None,
    quantisation: Quantisation | None,
) -> str:
    """The config's dtype, else that of the weights."""
    text = config.get("text_config")
    for each in (config, text if isinstance(text, Mapping) else {}):
        named = each.get("dtype") or each.get("torch_dtype")
        is_packed = str(named).startswith("float8") and bool(config.get("quantization_config"))
        if named not in (None, "", "auto") and not is_packed:
            return _float_type(named)
    if found == "dummy":
        return "float32"
    if quantisation is not None:
        return "float16"
    if found == "sharded_state":
        from headrace.executor.checkpoints.sources.safetensors_weights import SafetensorsWeights

        return _format_of_largest(SafetensorsWeights(sorted(folder.glob(SHARDED_STATE))[:1]))
    return _format_of_largest(tensorized.weights() if tensorized is not None else _folder_weights(folder, found))


def _format_of_largest(source: WeightSource) -> str:
    """The format of most of a folder's weights: that of the largest tensor; float32 if it has none."""
    records = map(source.stored, sorted(source.names()))
    largest = max(records, key=lambda stored: math.prod(stored.shape), default=None)
    return "float32" if largest is None else largest.format


def _float_type(named: Any) -> str:
    """The name of a config's dtype. Raises ModelError if it is no type of floats."""
    plain = named.removeprefix("torch.") if isinstance(named, str) else ""
    if plain not in FLOAT_TYPES:
        raise ModelError(
            f"the config's dtype is {named!r:.80}; {', '.join(sorted(FLOAT_TYPES))} are known",
            hint='hf_overrides={"dtype": null} takes the type in which the weights are stored',
        )
    return FLOAT_TYPES[plain]


def _weight_files(folder: Path) -> list[Path]:
    return _safetensors_files(folder) or _torch_files(folder)


def _safetensors_files(folder: Path) -> list[Path]:
    return _files(folder, ("*.safetensors",))


def _torch_files(folder: Path) -> list[Path]:
    return _files(folder, ("pytorch_model*.bin",)) or _files(folder, ("*.bin", "*.pt", "*.pth"))


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(
        file for pattern in patterns for file in folder.glob(pattern) if not file.name.startswith(NOT_WEIGHTS)
    )


def _folder_weights(
    folder: Path, found: Format, strategy: Strategy = "lazy", place: RankCoordinates = SINGLE
) -> WeightSource:
    from headrace.executor.checkpoints.sources.safetensors_weights import SafetensorsWeights
    from headrace.executor.checkpoints.sources.torch_files import TorchWeights

    files, weight_map, _ = _listed_files(folder, found)
    return TorchWeights(files, weight_map) if found == "pt" else SafetensorsWeights(files, weight_map, strategy, place)


def _listed_files(folder: Path, found: Format) -> tuple[list[Path], dict[str, str] | None, str]:
    """The files that are read, in which of them an index says each weight is, and what is odd about the two. Raises
    ModelError."""
    if found == "mistral":
        return sorted(folder.glob(MISTRAL_FILES)), None, ""
    index_path = folder / (TORCH_INDEX if found == "pt" else SAFETENSORS_INDEX)
    if not index_path.exists():
        return _torch_files(folder) if found == "pt" else _safetensors_files(folder), None, ""
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(each, str) for each in weight_map.values()):
        raise ModelError(f"{index_path} has no weight_map of weight names to file names")
    names = sorted(set(weight_map.values()))
    if wrong := [name for name in names if not _is_file_name(name)]:
        raise ModelError(f"{index_path} names {wrong[0]!r:.100}, which is no file beside it")
    files, whole = [folder / each for each in names], folder / WHOLE[index_path.name]
    missing = [file.name for file in files if not file.is_file()]
    if missing == names and whole.is_file():
        return [whole], None, f"lists {len(names)} files, none of which is there; {whole.name} is read"
    if missing:
        raise ModelError(f"{folder} lacks {', '.join(missing)}, which {index_path.name} lists; fetch the model again")
    passes_over = whole.is_file() and whole not in files
    return files, weight_map, f"does not list {whole.name}, which is not read" if passes_over else ""


def _is_file_name(name: str) -> bool:
    """Whether a name in an index is that of a file in its folder or below: others' files are no part of a model."""
    parts = name.split("/")
    return (
        name.isprintable()
        and len(name) < 1000
        and not any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts)
    )


def _dummy(config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]] | None) -> WeightSource:
    from headrace.executor.checkpoints.sources.dummy_weights import DummyWeights
    from headrace.executor.models.families import spec_from_config
    from headrace.executor.models.sizes import table_names, weight_shapes

    if shapes is not None:
        return DummyWeights(shapes)
    spec = spec_from_config(config)
    return DummyWeights(weight_shapes(spec), tables=table_names(spec))
