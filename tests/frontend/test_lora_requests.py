"""What users say of LoRA adapters, before any engine is asked: LoRARequest, --lora-modules, and the resolvers."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import InvalidRequestError, LoRARequest, OptionError
from headrace.frontend.adapters import hub_resolver
from headrace.frontend.adapters.folder_resolver import FilesystemResolver
from headrace.frontend.adapters.hub_resolver import HfHubResolver
from headrace.frontend.adapters.lora_modules import LoRAModulePath, parse_lora_modules
from headrace.frontend.adapters.resolver import LoRAResolver, LoRAResolverRegistry
from headrace.frontend.request.lora_request import lora_requests_for
from headrace.ipc.adapters import AdapterUse

BASE = "org/model"


def test_a_request_has_vllms_fields_and_is_equal_by_name(tmp_path: Path) -> None:
    request = LoRARequest("sql", 1, str(tmp_path))
    assert (request.name, request.adapter_id, request.path) == ("sql", 1, str(tmp_path))
    assert (request.load_inplace, request.is_3d_lora_weight, request.base_model_name) == (False, False, None)
    assert request == LoRARequest("sql", 2, "/elsewhere")
    assert request != LoRARequest("chat", 1, str(tmp_path))
    assert len({request, LoRARequest("sql", 3), LoRARequest("chat", 1)}) == 2
    number = LoRARequest("a", np.int64(7)).lora_int_id
    assert (number, type(number)) == (7, int)
    assert LoRARequest(lora_name="a", lora_int_id=1, lora_local_path="/a").lora_path == "/a", "vLLM's former name"


def test_a_path_of_this_machine_reaches_the_engine_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapter").mkdir()
    assert LoRARequest("a", 1, "adapter").use == AdapterUse(name="a", path=str(tmp_path / "adapter"))
    assert LoRARequest("a", 1, "org/adapter").use.path == "org/adapter", "the name of a repository"
    assert LoRARequest("a", 1).use.path == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_int_id": 0}, "lora_int_id = 0: id must be > 0"),
        ({"lora_int_id": True}, "lora_int_id = True"),
        ({"lora_int_id": "1"}, "lora_int_id = '1': must be an integer"),
        ({"lora_name": ""}, "lora_name = ''"),
        ({"lora_name": "n" * 5000}, "lora_name = 'nnn.*: has 5000 characters, and at most 4096 are taken"),
        ({"lora_path": "p" * 5000}, "lora_path = 'ppp.*: has 5000 characters, and at most 4096 are taken"),
        ({"load_inplace": "yes"}, "load_inplace = 'yes': must be True or False"),
        ({"is_3d_lora_weight": 3}, "is_3d_lora_weight = 3: must be True or False"),
        ({"base_model_name": 7}, "base_model_name = 7: must be a text"),
        ({"lora_path": 7}, "lora_path = 7: must be the path"),
        ({"tensorizer_config_dict": {}}, "tensorizer_config_dict = {}: is not supported"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        LoRARequest(**{"lora_name": "a", "lora_int_id": 1, "lora_path": "/a", **fields})


def test_one_request_is_for_all_prompts_and_a_list_has_one_for_each() -> None:
    one, other = LoRARequest("a", 1, "/a"), LoRARequest("b", 2, "/b")
    assert list(lora_requests_for(one, 2)) == [one, one]
    assert list(lora_requests_for(None, 2)) == [None, None]
    assert list(lora_requests_for([one, None, other], 3)) == [one, None, other]
    with pytest.raises(InvalidRequestError, match="there are 2 prompts and 1 lora_requests"):
        lora_requests_for([one], 2)
    for wrong in (object(), "sql", [one, "sql"], {"lora_name": "a"}):
        with pytest.raises(InvalidRequestError, match="lora_request must be a LoRARequest"):
            lora_requests_for(wrong, 2)


def test_modules_are_pairs_or_json() -> None:
    given = ("sql=/a=b", '{"name": "chat", "path": "/c", "base_model_name": "m"}', '[{"name": "d", "path": "/d"}]')
    sql, chat, third = parse_lora_modules(given)
    assert sql == LoRAModulePath("sql", "/a=b")
    assert chat == LoRAModulePath("chat", "/c", "m")
    assert third.is_3d_lora_weight is False


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("sql",), "it must be NAME=PATH, or JSON"),
        (("=/a",), "a name and a path are needed"),
        (("sql=",), "a name and a path are needed"),
        (("a=/a", "a=/b"), "there is an adapter 'a' already"),
        (('{"name": "a"}',), "missing required field `path`"),
        (('{"name": "a", "path": "/a", "rank": 4}',), "unknown field `rank`"),
        (('{"name": ',), "it must be NAME=PATH, or JSON"),
    ],
)
def test_a_module_in_another_form_is_refused(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_lora_modules(given)


def adapter_in(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    told = {"peft_type": "LORA", "base_model_name_or_path": BASE, **config}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


def resolved(resolver: LoRAResolver, name: str, base: str = BASE) -> str | None:
    found = asyncio.run(resolver.resolve_lora(base, name))
    return None if found is None else found.lora_path


def test_the_folders_resolver_finds_what_fits_the_model(tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    resolver = FilesystemResolver(str(shelf))
    assert resolved(resolver, "sql") is None, "there is not even the folder"
    adapter_in(shelf / "sql")
    adapter_in(shelf / "team" / "chat")
    adapter_in(shelf / "other", base_model_name_or_path="org/other")
    adapter_in(shelf / "prompts", peft_type="PROMPT_TUNING")
    (adapter_in(shelf / "broken") / "adapter_config.json").write_text("{")
    assert resolved(resolver, "sql") == str(shelf / "sql")
    assert resolved(resolver, "team/chat") == str(shelf / "team" / "chat")
    (adapter_in(shelf / "deep") / "adapter_config.json").write_text("[" * 100_000)
    (file := adapter_in(shelf / "pipe") / "adapter_config.json").unlink()
    os.mkfifo(file)
    with (adapter_in(shelf / "large") / "adapter_config.json").open("r+b") as large:
        large.truncate(1 << 40)
    for name in ("other", "prompts", "broken", "missing", "deep", "pipe", "large"):
        assert resolved(resolver, name) is None
    assert resolved(resolver, "other", "org/other") == str(shelf / "other")


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/out", "a//b", ".", "", "a\0b", "..\\out", "out/."])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    adapter_in(tmp_path / "out")
    assert resolved(FilesystemResolver(str(shelf)), name.replace("/out", f"{tmp_path}/out", 1)) is None
    assert resolved(FilesystemResolver(str(shelf)), name) is None


def test_a_base_named_by_its_folder_is_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "model")
    adapter_in(tmp_path / "shelf" / "a", base_model_name_or_path=str(tmp_path / "link"))
    resolver = FilesystemResolver(str(tmp_path / "shelf"))
    assert resolved(resolver, "a", str(tmp_path / "model")) is not None
    assert resolved(resolver, "a", str(tmp_path / "elsewhere")) is None


class Hub:
    """Of one repository, whose files are in a folder."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        import huggingface_hub

        self.folder = folder
        self.listed: list[str] = []
        self.fetched: list[list[str]] = []
        self.error: Exception | None = None
        patch.setattr(huggingface_hub, "list_repo_files", self.list_files)
        patch.setattr(huggingface_hub, "snapshot_download", self.download)

    def list_files(self, repo: str) -> list[str]:
        self.listed.append(repo)
        if self.error is not None:
            raise self.error
        return [str(each.relative_to(self.folder)) for each in self.folder.rglob("*") if each.is_file()]

    def download(self, repo: str, *, allow_patterns: list[str]) -> str:
        assert repo == "org/adapters"
        self.fetched.append(allow_patterns)
        return str(self.folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    adapter_in(tmp_path / "sql")
    return Hub(tmp_path, monkeypatch)


def test_the_hubs_resolver_asks_for_named_repositories_alone(hub: Hub) -> None:
    resolver = HfHubResolver(["org/adapters"])
    for name in ("org/others/sql", "org/adaptersX/sql", "org/adapters/../sql", "sql"):
        assert resolved(resolver, name) is None
    assert not hub.listed, "no other repository is asked for anything"
    assert resolved(resolver, "org/adapters/sql") == str(hub.folder / "sql")
    assert hub.listed == ["org/adapters"]
    assert hub.fetched == [["sql/adapter_config.json", "sql/adapter_model.*"]]


def test_names_that_clients_make_up_cost_no_requests(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = HfHubResolver(["org/adapters"])

    async def flood() -> None:
        for _ in range(2):
            asked = [resolver.resolve_lora(BASE, f"org/adapters/made/up/{each}") for each in range(200)]
            assert not any(await asyncio.gather(*asked))

    asyncio.run(flood())
    assert len(hub.listed) == 1
    assert not hub.fetched
    for _ in range(3):  # of another model: it is refused by its config, and not fetched each time
        assert resolved(resolver, "org/adapters/sql", "another") is None
    assert len(hub.fetched) == 1
    adapter_in(hub.folder / "new")
    assert resolved(resolver, "org/adapters/new") is None
    monkeypatch.setattr(hub_resolver, "REMEMBERED_S", 0.0)
    assert resolved(resolver, "org/adapters/new") == str(hub.folder / "new"), "what is added is found later"
    assert len(hub.listed) == 2


def test_a_hub_that_does_not_answer_is_no_error(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = HfHubResolver(["org/adapters"])
    hub.error = ConnectionError("no network")
    for name in ("org/adapters", "org/adapters/sql"):
        assert resolved(resolver, name) is None
    assert len(hub.listed) == 1, "nor is it asked again for each name"
    monkeypatch.setattr(hub_resolver, "FAILED_S", 0.0)
    resolver = HfHubResolver(["org/adapters"])
    assert resolved(resolver, "org/adapters/sql") is None
    hub.error = None
    assert resolved(resolver, "org/adapters/sql") == str(hub.folder / "sql"), "it is asked again sooner"


def test_the_registry_has_vllms_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoRAResolverRegistry, "resolvers", {})
    mine = FilesystemResolver("/shelf")
    LoRAResolverRegistry.register_resolver("mine", mine)
    assert LoRAResolverRegistry.get_supported_resolvers() == {"mine"}
    assert LoRAResolverRegistry.get_resolver("mine") is mine
    with pytest.raises(KeyError, match=r"'other' not found. Available resolvers: mine"):
        LoRAResolverRegistry.get_resolver("other")
