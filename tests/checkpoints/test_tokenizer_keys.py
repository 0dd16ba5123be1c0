"""Every key of a tokenizer's files counts, is known not to matter, or is refused by name: real-looking files are
changed key by key. What must change is what a prompt or an answer is, not the file."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import pytest
import sentencepiece
import tiny_models
from test_folder_tokens import write
from test_tokenizer_bundle import TEXTS, bundle_of, open_folder, save_tokenizer
from thinned import every
from tiny_gguf import convert, save_gguf, saved_state
from tokenizers import AddedToken, Tokenizer, processors
from transformers import GenerationConfig

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.checkpoints.generation_keys import IDLE, UNSET
from headrace.executor.checkpoints.sources.gguf.header import GGUFHeader
from headrace.executor.checkpoints.sources.gguf.tokenizer import gguf_bundle
from headrace.executor.checkpoints.tokenizers import sentencepiece_files
from headrace.executor.checkpoints.tokenizers.tokenizer import end_of_tokenizer
from headrace.executor.checkpoints.tokenizers.tokenizer_keys import (
    A_TOKEN,
    CONFIG_TYPES,
    GGUF,
    GGUF_BESIDE,
    GGUF_TYPES,
    NOT_IN_BPE,
    NOT_IN_SENTENCEPIECE,
    NOT_IN_WORD_PIECE,
    OF_TRAINING,
    OF_WORD_PIECE,
    READ,
    ROLES,
    SENTENCEPIECE,
    TOKEN_TYPES,
    TOKENIZER_CONFIG,
)
from headrace.frontend.text import tokenizer as frontend
from headrace.ipc.failure import HeadraceError, ModelError

Place = tuple[str | int, ...]
READ_TEXTS = (
    *TEXTS, "  a  b ", "a</s> b<s>  c", "<|tool|> x <|tool|>", "x<think>y", "<|pad|>z", "<|a|><|b|>", "the waterwheel",
    "a <think> b", "a <|a|> b", "a <|c|> b", "thé",
)  # fmt: skip
FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
CONFIG = {
    "add_bos_token": True,
    "add_eos_token": False,
    "add_prefix_space": True,
    "added_tokens_decoder": {
        "0": {"content": "<s>", **FLAGS},
        "321": {"content": "<|tool|>", **FLAGS, "lstrip": True},
        "322": {"content": "<think>", **FLAGS, "special": False},
    },
    "additional_special_tokens": ["<|a|>"],
    "bos_token": "<s>",
    "chat_template": "{{ bos_token }}{{ messages }}",
    "clean_up_tokenization_spaces": False,
    "eos_token": "</s>",
    "errors": "replace",
    "extra_special_tokens": {"image_token": "<|b|>"},
    "legacy": True,
    "model_input_names": ["input_ids", "attention_mask"],
    "model_max_length": 32768,
    "name_or_path": "org/model",
    "pad_token": "<|pad|>",
    "padding_side": "left",
    "processor_class": "SomeProcessor",
    "sp_model_kwargs": {},
    "spaces_between_special_tokens": False,
    "split_special_tokens": False,
    "tokenizer_class": "GPT2Tokenizer",
    "truncation_side": "right",
    "unk_token": None,
    "use_default_system_prompt": False,
    "use_fast": True,
}  # fmt: skip
"""A tokenizer_config.json with the keys that chat models' have."""
OTHERS: Mapping[str, list[Any]] = {
    "sp_model_kwargs": [{"enable_sampling": True, "alpha": 0.1}],
    "unk_token": ["<|unk|>"],
    "extra_special_tokens": [["<|b|>"]],
    "tokenizer_class": ["LlamaTokenizer"],
    "fast_tokenizer_files": [["tokenizer.4.json"]],
}
"""Further values of keys."""
IDLE_HERE: Mapping[str, str] = {
    "add_bos_token": "the post-processor of tokenizer.json says it, as in transformers 5",
    "add_eos_token": "the post-processor of tokenizer.json says it, as in transformers 5",
    "legacy": "it is a flag of Llama's tokenizers",
    "auto_map": "only trust_remote_code runs code",
    "model_input_names": "of models that tell two texts apart: tests/models/test_scores.py",
}
"""Keys that are read, and do not matter in a folder with a byte-level tokenizer.json."""


def outcome(path: Path, **options: Any) -> Any:
    """What prompts and answers are with a tokenizer, or why it is refused."""
    try:
        bundle = bundle_of(path, **options)
        tokenizer = frontend.Tokenizer(bundle)
        encoded = [tokenizer.encode(text) for text in READ_TEXTS]
        # These vocabularies are too small to show in ids how a text is split.
        split = Tokenizer.from_buffer(bundle.tokenizer_json).pre_tokenizer
        cut = [split.pre_tokenize_str(text) if split is not None else text for text in READ_TEXTS]
        shown = [tokenizer.decode(ids, skip_special_tokens=skip) for ids in encoded for skip in (True, False)]
        end = end_of_tokenizer(open_folder(path), Options(model=str(path), **options))
        ends = open_checkpoint(Options(model=str(path), load_format="dummy")).eos_token_ids
    except HeadraceError as error:
        return str(error)
    roles, special = dict(bundle.special_tokens), sorted(tokenizer.special_ids)
    return encoded, cut, shown, dict(bundle.chat_templates), roles, special, end, ends


def others(value: Any) -> Iterator[Any]:
    """Values of the same type as another one, and none."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, max(0, value - 1))
    elif isinstance(value, float):
        yield from (value + 0.5, -100.0)
    elif isinstance(value, str):
        yield from (value + "x", "T")
    elif isinstance(value, Mapping):
        yield {}
    elif isinstance(value, list):
        yield []
    yield None


def places(content: Any, at: Place = ()) -> Iterator[Place]:
    """Every key of an object, of the objects in it, and of the first two of a list of objects."""
    for key, value in content.items():
        yield (*at, key)
        if isinstance(value, Mapping) and len(value) < 50:
            yield from places(value, (*at, key))
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for index, each in enumerate(value[:2]):
                yield from places(each, (*at, key, index))


def changed(content: Any, place: Place, value: Any) -> Any:
    new = copy.deepcopy(content)
    inner = new
    for key in place[:-1]:
        inner = inner[key]
    if value is None and isinstance(inner, dict):
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return new


def idle_places(content: Any, read: Callable[[Any], Any], more: Mapping[str, list[Any]] | None = None) -> list[Place]:
    """The places of a file at which no other value makes a difference. read: the outcome with a changed file."""
    expected, found = read(content), []
    assert not isinstance(expected, str), expected
    for place in places(content):
        inner = content
        for key in place:
            inner = inner[key]
        values = [*(more or {}).get(str(place[-1]), []), *others(inner)]
        if all(read(changed(content, place, value)) == expected for value in values):
            found.append(place)
    return found


@pytest.fixture
def folder(tmp_path: Path, private_cache: Path) -> Path:
    """With a tokenizer.json that adds bos, and whose vocabulary has none of the tokens that the config adds."""
    path = save_tokenizer(tmp_path) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([AddedToken("<|c|>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tiny_models.BOS)])
    tokenizer.save(str(path))
    return tmp_path


def test_each_key_of_a_tokenizer_config_counts_or_is_known_not_to(folder: Path) -> None:
    def read(config: Any) -> Any:
        write(folder, "tokenizer_config.json", config)
        return outcome(folder)

    config = {**CONFIG, "fast_tokenizer_files": ["tokenizer.json"], "auto_map": {"AutoTokenizer": ["a.B", None]}}
    for place in idle_places(config, read, OTHERS):
        name = str(place[0])
        if name == "added_tokens_decoder":  # special flags of what no text here shows
            assert place[1:2] == ("0",) or place[2:] in (
                (),
                ("normalized",),
                ("special",),
                ("rstrip",),
                ("single_word",),
            )
        else:
            assert TOKENIZER_CONFIG.get(name) or IDLE_HERE.get(name), f"{name} is not known not to matter"


def test_each_key_that_is_known_not_to_matter_does_not(folder: Path) -> None:
    write(folder, "tokenizer_config.json", CONFIG)
    expected = outcome(folder)
    for name, reason in TOKENIZER_CONFIG.items():
        if reason != READ:
            for value in others(CONFIG.get(name, True)):
                write(folder, "tokenizer_config.json", {**CONFIG, name: value})
                assert outcome(folder) == expected, name


def test_a_key_that_is_not_known_is_named_in_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(
        folder,
        "tokenizer_config.json",
        {**CONFIG, "some_new_flag": True, "another": [], "some_token": "<|x|>", "add_some_token": True},
    )
    with caplog.at_level(logging.WARNING):
        bundle_of(folder)
    assert [record.getMessage().partition(" has ")[2] for record in caplog.records] == [
        "add_some_token, some_new_flag, which is not known and has no effect"
    ]


OF_OTHER_TYPES: Mapping[str, list[Any]] = {
    A_TOKEN: [5, True, 1.5, [], ["<s>"], {}, {"content": 5}],
    "true or false": ["false", 0, 1.5, [], {}],
    "a text": [5, True, [], {}],
    "a number": ["512", True, [], {}],
    "an object": ["a", 5, True, ["a"]],
    "a list of texts": ["tokenizer.json", 5, True, [5], {}],
    "a text or a list of named templates": [5, True, {"default": "a"}],
}
"""Values of other types than those of `CONFIG_TYPES`."""


@pytest.mark.parametrize("key", [*CONFIG_TYPES])
def test_a_value_of_another_type_in_a_tokenizer_config_is_refused(key: str, folder: Path) -> None:
    """Whatever its other files say. A text "false" is true to Python, and a number is no end of an answer."""
    write(folder, "chat_template.jinja", "a")
    write(folder, "special_tokens_map.json", dict.fromkeys(ROLES, "</s>"))
    wanted, known = CONFIG_TYPES[key], {**CONFIG, "tokenizer_class": "Qwen2Tokenizer"}
    for other in OF_OTHER_TYPES[wanted]:
        write(folder, "tokenizer_config.json", {**known, key: other})
        read = outcome(folder)
        assert isinstance(read, str), f"{key}: {other!r} is taken"
        assert re.search(rf"{key}(: content)? is .*; .* is expected", read), read
        with pytest.raises(ModelError, match=rf"{key}(: content)? is .* expected"):
            end_of_tokenizer(open_folder(folder), Options(model=str(folder)))
    write(folder, "tokenizer_config.json", {**known, key: None})
    assert not isinstance(outcome(folder), str), "null says nothing"


@pytest.mark.parametrize("key", ROLES)
def test_a_role_of_another_type_in_the_older_file_is_refused(key: str, folder: Path) -> None:
    write(folder, "tokenizer_config.json", CONFIG)
    for other in OF_OTHER_TYPES[A_TOKEN][:-1]:
        write(folder, "special_tokens_map.json", {key: other})
        if other != {}:  # an object is read where the config does not list its tokens
            with pytest.raises(ModelError, match=rf"special_tokens_map\.json: {key} is .*; {A_TOKEN} is expected"):
                bundle_of(folder)
    write(folder, "special_tokens_map.json", {key: None})
    bundle_of(folder)


@pytest.mark.parametrize("key", [*TOKEN_TYPES])
def test_a_value_of_another_type_in_a_listed_token_is_refused(key: str, folder: Path) -> None:
    token = {"content": "<|tool|>", **FLAGS}
    for other in OF_OTHER_TYPES[TOKEN_TYPES[key]]:
        write(folder, "tokenizer_config.json", {"added_tokens_decoder": {"321": {**token, key: other}}})
        with pytest.raises(ModelError, match=rf"added_tokens_decoder: 321: {key} is .* expected"):
            bundle_of(folder)


def test_values_that_real_files_have_are_taken(folder: Path) -> None:
    usual = {
        "bos_token": {"__type": "AddedToken", "content": "<s>", **FLAGS},
        "model_max_length": 1000000000000000019884624838656,
        "chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}],
        "pad_token": None,
        "strip_accents": None,
        "auto_map": {"AutoTokenizer": ["a.B", None]},
        "tokenizer_class": "Qwen2Tokenizer",
    }
    for more in ({}, {"model_max_length": 1e30}):
        write(folder, "tokenizer_config.json", {**usual, **more})
        bundle = bundle_of(folder)
        assert dict(bundle.special_tokens) == {"bos_token": "<s>"}
        assert dict(bundle.chat_templates) == {"default": "a", "tool_use": "b"}


OF_TOKENIZER_JSON = {
    "version": "of the format",
    "truncation": "prompts are not cut",
    "padding": "prompts are not padded",
    "trim_offsets": "offsets in the text are not used",
    "type_id": "models served here take no types of tokens",
    "pair": "texts are not encoded in pairs",
    "model.dropout": "absent from files of models; its effect is random",
    "continuing_subword_prefix": "byte-level vocabularies have none",
    "end_of_word_suffix": "byte-level vocabularies have none",
    "fuse_unk": "byte-level vocabularies know every character",
    "unk_token": "byte-level vocabularies know every character",
    "byte_fallback": "byte-level vocabularies know every character",
    "ignore_merges": "every token of this vocabulary is reached by its merges",
    "decoder.add_prefix_space": "of the encoder's side",
    "decoder.use_regex": "of the encoder's side",
    "type": "there is one type of it, or the library refuses others",
}


def test_each_key_of_a_tokenizer_json_counts_or_is_known_not_to(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {"strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": 9, "pad_id": 1,
                          "pad_type_id": 0, "pad_token": "</s>"}  # fmt: skip

    def read(changed: Any) -> Any:
        write(folder, "tokenizer.json", changed)
        return outcome(folder)

    for place in idle_places(content, read, {"normalizer": [{"type": "Lowercase"}]}):
        names = {str(place[0]), str(place[-1]), ".".join(map(str, place)), f"{place[0]}.{place[-1]}", *map(str, place)}
        in_tokens = place[0] == "added_tokens" and place[-1] in ("normalized", "lstrip", "rstrip", "single_word", "id")
        assert in_tokens or names & OF_TOKENIZER_JSON.keys(), place


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json", "generation_config.json"])
def test_each_key_of_the_files_beside_counts(name: str, folder: Path) -> None:
    tool = {"content": "<|tool|>", "lstrip": True, "rstrip": True, "single_word": False, "normalized": False}
    contents: dict[str, dict[str, Any]] = {
        "special_tokens_map.json": {
            "bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": tool, "image_token": "<|b|>",
            "additional_special_tokens": ["<|a|>"],
        },
        "added_tokens.json": {"<think>": 320, "<|tool|>": 321, "<|a|>": 325},
        "generation_config.json": {"eos_token_id": [1, 7], "bos_token_id": 0, "pad_token_id": 0},
    }  # fmt: skip
    content = contents[name]

    def read(changed: Any) -> Any:
        write(folder, name, changed)
        return outcome(folder)

    idle = {".".join(map(str, place)) for place in idle_places(content, read)}
    assert idle <= {
        "bos_token_id",  # the tokenizer puts it
        "pad_token_id",  # prompts are not padded
        "unk_token.normalized",  # these texts have no other spelling
        "unk_token.single_word",
    }


def test_what_generate_would_apply_of_a_generation_config_is_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = {**GenerationConfig().to_dict(), "eos_token_id": [1, 2], "do_sample": True, "temperature": 0.5}
    asked = {
        "stop_strings": ["x"], "suppress_tokens": [3], "bad_words_ids": [[3]], "num_beams": 4, "min_length": 5,
        "no_repeat_ngram_size": 3, "forced_eos_token_id": 1, "sequence_bias": {"3": 1.0}, "typical_p": 0.9,
        "encoder_repetition_penalty": 2.0, "encoder_no_repeat_ngram_size": 3,
    }  # fmt: skip
    for more in ({}, dict.fromkeys(asked), {"num_beams": 1, "typical_p": 1.0, "encoder_repetition_penalty": 1.0}):
        write(folder, "generation_config.json", {**content, **more})
        open_folder(folder)
        assert not caplog.records
    write(folder, "generation_config.json", {**content, **asked})
    assert open_folder(folder).eos_token_ids == (1, 2)
    (record,) = caplog.records
    assert (
        record.getMessage().partition(" has ")[2] == f"{', '.join(sorted(asked))}, which has no effect here, as in vLLM"
    )
    known = {name for name, value in GenerationConfig().to_dict().items() if value not in (None, False, 0)}
    assert known <= {*IDLE, *UNSET}, "transformers' own defaults ask for nothing"


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def ggml(**values: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def byte_level() -> dict[str, Any]:
    """Metadata of a byte-level tokenizer with every key that llama.cpp reads."""
    model = json.loads(tiny_models.make_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    tokens += [
        "<|tool|>",
        "<think>",
        "<|a|>",
        "<|b|>",
        "<|pad|>",
        "<e1>",
        "<e2>",
        "<e3>",
        "<e4>",
        "<e5>",
        "<e6>",
        "<e7>",
    ]
    size = len(tokens) - 12
    roles = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep", "fim_pre", "fim_suf")
    return {
        **ggml(model="gpt2", pre="llama-bpe", tokens=tokens, merges=[" ".join(merge) for merge in model["merges"]]),
        **ggml(token_type=[3, 3] + [1] * (size - 2) + [3, 4, 3, 3, 3] + [3] * 7),
        **ggml(**{f"{role}_token_id": size + 5 + index for index, role in enumerate(roles)}),
        **ggml(bos_token_id=0, eos_token_id=1, unknown_token_id=size, padding_token_id=size + 4, cls_token_id=size + 2),
        **ggml(seperator_token_id=size + 2, mask_token_id=size + 3, fim_mid_token_id=size, prefix_token_id=size),
        **ggml(add_bos_token=True, add_eos_token=True, add_sep_token=True, add_space_prefix=True, token_type_count=2),
        **ggml(remove_extra_whitespaces=True, scores=[0.0] * len(tokens), suffix_token_id=size, middle_token_id=size),
        **ggml(precompiled_charsmap=bytes(8), eos_token_ids=[1, size + 4]),
        "tokenizer.ggml.normalizer.lowercase": True,
        "tokenizer.ggml.normalizer.strip_accents": True,
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_template.tool_use": "{{ tools }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.huggingface.json": "{}",
    }


def pieces() -> dict[str, Any]:
    """The same of a SentencePiece vocabulary."""
    letters = [*"abcdefghijklmnopqrstuvwxyz", "▁"]
    words = ["▁t", "he", "▁the", "in", "er", "▁w", "at", "▁wat", "▁water", "th"]
    marks = ["<|tool|>", "<think>", "<|a|>", "<|b|>", "<|pad|>", "<e1>", "<e2>", "<e3>", "<e4>", "<e5>", "<e6>", "<e7>"]
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *letters, *words, *marks]
    size = len(tokens) - len(marks)
    held = byte_level()
    shift = size - len(held["tokenizer.ggml.tokens"]) + len(marks)
    held = {key: value + shift if key.endswith("_token_id") else value for key, value in held.items()}
    scores = [0.0] * (259 + len(letters)) + [-float(index) for index in range(len(words))] + [0.0] * len(marks)
    types = [2, 3, 3, *[6] * 256, *[1] * (len(letters) + len(words)), 3, 4, *[3] * 10]
    return {
        **held,
        **ggml(model="llama", tokens=tokens, scores=scores, token_type=types, eos_token_ids=[2, size + 4]),
        **ggml(bos_token_id=1, eos_token_id=2, unknown_token_id=0, add_space_prefix=True),
    }


def unigram() -> dict[str, Any]:
    held = pieces()
    scores = [-5.0 if each == 0.0 else each for each in held["tokenizer.ggml.scores"]]
    return {**held, **ggml(model="t5", scores=scores, precompiled_charsmap=charsmap(), remove_extra_whitespaces=False)}


def word_pieces() -> dict[str, Any]:
    """The same of BERT's, in a vocabulary without capitals, of whose letters one has an accent."""
    held = pieces()
    tokens = [each.replace("<0x41>", "é").lower() for each in held["tokenizer.ggml.tokens"]]
    types = [1 if each == 6 else each for each in held["tokenizer.ggml.token_type"]]
    flags = {"tokenizer.ggml.normalizer.lowercase": True, "tokenizer.ggml.normalizer.strip_accents": True}
    return {**held, **ggml(model="bert", tokens=tokens, token_type=types), **flags}


@cache
def charsmap() -> bytes:
    """SentencePiece's map of characters for one rule, that T becomes t."""
    with TemporaryDirectory() as folder:
        rule, made = Path(folder) / "rule", Path(folder) / "it"
        rule.write_text(f"{ord('T'):x}\t{ord('t'):x}\n")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([tiny_models.TRAINING_TEXT] * 4), model_prefix=str(made), vocab_size=60,
            hard_vocab_limit=False, minloglevel=3, normalization_rule_tsv=str(rule),
        )  # fmt: skip
        model = sentencepiece_files.parse(made.with_suffix(".model"))
    return bytes(model.normalizer_spec.precompiled_charsmap)


def of_other_type(key: str, value: Any) -> list[Any]:
    """Other values of a GGUF key."""
    if key.endswith("merges"):
        return [value[::-1], value[:3]]
    if key.endswith("tokens") or key.endswith("chat_templates"):
        return [[each + "x" for each in value]]
    if key.endswith("token_type"):
        return [[4 if each == 3 else each for each in value]]
    if key.endswith("scores"):
        return [[-each for each in value]]
    if key.endswith("eos_token_ids"):
        return [value[:1]]
    if isinstance(value, bytes):
        return [bytes(8)]
    return [each for each in others(value) if each is not None]


@pytest.mark.parametrize("make", every(2, [byte_level, pieces, unigram, word_pieces]))
def test_each_key_of_a_gguf_tokenizer_counts_or_is_known_not_to(
    make: Callable[[], dict[str, Any]], tmp_path: Path, private_cache: Path
) -> None:
    metadata = make()
    model = tiny_models.build("llama", vocab_size=512, num_hidden_layers=1, bos_token_id=None, eos_token_id=None)

    config, state = model.config.to_dict(), saved_state(model)

    def read(changed: Mapping[str, Any]) -> Any:
        return outcome(convert(type(model).__name__, config, state, tmp_path / "m.gguf", tokenizer=changed))

    expected = read(metadata)
    assert not isinstance(expected, str), expected
    not_in = {byte_level: NOT_IN_BPE, pieces: NOT_IN_SENTENCEPIECE, unigram: OF_WORD_PIECE}.get(make, NOT_IN_WORD_PIECE)
    for key, value in metadata.items():
        values = [{**metadata, key: other} for other in of_other_type(key, value)]
        values.append({name: each for name, each in metadata.items() if name != key})
        name = key.removeprefix("tokenizer.").removeprefix("ggml.")
        reason = GGUF.get(name) or GGUF_BESIDE.get(name) or not_in.get(name)
        if make is unigram and name in ("merges", "pre"):
            reason = NOT_IN_SENTENCEPIECE[name]
        differs = [read(each) != expected for each in values]
        assert any(differs) != bool(reason), f"{name}: {reason!r} {differs}"


def test_case_and_accents_of_word_pieces_are_as_the_file_says(tmp_path: Path) -> None:
    """Where it does not say of accents they go with capitals, and where it says nothing the vocabulary decides."""
    model = tiny_models.build("llama", vocab_size=512, num_hidden_layers=1)
    said = {f"tokenizer.ggml.normalizer.{name}": None for name in ("lowercase", "strip_accents")}
    held = {key: value for key, value in word_pieces().items() if key not in said}

    def normalised(lowercase: bool | None, strip_accents: bool | None) -> str:
        flags = dict(zip(said, (lowercase, strip_accents), strict=True))
        given = held | {key: value for key, value in flags.items() if value is not None}
        json_text = gguf_bundle(GGUFHeader(save_gguf(model, tmp_path / "m.gguf", tokenizer=given))).tokenizer_json
        text: str = Tokenizer.from_buffer(json_text).normalizer.normalize_str("Thé")
        return text

    assert [normalised(None, None), normalised(False, None), normalised(True, None)] == ["the", "Thé", "the"]
    assert [normalised(True, False), normalised(False, True), normalised(None, False)] == ["thé", "The", "thé"]


WRONG: Mapping[str, list[Any]] = {
    "true or false": ["false", 0, 1.5, [True, True], ["a"]],
    "a whole number": ["1", True, 1.5, [1, 2], ["a"]],
    "a text": [True, 1, 1.5, [1, 2], ["a"]],
    "a list of texts": ["ab", True, 1, [1, 2]],
    "a list of whole numbers": ["ab", True, 1, [0.5, 1.5], ["a"]],
    "a list of numbers": ["ab", True, 1.5, ["a"]],
}
"""Values of other types than those of `GGUF_TYPES`."""


@pytest.mark.parametrize("make", every(2, [pieces, byte_level, word_pieces, unigram]))
def test_a_value_of_another_type_in_a_gguf_tokenizer_is_refused(
    make: Callable[[], dict[str, Any]], tmp_path: Path, private_cache: Path
) -> None:
    """A text "false" is true to Python, and a number where an id should stand would be passed over."""
    model = tiny_models.build("llama", vocab_size=512, num_hidden_layers=1, bos_token_id=None, eos_token_id=None)
    held, config, state = make(), model.config.to_dict(), saved_state(model)
    for key in held:
        name = key.removeprefix("tokenizer.").removeprefix("ggml.").removesuffix(".tool_use")
        for other in WRONG.get(GGUF_TYPES.get(name, ""), []):
            tokenizer = {**held, key: other}
            path = convert(type(model).__name__, config, state, tmp_path / "m.gguf", tokenizer=tokenizer)
            with pytest.raises(ModelError, match=rf"({re.escape(key)}|eos_token_id) is .* expected"):
                bundle_of(path)


def test_every_key_of_the_format_is_known() -> None:
    held = [value for name, value in vars(gguf.Keys.Tokenizer).items() if name.isupper() and isinstance(value, str)]
    for key in held:
        name = key.removeprefix("tokenizer.").replace(".{name}", "")
        assert name.removeprefix("ggml.") in (*GGUF, "suppress_tokens") or name in GGUF_BESIDE, key


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "tokenizer.ggml.some_new_flag",
            True,
            "some_new_flag, which is not known and may change what its tokenizer does",
        ),
        ("tokenizer.ggml.suppress_tokens", [3, 4], r"suppress_tokens forbids 2 tokens to the model, which is not supp"),
        ("tokenizer.ggml.token_type", [1], "token_type has 1 entries for "),
        ("tokenizer.ggml.scores", [1.0], "scores has 1 entries for "),
    ],
)
def test_keys_of_a_gguf_tokenizer_that_cannot_be_followed_are_refused(
    key: str, value: Any, message: str, tmp_path: Path, private_cache: Path
) -> None:
    path = save_gguf(tiny_models.build("llama"), tmp_path / "m.gguf", tokenizer={**pieces(), key: value})
    with pytest.raises(HeadraceError, match=message):
        bundle_of(path)


@pytest.mark.system
def test_each_field_of_a_sentencepiece_model_counts_or_is_known_not_to(tmp_path: Path, private_cache: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS, tiny_models.TRAINING_TEXT] * 4), model_prefix=str(tmp_path / "it"),
        vocab_size=600, hard_vocab_limit=False, model_type="bpe", byte_fallback=True, minloglevel=3, pad_id=3,
    )  # fmt: skip
    whole = (tmp_path / "it.model").read_bytes()

    def read(place: tuple[str, str] | None = None, value: Any = None) -> Any:
        model = sentencepiece_files.parse(tmp_path / "it.model")
        if place is not None:
            setattr(getattr(model, place[0]), place[1], value)
        (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
        return outcome(tmp_path)

    assert whole
    expected, model = read(), sentencepiece_files.parse(tmp_path / "it.model")
    assert not isinstance(expected, str), expected
    for part in ("trainer_spec", "normalizer_spec", "denormalizer_spec"):
        spec = getattr(model, part)
        for field in spec.DESCRIPTOR.fields:
            value = getattr(spec, field.name)
            if not isinstance(value, str | int | float | bytes):
                continue  # lists of texts, from which the model was trained
            values = [b"x" if isinstance(value, bytes) else each for each in others(value) if each is not None]
            if field.name == "model_type":
                values = [1, 4]
            differs = [read((part, field.name), each) != expected for each in values or [b"x"]]
            name = f"{part}.{field.name}"
            reason = SENTENCEPIECE.get(name, OF_TRAINING)
            assert any(differs) == (reason == READ), f"{name}: {reason!r}"
