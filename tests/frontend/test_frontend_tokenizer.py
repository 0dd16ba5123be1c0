"""The tokenizer: chat templates as transformers renders them, and the cache of bundles."""

from __future__ import annotations

import array
import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_tokenizers import CHAT_TEMPLATE, bundle_of, byte_level_tokenizer, sentencepiece_tokenizer

from headrace import InvalidRequestError, ModelError
from headrace.frontend.client import tokenizers_in_advance
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.frontend.text.tokenizer_cache import load_bundle, store_bundle
from headrace.frontend.vllm.helpers import get_tokenizer
from headrace.ipc.messages import TokenizerBundle, TokenizerInfo

LLAMA_LIKE = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = 'Be kind.' %}
{%- endif %}
    {% if tools is not none %}
Tools: {{ tools | tojson(indent=2) }}
    {% endif %}
<<SYS>>{{ system }}<</SYS>>
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('Unknown role: ' + message.role) }}
    {%- endif %}
    {%- if loop.index0 > 8 %}{% break %}{% endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ '[A]' + (message.content or '') }}{% endgeneration %}
        {%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
        {%- for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}
        {{- eos_token }}
    {%- elif message.content is string %}
        {{- '[' + message.role + ']' + message.content }}
    {%- else %}
        {%- for part in message.content %}{{ part.text }}|{% endfor %}
    {%- endif %}
{% endfor %}
{% for document in documents or [] %}
Doc: {{ document.title }}
{% endfor %}
{{ dict(a=1).a }} {{ namespace(x=2).x }} {{ extra }}
{% if add_generation_prompt %}[A]{% endif %}"""

TRIMMING = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</{{ m['role'] }}>{% endfor %}"
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "wetter", "description": "für <überall> & 世界"}}
USER = {"role": "user", "content": "Hello & <b>世界</b> 'quoted'"}
HALF = {"role": "assistant", "content": "The answer is  "}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(bundle_of(byte_level_tokenizer()))


@pytest.fixture(scope="module")
def transformers_tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )


CASES: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
    (CHAT_TEMPLATE, [USER], {"add_generation_prompt": True}),
    (CHAT_TEMPLATE, [USER], {}),
    (CHAT_TEMPLATE, [USER, HALF], {"continue_final_message": True}),
    (TRIMMING, [USER, HALF], {"continue_final_message": True}),
    (LLAMA_LIKE, [USER], {"add_generation_prompt": True, "extra": "ü"}),
    (LLAMA_LIKE, [{"role": "system", "content": " S "}, USER, HALF, USER], {"tools": [TOOL], "extra": [1, None, "x"]}),
    (LLAMA_LIKE, [USER, {**HALF, "content": None, "tool_calls": [TOOL], "thinking": "hm"}], {}),
    (CHAT_TEMPLATE, [USER, {"role": "assistant", "content": None}], {}),
    (LLAMA_LIKE, [USER] * 12, {"documents": [{"title": "T", "text": "x"}]}),
    (LLAMA_LIKE, [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], {}),
    (
        CHAT_TEMPLATE.replace("m['content']", "m['content'][0]['text']"),
        [{"role": "assistant", "content": [{"type": "text", "text": "to go on"}]}],
        {"continue_final_message": True},
    ),
]


@pytest.mark.parametrize(("template", "messages", "arguments"), CASES)
def test_templates_render_as_in_transformers(
    tokenizer: Tokenizer,
    transformers_tokenizer: Any,
    template: str,
    messages: list[dict[str, Any]],
    arguments: dict[str, Any],
) -> None:
    expected = transformers_tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **arguments)
    assert tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **arguments) == expected
    ids = transformers_tokenizer.apply_chat_template(messages, chat_template=template, return_dict=False, **arguments)
    assert tokenizer.apply_chat_template(messages, chat_template=template, **arguments) == ids


TWO_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    "text",
    [
        "{% if m.content.startswith('<tool_response>') or '</think>' in m.content %}!{% endif %}{{ m.content }}",
        "{% if m.content is string %}{% set said = m.content %}{% else %}{% set said = '' %}{% endif %}{{ said }}",
        "{% if m.content is string %}{{ m.content }}{% else %}{{ raise_exception('a text') }}{% endif %}",
        "{% if m.content is not string %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}",
    ],
)
def test_parts_are_one_text_for_a_template_that_only_looks_as_if_it_took_parts(tokenizer: Tokenizer, text: str) -> None:
    """As those of Qwen 3, which refused every message in parts, or left its text out."""
    template = "{% for m in messages %}[" + text + "]{% endfor %}"
    messages = [{"role": role, "content": TWO_PARTS} for role in ("system", "user", "assistant", "tool")]
    assert tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False) == "[a\nb]" * 4


def test_parts_stay_parts_where_a_template_shows_them_of_that_role(tokenizer: Tokenizer) -> None:
    template = (
        "{% for m in messages %}[{% if m.role == 'system' %}{{ m.content | trim }}{% elif m.content is string %}"
        "{{ m.content }}{% else %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}]{% endfor %}"
    )
    messages = [{"role": role, "content": TWO_PARTS} for role in ("system", "user", "assistant")]
    told = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert told == "[a\nb][<a><b>][<a><b>]"


def test_a_template_multiplies(tokenizer: Tokenizer) -> None:
    template = "{{ '-' * 3 }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 1.5 * 2 }}{{ [1] * 2 }}"
    assert tokenizer.apply_chat_template([USER], chat_template=template, tokenize=False) == "---10240.53.0[1, 1]"


def test_the_date_is_available_to_templates(tokenizer: Tokenizer) -> None:
    import datetime

    template = "{{ strftime_now('%Y') }}{{ messages[0].role }}"
    assert tokenizer.apply_chat_template([USER], chat_template=template, tokenize=False) in {
        f"{datetime.date.today().year + offset}user" for offset in (-1, 0)
    }


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{% if %}", "is not valid"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "unsafe|not safely callable"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "OverflowError"),
        ("{% for i in messages %}" * 25 + "{% endfor %}" * 25, "is not valid"),
        ("{{ 9 ** (9 ** 9) }}", "as much as it may take"),
        ("{{ 'x' * 2 ** 30 }}", "as much as it may take"),
        ("{{ 2 ** 30 * messages }}", "as much as it may take"),
    ],
)
def test_a_template_that_refuses_or_breaks_out_gives_a_sentence(
    tokenizer: Tokenizer, template: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.frontend.text.template_renderer.MOST_COMPUTING_S", 0.3)
    with pytest.raises(InvalidRequestError, match=said):
        tokenizer.apply_chat_template([USER], chat_template=template)


@pytest.mark.parametrize(
    "template",
    [
        "{% set n = range(99999) | list %}{% for i in n %}{% for j in n %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    ],
)
def test_a_template_that_would_run_for_hours_is_stopped(
    tokenizer: Tokenizer, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.frontend.text.template_renderer.MOST_COMPUTING_S", 0.02)
    with pytest.raises(InvalidRequestError, match=r"takes more than 0\.02 s of processor time"):
        tokenizer.apply_chat_template([USER], chat_template=template)


@pytest.mark.parametrize(
    ("messages", "arguments", "said"),
    [
        ([], {}, "empty"),
        ("Hello", {}, "must be a list"),
        (["Hello"], {}, r"messages\[0\] must be a dict with a 'role'"),
        ([{"content": "x"}], {}, "'role'"),
        ([USER], {"tools": [len]}, r"tools\[0\] must be a dict"),
        ([USER], {"add_generation_prompt": True, "continue_final_message": True}, "exclude each other"),
        ([{"role": "assistant"}], {"continue_final_message": True}, "final message with text"),
    ],
)
def test_bad_messages_are_refused(tokenizer: Tokenizer, messages: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        tokenizer.apply_chat_template(messages, **arguments)


def test_a_message_that_the_template_drops_cannot_be_continued(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="does not appear"):
        tokenizer.apply_chat_template([HALF], chat_template="nothing", continue_final_message=True)


def test_templates_are_chosen_by_name_and_for_tools() -> None:
    templates = {"default": "D", "tool_use": "T", "rag": "R"}
    tokenizer = Tokenizer(msgspec.structs.replace(bundle_of(byte_level_tokenizer()), chat_templates=templates))
    render = tokenizer.apply_chat_template
    assert render([USER], tokenize=False) == "D"
    assert render([USER], tokenize=False, tools=[TOOL]) == "T"
    assert render([USER], tokenize=False, chat_template="rag") == "R"
    assert render([USER], tokenize=False, chat_template="{{ 1 + 1 }}") == "2"
    base = Tokenizer(msgspec.structs.replace(bundle_of(byte_level_tokenizer()), chat_templates={}))
    with pytest.raises(InvalidRequestError, match="no chat template"):
        base.apply_chat_template([USER])


def test_settings_for_training_in_the_file_do_not_cut_or_pad_prompts() -> None:
    fast = byte_level_tokenizer()
    fast.enable_truncation(2)
    fast.enable_padding(length=50)
    tokenizer = Tokenizer(bundle_of(fast))
    assert tokenizer.encode("Hello there") == byte_level_tokenizer().encode("Hello there").ids
    assert tokenizer.encode_batch(["Hello", "x"]) == [tokenizer.encode("Hello"), tokenizer.encode("x")]


def test_the_names_of_transformers(tokenizer: Tokenizer, transformers_tokenizer: Any) -> None:
    assert len(tokenizer) == len(transformers_tokenizer)
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", transformers_tokenizer.bos_token_id)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", transformers_tokenizer.eos_token_id)
    ids = tokenizer.encode("Hello<|im_end|>")
    assert tokenizer.convert_ids_to_tokens(ids) == transformers_tokenizer.convert_ids_to_tokens(ids)
    assert tokenizer.decode(ids) == "Hello<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hello"
    assert tokenizer.decode(ids[0]) == transformers_tokenizer.decode(ids[0])
    assert tokenizer.batch_decode([array.array("i", ids), ids[:1]]) == transformers_tokenizer.batch_decode(
        [ids, ids[:1]]
    )


@pytest.mark.parametrize(
    "line",
    [
        "t.is_fast", "t.vocab_size", "t.vocab == t.get_vocab()", "t.get_added_vocab()", "t.added_tokens_encoder",
        "[str(each) for each in t.added_tokens_decoder.values()]", "t.unk_token, t.unk_token_id, t.mask_token",
        "t.pad_token, t.pad_token_id", "t.num_special_tokens_to_add()",
        "t.convert_tokens_to_ids('fox'), t.convert_tokens_to_ids(['the', 'no such token'])",
        "t.convert_ids_to_tokens(5), t.convert_ids_to_tokens([1, 5], skip_special_tokens=True)",
        "t.convert_tokens_to_string(t.tokenize('the fox'))", "t.tokenize('the fox')",
        "t('the quick fox', truncation=True, max_length=2).input_ids",
        "t('the fox', padding=False, return_tensors=None)['input_ids']",
        "t(['the quick fox', 'a'], truncation=True, max_length=3)['input_ids']",
        "t.encode('the quick fox', truncation=True, max_length=3, add_special_tokens=False)",
        "t.apply_chat_template([{'role': 'user', 'content': 'a'}], chat_template='x{{ messages }}', return_dict=True)"
        "['input_ids']",
        "t.decode([5], clean_up_tokenization_spaces=False)",
    ],
)  # fmt: skip
def test_what_scripts_ask_of_a_tokenizer_is_as_in_transformers(
    tokenizer: Tokenizer, transformers_tokenizer: Any, line: str
) -> None:
    assert eval(line, {"t": tokenizer}) == eval(line, {"t": transformers_tokenizer})


def test_truncation_leaves_room_for_special_tokens_and_what_is_lacking_is_told() -> None:
    from transformers import PreTrainedTokenizerFast

    fast = sentencepiece_tokenizer()
    ours, theirs = Tokenizer(bundle_of(fast, unk_token="<unk>")), PreTrainedTokenizerFast(tokenizer_object=fast)
    assert (
        ours("the fox", truncation=True, max_length=2).input_ids
        == theirs("the fox", truncation=True, max_length=2).input_ids
    )
    assert ours.convert_tokens_to_ids("no such token") == ours.unk_token_id == 0
    assert (ours.pad_token, ours.pad_token_id) == (None, None)
    ours.pad_token = "</s>"
    assert ours.pad_token_id == 2
    with pytest.raises(InvalidRequestError, match=r"call: return_tensors is refused: get_tokenizer\(hf=True\)"):
        ours("a", return_tensors="pt")
    with pytest.raises(InvalidRequestError, match="truncation needs max_length"):
        ours("a", truncation=True)
    with pytest.raises(AttributeError, match=r"Tokenizer has no 'save_pretrained': get_tokenizer\(hf=True\)"):
        ours.save_pretrained("folder")  # type: ignore[attr-defined]


def test_get_tokenizer_reads_as_its_mode_says(tmp_path: Path) -> None:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "config.json").write_text("{}")
    expected = byte_level_tokenizer().encode("Hello").ids
    for mode in ("auto", "hf", None):
        assert get_tokenizer(tmp_path, tokenizer_mode=mode).encode("Hello") == expected
    for mode, reason in (("slow", "the fast tokenizer is the only kind"), ("mistrl", "did you mean mistral")):
        with pytest.raises(InvalidRequestError, match=f"get_tokenizer: tokenizer_mode='{mode}': .*{reason}"):
            get_tokenizer(tmp_path, tokenizer_mode=mode)
    # Of which there is no file, or no library.
    with pytest.raises(InvalidRequestError, match=r"has no tokenizer for .*(mistral-common|tokenizer file)"):
        get_tokenizer(str(tmp_path), tokenizer_mode="mistral")


def test_a_tokenizer_that_is_none_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer(TokenizerBundle(tokenizer_json=b"{}"))


def info_of(bundle: TokenizerBundle) -> TokenizerInfo:
    data = msgspec.msgpack.encode(bundle)
    return TokenizerInfo(content_hash=hashlib.sha256(data).hexdigest(), size_bytes=len(data))


def test_a_stored_bundle_is_found_again(private_cache: Path) -> None:
    bundle = bundle_of(byte_level_tokenizer())
    assert load_bundle(info_of(bundle)) is None
    store_bundle(info_of(bundle), bundle)
    assert load_bundle(info_of(bundle)) == bundle
    assert [path.name for path in (private_cache / "tokenizers").iterdir()] == [
        f"{info_of(bundle).content_hash}.msgpack"
    ]


def test_a_tokenizer_that_an_engine_announces_while_it_loads_is_read_once(private_cache: Path) -> None:
    bundle = bundle_of(byte_level_tokenizer())
    store_bundle(info_of(bundle), bundle)
    for _ in range(2):
        tokenizers_in_advance.read_in_advance(info_of(bundle))
    begun = tokenizers_in_advance.take(info_of(bundle))
    assert begun is not None
    read = begun.result(30)
    assert read is not None
    assert read.encode("the fox") == Tokenizer(bundle).encode("the fox")
    assert tokenizers_in_advance.take(info_of(bundle)) is None


@pytest.mark.parametrize("data", [None, b"{}"])
def test_a_tokenizer_that_there_is_no_copy_of_or_that_cannot_be_read_is_left_to_who_needs_it(
    private_cache: Path, data: bytes | None
) -> None:
    bundle = TokenizerBundle(tokenizer_json=data or b"")
    if data is not None:
        store_bundle(info_of(bundle), bundle)
    tokenizers_in_advance.read_in_advance(info_of(bundle))
    begun = tokenizers_in_advance.take(info_of(bundle))
    assert begun is not None
    assert begun.result(30) is None


ANOTHER = msgspec.msgpack.encode(TokenizerBundle(tokenizer_json=b"another"))


@pytest.mark.parametrize("damage", [b"", b"garbage", ANOTHER, None])
def test_a_damaged_file_counts_as_missing(private_cache: Path, damage: bytes | None) -> None:
    bundle = bundle_of(byte_level_tokenizer())
    store_bundle(info_of(bundle), bundle)
    (path,) = (private_cache / "tokenizers").iterdir()
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    assert load_bundle(info_of(bundle)) is None


def test_a_bundle_that_is_not_the_announced_one_is_refused(private_cache: Path) -> None:
    bundle = bundle_of(byte_level_tokenizer())
    with pytest.raises(ModelError, match="announced"):
        store_bundle(info_of(bundle), TokenizerBundle(tokenizer_json=b"{}"))
    with pytest.raises(ModelError, match="no SHA-256"):
        load_bundle(TokenizerInfo(content_hash="../../etc/passwd", size_bytes=1))
    assert not private_cache.exists()


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    bundle = bundle_of(byte_level_tokenizer())
    store_bundle(info_of(bundle), bundle)
    assert load_bundle(info_of(bundle)) is None


def test_calling_it_gives_ids_and_a_mask(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox")
    assert tokenizer("the fox") == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    both = tokenizer(["the fox", "a"])
    assert both.input_ids == [ids, tokenizer.encode("a")]
    assert tokenizer.batch_decode(both["input_ids"]) == ["the fox", "a"]
    assert tokenizer.get_vocab()[tokenizer.tokenize("the fox")[0]] == ids[0]
    with pytest.raises(InvalidRequestError, match="a text or a list of them, not dict"):
        tokenizer({"a": 1})  # type: ignore[arg-type]
