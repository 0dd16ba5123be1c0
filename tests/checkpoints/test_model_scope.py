"""Models of ModelScope: what is asked of its library, by one of the test's own; and the library itself, where it is
installed, against a hub of the test's own."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_hub import serve_hub
from fake_tokenizers import byte_level_tokenizer
from test_hub import locate_all

from headrace.core.options.option import Secret
from headrace.executor.checkpoints.hub import HubChoice, cached_config, locate
from headrace.executor.checkpoints.hub.model_scope import OF_VLLM, USE, ModelScope
from headrace.frontend.vllm.helpers import get_tokenizer
from headrace.ipc.extras import how_to_install
from headrace.ipc.failure import InvalidRequestError, ModelError, OptionError

FILES = ("config.json", "configuration.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json", "onnx/a.onnx")
KEPT = ["config.json", "configuration.json", "model.safetensors", "tokenizer.json"]


class Answer(Exception):
    """An error of the library's, with the hub's status."""

    def __init__(self, status_code: int) -> None:
        super().__init__(f"[{status_code}] no")
        self.status_code = status_code


class Library:
    """modelscope's two functions: a repository `mills/own` with the files of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.fails = folder, list[dict[str, Any]](), Answer(404)

    def get_model_files(self, repo: str, revision: str, recursive: bool) -> list[dict[str, str]]:
        assert recursive
        if (repo, revision) != ("mills/own", "master"):
            raise self.fails
        return [{"Path": name, "Type": "blob"} for name in FILES] + [{"Path": "onnx", "Type": "tree"}]

    def snapshot_download(self, repo: str, **how: Any) -> str:
        self.calls.append({"repo": repo, **how})
        if how.get("local_files_only") and not self.folder.exists():
            raise FileNotFoundError("nothing in the cache")
        self.folder.mkdir(exist_ok=True)
        for name in how.get("allow_patterns", ()):
            (self.folder / name).touch()
        return str(self.folder)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library(tmp_path / "snapshot")
    modules = {name: ModuleType(name) for name in ("modelscope", "modelscope.hub")}
    modules["modelscope"].__spec__ = util.spec_from_loader("modelscope", None)
    modules["modelscope.hub.api"] = api = ModuleType("modelscope.hub.api")
    modules["modelscope.hub.snapshot_download"] = snapshot = ModuleType("modelscope.hub.snapshot_download")
    vars(api)["HubApi"] = lambda: made
    vars(snapshot)["snapshot_download"] = made.snapshot_download
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(USE, "True")
    return made


def test_a_name_fetches_from_modelscope_what_it_would_from_hugging_face(library: Library, tmp_path: Path) -> None:
    assert cached_config("mills/own", HubChoice()) is None
    folder = locate("mills/own", HubChoice(download_dir=str(tmp_path / "kept"), ignore_patterns=("tok*",)))
    assert sorted(file.name for file in folder.iterdir()) == KEPT[:-1]
    asked = library.calls[-1]
    assert (asked["repo"], asked["cache_dir"], asked["revision"]) == ("mills/own", str(tmp_path / "kept"), None)
    assert cached_config("mills/own", HubChoice()) == folder / "config.json"


@pytest.mark.parametrize("variable", [USE, OF_VLLM])
def test_get_tokenizer_fetches_from_modelscope_what_lies_beside_the_weights(
    variable: str, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(USE)
    monkeypatch.setenv(variable, "1")
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    library.folder.mkdir()
    shutil.move(tmp_path / "tokenizer.json", library.folder)
    (library.folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (library.folder / "config.json").write_text("{}")
    tokenizer = get_tokenizer("mills/own", download_dir=str(tmp_path / "kept"))
    assert tokenizer.encode("Hello") == byte_level_tokenizer().encode("Hello").ids
    asked = library.calls[-1]
    assert (asked["repo"], asked["cache_dir"]) == ("mills/own", str(tmp_path / "kept"))
    assert sorted(asked["allow_patterns"]) == ["config.json", "configuration.json", "tokenizer.json"]
    assert get_tokenizer(library.folder).encode("Hello") == tokenizer.encode("Hello"), "a folder is read as it is"
    with pytest.raises(InvalidRequestError, match=r"get_tokenizer: the model mills/other .* nor on ModelScope"):
        get_tokenizer("mills/other")


def test_what_modelscope_refuses_is_told_apart_from_one_out_of_reach(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ModelError, match=r"nor on ModelScope: there is no mills/none with .* master, or it is"
    ) as raised:
        locate("mills/none", HubChoice())
    assert "MODELSCOPE_API_TOKEN" in raised.value.hint
    library.fails = Answer(403)
    with pytest.raises(ModelError, match=r"mills/none may not be read: \[403\] no"):
        locate("mills/none", HubChoice())
    library.fails = Answer(502)
    with pytest.raises(ModelError, match=r"cannot be reached \(\[502\] no\), and mills/own at v2 is not in"):
        locate("mills/own", HubChoice(revision="v2"))
    locate("mills/own", HubChoice())
    assert locate("mills/own", HubChoice(revision="v2")) == library.folder, "what was fetched before needs no hub"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    locate("mills/own", HubChoice())
    assert library.calls[-1]["local_files_only"]


def test_values_that_modelscope_has_no_use_for_are_refused(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"hf_token is for Hugging Face's hub"):
        locate("mills/own", HubChoice(token=Secret("hf_x")))
    monkeypatch.setenv(USE, "perhaps")
    with pytest.raises(OptionError, match=f"{USE}=perhaps: it must be 1 or 0"):
        locate("mills/own", HubChoice())
    monkeypatch.delitem(sys.modules, "modelscope")
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="needs modelscope, .*" + re.escape(how_to_install("modelscope"))):
        ModelScope()


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    if util.find_spec("modelscope") is None:
        pytest.skip("modelscope is not installed")
    held = {name: name.encode() for name in FILES}
    with serve_hub({"mills/own": {"master": held}, "mills/private": {"master": held}}, {"mills/private": "key"}) as it:
        yield it


@pytest.mark.system
def test_the_library_fetches_from_a_hub_and_finds_it_again_without(hub: str, tmp_path: Path) -> None:
    environment = {USE: "1", "MODELSCOPE_ENDPOINT": hub, "MODELSCOPE_CACHE": str(tmp_path / "cache")}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("mills/own", {}),
        ("mills/private", {}),
        ("mills/own", {"revision": "v"}),
    ]
    own, private, revision = locate_all(asked, hub, tmp_path, **environment)
    assert own == ["", KEPT]
    for refused in (private, revision):
        assert "there is no mills/" in str(refused[0])
    (opened,) = locate_all(asked[1:2], hub, tmp_path, MODELSCOPE_API_TOKEN="key", **environment)
    assert opened == own
    nowhere = environment | {"HF_HUB_OFFLINE": "1", "MODELSCOPE_ENDPOINT": "http://127.0.0.1:9"}
    (again,) = locate_all(asked[:1], hub, tmp_path, **nowhere)
    assert again == own
