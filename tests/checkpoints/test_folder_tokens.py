"""What the files of a folder say together, as in transformers: special and added tokens, chat templates, prefixes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from test_tokenizer_bundle import TEXTS, auto_tokenizer, bundle_of, ids_of, open_folder, save_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.tokenizers.text_flags import BYTE_LEVEL
from headrace.executor.checkpoints.tokenizers.tokenizer import end_of_tokenizer
from headrace.executor.checkpoints.tokenizers.tokenizer_keys import TOKEN_FLAGS
from headrace.frontend.text import tokenizer as frontend
from headrace.ipc.failure import ModelError

MARKED = ("a<think>b</think>c", "x <|tool|>\n y", "<|image|><|pad|>")
TOKEN = {"__type": "AddedToken", "content": "<|tool|>", "special": True, "lstrip": True, "rstrip": True}


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def assert_as_transformers(folder: Path) -> None:
    """The same vocabulary, ids, texts without special tokens, and roles."""
    bundle, theirs = bundle_of(folder), auto_tokenizer(folder)
    ours = frontend.Tokenizer(bundle)
    assert ours.get_vocab() == theirs.get_vocab()
    for text in (*TEXTS, *MARKED):
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True), text
    roles = {name: str(token) for name, token in theirs.special_tokens_map.items() if token is not None}
    assert bundle.special_tokens == roles


@pytest.mark.parametrize(
    "files",
    [
        {"added_tokens.json": {"<think>": 320, "</think>": 321, "<|tool|>": 322}},
        {"tokenizer_config.json": {"additional_special_tokens": ["<think>", "<|tool|>"]}},
        {"tokenizer_config.json": {"additional_special_tokens": [TOKEN, "<|image|>"]}},
        {"tokenizer_config.json": {"extra_special_tokens": ["<|tool|>"]}},
        {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<|image|>", "boi_token": "<think>"}}},
        {"tokenizer_config.json": {"image_token": "<|image|>", "mask_token": TOKEN}},
        {"special_tokens_map.json": {"eos_token": "<|tool|>", "pad_token": {"content": "<|pad|>", "rstrip": True}}},
        {"special_tokens_map.json": {"additional_special_tokens": ["<|image|>"]}},
    ],
    ids=str,
)
def test_tokens_are_found_in_every_file(files: Mapping[str, Any], tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    for name, content in files.items():
        held = json.loads((tmp_path / name).read_text()) if (tmp_path / name).exists() else {}
        write(tmp_path, name, {**held, **content})
    assert_as_transformers(tmp_path)


def test_an_added_token_is_hidden_if_another_file_names_it_as_special(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    write(tmp_path, "added_tokens.json", {"<|tool|>": 320, "<think>": 321})
    write(tmp_path, "special_tokens_map.json", {"additional_special_tokens": ["<|tool|>"]})
    ours = frontend.Tokenizer(bundle_of(tmp_path))
    assert ours.decode(ours.encode("a<|tool|>b<think>c"), skip_special_tokens=True) == "ab<think>c"


def test_what_tokenizer_json_says_of_a_token_stays(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path, additional_special_tokens=["<|tool|>"]) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([AddedToken("<|tool|>", special=False), AddedToken("<think>", special=False)])
    tokenizer.save(str(path))
    assert_as_transformers(tmp_path)


@pytest.mark.parametrize("flag", [*TOKEN_FLAGS, "special"])
@pytest.mark.parametrize("name", [None, "PreTrainedTokenizerFast", "GPT2Tokenizer"])
def test_the_flags_of_a_listed_token_come_before_those_of_tokenizer_json(
    name: str | None, flag: str, tmp_path: Path
) -> None:
    listed = {"320": {"content": "tool", "special": False, **dict.fromkeys(TOKEN_FLAGS, False), flag: True}}
    path = save_tokenizer(tmp_path, tokenizer_class=name, added_tokens_decoder=listed) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.Lowercase() if name != "GPT2Tokenizer" else None  # which the class drops
    tokenizer.add_tokens([AddedToken("tool", special=False, normalized=False)])
    tokenizer.save(str(path))
    ours, theirs = frontend.Tokenizer(bundle_of(tmp_path)), auto_tokenizer(tmp_path)
    for text in ("a tool b", "tools", "a TOOL", "tool tool"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True), text


def test_a_token_with_a_role_is_special(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path, pad_token="<|tool|>") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([AddedToken("<|tool|>", special=False)])
    tokenizer.save(str(path))
    ours, theirs = frontend.Tokenizer(bundle_of(tmp_path)), auto_tokenizer(tmp_path)
    ids = ours.encode("a<|tool|>b")
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True) == "ab"


@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2TokenizerFast"])
@pytest.mark.parametrize("ends", [{}, {"eos_token": "<s>"}, {"bos_token": "<s>"}])
def test_ends_that_no_file_names_are_those_of_the_class(
    name: str, ends: dict[str, Any], tmp_path: Path, private_cache: Path
) -> None:
    if name.startswith("Llama"):
        sentencepiece_json(tmp_path, "first")
    else:
        save_tokenizer(tmp_path)
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        tokenizer.add_special_tokens(["<|endoftext|>"])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": name, **ends})
    theirs, found = auto_tokenizer(tmp_path), bundle_of(tmp_path).special_tokens
    assert (found.get("bos_token"), found.get("eos_token")) == (theirs.bos_token, theirs.eos_token)
    assert end_of_tokenizer(open_folder(tmp_path), Options(model=str(tmp_path))) == theirs.eos_token_id


def test_an_end_of_the_class_that_the_vocabulary_lacks_is_none(tmp_path: Path, private_cache: Path) -> None:
    save_tokenizer(tmp_path, tokenizer_class="GPT2Tokenizer", eos_token=None)
    assert bundle_of(tmp_path).special_tokens == {"bos_token": "<s>"}
    assert end_of_tokenizer(open_folder(tmp_path), Options(model=str(tmp_path))) is None


def test_the_older_file_says_less_where_the_config_lists_its_tokens(tmp_path: Path) -> None:
    listed = {"0": {"content": "<s>", "special": True}, "1": {"content": "</s>", "special": True}}
    save_tokenizer(tmp_path, bos_token=None, eos_token="</s>", added_tokens_decoder=listed)
    write(tmp_path, "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": "<s>"})
    write(tmp_path, "added_tokens.json", {"<think>": 320})
    bundle = bundle_of(tmp_path)
    assert bundle.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert auto_tokenizer(tmp_path).eos_token == "</s>"
    assert Tokenizer.from_buffer(bundle.tokenizer_json).token_to_id("<think>") is None


def test_a_token_stands_at_the_id_that_is_listed(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    size = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size()
    write(tmp_path, "added_tokens.json", {"<|tool|>": size + 3, "<think>": size + 1})
    assert ids_of(bundle_of(tmp_path), "<think><|tool|>") == [size + 1, size + 3]
    write(tmp_path, "added_tokens.json", {"<|tool|>": size + 10**9})
    with pytest.raises(ModelError, match=r"the token '<\|tool\|>' is listed at 1000000\d+, of \d+ tokens"):
        bundle_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("added_tokens.json", {"<think>": "7"}, r"added_tokens\.json has '<think>': '7'; a token id is expected"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, r"added_tokens_decoder is \[\]; an object is expected"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}, "added_tokens_decoder has 'x': {}"),
        ("tokenizer_config.json", {"extra_special_tokens": 3}, "extra_special_tokens is 3; a list of tokens or"),
        ("tokenizer_config.json", {"additional_special_tokens": [3]}, "additional_special_tokens is 3; a token's text"),
        ("tokenizer_config.json", {"chat_template": 3}, "chat_template is 3; a text or a list of named templates is"),
        ("tokenizer_config.json", {"chat_template": [{"name": "a"}]}, "an entry of chat_template is {'name': 'a'}"),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["tokenizer.4.0.json"]}, "only tokenizer.json is read"),
    ],
)
def test_what_is_no_token_or_template_is_refused(name: str, content: Any, message: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    write(tmp_path, name, content)
    with pytest.raises(ModelError, match=message):
        bundle_of(tmp_path)


LIST = [{"name": "default", "template": "of the list"}, {"name": "tool_use", "template": "tools of the list"}]


@pytest.mark.parametrize(
    ("files", "usual"),
    [
        ({"tokenizer_config.json": {"chat_template": "config"}}, "config"),
        ({"tokenizer_config.json": {"chat_template": LIST}}, "of the list"),
        ({"tokenizer_config.json": {"chat_template": "config"}, "chat_template.jinja": "jinja"}, "jinja"),
        ({"tokenizer_config.json": {"chat_template": LIST}, "chat_template.jinja": "jinja"}, "jinja"),
        ({"chat_template.jinja": "jinja", "additional_chat_templates/rag.jinja": "rag"}, "jinja"),
        (
            {
                "tokenizer_config.json": {"chat_template": LIST},
                "chat_template.jinja": "jinja",
                "additional_chat_templates/tool_use.jinja": "tools",
            },
            "jinja",
        ),
        (
            {"tokenizer_config.json": {"chat_template": "config"}, "chat_template.json": {"chat_template": "j"}},
            "config",
        ),
        ({"chat_template.jinja": "jinja", "chat_template.json": {"chat_template": "j"}}, "jinja"),
    ],
    ids=str,
)
def test_the_chat_template_is_the_one_that_transformers_takes(
    files: Mapping[str, Any], usual: str, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path)
    for name, content in files.items():
        write(tmp_path, name, content)
    found, theirs = bundle_of(tmp_path).chat_templates, auto_tokenizer(tmp_path).chat_template
    assert found == (theirs if isinstance(theirs, dict) else {"default": theirs})
    assert found["default"] == usual


def test_a_processors_chat_template_comes_first(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    write(tmp_path, "chat_template.json", {"chat_template": "legacy"})
    assert bundle_of(tmp_path).chat_templates == {"default": "legacy"}, "there is no other"
    write(tmp_path, "chat_template.jinja", "jinja")
    write(tmp_path, "preprocessor_config.json", {"image_processor_type": "ViTImageProcessor"})
    assert bundle_of(tmp_path).chat_templates == {"default": "legacy"}
    write(tmp_path, "processor_config.json", {"processor_class": "LlavaProcessor", "chat_template": "processor"})
    assert bundle_of(tmp_path).chat_templates == {"default": "processor"}


def test_special_tokens_may_be_read_as_text(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, split_special_tokens=True, chat_template="{{ eos_token }}")
    ours, theirs = frontend.Tokenizer(bundle_of(tmp_path)), auto_tokenizer(tmp_path)
    for text in (*TEXTS, "</s>"):
        assert ours.encode(text) == theirs.encode(text), text
    assert tiny_models.EOS not in ours.encode("</s>")
    hello = [{"role": "user", "content": "Hello"}]
    rendered = theirs.apply_chat_template(hello, return_dict=False)
    assert ours.apply_chat_template(hello) == rendered == ours.encode_batch(["</s>"])[0]


def sentencepiece_json(folder: Path, kind: str, **config: Any) -> None:
    """A folder with a tokenizer.json as it was made of SentencePiece models, now or before Metaspace was used."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdHelo", "▁H", "▁He"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "H"), ("▁H", "e")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if kind == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=kind, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", **config})
    write(folder, "config.json", {"model_type": "llama", "dtype": "float32", "architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize("kind", ["normalizer", "first", "always", "never"])
@pytest.mark.parametrize(
    "flags", [{"add_prefix_space": False}, {"add_prefix_space": True}, {"legacy": True}, {"legacy": False}]
)
def test_llamas_flags_say_where_a_space_is_put_as_in_transformers(
    kind: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    sentencepiece_json(tmp_path, kind, tokenizer_class="LlamaTokenizer", **flags)
    bundle, theirs = bundle_of(tmp_path), auto_tokenizer(tmp_path)
    for text in ("Hello", "a</s>Hello", "</s>Hello", "a b  c", "Hello</s>", ""):
        assert ids_of(bundle, text) == theirs.encode(text), text


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "LlamaTokenizer"])
def test_without_a_flag_tokenizer_json_says_it(name: str, tmp_path: Path) -> None:
    sentencepiece_json(tmp_path, "normalizer", tokenizer_class=name)
    assert bundle_of(tmp_path).tokenizer_json == (tmp_path / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("name", [*BYTE_LEVEL, "GPT2TokenizerFast", "PreTrainedTokenizerFast"])
def test_a_byte_level_tokenizers_prefix_is_as_in_transformers(
    name: str, asked: bool | None, stored: bool, tmp_path: Path
) -> None:
    path = save_tokenizer(tmp_path, tokenizer_class=name, add_prefix_space=asked) / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["add_prefix_space"] = stored
    path.write_text(json.dumps(content))
    ours, theirs = frontend.Tokenizer(bundle_of(tmp_path)), auto_tokenizer(tmp_path)
    for text in ("The mill", " The", ""):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("flags", [{}, {"add_prefix_space": False}, {"add_prefix_space": True}, {"legacy": True}])
@pytest.mark.parametrize("scheme", ["always", "never"])
def test_xlm_rs_flag_says_where_a_space_is_put_as_in_transformers(
    scheme: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", "a", "b", "▁a", "▁b", "<mask>"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=3, byte_fallback=False))
    steps = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁", prepend_scheme=scheme)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "XLMRobertaTokenizer", **flags})
    write(tmp_path, "config.json", {"model_type": "xlm-roberta", "dtype": "float32"})
    bundle, theirs = bundle_of(tmp_path), auto_tokenizer(tmp_path)
    for text in ("ab", "a b", " a"):
        if scheme == "always" or "add_prefix_space" in flags:  # without a flag, the file holds
            assert ids_of(bundle, text) == theirs.encode(text), text


def wordpiece_json(folder: Path, lowercase: bool, **config: Any) -> None:
    """A folder with a BERT's tokenizer.json."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [*"aAeEéÉhHlLoOöÖ中文x"]
    pieces = [*special, "hello", "Hello", *letters, *(f"##{each}" for each in letters)]
    tokenizer = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    write(folder, "tokenizer_config.json", {**roles, **config})
    write(folder, "config.json", {"model_type": "bert", "dtype": "float32"})


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize(
    "name", ["BertTokenizer", "DistilBertTokenizerFast", "ElectraTokenizer", "PreTrainedTokenizerFast"]
)
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": False, "strip_accents": True},
        {"tokenize_chinese_chars": False},
    ],
    ids=str,
)
def test_berts_flags_say_how_text_is_normalised_as_in_transformers(
    flags: dict[str, Any], name: str, lowercase: bool, tmp_path: Path
) -> None:
    wordpiece_json(tmp_path, lowercase, tokenizer_class=name, **flags)
    bundle, theirs = bundle_of(tmp_path), auto_tokenizer(tmp_path)
    for text in ("Hello", "HÉLLO", "öÖ", "x中文", "hello [MASK]"):
        assert ids_of(bundle, text) == theirs.encode(text), text


def test_the_tokenizers_own_end_is_found_in_each_of_its_files(tmp_path: Path, private_cache: Path) -> None:
    def end(folder: Path, **options: Any) -> int | None:
        return end_of_tokenizer(open_folder(folder), Options(model=str(folder), **options))

    save_tokenizer(tmp_path)
    assert end(tmp_path) == tiny_models.EOS
    save_tokenizer(tmp_path, eos_token="<s>")
    assert end(tmp_path) == tiny_models.BOS
    save_tokenizer(tmp_path, eos_token="<|end|>")
    size = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size()
    assert end(tmp_path) == size, "a token that tokenizer.json lacks"
    save_tokenizer(tmp_path, eos_token=None)
    assert end(tmp_path) is None
    write(tmp_path, "special_tokens_map.json", {"eos_token": {"content": "T"}})
    assert end(tmp_path) == ids_of(bundle_of(tmp_path), "T")[0], "a token that is no added one"
    assert end(tmp_path, skip_tokenizer_init=True) is None
    other = save_tokenizer(tmp_path / "other", eos_token="<s>")
    assert end(tmp_path, tokenizer=str(other)) == tiny_models.BOS
