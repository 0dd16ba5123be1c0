"""Files of sentence-transformers that its kinds of models have in common: the list of modules, the settings of the
Transformer module, and those of the whole model.

    modules.json                        the chain of modules, in order; each may have a folder
    sentence_bert_config.json           of the Transformer: what it computes, and how texts are tokenised
    tokenizer_config.json               model_max_length, where the Transformer's settings say no max_seq_length, as
                                        those that version 5.4 and later ones write
    config_sentence_transformers.json   the kind of model, prompts, how vectors are compared

What these files ask for is followed or refused by name: the key of a setting that is not known here is one that
sentence-transformers does not know either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from headrace.ipc.failure import ModelError
from headrace.ipc.messages import PairChat
from headrace.ipc.process.regular_files import is_there, read_text

T = TypeVar("T")

MODULES, GENERAL = "modules.json", "config_sentence_transformers.json"
SETTINGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the Transformer module's settings, of which a folder has one."""
KNOWN = (
    *("Transformer", "Pooling", "Dense", "LayerNorm", "Dropout", "Normalize"),
    *("MLMTransformer", "SpladePooling", "LogitScore", "MultiVectorMask"),
)
_PACKAGES = ("sentence_transformers", "pylate")
JINA_TRANSFORMER = "custom_st.Transformer"
"""Of Jina Embeddings 3: a Transformer that chooses among the tasks' factors (merged_tasks.py)."""
MOST = (1 << 31) - 1
"""Of sizes and lengths in these files."""
OUTPUTS: Mapping[str, tuple[str, str]] = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "fill-mask": ("logits", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
    "text-generation": ("logits", "causal_logits"),
}
"""By a Transformer's task, which of the model's outputs it takes for texts, and what the next module finds it as."""
FLAT, STRUCTURED = "flat", "structured"
"""How a message has its text: as its content, or as a part of it."""
_OWN_KEYS = {
    *("max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name"),
    *("processing_kwargs", "query_length", "document_length", "query_expansion"),
    *("tokenizer_args", "processor_kwargs", "model_args", "model_kwargs", "config_args", "config_kwargs"),
}
_WITHOUT_EFFECT = {"unpad_inputs", "cache_dir", "backend", "tokenizer_name_or_path"}
"""Of the Transformer's settings: how and from where it is loaded."""
_LOADING = {
    *("add_pooling_layer", "attn_implementation", "cache_dir", "device_map", "dtype", "local_files_only"),
    *("low_cpu_mem_usage", "padding_side", "revision", "subfolder", "token", "torch_dtype", "trust_remote_code"),
    *("unpad_inputs", "use_fast", "use_flash_attn", "use_memory_efficient_attention", "use_safetensors"),
}
"""Arguments of transformers' classes that change no vector here."""
_CALLING: Mapping[str, tuple[Any, ...]] = {
    "truncation": (True, "longest_first"),
    "add_special_tokens": (True,),
}
"""Arguments of a call of the tokenizer that change tokens, and the values that are followed."""
_CALLING_WITHOUT_EFFECT = {"padding", "pad_to_multiple_of", "return_tensors", "return_attention_mask", "verbose"}


class Module(NamedTuple):
    kind: str
    folder: Path


class TransformerSettings(NamedTuple):
    task: str
    """One of `OUTPUTS`."""
    max_tokens: int | None
    """Most tokens of a text; None: as many as the model takes."""
    lower_case: bool
    """Whether texts are put in lower case before they are tokenised."""
    chat: PairChat | None
    """Texts are put through the tokenizer's chat template; None: they are not."""
    query_length: int | None
    document_length: int | None
    """Most tokens of texts whose task is so."""
    query_expansion: Mapping[str, Any] | None
    file: Path
    """For messages."""


class GeneralSettings(NamedTuple):
    kind: str
    """The class of sentence-transformers whose model it is, such as CrossEncoder; empty: it does not say."""
    prompts: dict[str, str]
    """What is put before a text, by name."""
    default_prompt: str | None
    similarity: str | None
    """How vectors are compared; None: as the class does."""
    truncate_dim: int | None = None
    """How many values of a vector are kept; None: all."""


def modules_of(folder: Path) -> list[Module]:
    """The modules of modules.json; none: there is no such file. Raises ModelError, naming the module, for one of
    another class."""
    if not is_there(folder / MODULES):
        return []
    modules = read_json(folder / MODULES)
    if not (isinstance(modules, list) and modules and all(isinstance(each, dict) for each in modules)):
        raise ModelError(f"{folder / MODULES} is no list of modules")
    found: list[Module] = []
    for module in modules:
        package, _, kind = str(module.get("type", "")).rpartition(".")
        if f"{package}.{kind}" == JINA_TRANSFORMER and _has_tasks(folder):
            package = _PACKAGES[0]
        if kind not in KNOWN or package.partition(".")[0] not in _PACKAGES:
            raise ModelError(
                f"{folder / MODULES} has the module {module.get('type')!r}, which is not computed here; known: "
                f"{', '.join(KNOWN)} of sentence_transformers"
            )
        if not isinstance(given := module.get("path", ""), str):
            raise ModelError(f"{folder / MODULES} gives {kind} the path {given!r:.100}; a text is expected")
        path = PurePosixPath(given)
        if path.is_absolute() or ".." in path.parts:
            raise ModelError(f"{folder / MODULES} gives {kind} the path {str(path)!r}, which leaves the folder")
        found.append(Module(kind, folder / path))
    return found


def _has_tasks(folder: Path) -> bool:
    config = read_json(folder / "config.json")
    return isinstance(config, dict) and bool(config.get("lora_adaptations"))


def transformer_settings(folder: Path, tasks: tuple[str, ...]) -> TransformerSettings:
    """What the Transformer module in `folder` does. tasks: those of `OUTPUTS` that are followed, the usual one first.
    Raises ModelError, naming the key, for what is not followed."""
    file = next((each for name in SETTINGS if is_there(each := folder / name)), folder / SETTINGS[0])
    given = object_in(file)
    task = given_value(given, "transformer_task", str, file) or tasks[0]
    if task not in tasks:
        raise ModelError(
            f"{file} has the transformer_task {task!r:.100}; with these modules it is {' or '.join(tasks)}"
        )
    unknown = [key for key in given if key not in _OWN_KEYS | _WITHOUT_EFFECT]
    if unknown and not _has_tasks(folder):
        raise ModelError(f"{file} has the key {unknown[0]!r:.100}; known: {', '.join(sorted(_OWN_KEYS))}")
    format = _format_of_messages(given, task, file)
    expansion = given_value(given, "query_expansion", dict, file)
    return TransformerSettings(
        task=task,
        max_tokens=_most_tokens(given, folder, file),
        lower_case=given_value(given, "do_lower_case", bool, file) or False,
        chat=None if format is None else PairChat(variables=_variables(given, file), are_parts=format == STRUCTURED),
        query_length=given_value(given, "query_length", int, file),
        document_length=given_value(given, "document_length", int, file),
        query_expansion=expansion,
        file=file,
    )


def _format_of_messages(given: Mapping[str, Any], task: str, file: Path) -> str | None:
    """How the chat template gets texts; None: they are not put through it. Raises ModelError where another output of
    the model than the task's is taken."""
    output, found_as = OUTPUTS[task]
    named = given_value(given, "module_output_name", str, file) or found_as
    modalities = given_value(given, "modality_config", dict, file) or {}
    for kind in [each for each in ("text", "message") if each in modalities] or ["text"]:
        if not isinstance(how := modalities.get(kind, {}), dict):
            raise ModelError(f"{file} has the modality_config {kind} {how!r:.100}; an object is expected")
        taken = (how.get("method", "forward"), how.get("method_output_name", output))
        if taken != ("forward", output) or named != found_as:
            raise ModelError(
                f"{file} makes {named} of {taken[1]} of the model's {taken[0]} (modality_config, module_output_name), "
                f"which is not computed here; of {task} it is {found_as} of {output} of forward"
            )
    if modalities and not {"text", "message"} & modalities.keys():
        raise ModelError(f"{file} takes {', '.join(map(str, modalities))} (modality_config), and models take text here")
    if "message" not in modalities:
        return None
    format = modalities["message"].get("format") or FLAT
    if format not in (FLAT, STRUCTURED):
        raise ModelError(
            f"{file} has the modality_config message with format {format!r:.100}; flat or structured is known"
        )
    return str(format)


def _variables(given: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Of the chat template. restore_suffix: what the template writes at the end stays when a prompt is cut, as here."""
    calls = given_value(given, "processing_kwargs", dict, file) or {}
    found = dict(given_value(calls, "chat_template", dict, file) or {})
    if not found.pop("restore_suffix", True):
        raise ModelError(
            f"{file} has restore_suffix false, and what the chat template writes at the end always stays here"
        )
    return found


def _most_tokens(given: Mapping[str, Any], folder: Path, file: Path) -> int | None:
    tokenizer = given_value(given, "tokenizer_args", dict, file) or given_value(given, "processor_kwargs", dict, file)
    for key in ("model_args", "model_kwargs", "config_args", "config_kwargs"):
        _check_arguments(given_value(given, key, dict, file) or {}, key, file)
    _check_arguments(
        {key: each for key, each in (tokenizer or {}).items() if key != "model_max_length"}, "tokenizer_args", file
    )
    limits = [_most_of_calls(given_value(given, "processing_kwargs", dict, file) or {}, file)]
    if (stated := given_value(given, "max_seq_length", int, file)) is not None:
        limits.append(stated)
    elif "model_max_length" in (tokenizer or {}):
        limits.append(_length(tokenizer["model_max_length"]))  # type: ignore[index]
    else:
        limits.append(most_of_tokenizer(folder))
    return min((each for each in limits if each is not None), default=None)


def most_of_tokenizer(folder: Path) -> int | None:
    """Most tokens of a text by the tokenizer's settings; None: they do not say. Raises ModelError."""
    return _length(object_in(folder / "tokenizer_config.json").get("model_max_length"))


def tells_texts_apart(folder: Path) -> bool:
    """Whether the tokenizer gives the model token types, which tell the second text of a pair from the first. Without
    the setting its class decides: all that encoders with token types have do, but for the general one. Raises
    ModelError."""
    settings = object_in(folder / "tokenizer_config.json")
    named = settings.get("model_input_names")
    if isinstance(named, list):
        return "token_type_ids" in named
    return settings.get("tokenizer_class") not in ("PreTrainedTokenizerFast", "TokenizersBackend")


def _length(value: object) -> int | None:
    """A tokenizer's model_max_length, which is a number without end where it has none."""
    return int(value) if is_size(value) else None  # type: ignore[call-overload]


def _check_arguments(given: Mapping[str, Any], name: str, file: Path) -> None:
    if unknown := [key for key in given if key not in _LOADING]:
        raise ModelError(f"{file} has {name} with {unknown[0]!r:.100}, which is not followed here")


def _most_of_calls(given: Mapping[str, Any], file: Path) -> int | None:
    """The max_length of processing_kwargs, with which the tokenizer is called."""
    calls = {
        **(given_value(given, "common", dict, file) or {}),
        **(given_value(given, "text", dict, file) or {}),
    }
    for key, value in calls.items():
        if key in _CALLING and value not in _CALLING[key]:
            allowed = " or ".join(map(repr, _CALLING[key]))
            raise ModelError(f"{file} has processing_kwargs with {key} {value!r:.100}; {allowed} is computed here")
        if key not in {*_CALLING, *_CALLING_WITHOUT_EFFECT, "max_length"}:
            raise ModelError(f"{file} has processing_kwargs with {key!r:.100}, which is not followed here")
    return given_value(calls, "max_length", int, file)


def general_settings(folder: Path) -> GeneralSettings:
    """Raises ModelError, naming the key, for a value that is none."""
    file = folder / GENERAL
    given = object_in(file)
    prompts, default = given.get("prompts") or {}, given_value(given, "default_prompt_name", str, file)
    if not (isinstance(prompts, dict) and all(isinstance(text, str | None) for text in prompts.values())):
        raise ModelError(f"{file} has prompts that are no texts by name")
    if default is not None and default not in prompts:
        raise ModelError(f"{file} has the default_prompt_name {default!r:.100}; its prompts are {', '.join(prompts)}")
    return GeneralSettings(
        kind=given_value(given, "model_type", str, file) or "",
        prompts={str(name): text or "" for name, text in prompts.items()},
        default_prompt=default,
        similarity=given_value(given, "similarity_fn_name", str, file),
        truncate_dim=given_value(given, "truncate_dim", int, file),
    )


def check_names(module: Module, name: str, *, ends: str = "") -> None:
    """Raises ModelError for a module that takes its input, or leaves its output, under another name than `name`. ends:
    what its output may be called besides."""
    file = module.folder / "config.json"
    config = object_in(file)
    taken = given_value(config, "module_input_name", str, file) or name
    left = given_value(config, "module_output_name", str, file) or taken
    if taken != name or left not in (name, ends):
        raise ModelError(
            f"{file} makes {left} of {taken} (module_input_name, module_output_name); {module.kind} is computed of "
            f"{name} here"
        )


def read_json(file: Path) -> Any:
    """None if there is no such file. Raises ModelError."""
    if not is_there(file):
        return None
    try:
        return json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def object_in(file: Path) -> dict[str, Any]:
    """Empty if there is no such file. Raises ModelError for one that holds anything else."""
    if not is_there(file):
        return {}
    found = read_json(file)
    if not isinstance(found, dict):
        raise ModelError(f"{file} holds a {type(found).__name__}; a JSON object is expected")
    return found


def given_value(given: Mapping[str, Any], key: str, kind: type[T], where: Path) -> T | None:
    """A file's value of a key, None where it has none; a whole number is a size. where: for messages."""
    value = given.get(key)
    if value is None or (is_size(value) if kind is int else isinstance(value, kind)):
        return value
    wanted = f"a whole number from 1 to {MOST}" if kind is int else f"a {kind.__name__}"
    raise ModelError(f"{where} has the {key} {value!r:.100}; {wanted} is expected")


def is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST
