"""The repository's files, with their imports and defined names, for the repository's own checks."""

from __future__ import annotations

import ast
import functools
import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
FOLDERS = ("headrace", "ipc", "core", "executor", "kernels", "frontend")
PYTHONPATH = os.pathsep.join(sorted({str(path.parent) for path in (ROOT / "tests").rglob("*.py")}))
"""The PYTHONPATH with which a child process can import any module of the tests."""
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def files() -> tuple[Path, ...]:
    """Every file that is or could be committed, relative to the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return tuple(sorted({Path(name) for name in listed if (ROOT / name).is_file()}))


@functools.cache
def python_files(folder: str | None = None) -> tuple[Path, ...]:
    """All Python files, or those under one top-level folder."""
    return tuple(path for path in files() if path.suffix == ".py" and (folder is None or path.parts[0] == folder))


@functools.cache
def tree(path: Path) -> ast.Module:
    gc.disable()
    try:
        return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))
    finally:
        gc.freeze()  # it stays: the collector of garbage would walk through it again and again
        gc.enable()


@dataclass(frozen=True)
class Import:
    path: Path
    line: int
    name: str
    """The absolute dotted name; of a third-party module only the first part."""
    is_lazy: bool
    """Whether it is inside a function, so that importing the file does not run it."""


def imports(path: Path) -> Iterator[Import]:
    """The imports of a file, without the standard library and those under TYPE_CHECKING."""
    yield from _imports(path, tree(path), is_lazy=False)


def _imports(path: Path, node: ast.AST, *, is_lazy: bool) -> Iterator[Import]:
    if isinstance(node, ast.If) and _is_for_types(node.test):
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        for name in _imported(path, node):
            first = name.partition(".")[0]
            if first not in sys.stdlib_module_names:
                yield Import(path, node.lineno, name if first == "headrace" else first, is_lazy)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        yield from _imports(path, child, is_lazy=is_lazy or isinstance(node, FunctionNode))


def _is_for_types(test: ast.expr) -> bool:
    names = (getattr(each, "id", getattr(each, "attr", "")) for each in ast.walk(test))
    return "TYPE_CHECKING" in names


def _imported(path: Path, node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    module = node.module or ""
    if node.level:
        package = ["headrace", *path.parent.parts][: len(path.parent.parts) + 2 - node.level]
        module = ".".join([*package, *filter(None, [module])])
    if module == "headrace":  # `from headrace import kernels` names a folder
        return [f"headrace.{alias.name}" if alias.name in FOLDERS else "headrace" for alias in node.names]
    return [module]


def defines(path: Path, qualified_name: str) -> bool:
    """Whether a file defines a name: a function, class, constant, method or class attribute."""
    body: list[ast.stmt] = tree(path).body
    for part in qualified_name.split("."):
        found = next((node for node in body if part in _names(node)), None)
        if found is None:
            return False
        body = found.body if isinstance(found, ast.ClassDef) else []
    return True


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, FunctionNode | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def docs_program(name: str) -> ModuleType:
    """A program of docs_site/, which is no package, as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_site_{name}", ROOT / "docs_site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
