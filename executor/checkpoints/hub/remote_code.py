"""Fetches the code that a checkpoint's config files reference (`auto_map`) and puts it beside the checkpoint's files,
from where transformers runs it. Nothing is run here.

A reference is FILE.CLASS in the checkpoint's own files, or OWNER/NAME--FILE.CLASS in another repository on the hub.
`code_revision` is the revision of the code, also of code in the model's own repository; by default that has `revision`.

Code that other users can have written into the hub's cache, or into ours, is not taken from there but fetched or made
privately. A checkpoint that the user names by its path is theirs to judge.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.hub import CODE_PATTERN, HubChoice, locate, repository_of
from headrace.ipc.cache import cache_folder
from headrace.ipc.failure import ModelError, OptionError
from headrace.ipc.process.own_folder import private_folder
from headrace.ipc.process.regular_files import read_text
from headrace.ipc.process.trusted_files import trusted_folder, warn_of, why_untrusted, why_untrusted_tree

NAMING_FILES = ("config.json", "tokenizer_config.json")
ELSEWHERE = "--"
FOLDER = "remote_code"
"""Name in the cache folder. It has a folder for each checkpoint whose code is in another place than its files."""


def with_code(folder: Path, options: Options) -> Path:
    """The folder itself or, if its code is in another repository or revision, a folder with links to the same files and
    that code.

    Raises ModelError for code that cannot be fetched or is in several places, and OptionError for a code_revision of a
    model that is not on the hub.
    """
    if not options.trust_remote_code:
        return folder
    configs = {name: _read(folder / name) for name in NAMING_FILES if (folder / name).is_file()}
    named = sorted({each for config in configs.values() for each in _references(config.get("auto_map"))})
    if not named:
        return folder
    sources = {reference.rpartition(ELSEWHERE)[0] for reference in named}
    own = None if Path(options.model).expanduser().exists() else repository_of(options.model)
    if options.code_revision is not None and "" in sources:
        if own is None:
            raise OptionError(
                f"code_revision={options.code_revision} is for models on the hub only; {folder} has its own code"
            )
        sources = sources - {""} | {own}
    if sources == {""}:
        if own is None or not _why_untrusted(folder):
            return folder
        sources = {own}
    if len(sources) > 1:
        where = ", ".join(source or "its own files" for source in sorted(sources))
        raise ModelError(f"{folder} names code in several places, and one is allowed: {where}")
    (source,) = sources
    choice = HubChoice.of(options).beside(options.code_revision)
    try:
        code = _located(source, replace(choice, with_code=True))
    except ModelError as error:
        raise ModelError(f"the code of {options.model} in {source}: {error}", hint=error.hint) from None
    return _assembled(folder, configs, code)


def _located(source: str, choice: HubChoice) -> Path:
    """The folder of the code. Raises ModelError, also for code that others can have written and the hub does not give
    again."""
    code = locate(source, choice)
    reason = "" if Path(source).expanduser().exists() else _why_untrusted(code)
    if not reason:
        return code
    warn_of(reason, f"The code of {source} is fetched again, for this process alone; HF_HOME names another cache.")
    try:
        return locate(source, replace(choice, download_dir=str(private_folder("code").path)))
    except ModelError as error:
        raise ModelError(f"{reason}, and it could not be fetched again: {error}", hint=error.hint) from None


def _why_untrusted(folder: Path) -> str:
    """The reason why the code in a folder may not be run; "" if it may."""
    return next(filter(None, map(why_untrusted, sorted(folder.rglob(CODE_PATTERN)))), "")


def _read(file: Path) -> dict[str, Any]:
    """The file's JSON object; {} if it is not valid. Others that need the file report the error."""
    try:
        content = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _references(auto_map: Any) -> Iterator[str]:
    """The references in an auto_map, whose values are references, lists of them, or null."""
    if isinstance(auto_map, str):
        yield auto_map
    elif isinstance(auto_map, dict | list):
        for each in auto_map.values() if isinstance(auto_map, dict) else auto_map:
            yield from _references(each)


def _as_own(auto_map: Any) -> Any:
    """The auto_map with references to files beside the config, without a repository."""
    if isinstance(auto_map, str):
        return auto_map.rpartition(ELSEWHERE)[2]
    if isinstance(auto_map, dict):
        return {name: _as_own(value) for name, value in auto_map.items()}
    return [_as_own(each) for each in auto_map] if isinstance(auto_map, list) else auto_map


def _assembled(folder: Path, configs: dict[str, dict[str, Any]], code: Path) -> Path:
    """A folder in the cache with links to the files of `folder`, copies of the code in `code`, and configs that
    reference these copies."""
    written = {
        name: json.dumps({**config, "auto_map": _as_own(config.get("auto_map"))}) for name, config in configs.items()
    }
    parts = sorted(file for file in code.rglob(CODE_PATTERN))
    digest = hashlib.sha256(json.dumps([str(folder.resolve()), written, sorted(os.listdir(folder))]).encode())
    for file in parts:
        digest.update(str(file.relative_to(code)).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    made = cache_folder() / FOLDER / digest.hexdigest()[:32]
    if reason := why_untrusted(made) or (made.is_dir() and why_untrusted_tree(made)):
        warn_of(reason, "The model's code is put together for this process alone; HEADRACE_CACHE names another folder.")
        made = private_folder("code").path / made.name
    if made.is_dir():
        return made
    trusted_folder(made.parent)
    work = Path(tempfile.mkdtemp(dir=made.parent))
    try:
        for file in folder.iterdir():
            if file.name not in written and file.suffix != ".py":
                (work / file.name).symlink_to(file.resolve())
        for name, text in written.items():
            (work / name).write_text(text, encoding="utf-8")
        for file in parts:
            (work / file.relative_to(code)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, work / file.relative_to(code))
        try:
            work.rename(made)
        except OSError:
            if not made.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return made
