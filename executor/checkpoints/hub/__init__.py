"""Resolves a model's name to a folder or .gguf file on this machine, and downloads it if needed.

A name is first tried as a local path, then on the Hugging Face hub (`hugging_face.py`), or on ModelScope if the
environment variable HEADRACE_USE_MODELSCOPE is set (`model_scope.py`). One file of a repository of GGUF files is named
`owner/name:FILE.gguf`, `owner/name/FILE.gguf` or `owner/name:Q4_K_M`.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.core.options.engine_options import Options
from headrace.core.options.model_path import is_path, nearest_path
from headrace.core.options.option import Secret, secret_text
from headrace.executor.checkpoints.hub.hugging_face import HuggingFace
from headrace.executor.checkpoints.hub.model_scope import ModelScope, is_asked_for
from headrace.executor.checkpoints.hub.sources import HubLibrary, first_line
from headrace.ipc.failure import ModelError, OptionError

CODE_PATTERN = "*.py"
CONFIG_PATTERNS = ("*.json", "*.jinja", "*.model", "*.model.v*", "*.tiktoken", "merges.txt", "vocab.txt")
WEIGHT_PATTERNS = {
    "safetensors": ("*.safetensors",),
    "pt": ("*.bin", "*.pt", "*.pth"),
    "mistral": ("consolidated*.safetensors",),
    "tensorizer": ("*.tensors",),
}
# Files that are not fetched: state of a training run, and the same weights in another format.
NEEDLESS = ("*/*", "consolidated*", "optimizer*", "scheduler*", "training_args*", "rng_state*", "tf_model*", "flax_*")
_HUB_NAME = re.compile(r"(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?::(?P<tag>[^:]+))?")
_HUB_FILE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)/(?P<tag>.+\.gguf)")


@dataclass(frozen=True)
class HubChoice:
    """Which revision and files to fetch from a hub, where to store them, and the token."""

    revision: str | None = None
    download_dir: str | None = None
    load_format: str = "auto"
    """As the option; with dummy no weights are fetched."""
    ignore_patterns: tuple[str, ...] = ()
    """Patterns of files that are not fetched."""
    token: Secret | None = None
    """None: the library uses HF_TOKEN, or the token that its login saved."""
    with_code: bool = False
    """Whether to fetch the model's Python files too."""

    @classmethod
    def of(cls, options: Options) -> HubChoice:
        """The choice for the model itself. Raises OptionError for an invalid token."""
        token = options.hf_token and Secret(secret_text(options.hf_token.value))
        if token is not None and not (token.value.isascii() and token.value.isprintable() and token.value.strip()):
            raise OptionError("hf_token is no token: it must be printable ASCII characters, and some")
        return cls(
            options.revision,
            options.download_dir,
            options.load_format,
            options.ignore_patterns,
            token,
            options.trust_remote_code,
        )

    def beside(self, revision: str | None = None) -> HubChoice:
        """The choice for another repository, from which no weights are needed: of a tokenizer, a config."""
        return replace(self, revision=revision, load_format="dummy", ignore_patterns=())


def locate(model: str, choice: HubChoice) -> Path:
    """The folder or .gguf file that `model` names, downloaded from the hub if it is not on this machine.

    Raises ModelError, which says what was tried and suggests corrections, and OptionError if ModelScope is asked for
    and its library is not installed or hf_token is given.
    """
    path = Path(model).expanduser()
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise ModelError(f"there is no model at {model!r:.200}: {error.strerror}") from error
    if is_folder:
        return path
    if is_file:
        if path.suffix == ".gguf":
            return path
        raise ModelError(f"{path} is a file but not a .gguf one; give the folder that holds the model, {path.parent}")
    if path.exists():
        raise ModelError(f"{path} is neither a folder nor a file")
    match = _HUB_FILE.fullmatch(model) or _HUB_NAME.fullmatch(model)
    if match is None or is_path(model) or (model.endswith(".gguf") and match["tag"] is None):
        raise ModelError(f"there is no model at {path}{nearest_path(path)}")
    source = _source()
    try:
        return _fetch(source, match["repo"], match["tag"], choice)
    except ModelError as error:
        raise ModelError(
            f"the model {model} was found neither as a folder or .gguf file here{nearest_path(path)} "
            f"nor on {source.name}: {error}",
            hint=error.hint,
        ) from error


def repository_of(model: str) -> str | None:
    """The hub repository in a model's name; None if the name has not the form of one."""
    match = _HUB_FILE.fullmatch(model) or _HUB_NAME.fullmatch(model)
    return None if match is None else match["repo"]


def cached_config(model: str, choice: HubChoice, file: str = "config.json") -> Path | None:
    """Path of a hub model's config if it is in the cache, else None. Accesses no network."""
    match = _HUB_NAME.fullmatch(model)
    if match is None or match["tag"] is not None:
        return None
    return _source().cached_file(match["repo"], file, choice)


def _source() -> HubLibrary:
    """The hub to use. Raises OptionError if its library is not installed."""
    return ModelScope() if is_asked_for() else HuggingFace()


def _fetch(source: HubLibrary, repo: str, tag: str | None, choice: HubChoice) -> Path:
    """The folder of the downloaded snapshot, or the .gguf file in it. Raises ModelError and OptionError."""
    files: list[str] | None = None
    reason = ""
    try:
        files, reason = source.listing(repo, choice)
        if files is None:
            folder = source.cached(repo, choice)
            files = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
            gguf = _chosen_gguf(repo, files, tag, choice)
        else:
            files = _not_ignored(repo, files, choice)
            gguf = _chosen_gguf(repo, files, tag, choice)
            patterns = [*_split_parts(gguf, files), "*.json"] if gguf else _patterns(files, choice)
            folder = source.fetch(repo, choice, patterns)
    except (ModelError, OptionError):
        raise
    except Exception as error:  # the library's own errors, its HTTP library's and OSError, with no common base
        raise _explained(source, repo, error, choice, reason) from error
    return folder / gguf if gguf else folder


def _patterns(files: Sequence[str], choice: HubChoice) -> list[str]:
    """Files to fetch: config, tokenizer, weights in one format (safetensors before PyTorch's), and code if wanted."""
    wanted = ["safetensors", "pt", "mistral"] if choice.load_format == "auto" else [choice.load_format]
    for each in wanted:
        needless = () if each == "mistral" else NEEDLESS
        weights = [
            file for file in files if _matches(file, WEIGHT_PATTERNS.get(each, ())) and not _matches(file, needless)
        ]
        if weights:
            break
    else:
        weights = []
    beside = [file for file in files if _matches(file, CONFIG_PATTERNS) and "/" not in file]
    return [*weights, *beside, *(file for file in files if choice.with_code and _matches(file, (CODE_PATTERN,)))]


def _not_ignored(repo: str, files: Sequence[str], choice: HubChoice) -> list[str]:
    """The files without those that ignore_patterns match. Raises ModelError if no weights are left."""
    kept = [file for file in files if not _matches(file, choice.ignore_patterns)]
    weights = ("*.gguf", *itertools.chain(*WEIGHT_PATTERNS.values()))
    had, has = (any(_matches(file, weights) for file in each) for each in (files, kept))
    if had and not has and choice.load_format != "dummy":
        raise ModelError(f"ignore_patterns ({', '.join(choice.ignore_patterns)[:200]}) leave no weights of {repo}")
    return kept


def _matches(file: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)


def _chosen_gguf(repo: str, files: Sequence[str], tag: str | None, choice: HubChoice) -> str | None:
    """The GGUF file to use; None if the repository is to be read as a folder. Raises ModelError."""
    found = sorted(file for file in files if file.endswith(".gguf"))
    first = [file for file in found if "-of-" not in file or re.search(r"-00001-of-\d{5}\.gguf$", file)]
    if tag is not None:
        named = [file for file in first if file == tag or (not tag.endswith(".gguf") and _has_tag(file, tag))]
        if len(named) == 1:
            return named[0]
        raise ModelError(f"{len(named)} GGUF files of {repo} match {tag!r}; it has {', '.join(first) or 'none'}")
    others = choice.load_format in ("safetensors", "pt") or any(_matches(f, ("*.safetensors", "*.bin")) for f in files)
    if not first or (others and choice.load_format != "gguf"):
        return None
    if len(first) == 1:
        return first[0]
    raise ModelError(f"{repo} holds several GGUF files; name one as {repo}:FILE.gguf, of {', '.join(first)}")


def _has_tag(file: str, tag: str) -> bool:
    return re.search(rf"(^|[-._/]){re.escape(tag)}([-._/]|$)", file, re.IGNORECASE) is not None


def _split_parts(gguf: str, files: Sequence[str]) -> list[str]:
    """All files of a split model whose first file is given; else that file alone."""
    match = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", gguf)
    if match is None:
        return [gguf]
    return [file for file in files if re.fullmatch(rf"{re.escape(match[1])}-\d{{5}}-of-{match[2]}\.gguf", file)]


def _explained(source: HubLibrary, repo: str, error: Exception, choice: HubChoice, reason: str) -> ModelError:
    refusal = source.refusal(repo, error, choice)
    if refusal is not None:
        return refusal
    if reason:
        cache, revision = choice.download_dir or source.cache_name, choice.revision or source.default_revision
        return ModelError(
            f"{reason}, and {repo} at {revision} is not in {cache}", hint="fetch it once with network access"
        )
    return ModelError(f"{repo} could not be fetched: {first_line(error)}")
