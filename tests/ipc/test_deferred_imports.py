"""Modules whose import is put off: they are as they would be, whoever asks first, and are imported once."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.ipc.plugins import import_users_module
from headrace.ipc.process.deferred_imports import DeferredModule, defer, import_deferred

FILES = {
    "__init__.py": "from . import heavy as heavy\nimport big.registers\nlog, tries = [], 0\n",
    "heavy/__init__.py": "import big\nbig.log.append('heavy')\nfrom big.heavy.part import part\nbig.heavy.mark = 1\n",
    "heavy/part.py": "import big\nbig.log.append('part')\npart = 'a part'\n",
    "registers.py": "import big\nbig.log.append('registers')\n",
    "broken.py": "import big\nbig.tries += 1\nif big.tries == 1: raise ValueError('not yet')\nvalue = 2\n",
}


@pytest.fixture
def big(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A library `big`, whose `heavy` and `registers` are put off."""
    for name, text in FILES.items():
        (tmp_path / "big" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "big" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    defer(("big.heavy", "big.registers"))
    yield
    import_deferred()
    for name in [name for name in sys.modules if name.partition(".")[0] == "big"]:
        del sys.modules[name]


def test_a_module_is_imported_when_one_of_its_names_is_asked_for(big: None) -> None:
    library = importlib.import_module("big")
    assert library.log == []
    assert type(sys.modules["big.heavy"]) is DeferredModule
    importlib.import_module("big.heavy")  # as `import big.heavy` in another module: no name of it is asked for
    assert library.log == []
    assert library.heavy.part == "a part"
    assert library.heavy.mark == 1
    assert library.log == ["heavy", "part"]
    assert type(library.heavy) is type(sys)
    assert library.heavy.__spec__.loader is library.heavy.__loader__
    assert Path(library.heavy.__file__).name == "__init__.py"


def test_a_module_below_one_that_is_put_off_comes_after_it(big: None) -> None:
    assert importlib.import_module("big.heavy.part").part == "a part"
    assert importlib.import_module("big").log == ["heavy", "part", "registers"]
    part = sys.modules["big.heavy.part"]
    assert part.__spec__ is not None
    assert part.__spec__.origin == part.__file__


def test_a_module_that_the_library_leaves_out_comes_after_those_put_off(big: None, tmp_path: Path) -> None:
    (tmp_path / "big" / "later.py").write_text("import big\nbig.log.append('later')\n")
    (tmp_path / "big" / "heavy" / "__init__.py").write_text(FILES["heavy/__init__.py"] + "import big.later\n")
    library = importlib.import_module("big")
    later = importlib.import_module("big.later")
    assert library.log == ["heavy", "part", "later", "registers"]  # once each, and `later` where `heavy` asks for it
    assert library.later is later is sys.modules["big.later"]
    assert later.__spec__ is not None
    assert later.__spec__.origin == later.__file__


def test_modules_that_nobody_asks_are_imported_before_code_of_others(big: None, tmp_path: Path) -> None:
    library = importlib.import_module("big")
    (tmp_path / "of_a_user.py").write_text("import big\nseen = list(big.log)\n")
    assert import_users_module("of_a_user").seen == ["heavy", "part", "registers"]
    assert library.log == ["heavy", "part", "registers"]
    assert not any(isinstance(module, DeferredModule) for module in sys.modules.values())
    del sys.modules["of_a_user"]


def test_threads_that_ask_at_once_get_the_whole_module(big: None) -> None:
    library = importlib.import_module("big")
    found: list[str] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait(30)
        found.append(library.heavy.part)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert found == ["a part"] * 8
    assert library.log == ["heavy", "part"]


def test_an_import_that_failed_is_tried_again(big: None, tmp_path: Path) -> None:
    (tmp_path / "big" / "__init__.py").write_text(FILES["__init__.py"] + "import big.broken\n")
    defer(("big.broken",))
    broken = importlib.import_module("big").broken
    with pytest.raises(ValueError, match="not yet"):
        _ = broken.value
    assert broken.value == 2


def test_what_is_imported_already_and_what_there_is_not_are_left_alone(big: None) -> None:
    importlib.import_module("big")
    defer(("json", "big.there_is_no_such_module"))
    assert not isinstance(sys.modules["json"], DeferredModule)
    with pytest.raises(ModuleNotFoundError, match=r"big\.there_is_no_such_module"):
        importlib.import_module("big.there_is_no_such_module")


def test_torch_works_without_its_deferred_modules_and_has_them_when_asked() -> None:
    program = (
        "import sys; from headrace.ipc.process.deferred_imports import *\n"
        "defer(); import torch\n"
        "left = [name for name in OF_TORCH if isinstance(sys.modules.get(name), DeferredModule)]\n"
        "assert len(left) > len(OF_TORCH) // 2, left\n"
        "assert torch.distributions.Normal(torch.zeros(2), torch.ones(2)).mean.tolist() == [0, 0]\n"
        "import_deferred()\n"
        "assert not any(isinstance(each, DeferredModule) for each in list(sys.modules.values()))\n"
        "meta = torch.empty(2, 3, device='meta')\n"
        "assert torch.nn.functional.scaled_dot_product_attention(*[meta[None, None]] * 3).shape == (1, 1, 2, 3)\n"
        "assert torch.optim.SGD and torch.ao.quantization.QConfig and torch.export.Dim and torch.utils.data.Dataset\n"
        "from torch.fx.experimental.proxy_tensor import make_fx\n"
        "made = make_fx(lambda x: torch.linalg.svd(x).S.sum(), tracing_mode='fake')(torch.ones(2, 2))\n"
        "assert 'svd' in made.code\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "torch._prims",
        *(
            pytest.param(f"torch.{name}", marks=pytest.mark.system)
            for name in ("_inductor", "ao.quantization.fx", "utils._content_store")
        ),
    ],
)
def test_a_module_of_torch_that_imports_those_put_off_in_a_circle_is_imported(name: str) -> None:
    program = f"from headrace.ipc.process.deferred_imports import *\ndefer(); import torch, {name}\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
