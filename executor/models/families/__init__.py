"""Model families: adapters from a checkpoint's config to an `ArchSpec`. A family is a module with a constant `FAMILY`.

It is in this folder, or in another package that registers it under the entry point `headrace.plugins`.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import pkgutil
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.executor.models.arch import INCONSISTENT, ArchSpec
from headrace.executor.models.config import Config
from headrace.executor.models.families._defaults import defaults_of
from headrace.executor.models.families._lacking import LACKING
from headrace.executor.models.families._model_types import COMPUTED_BY, MODEL_TYPES
from headrace.executor.models.families._unread import check_unread
from headrace.executor.models.heads import Classifier, HeadLayer, HeadLinear, num_labels
from headrace.executor.models.registry import class_of_plugin, registered_model
from headrace.ipc.failure import HeadraceError, ModelError, let_interrupts_pass
from headrace.ipc.plugins import load_plugins
from headrace.ipc.process.log import printable

__all__ = ["Config"]


class UnknownArchitectureError(ModelError):
    """Neither a family of Headrace's nor one of another package has the architecture."""

    def __init__(self, what: str, known: Iterable[str]) -> None:
        super().__init__(f"{what}; known: {', '.join(known)}")
        self.what = what
        """The message without what is known."""


class NotNativeError(ModelError):
    """Headrace's blocks do not support something that this model needs; transformers' code may compute it."""


CLASSIFIERS: Mapping[str, str] = MappingProxyType(
    {
        "ForSequenceClassification": "LAST",
        "ForTokenClassification": "ALL",
        "ForRewardModel": "ALL",
        "ForProcessRewardModel": "ALL",
    }
)
"""Ends of the names of decoders with a classifier, and of which tokens it is."""


STAND_INS = (1, 64)
"""Values of fields whose own is to blame, perhaps; the second is divided by the number of heads."""
MOST_BLAMED = 64
"""Fields of a config that is wrong that are looked at for its cause: for each the config is read again."""
MOST_SECTIONS = 3
"""Depth of sections in which they are looked for."""


@dataclass(frozen=True)
class Family:
    architectures: tuple[str, ...]
    """Names as in a config's `architectures`."""
    build: Callable[[Config], ArchSpec]
    """Builds the spec from a config, which has `architectures`. The spec may use blocks that the family defines. Raises
    ModelError, naming the field that is missing or wrong, and NotNativeError for what the blocks do not support."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Keys of its configs that change no result, besides those of `_unread.IGNORED`: from the name to the reason."""
    assumes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that `build` does not read, with the values that the family computes with; others are refused."""
    token_classifier: str = "score"
    """What transformers calls the layer of the decoder's ForTokenClassification."""

    def __post_init__(self) -> None:
        """Raises TypeError, as the module of another package that makes it is imported."""
        names: Any = self.architectures
        if not (isinstance(names, tuple) and names and all(isinstance(each, str) for each in names)):
            raise TypeError(f"a family's architectures are {names!r:.100}; they must be a tuple of names")
        if not callable(self.build):
            raise TypeError(f"the build of the family of {names[0]} is {self.build!r:.100}; it must be a function")


@functools.cache
def families() -> Mapping[str, Family]:
    """Every family by architecture name."""
    found: dict[str, Family] = {}
    for name in _modules():
        found.update(dict.fromkeys(_family_in(name).architectures, _family_in(name)))
    return MappingProxyType(found)


@functools.cache
def own_family(architecture: str) -> Family | None:
    """As `families().get`, which imports all of them, for a tenth of a second: modules with the name in their text come
    first."""
    quoted = f'"{architecture}"'.encode()
    for name in reversed(_modules()):
        if quoted in _text_of(name) and architecture in _family_in(name).architectures:
            return _family_in(name)
    return families().get(architecture)


def _modules() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def _family_in(module: str) -> Family:
    found: Family = importlib.import_module(f"{__name__}.{module}").FAMILY
    return found


def _text_of(module: str) -> bytes:
    """Empty where there is none, as in an installation of compiled modules alone."""
    try:
        return Path(__path__[0], f"{module}.py").read_bytes()
    except OSError:
        return b""


@functools.cache
def family_of_plugin(architecture: str) -> Family:
    """The family that another package registers under `headrace.plugins` (see `ipc.plugins`). Raises NotNativeError if
    a package has a class for transformers instead, and UnknownArchitectureError if none has the architecture, naming
    the plugins that could not be loaded."""
    found, problems = load_plugins(Family)
    others = {name: family for family in found for name in family.architectures}
    if architecture in others:
        return others[architecture]
    if (found_class := class_of_plugin(architecture)) is not None:
        raise NotNativeError(f"{architecture} comes from a plugin as {found_class!r}, a class for transformers")
    failed = "".join(f"; {problem}" for problem in problems)
    shown, lacks = printable(f"{architecture:.100}"), LACKING.get(architecture)
    why = f" ({lacks})" if lacks else ""
    raise UnknownArchitectureError(f"the architecture {shown} is not supported{why}{failed}", [*families(), *others])


def spec_from_config(config: Mapping[str, Any], warns: bool = False) -> ArchSpec:
    """The spec of the model that a Hugging Face `config.json` describes. warns: whether a warning names keys that
    nothing reads; an engine reads its config in several places, and one of them says so.

    Raises ModelError if the architecture is unknown (listing the known ones), a field is missing or of the wrong type,
    or the numbers are inconsistent. The fields that are to blame are named, with their values.
    """
    try:
        return _spec_from_config(config, warns)
    except (NotNativeError, UnknownArchitectureError):
        raise
    except ModelError as error:
        if not (causes := _fields_to_blame(config, error)):
            raise
        raise ModelError(f"{error}; the config's {' and '.join(causes)}", hint=error.hint) from error


def _fields_to_blame(config: Mapping[str, Any], error: ModelError) -> list[str]:
    """Fields that a message does not name and that are behind it, with their values: a check of sizes says what is
    wrong with these, and not from which of a family's fields they come. Those are fields of 0 or less with which
    another value does away with the message, and for what a spec calls inconsistent those of its numbers that another
    value changes."""
    found, message = list[str](), str(error)
    said = set(map(int, re.findall(r"\d{1,18}", message.partition(INCONSISTENT)[2])))
    for path, value in itertools.islice(_suspects(config, said), MOST_BLAMED):
        if _names(message, path[-1]):
            continue
        others = [_refusal(_changed(config, path, each)) for each in STAND_INS]
        if value > 0:
            is_cause = any(each != message and _without_numbers(each) == _without_numbers(message) for each in others)
        else:
            is_cause = any(each != message and not _names(each, path[-1]) for each in others)
        if is_cause:
            found.append(f"{printable('.'.join(path))} is {value}")
    return found


def _suspects(
    config: Mapping[str, Any], said: Container[float], within: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Paths and values of the numbers in a config and its sections that are at most 0, or said."""
    for key, value in config.items():
        if isinstance(value, Mapping) and len(within) < MOST_SECTIONS:
            yield from _suspects(value, said, (*within, key))
        elif type(value) in (int, float) and (value <= 0 or value in said):
            yield (*within, key), value


def _changed(config: Mapping[str, Any], path: tuple[str, ...], value: int) -> dict[str, Any]:
    key, *rest = path
    return {**config, key: _changed(config[key], tuple(rest), value) if rest else value}


def _refusal(config: Mapping[str, Any]) -> str:
    """Empty for a config that is read."""
    try:
        _spec_from_config(config, warns=False)
    except ModelError as error:
        return str(error)
    return ""


def _names(message: str, key: str) -> bool:
    return re.search(rf"\b{re.escape(key)}\b", message) is not None


def _without_numbers(message: str) -> str:
    return re.sub(r"\d+", "", message)


def _spec_from_config(config: Mapping[str, Any], warns: bool) -> ArchSpec:
    named = causal_architecture(config) or named_architecture(config)
    family = _family(named)
    try:
        read = Config({**config, **defaults_of(named, config), "architectures": [named]})
        read.warns = warns
        spec = family.build(read)
        if not isinstance(spec, ArchSpec):
            raise TypeError(f"its build returned {spec!r:.100}; expected: an ArchSpec")
        check_unread(read, family, refuses=family is own_family(named))
        return _with_classifier(spec, read, str((config.get("architectures") or [""])[0]), family)
    except HeadraceError:
        raise
    except BaseException as error:  # whatever a package's own family does
        let_interrupts_pass(error)
        raise ModelError(
            f"the family of {named} ({getattr(family.build, '__module__', 'unknown')}) cannot read the config: "
            f"{type(error).__name__}: {error}"
        ) from error


def _with_classifier(spec: ArchSpec, config: Config, named: str, family: Family) -> ArchSpec:
    """The spec of a decoder with the classifier that its architecture's name says; the spec itself if it says none."""
    tokens = next((tokens for end, tokens in CLASSIFIERS.items() if named.endswith(end)), None)
    if tokens is None or spec.classifier is not None or config.get("classifier_from_token") is not None:
        return spec
    width, layers = spec.embedding_width, tuple[HeadLayer, ...]()
    if named.startswith("InternLM2"):
        labels, layers = 1, (HeadLinear("v_head", 1, width, bias=False),)
    elif named.endswith("RewardModel"):
        labels = 2 if named.endswith("ForProcessRewardModel") else 1
        layers = HeadLinear("score.0", width, width, activation="relu"), HeadLinear("score.2", labels, width)
    else:
        labels = num_labels(config)
        of_tokens = tokens == "ALL"
        layers = (HeadLinear(family.token_classifier if of_tokens else "score", labels, width, bias=of_tokens),)
    found: Any = tokens
    return replace(spec, classifier=Classifier(found, layers, labels))


def named_architecture(config: Mapping[str, Any]) -> str:
    """The first of the config's `architectures` that a family has, else the first; that of its model_type where there
    is none, or it is one that computes the model_type.

    Raises ModelError if the config has neither, and UnknownArchitectureError for a model_type that no family has.
    """
    named = config.get("architectures")
    listed = [each for each in named if isinstance(each, str)] if isinstance(named, list | tuple) else []
    kind = config.get("model_type")
    if listed and not (isinstance(kind, str) and listed == [COMPUTED_BY.get(kind)]):
        return next(filter(_is_known, listed), listed[0]) if len(listed) > 1 else listed[0]
    if not isinstance(kind, str) or not kind:
        raise ModelError('the config has neither "architectures" nor "model_type", which name the kind of model')
    if kind not in MODEL_TYPES:
        shown = printable(f"{kind:.100}")
        what = f'the config has no "architectures", and its model_type is {shown}'
        raise UnknownArchitectureError(what, MODEL_TYPES)
    return MODEL_TYPES[kind]


def causal_architecture(config: Mapping[str, Any]) -> str | None:
    """Where the config names a model without a head (`Qwen3Model`) or with a classifier, which pools: the architecture
    that generates, which has the same layers, if a family has it. None for all others."""
    named = named_architecture(config) if config.get("architectures") else ""
    end = next((end for end in (*CLASSIFIERS, "Model") if named.endswith(end)), "")
    if not end or _is_known(named):
        return None
    named = named.removeprefix("ColBERT")  # as vLLM names models whose tokens are compared: ColBERTLfm2Model
    kinds = ("ForConditionalGeneration", "ForCausalLM") if config.get("text_config") else ("ForCausalLM",)
    stems = (named.removesuffix(end), named.removesuffix(f"Text{end}"))
    return next(
        (name for stem in stems for kind in (*kinds, "LMHeadModel") if _is_known(name := f"{stem}{kind}")), None
    )


def has_no_head(config: Mapping[str, Any]) -> bool:
    """Whether the config names a model without a head, or with a classifier, of one that generates: of a family, or
    of transformers' code."""
    named = named_architecture(config) if config.get("architectures") else ""
    is_bare = named.endswith("Model") and not named.endswith(("HeadModel", *CLASSIFIERS)) and not _is_known(named)
    return is_bare or causal_architecture(config) is not None


def _is_known(architecture: str) -> bool:
    try:
        _family(architecture)
    except UnknownArchitectureError:
        return False
    except NotNativeError:
        return True
    return True


def _family(architecture: str) -> Family:
    found = registered_model(architecture)
    if isinstance(found, Family):
        return found
    if found is not None:
        raise NotNativeError(f"{architecture} is registered as {found!r}, a class for transformers")
    return own_family(architecture) or family_of_plugin(architecture)
