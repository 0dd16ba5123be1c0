"""Tokenizer bundles: the same ids as transformers' AutoTokenizer from the same files, and converted only once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from tiny_gguf import save_gguf
from tokenizers import Tokenizer, processors

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import Checkpoint, open_checkpoint
from headrace.executor.checkpoints.tokenizers import sentencepiece_files
from headrace.executor.checkpoints.tokenizers.tokenizer import load_bundle
from headrace.ipc.failure import ModelError
from headrace.ipc.messages import TokenizerBundle

TEXTS = (
    "",
    "Hello, world!",
    "  The headrace carries   the water.\n\n\tIt's what we'll DON'T'VE you'd. \r\n  ",
    "日本語のテキストと中文。한국어도",
    "😀👩‍👩‍👧‍👦 naïve café ﬁn Ångström e\u0301 \u200b\u00a0x",
    "def f(x):\n    return x ** 2  # 3.14159 + 1,000,000\n",
    "<s>special</s> <|im_start|>user\nHi<|im_end|><think>x</think> <repo_name>a",
    "½ ² ① Ⅷ ٣ $5 100% x1y22z333",
    "ALLCAPS CamelCase snake_case http://example.org/a?b=c&d=%20",
)


def open_folder(folder: Path) -> Checkpoint:
    if folder.is_dir() and not (folder / "config.json").exists():
        (folder / "config.json").write_text('{"dtype": "float32"}')
    return open_checkpoint(Options(model=str(folder), load_format="dummy"))


def bundle_of(folder: Path, **options: Any) -> TokenizerBundle:
    bundle = load_bundle(open_folder(folder), Options(model=str(folder), **options))
    assert bundle is not None
    return bundle


def ids_of(bundle: TokenizerBundle, text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_buffer(bundle.tokenizer_json).encode(text).ids
    return ids


def assert_same_ids(bundle: TokenizerBundle, theirs: Any, texts: tuple[str, ...] = TEXTS) -> None:
    for text in texts:
        assert ids_of(bundle, text) == theirs.encode(text), text


def auto_tokenizer(folder: Path, **arguments: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), **arguments)


def save_tokenizer(folder: Path, **config: Any) -> Path:
    """A byte-level tokenizer.json; `config` goes into tokenizer_config.json, where None takes a field out."""
    tiny_models.make_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    fields = {k: v for k, v in (json.loads(path.read_text()) | config).items() if v is not None}
    path.write_text(json.dumps(fields))
    return folder


def test_a_tokenizer_json_is_taken_as_it_is(tmp_path: Path) -> None:
    bundle = bundle_of(save_tokenizer(tmp_path))
    assert bundle.tokenizer_json == (tmp_path / "tokenizer.json").read_bytes()
    assert bundle.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert bundle.chat_templates == {}
    assert_same_ids(bundle, auto_tokenizer(tmp_path))


@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": True, "add_eos_token": True},
        {"added_tokens_decoder": {"7": {"content": "<think>", "special": False, "normalized": False}}},
        {"pad_token": "<|pad|>", "unk_token": {"__type": "AddedToken", "content": "<s>"}},
    ],
    ids=str,
)
def test_tokens_of_the_config_apply_as_in_transformers(config: Mapping[str, Any], tmp_path: Path) -> None:
    bundle = bundle_of(save_tokenizer(tmp_path, **config))
    theirs = auto_tokenizer(tmp_path)
    assert_same_ids(bundle, theirs, (*TEXTS, "a<think>b<|pad|>c"))
    ours = Tokenizer.from_buffer(bundle.tokenizer_json)
    assert ours.get_vocab() == theirs.get_vocab()


def test_what_is_put_around_a_text_is_the_post_processors_to_say(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path, add_bos_token=False) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tiny_models.BOS)])
    tokenizer.save(str(path))
    bundle = bundle_of(tmp_path)
    assert_same_ids(bundle, auto_tokenizer(tmp_path))
    assert ids_of(bundle, "x")[0] == tiny_models.BOS


def test_another_tokenizer_can_be_named_and_none_at_all(tmp_path: Path) -> None:
    model, other = tmp_path / "model", save_tokenizer(tmp_path / "other", bos_token="<|other|>")
    model.mkdir()
    checkpoint = open_folder(model)
    with pytest.raises(
        ModelError, match=r"model holds no tokenizer: none of tokenizer\.json, tokenizer\.model"
    ) as raised:
        load_bundle(checkpoint, Options())
    assert "--skip-tokenizer-init" in raised.value.hint
    assert load_bundle(checkpoint, Options(skip_tokenizer_init=True)) is None
    named = load_bundle(checkpoint, Options(tokenizer=str(other)))
    assert named is not None
    assert named.special_tokens["bos_token"] == "<|other|>"
    with pytest.raises(ModelError, match=r"no model at .*othre \(did you mean .*other\?\)"):
        load_bundle(checkpoint, Options(tokenizer=str(tmp_path / "othre")))


def test_a_damaged_tokenizer_file_is_named(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read by tokenizers"):
        bundle_of(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("nonsense")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read as JSON"):
        bundle_of(tmp_path)


def test_an_older_form_is_converted_by_transformers_and_kept(private_cache: Path, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "model", tokenizer_class="GPT2Tokenizer", chat_template="hello")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    (folder / "tokenizer.json").unlink()
    bundle = bundle_of(folder)
    assert_same_ids(bundle, auto_tokenizer(folder))
    assert bundle.chat_templates == {"default": "hello"}
    assert bundle.special_tokens["eos_token"] == "</s>"
    (kept,) = (private_cache / "converted-tokenizers").iterdir()
    assert load_without_transformers(folder) == len(bundle.tokenizer_json)
    kept.write_bytes(kept.read_bytes()[:100])
    assert bundle_of(folder) == bundle, "a damaged copy is made anew"
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<s>"}')
    assert bundle_of(folder).special_tokens["eos_token"] == "<s>", "other files are another tokenizer"


def test_a_sentencepiece_file_is_told_which_package_reads_it(
    private_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentencepiece_files, "is_installed", lambda name: name != "sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>")
    with pytest.raises(
        ModelError, match=r"reading tokenizer\.model in .* needs sentencepiece.*: pip install sentencepiece"
    ):
        bundle_of(tmp_path)


def load_without_transformers(path: Path) -> int:
    """The size of the bundle's tokenizer, loaded in a new process that must not import transformers."""
    program = (
        "import sys; from headrace.core.options.engine_options import Options; "
        "from headrace.executor.checkpoints.checkpoint import open_checkpoint; "
        "from headrace.executor.checkpoints.tokenizers.tokenizer import load_bundle; "
        "bundle = load_bundle(open_checkpoint(Options(model=sys.argv[1], load_format='dummy')), Options()); "
        "assert 'transformers' not in sys.modules; print(len(bundle.tokenizer_json))"
    )
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, env=dict(os.environ), stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    return int(done.stdout)


def byte_level_metadata(pre: str, **more: Any) -> dict[str, Any]:
    tokenizer = tiny_models.make_tokenizer().backend_tokenizer
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    tokens += ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "[PAD1]"]
    types = [3 if token in ("<s>", "</s>", "<|im_start|>", "<|im_end|>") else 1 for token in tokens]
    types[tokens.index("<think>")] = types[tokens.index("</think>")] = 4
    types[-1] = 5
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.chat_template": "main",
        "tokenizer.chat_template.tools": "with tools",
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


@pytest.mark.parametrize(
    ("pre", "more"),
    [
        ("gpt-2", {}),
        ("qwen2", {"add_bos_token": False}),
        ("llama-bpe", {"add_bos_token": True}),
        ("tekken", {"add_bos_token": True, "add_eos_token": True}),
        ("gpt-4o", {"add_bos_token": True}),
    ],
)
def test_a_byte_level_gguf_tokenizer_gives_the_ids_of_transformers(
    pre: str, more: Mapping[str, Any], private_cache: Path, tmp_path: Path
) -> None:
    path = save_gguf(tiny_models.build("llama"), tmp_path / "m.gguf", tokenizer=byte_level_metadata(pre, **more))
    bundle = bundle_of(path)
    theirs = auto_tokenizer(tmp_path, gguf_file="m.gguf")
    assert_same_ids(bundle, theirs)
    assert bundle.chat_templates == {"default": "main", "tools": "with tools"}
    assert bundle.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (ids_of(bundle, "x")[0] == tiny_models.BOS) == more.get("add_bos_token", False)
    ours = Tokenizer.from_buffer(bundle.tokenizer_json)
    for text in TEXTS:
        cut = theirs.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert ours.pre_tokenizer.pre_tokenize_str(text) == cut, "this vocabulary is too small to show it in ids"
        assert ours.decode(ours.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("deepseek-v3", ["Paying", " ", "123", "45", "元", "don", "'t", " (", "x", ")\n"]),
        ("glm4", ["Paying", " ", "123", "45", "元don", "'t", " (", "x", ")\n"]),
        ("kimi-k2", ["Paying", " ", "123", "45", "元", "don't", " (", "x", ")\n"]),
        ("starcoder", ["Paying", " ", "1", "2", "3", "4", "5", "元don", "'t", " (", "x", ")", "\n"]),
        ("mpt", ["Paying", " 12345", "元don", "'t", " (", "x", ")", "\n"]),
        ("falcon", ["Paying", " ", "123", "45", "元don", "'", "t", " ", "(", "x", ")", "\n"]),
        ("default", ["Paying", " ", "123", "45", "元don", "'", "t", " ", "(", "x", ")", "\n"]),
        ("bloom", ["Paying", " 12345元don't", " (", "x", ")\n"]),
        ("deepseek-coder", ["Paying", " ", "1", "2", "3", "4", "5", "元", "don", "'", "t", " (", "x", ")", "\n"]),
        ("deepseek-llm", ["Paying", " ", "12345", "元", "don", "'", "t", " (", "x", ")", "\n"]),
        ("seed-coder", ["Paying", " ", "1", "2", "3", "4", "5", "元don", "'t", " (", "x", ")", "\n"]),
        ("bailingmoe", ["Paying", " ", "1", "2", "3", "4", "5", "元don", "'t", " (", "x", ")\n"]),
        ("minicpm5", ["Paying", " ", "123", "45", "元don", "'t", " (", "x", ")\n"]),
        ("ufakzeka", ["Paying", " ", "1", "2", "3", "4", "5", "元don", "'t", " (", "x", ")\n"]),
        ("qwen35", ["Paying", " ", "1", "2", "3", "4", "5", "元don", "'t", " (", "x", ")\n"]),
    ],
)
def test_a_gguf_tokenizer_cuts_text_as_its_vocabulary_was_trained(
    pre: str, pieces: list[str], private_cache: Path, tmp_path: Path
) -> None:
    path = save_gguf(tiny_models.build("llama"), tmp_path / "m.gguf", tokenizer=byte_level_metadata(pre))
    text = "Paying 12345元don't (x)\n"
    cut = Tokenizer.from_buffer(bundle_of(path).tokenizer_json).pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in cut] == pieces


def test_a_gguf_tokenizer_whose_way_of_cutting_is_not_known_is_refused(tmp_path: Path) -> None:
    metadata = byte_level_metadata("kimi-k9")
    path = save_gguf(tiny_models.build("llama"), tmp_path / "m.gguf", tokenizer=metadata)
    with pytest.raises(ModelError, match=r"m\.gguf cuts text \(pre-tokenizer kimi-k9\) is not known") as raised:
        bundle_of(path)
    assert "--tokenizer" in raised.value.hint


def test_an_end_that_a_gguf_has_as_text_is_a_control_token(private_cache: Path, tmp_path: Path) -> None:
    metadata = byte_level_metadata("gpt-2")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    types[tokens.index("<|im_end|>")] = 1
    bundle = bundle_of(save_gguf(tiny_models.build("llama"), tmp_path / "m.gguf", tokenizer=metadata))
    assert ids_of(bundle, "<|im_end|>") == [tokens.index("<|im_end|>")]
    assert Tokenizer.from_buffer(bundle.tokenizer_json).decode(ids_of(bundle, "a<|im_end|>")) == "a"


def test_phi3s_tokens_remove_white_space_behind_them(private_cache: Path, tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "<|user|>"]
    metadata = {
        "general.name": "Phi-3-mini",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 1, 1, 3],
        "tokenizer.ggml.add_space_prefix": False,
    }
    model = tiny_models.build("llama", bos_token_id=None, eos_token_id=None)
    bundle = bundle_of(save_gguf(model, tmp_path / "m.gguf", tokenizer=metadata))
    assert [tokens[each] for each in ids_of(bundle, "<|user|>\n  a<s> a")] == ["<s>", "<|user|>", "a", "<s>", "▁", "a"]


def test_a_llama3_gguf_without_the_flag_adds_bos_as_llama_cpp_does(private_cache: Path, tmp_path: Path) -> None:
    path = save_gguf(tiny_models.build("llama"), tmp_path / "m.gguf", tokenizer=byte_level_metadata("llama-bpe"))
    assert ids_of(bundle_of(path), "x")[0] == tiny_models.BOS


def test_a_sentencepiece_gguf_tokenizer_is_converted_once(private_cache: Path, tmp_path: Path) -> None:
    letters = [*"abcdefghijklmnopqrstuvwxyz", "▁"]
    words = ["▁t", "he", "▁the", "in", "er", "▁w", "at", "▁wat", "▁water"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * (259 + len(letters)) + [-float(i) for i in range(len(words))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(letters) + len(words))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    model = tiny_models.build("llama", bos_token_id=None, eos_token_id=None)
    path = save_gguf(model, tmp_path / "m.gguf", tokenizer=metadata)
    bundle = bundle_of(path)
    # transformers loses the first of the spaces with which a text begins, and puts none behind special tokens.
    texts = (*(text for text in TEXTS if not text.startswith((" ", "<s>"))), "the water in the winter")
    assert_same_ids(bundle, auto_tokenizer(tmp_path, gguf_file="m.gguf"), texts)
    space, the = tokens.index("▁"), tokens.index("▁the")
    assert ids_of(bundle, "  the") == [1, space, space, the], "one is put before it"
    assert ids_of(bundle, "the water")[:2] == [1, tokens.index("▁the")]
    assert ids_of(bundle, "the</s>the") == [1, the, 2, the], "text begins anew behind a special token, as in llama.cpp"
    copy = tmp_path / "elsewhere" / "copy.gguf"
    copy.parent.mkdir()
    path.rename(copy)
    assert load_without_transformers(copy) == len(bundle.tokenizer_json)


def test_a_gguf_without_a_tokenizer_is_told_so(tmp_path: Path) -> None:
    path = save_gguf(tiny_models.build("llama"), tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"m\.gguf has no tokenizer \(tokenizer\.ggml\.model and"):
        bundle_of(path)
    other = save_gguf(tiny_models.build("llama"), tmp_path / "o.gguf", tokenizer=byte_level_metadata("gpt-2"))
    assert load_bundle(open_folder(path), Options(tokenizer=str(other))) == bundle_of(other)


@pytest.mark.demo_model
@pytest.mark.system
def test_the_demo_models_tokenizer_gives_the_ids_of_transformers(demo_model_path: Path, private_cache: Path) -> None:
    load_without_transformers(demo_model_path)  # not even for the first conversion
    bundle = bundle_of(demo_model_path)
    theirs = auto_tokenizer(demo_model_path.parent, gguf_file=demo_model_path.name)
    # transformers does not know how this vocabulary cuts digits, which shows after more than one space (see below).
    assert_same_ids(bundle, theirs, tuple(text for text in TEXTS if not text.startswith("½")))
    assert bundle.special_tokens == {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>",
    }  # fmt: skip
    assert bundle.chat_templates["default"] == theirs.chat_template


@pytest.mark.demo_model
def test_the_demo_models_digits_are_cut_apart_as_its_vocabulary_was_trained(
    demo_model_path: Path, private_cache: Path
) -> None:
    tokenizer = Tokenizer.from_buffer(bundle_of(demo_model_path).tokenizer_json)
    assert not any("Ġ1" in token or "12" in token for token in tokenizer.get_vocab())
    assert tokenizer.encode("  12").tokens == ["ĠĠ", "1", "2"]
    assert tokenizer.encode("a\n\n 1").tokens == ["a", "ĊĊĠ", "1"]
