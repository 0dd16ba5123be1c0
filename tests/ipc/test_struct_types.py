"""What msgspec knows of a struct type is complete before any other thread converts to it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading, types
import msgspec
from headrace.ipc.struct_types import threadsafe

sys.setswitchinterval(1e-6)
source = "from __future__ import annotations\\nimport msgspec\\n"
for index in range(30):
    inner = f"Struct{index - 1}" if index else "int"
    fields = "".join(f"    f{nth}: int | str | None | list[{inner}] = None\\n" for nth in range(60))
    source += f"class Struct{index}(msgspec.Struct):\\n{fields}"
module = sys.modules["structs"] = types.ModuleType("structs")
exec(source, module.__dict__)
begin = threading.Barrier(8)

def convert():
    begin.wait()
    CONVERTED

threads = [threading.Thread(target=convert) for _ in range(8)]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""
WAYS = {
    "convert": "assert msgspec.convert({'f1': [{'f2': 3}]}, threadsafe(module.Struct29)).f1[0].f2 == 3",
    "decode": 'assert msgspec.json.decode(b\'{"f1": [{"f2": 3}]}\', type=threadsafe(module.Struct29)).f1[0].f2 == 3',
    "list": "assert msgspec.convert([{'f1': 3}], threadsafe(list[module.Struct29]))[0].f1 == 3",
}


@pytest.mark.parametrize("way", WAYS)
def test_threads_that_convert_to_a_new_type_at_once(way: str) -> None:
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", PROGRAM.replace("CONVERTED", WAYS[way])], check=False)
        assert done.returncode == 0


ROOT = Path(__file__).parents[2]
PLAIN = ("Any", "dict[str, Any]", "dict[str, msgspec.Raw]", "tuple[int, ...]")
"""Types without structs."""


@pytest.mark.system
def test_every_conversion_to_a_type_is_safe_on_threads() -> None:
    found = []
    for path in (each for room in ("core", "executor", "frontend", "ipc") for each in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and (kind := _kind_of(node)) is not None:
                said = ast.unparse(kind)
                if not said.startswith("threadsafe(") and said not in PLAIN and path.name != "struct_types.py":
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "pass the type through headrace.ipc.struct_types.threadsafe:\n" + "\n".join(found)


def _kind_of(call: ast.Call) -> ast.expr | None:
    """The type that a call of msgspec converts to; None for other calls."""
    name = ast.unparse(call.func)
    if name == "msgspec.convert":
        return call.args[1]
    if name.startswith("msgspec.") and name.endswith(".Decoder"):
        return call.args[0] if call.args else None
    if name.startswith("msgspec.") and name.endswith(".decode"):
        return next((each.value for each in call.keywords if each.arg == "type"), None)
    return None
