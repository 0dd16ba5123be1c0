"""tekken.json, Mistral's tokenizers: the tokens of tiktoken's rule behind the special ones, and the library's chat
templates, which must give its own tokens."""

from __future__ import annotations

import base64
import json
import re
import sys
from importlib import metadata, util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_tiktoken_files import TEXTS, by_rank, trained_ranks

from headrace.core.options.parsing import parse_options
from headrace.executor.checkpoints.checkpoint import Checkpoint
from headrace.executor.checkpoints.tokenizers import mistral
from headrace.executor.checkpoints.tokenizers.mistral.tekken import FIRST_SPECIAL
from headrace.executor.checkpoints.tokenizers.tokenizer import load_bundle
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.extras import how_to_install
from headrace.ipc.failure import ModelError, OptionError

PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_SPECIAL, SIZE = 30, 400
MORE_SPECIAL = ("[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
HAS_LIBRARY = util.find_spec(mistral.LIBRARY) is not None
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
CALL: Any = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Ulm"}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "  What's the weather in Ulm?\n"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "weather", "content": "12 degrees, 水"},
    {"role": "assistant", "content": "It is 12."},
    {"role": "user", "content": "And tomorrow?"},
]


def save_tekken(folder: Path, version: str = "v3", **changed: Any) -> dict[bytes, int]:
    """Writes the file, with more tokens than its vocabulary takes; gives the ranks of those that it takes."""
    ranks = trained_ranks(PATTERN, SIZE + 10)
    entries = [{"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
               for token, rank in ranks.items()]  # fmt: skip
    config = {"pattern": PATTERN, "num_vocab_tokens": len(entries), "default_vocab_size": SIZE + NUM_SPECIAL,
              "default_num_special_tokens": NUM_SPECIAL, "version": version} | changed  # fmt: skip
    content: dict[str, Any] = {"config": config, "vocab": entries}
    if version != "v3":
        names = (*FIRST_SPECIAL, *MORE_SPECIAL[: 4 if version == "v13" else 2])
        content["special_tokens"] = [
            {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)
        ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / mistral.TEKKEN).write_text(json.dumps(content))
    return {token: rank for token, rank in ranks.items() if rank < SIZE}


def load(folder: Path, mode: str = "auto") -> Tokenizer:
    checkpoint = Checkpoint(
        name="mill", path=folder, format="dummy", config={}, dtype_name="float32", generation_config={},
        eos_token_ids=(),
    )  # fmt: skip
    bundle = load_bundle(checkpoint, parse_options(tokenizer_mode=mode))
    assert bundle is not None
    return Tokenizer(bundle)


def put_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that makes a template of the file's name."""
    modules = {name: ModuleType(name) for name in ("mistral_common", "mistral_common.integrations")}
    modules["mistral_common"].__spec__ = util.spec_from_loader("mistral_common", None)
    name = "mistral_common.integrations.chat_templates"
    modules[name], modules[f"{name}.chat_templates"] = ModuleType(name), ModuleType(f"{name}.chat_templates")
    vars(modules[f"{name}.chat_templates"])["convert_tokenizer_to_chat_template"] = lambda path: (
        "{{ bos_token }}[INST]{{ messages[0].content }}[/INST] of " + Path(path).name
    )
    for each, module in modules.items():
        monkeypatch.setitem(sys.modules, each, module)
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda each: "0" if each == "mistral_common" else version(each))


def test_text_becomes_the_tokens_of_tiktokens_rule_behind_the_special_ones(tmp_path: Path, private_cache: Path) -> None:
    ranks = save_tekken(tmp_path)
    tokenizer = load(tmp_path)
    for text in TEXTS:
        found = tokenizer.encode(text, add_special_tokens=False)
        assert found == [NUM_SPECIAL + rank for rank in by_rank(PATTERN, ranks, text)], text
        assert tokenizer.decode(found) == text
    assert tokenizer.encode("a") == [1, NUM_SPECIAL + ord("a")], "a prompt begins with <s>"
    assert tokenizer.encode("[INST]a</s>", add_special_tokens=False) == [3, NUM_SPECIAL + ord("a"), 2]
    assert tokenizer.convert_ids_to_tokens([19, 20, 29]) == ["[TOOL_CONTENT]", "<SPECIAL_20>", "<SPECIAL_29>"]
    assert len(tokenizer) == SIZE + NUM_SPECIAL
    assert tokenizer.special_tokens_map == mistral.ROLES


def test_the_mode_takes_the_librarys_template_and_auto_the_folders(
    tmp_path: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_library(monkeypatch)
    save_tekken(tmp_path)
    prompt = [1, 3, NUM_SPECIAL + ord("a"), 4]
    message = [{"role": "user", "content": "a"}]
    assert load(tmp_path).apply_chat_template(message)[:4] == prompt
    (tmp_path / "chat_template.jinja").write_text("[INST]{{ messages[0].content }}")
    assert load(tmp_path).apply_chat_template(message) == prompt[1:3]
    (tmp_path / "tokenizer.json").write_text("{}")
    assert load(tmp_path, "mistral").apply_chat_template(message)[:4] == prompt
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        load(tmp_path, "hf")


def test_what_the_mode_lacks_is_named(tmp_path: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        OptionError, match=r"tokenizer_mode=mistral reads tekken\.json or tokenizer\.model\.v1 to v7, and .* has none"
    ):
        load(tmp_path, "mistral")
    save_tekken(tmp_path)
    monkeypatch.setattr(mistral, "LIBRARY", "not_a_package")
    with pytest.raises(OptionError, match="not_a_package, .*" + re.escape(how_to_install("mistral"))):
        load(tmp_path, "mistral")
    assert load(tmp_path).chat_template_names == (), "auto does without"
    with pytest.raises(OptionError, match="tokenizer_mode=slow: the fast tokenizer is the only kind"):
        parse_options(tokenizer_mode="slow")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"default_vocab_size": 10_000}, "has 410 tokens and 20 special ones; its config says 9970 and 30"),
        (
            {"default_num_special_tokens": 5, "default_vocab_size": 405},
            "and 20 special ones; .* says 400 and 5",
        ),
        ({"pattern": "(("}, "is not sound"),
        ({"default_num_special_tokens": None}, "is no tokenizer of Mistral's: TypeError"),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    changed: dict[str, Any], reason: str, tmp_path: Path, private_cache: Path
) -> None:
    save_tekken(tmp_path, **changed)
    with pytest.raises(ModelError, match=reason):
        load(tmp_path)


@pytest.mark.skipif(not HAS_LIBRARY, reason="mistral_common is not installed")
@pytest.mark.parametrize("version", ["v3", "v7", "v11", "v13"])
def test_conversations_become_the_tokens_of_mistral_common(version: str, tmp_path: Path, private_cache: Path) -> None:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    save_tekken(tmp_path, version)
    tokenizer, theirs = load(tmp_path, "mistral"), MistralTokenizer.from_file(tmp_path / mistral.TEKKEN)
    for text in TEXTS:
        expected = theirs.instruct_tokenizer.tokenizer.encode(text, bos=True, eos=False)
        assert tokenizer.encode(text) == expected
    for num_messages, tools in ((2, None), (2, [WEATHER]), (4, [WEATHER]), (6, [WEATHER]), (6, None)):
        messages = CHAT[:num_messages]
        request = ChatCompletionRequest.from_openai(messages, tools)
        expected = theirs.encode_chat_completion(request).tokens
        found = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
        assert found == expected, (tokenizer.decode(found), tokenizer.decode(expected))
