"""Code that a model brings: of which repository and revision it is, and that the token reaches it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from fake_hub import serve_hub

TOKEN = "hf_DoNotTell"
CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

from .names import MODEL_TYPE


class OwnConfig(LlamaConfig):
    model_type = MODEL_TYPE


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, **arguments):
        found = super().forward(**arguments)
        found.logits = SIGN * found.logits
        return found
"""
SMALL: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1 << 20, "trust_remote_code": True, "hf_token": TOKEN,
}  # fmt: skip


def code(sign: str) -> dict[str, bytes]:
    return {"own.py": CODE.replace("SIGN", sign).encode(), "names.py": b'MODEL_TYPE = "own"\n'}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a Llama model, which the hub has with code of its own. Environment: that hub, an empty cache."""
    llama = tiny_models.save("llama", tmp_path / "llama")
    config = json.loads((llama / "config.json").read_text())
    config |= {"architectures": ["OwnForCausalLM"], "model_type": "own"}
    files = {file.name: file.read_bytes() for file in llama.iterdir()}

    def model(source: str, parts: dict[str, bytes]) -> dict[str, bytes]:
        classes = {"AutoConfig": f"{source}own.OwnConfig", "AutoModelForCausalLM": f"{source}own.OwnForCausalLM"}
        return files | {"config.json": json.dumps(config | {"auto_map": classes}).encode()} | parts

    repositories = {
        "mills/own": {"main": model("", code("1")), "turned": model("", code("-1"))},
        "mills/weights": {"main": model("mills/code--", {})},
        "mills/code": {"main": code("1"), "turned": code("-1")},
    }
    with serve_hub(repositories, dict.fromkeys(repositories, TOKEN)) as address:
        for name in [name for name in os.environ if name.startswith(("HF_", "HUGGINGFACE"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        yield llama


def answers(*asked: tuple[str, dict[str, Any]]) -> list[Any]:
    """Of each model with its options, its tokens, or why it is refused.

    In one process that knows this environment, as transformers is long to import.
    """
    wanted = json.dumps([[model, SMALL | options] for model, options in asked])
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=wanted, capture_output=True, text=True, timeout=200, check=False
    )
    assert program.returncode == 0, program.stderr
    found: list[Any] = json.loads(program.stdout.splitlines()[-1])
    return found


PROGRAM = """
import json, sys
from headrace import HeadraceError, LLM, SamplingParams

found = []
for model, options in json.load(sys.stdin):
    try:
        with LLM(model, in_process=True, **options) as llm:
            (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
        found.append(list(output.outputs[0].token_ids))
    except HeadraceError as error:
        found.append(f"{error} {error.hint}")
print(json.dumps(found))
"""


@pytest.mark.system
def test_code_is_of_the_revision_that_is_named_in_its_own_repository_or_another(hub: Path) -> None:
    turned = {"code_revision": "turned"}
    straight, *found = answers(
        *((str(hub), {}), ("mills/own", {}), ("mills/weights", {})),
        *(("mills/own", turned), ("mills/own", {"revision": "turned"}), ("mills/weights", turned)),
    )
    assert found[2] != straight
    assert found == [straight] * 2 + [found[2]] * 3


def test_what_has_no_such_code_is_refused(hub: Path) -> None:
    config = json.loads((hub / "config.json").read_text())
    config |= {"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (hub / "config.json").write_text(json.dumps(config))
    untrusted, missing, private, folder = answers(
        ("mills/own", {"code_revision": "turned", "trust_remote_code": False}),
        ("mills/own", {"code_revision": "nowhere"}),
        ("mills/own", {"hf_token": "hf_WrongOne"}),
        (str(hub), {"code_revision": "main"}),
    )
    assert "code_revision=turned is of code that the model brings" in untrusted
    assert re.search("the code of mills/own in mills/own: .*no branch, tag or commit nowhere", missing)
    assert "there is no mills/own, or it is private" in private
    assert "hf_WrongOne" not in private
    assert re.search("code_revision=main is for models on the hub only; .* has its own code", folder)


@pytest.mark.system
def test_code_that_others_can_have_changed_in_a_cache_is_not_run(
    hub: Path, private_cache: Path, tmp_path: Path
) -> None:
    models: tuple[tuple[str, dict[str, Any]], ...] = (("mills/own", {}), ("mills/weights", {}))
    straight = answers(*models)
    assembled = list(private_cache.glob("remote_code/*/own.py"))
    fetched = [file.resolve() for file in (tmp_path / "home" / "hub").rglob("own.py")]
    imported = list((tmp_path / "home" / "modules").rglob("own.py"))
    assert assembled
    assert fetched
    assert imported
    for file in (*assembled, *fetched, *imported):
        status = file.stat()
        file.write_bytes(file.read_bytes().replace(b"1 *", b"0 *"))  # of the same size and time, as far as one can see
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        file.chmod(0o666)
    assert answers(*models) == straight
