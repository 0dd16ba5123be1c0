"""Runs vLLM's own tests of tool-call and reasoning parsers against the formats here.

    python benchmarks/vllm_parsers.py VLLM_SOURCES [--report FILE] [-- PYTEST_ARGUMENTS]

VLLM_SOURCES is an unpacked source archive of vLLM, whose tests/tool_parsers and tests/reasoning are run as they are.
Modules of the name `vllm` are made here: parser classes are the formats of this repository, tokenizers cut texts into
words and markers, and whatever else a test takes from vLLM skips it. The tests also need `partial-json-parser`.

What differs between the two interfaces, so that the adapter does it:
- A parser here is told that the answer has ended, and holds back what may still become a marker until then.
- Whether an answer begins inside reasoning follows from the prompt here, and from chat_template_kwargs there.
- An expected failure of vLLM's counts if it passes here, and is left out if it does not.

Of vLLM 0.32, these tests fail, as the formats here differ on purpose:
- Text around calls without markers is content, which vLLM drops (llama3_json: 1 test).
- A call whose outer object the model did not finish is told, as it is while it streams; vLLM answers with text if the
  answer comes whole (hermes, granite4: 2 tests).
- White space alone before a call, or before the marker that begins reasoning, is no text (jamba, deepseek_r1: 3 tests).
- A test of granite's reasoning passes a delta that does not continue the text before it.
- MiniCPM 5 (21 tests): vLLM guesses tags without their space and names that are like a tool's, and drops calls with
  arguments that the schema lacks; here the first are text, and the last are told as they are.
- LFM 2 (2 tests): text behind a call keeps the line break before it, and calls that are repeated without their first
  marker are text.
- Gemma 4 (5 tests), DeepSeek V3.2 and V4 (5), Step 3.5 (4), Apertus (1): a call without arguments that can be read is
  text, and white space before a call or around reasoning is none.
- Dots (6 tests): a call of a tool that was not given is told, a block that holds no call stays as it was written, a
  closing marker without a call before it is text, and what may still begin a marker is held until the end of the
  answer. One test asks for a second delta of a call, and one for an attribute of vLLM's class.
- MiniMax M3 (2 tests): digits that are no JSON number (018956) stay a string, also where the schema has integers.
"""

from __future__ import annotations

import argparse
import collections
import importlib.abc
import importlib.machinery
import re
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import pytest
import transformers
from report import write_report

from headrace.frontend.request.message import call_id
from headrace.frontend.text.formats.channels import ChannelParser
from headrace.frontend.text.formats.declaration import OutputFormat, ReasoningFormat, load_format
from headrace.frontend.text.formats.events import AnswerPart
from headrace.frontend.text.formats.parser import OutputParser

CALLS = {
    "ApertusToolParser": "apertus",
    "CohereCommand3ToolParser": "cohere_command3",
    "DeepSeekV3ToolParser": "deepseek_v3",
    "DeepSeekV31ToolParser": "deepseek_v31",
    "DeepSeekV32EngineToolParser": "deepseek_v32",
    "DeepSeekV4EngineToolParser": "deepseek_v4",
    "DotsToolParser": "dots",
    "Ernie45ToolParser": "ernie45",
    "FunctionGemmaToolParser": "functiongemma",
    "Gemma4EngineToolParser": "gemma4",
    "GigaChat3ToolParser": "gigachat3",
    "Glm47MoeModelToolParser": "glm47",
    "Granite20bFCToolParser": "granite-20b-fc",
    "GraniteEngineToolParser": "granite",
    "Granite4ToolParser": "granite4",
    "Hermes2ProToolParser": "hermes",
    "HunyuanA13BToolParser": "hunyuan_a13b",
    "HYV3ToolParser": "hy_v3",
    "Internlm2ToolParser": "internlm",
    "JambaToolParser": "jamba",
    "KimiK2ToolParser": "kimi_k2",
    "Lfm2ToolParser": "lfm2",
    "Llama3JsonToolParser": "llama3_json",
    "Llama4PythonicToolParser": "llama4_pythonic",
    "LongcatFlashToolParser": "longcat",
    "MiniCPM5XMLToolParser": "minicpm5",
    "MinimaxM2ToolParser": "minimax_m2",
    "MinimaxM3ToolParser": "minimax_m3",
    "MistralToolParser": "mistral",
    "Olmo3PythonicToolParser": "olmo3",
    "Phi4MiniJsonToolParser": "phi4_mini_json",
    "PythonicToolParser": "pythonic",
    "Qwen3EngineToolParser": "qwen3_xml",
    "SeedOssEngineToolParser": "seed_oss",
    "Step3ToolParser": "step3",
    "Step3p5ToolParser": "step3p5",
    "xLAMToolParser": "xlam",
}
"""vLLM's classes of tool-call parsers, and the formats here."""
SPECIAL = ("</s>",)
"""The special token in outputs of those tests, which a server drops."""
OPEN, AS_ASKED, CLOSED = "open", "as asked", "closed"
REASONING = {
    "DeepSeekR1ReasoningParser": ("deepseek_r1", OPEN),
    "DeepSeekV3ReasoningParser": ("deepseek_v3", AS_ASKED),
    "Ernie45ReasoningParser": ("ernie45", OPEN),
    "GraniteReasoningParser": ("granite", CLOSED),
    "HunyuanA13BReasoningParser": ("hunyuan_a13b", CLOSED),
    "KimiK2ReasoningParser": ("kimi_k2", OPEN),
    "MiniMaxM2ReasoningParser": ("minimax_m2", OPEN),
    "MistralReasoningParser": ("mistral", CLOSED),
    "Olmo3ReasoningParser": ("olmo3", OPEN),
    "Qwen3EngineReasoningParser": ("qwen3", OPEN),
    "Glm47MoeReasoningParser": ("glm45", OPEN),
    "SeedOssEngineReasoningParser": ("seed_oss", OPEN),
    "Step3ReasoningParser": ("step3", OPEN),
    "Step3p5ParserReasoningAdapter": ("step3p5", OPEN),
}
"""vLLM's classes of reasoning parsers, the formats here, and whether answers begin inside reasoning."""
CALLS_AFTER = {"qwen3": "qwen3_xml", "kimi_k2": "kimi_k2"}
"""Formats of calls that end the reasoning."""
NAMES = {"holo2": "qwen3"}
WORD = re.compile(r"</?[\w:|\uff5c\u2581\-]{1,40}>|\[/?[A-Z_]+\]|\n|[ ]?[\w']{1,6}|[ ]|.", re.DOTALL)


class Words:
    """A tokenizer that cuts texts into markers, parts of words and characters, and numbers them as they come."""

    all_special_ids: tuple[int, ...] = ()
    all_special_tokens: tuple[str, ...] = ()
    is_fast = True
    eos_token_id = bos_token_id = None

    def __init__(self) -> None:
        self._texts: list[str] = ["<unk>"]
        self._ids = {"<unk>": 0}
        for name in set(CALLS.values()) | {name for name, _ in REASONING.values()}:
            thinking = load_format(name).reasoning
            self.encode("".join([thinking.begin, thinking.end]) if thinking else "")

    def add_tokens(self, tokens: Sequence[Any], **_: Any) -> int:
        for each in tokens:
            self._id(str(each))
        return len(tokens)

    def get_vocab(self) -> dict[str, int]:
        return self._ids

    def tokenize(self, text: str, **_: Any) -> list[str]:
        return WORD.findall(text)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self._id(each) for each in self.tokenize(text)]

    def __call__(self, text: str, **_: Any) -> Any:
        return types.SimpleNamespace(input_ids=self.encode(text))

    def decode(self, token_ids: Any, **_: Any) -> str:
        given = {token_id: text for text, token_id in self._ids.items()}  # tests add to the vocabulary
        return "".join(given[each] for each in ([token_ids] if isinstance(token_ids, int) else token_ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._ids.get(tokens) if isinstance(tokens, str) else [self._id(each) for each in tokens]

    def convert_ids_to_tokens(self, token_ids: Any, **_: Any) -> Any:
        if isinstance(token_ids, int):
            return self._texts[token_ids]
        return [self._texts[each] for each in token_ids]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        return "".join(tokens)

    def _id(self, text: str) -> int:
        if text not in self._ids:
            self._ids[text] = len(self._texts)
            self._texts.append(text)
        return self._ids[text]


class Record(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", arbitrary_types_allowed=True)


class FunctionCall(Record):
    name: str | None = None
    arguments: str | None = None


class ToolCall(Record):
    id: str | None = None
    type: str | None = "function"
    function: Any = None
    index: int | None = None


class DeltaMessage(Record):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] = []


class Extracted(Record):
    tools_called: bool
    tool_calls: list[Any]
    content: str | None = None


class Definition(Record):
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolParam(Record):
    type: str = "function"
    function: Definition


class Request(Record):
    messages: Any = []
    model: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    skip_special_tokens: bool = True
    include_reasoning: bool = True


def as_openai(tools: Iterable[Any] | None) -> list[dict[str, Any]]:
    """Tools of either API as OpenAI's chat API has them."""
    found = []
    for each in tools or ():
        given = each if isinstance(each, Mapping) else each.model_dump()
        function = given.get("function") or {name: given.get(name) for name in ("name", "description", "parameters")}
        found.append({"type": "function", "function": dict(function)})
    return found


class Adapted:
    """Base of the adapters. What they lack of vLLM's classes skips a test that asks for it."""

    def __init__(self, tokenizer: Any, tools: Any = None, **others: Any) -> None:
        self.model_tokenizer, self.vocab = tokenizer, tokenizer.get_vocab() if isinstance(tokenizer, Words) else {}
        self.tools, self._others = tools, others
        self._stream: OutputParser | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        pytest.skip(f"vLLM's parsers have {name}")

    def _tools(self, request: Any) -> list[dict[str, Any]]:
        return as_openai(self.tools or getattr(request, "tools", None))

    def _streamed(self, previous_text: str, current_text: str, delta: str, request: Any) -> DeltaMessage | None:
        if self._stream is None or (not previous_text and current_text == delta):
            self._stream = self.parser(request)
            self._stream.feed(previous_text or "")
        return message_of(self._stream.feed(delta))

    def finished(self) -> DeltaMessage | None:
        """What a stream held back until its end."""
        stream, self._stream = self._stream, None
        return None if stream is None else message_of(stream.finish())

    def parser(self, request: Any) -> OutputParser:
        raise NotImplementedError


def message_of(events: list[AnswerPart]) -> DeltaMessage | None:
    """The events as one delta."""
    calls = dict[int, ToolCall]()
    for each in events:
        if each.call >= 0:
            call = calls.setdefault(each.call, ToolCall(index=each.call, type=None, function=FunctionCall()))
            if each.name:
                call.id, call.type, call.function.name = call_id(each), "function", each.name
            call.function.arguments = (call.function.arguments or "") + each.arguments
    content = "".join(each.content for each in events) or None
    reasoning = "".join(each.reasoning for each in events) or None
    if not calls and content is None and reasoning is None:
        return None
    return DeltaMessage(content=content, reasoning=reasoning, tool_calls=list(calls.values()))


class Calls(Adapted):
    format: str

    def parser(self, request: Any) -> OutputParser:
        declared = load_format(self.format)
        if declared.channels is not None:
            return ChannelParser(declared.channels, reads_calls=True)
        return OutputParser(None, declared, tools=self._tools(request), hidden=SPECIAL)

    def extract_tool_calls(self, model_output: str, request: Any = None, **_: Any) -> Extracted:
        parser = self.parser(request)
        calls, content = list[ToolCall](), ""
        for each in [*parser.feed(model_output), *parser.finish()]:
            content += each.content
            if each.name:
                calls.append(ToolCall(id=call_id(each), function=FunctionCall(name=each.name, arguments="")))
            if each.call >= 0:
                calls[each.call].function.arguments += each.arguments
        return Extracted(tools_called=bool(calls), tool_calls=calls, content=content or None)

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *others: Any, **more: Any
    ) -> DeltaMessage | None:
        request = more.get("request") or (others[-1] if others else None)
        said = self._streamed(previous_text, current_text, delta_text, request)
        return self._headed(said) if self.format == "xlam" else said

    _held = ""

    def _headed(self, said: DeltaMessage | None) -> DeltaMessage | None:
        """vLLM's parser of this format sends a call's header by itself; the arguments follow with the next delta."""
        if said is None or not said.tool_calls:
            return said
        function = said.tool_calls[-1].function
        function.arguments, self._held = self._held + function.arguments, ""
        if function.name:
            function.arguments, self._held = "", function.arguments
        return said

    current_tool_id = property(lambda self: pytest.skip("it is state of vLLM's parser"), lambda self, value: None)


class Reasons(Adapted):
    format: str
    begins: str

    @property
    def declared(self) -> ReasoningFormat:
        declared = load_format(self.format).reasoning
        assert declared is not None
        return declared

    def parser(self, request: Any) -> OutputParser:
        asked = self._others.get("chat_template_kwargs") or getattr(request, "chat_template_kwargs", None) or {}
        thinks = asked.get("thinking", asked.get("enable_thinking"))
        is_open = self.begins == OPEN if thinks is None else thinks and self.begins != CLOSED
        form = self.declared
        reads = is_open or self.begins == CLOSED
        whole = OutputFormat(reasoning=ReasoningFormat(begin=form.begin, end=form.end))
        calls = CALLS_AFTER.get(self.format)
        return OutputParser(
            load_format(self.format) if reads and self.begins == CLOSED else whole if reads else None,
            load_format(calls) if calls and reads else None,
            prompt=form.begin if is_open else "",
        )

    def extract_reasoning(self, model_output: str, request: Any = None) -> tuple[str | None, str | None]:
        parser = self.parser(request)
        events = [*parser.feed(model_output), *parser.finish()]
        said = self._with_raw_calls(message_of(events), parser, model_output) or DeltaMessage()
        # This class alone says "" where the others say None.
        return said.reasoning or ("" if self.format == "deepseek_r1" else None), said.content

    def extract_reasoning_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *_: Any, **__: Any
    ) -> DeltaMessage | None:
        said = self._streamed(previous_text, current_text, delta_text, None)
        assert self._stream is not None
        if previous_text == "":
            self._raw_content = ""
        self._text = current_text
        return self._with_raw_calls(said, self._stream, current_text)

    def finished(self) -> DeltaMessage | None:
        stream, said = self._stream, super().finished()
        return None if stream is None else self._with_raw_calls(said, stream, self._text)

    _raw_content, _text = "", ""

    def _with_raw_calls(self, said: DeltaMessage | None, parser: OutputParser, text: str) -> DeltaMessage | None:
        """vLLM reads calls from the content that this parser gives out; ours has read them already."""
        calls = load_format(CALLS_AFTER[self.format]).calls if self.format in CALLS_AFTER else None
        if calls is None or not parser.num_calls:
            return said
        content = text[text.index(calls.opener) :]
        new, self._raw_content = content.removeprefix(self._raw_content), content
        reasoning = said.reasoning if said else None
        return DeltaMessage(content=new or None, reasoning=reasoning) if new or reasoning else None

    @property
    def start_token(self) -> str:
        return self.declared.begin

    @property
    def end_token(self) -> str:
        return self.declared.end

    @property
    def start_token_id(self) -> int | None:
        return self.vocab.get(self.start_token)

    @property
    def end_token_id(self) -> int | None:
        return self.vocab.get(self.end_token)

    think_start_token_id, think_end_token_id = start_token_id, end_token_id

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        text = self.model_tokenizer.decode(list(input_ids))
        return self.end_token in text and not ReasoningFormat(begin=self.start_token, end=self.end_token).is_open_after(
            text
        )

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Sequence[int]) -> bool:
        return self.end_token in self.model_tokenizer.decode(list(delta_ids))

    def extract_content_ids(self, input_ids: Sequence[int]) -> list[int]:
        ids = list(input_ids)
        at = len(ids) - 1 - ids[::-1].index(self.end_token_id) if self.end_token_id in ids else len(ids)
        return ids[at + 1 :]


def adapter(base: type, **fields: Any) -> Any:
    return type(base.__name__, (base,), fields)


TOOL_PARSERS = {name: adapter(Calls, format=form) for name, form in CALLS.items()}
REASONING_PARSERS = {name: adapter(Reasons, format=form, begins=begins) for name, (form, begins) in REASONING.items()}


def tool_parser_of(name: str) -> Any:
    known = {"minimax": "jamba"}
    try:
        declared = load_format(known.get(name, name))
    except Exception:
        pytest.skip(f"there is no format {name}")
    if declared.calls is None and declared.channels is None:
        pytest.skip(f"{name} has no calls")
    for cls, form in CALLS.items():
        if load_format(form) == declared:
            return TOOL_PARSERS[cls]
    return adapter(Calls, format=known.get(name, name))


def reasoning_parser_of(name: str) -> Any:
    for cls, (form, _) in REASONING.items():
        if NAMES.get(name, name) in (cls, form):
            return REASONING_PARSERS[cls]
    pytest.skip(f"there is no format {name}")


class MissingKind(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        pytest.skip(f"{cls.__name__} is vLLM's own")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        pytest.skip(f"{cls.__name__}.{name} is vLLM's own", allow_module_level=True)


class Missing(metaclass=MissingKind):
    """A name of vLLM's that has no counterpart here: a test that uses it is skipped."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        pytest.skip(f"{type(self).__name__} is vLLM's own", allow_module_level=True)


def read_on(tokenizer: Words, all_input_ids: Sequence[int], *_: Any, **__: Any) -> tuple[list[str], str, int, int]:
    """As vLLM's detokenize_incrementally, for a tokenizer whose tokens are texts."""
    new = tokenizer.convert_ids_to_tokens([all_input_ids[-1]])
    return new, new[0], len(all_input_ids) - 1, len(all_input_ids)


def get_tokenizer(*_: Any, **__: Any) -> Words:
    return Words()


KNOWN: dict[str, Any] = {
    **TOOL_PARSERS,
    **REASONING_PARSERS,
    "ToolParser": Calls,
    "ReasoningParser": Reasons,
    "ToolParserManager": types.SimpleNamespace(get_tool_parser=tool_parser_of),
    "ReasoningParserManager": types.SimpleNamespace(get_reasoning_parser=reasoning_parser_of),
    "DeltaMessage": DeltaMessage,
    "DeltaToolCall": ToolCall,
    "DeltaFunctionCall": FunctionCall,
    "FunctionCall": FunctionCall,
    "ToolCall": ToolCall,
    "ExtractedToolCallInformation": Extracted,
    "ChatCompletionRequest": Request,
    "ResponsesRequest": Request,
    "ChatCompletionToolsParam": ToolParam,
    "FunctionDefinition": Definition,
    "TokenizerLike": Words,
    "get_tokenizer": get_tokenizer,
    "detokenize_incrementally": read_on,
    "is_mistral_tokenizer": lambda tokenizer: False,
    **{"TOOL_CALL_START": "<|tool_call>", "TOOL_CALL_END": "<tool_call|>"},  # Gemma 4's
}


class Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes every module of the name vllm."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.split(".", maxsplit=1)[0] == "vllm"
            else None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []

        def get(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if name in KNOWN:
                return KNOWN[name]
            return type(name, (Exception,), {}) if name.endswith("Error") else MissingKind(name, (Missing,), {})

        module.__getattr__ = get  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: the module's names are made as they are asked for."""


OTHERS = ("k2_horizon", "kimi_k3", "structural_tag", "test_utils")
"""Parts of the names of tests of formats, and of vLLM's own functions, that have no counterpart here."""


class Plugin:
    """Ends streams as a parser here expects, and counts results by file."""

    def __init__(self) -> None:
        self.results: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.failed: dict[str, str] = {}

    @pytest.fixture(scope="module")
    def default_tokenizer(self) -> Words:
        return Words()

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return any(each in collection_path.name for each in OTHERS) or None

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        finish_streams()
        # Whether a template opens the reasoning is seen in the prompt here.
        items[:] = [each for each in items if "template_forces_reasoning" not in each.name]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        name = Path(report.nodeid.split("::")[0]).stem.removeprefix("test_")
        if report.when == "call" or report.outcome != "passed":
            outcome = report.outcome
            if hasattr(report, "wasxfail") or "XPASS" in str(report.longrepr):
                outcome = "left out" if report.outcome == "skipped" else "passed"
            if outcome == "failed":
                self.failed[report.nodeid] = str(report.longrepr).splitlines()[-1][:300] if report.longrepr else ""
            if report.when != "teardown":
                self.results[name][outcome] += 1
        return report

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed[report.nodeid] = str(report.longrepr).splitlines()[-1][:300]


def finish_streams() -> None:
    """Ends each stream of vLLM's helper functions with what the parser held back."""
    for module in [
        each for name, each in sys.modules.items() if name.endswith(("tool_parsers.utils", "reasoning.utils"))
    ]:
        for name in ("run_tool_extraction_streaming", "run_reasoning_extraction_streaming"):
            if (run := module.__dict__.get(name)) is None or hasattr(run, "ends"):
                continue

            def ended(parser: Any, *arguments: Any, run: Any = run, **more: Any) -> Any:
                found = run(parser, *arguments, **more)
                if isinstance(parser, Adapted) and (rest := parser.finished()) is not None:
                    found.append_delta(rest)
                return found

            ended.ends = True  # type: ignore[attr-defined]
            for other in sys.modules.values():
                if getattr(other, "__dict__", {}).get(name) is run:
                    setattr(other, name, ended)


def main() -> int | str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="folder of an unpacked source archive of vLLM")
    parser.add_argument("--report", type=Path, help="file for the results as JSON")
    parser.add_argument("pytest_arguments", nargs="*", help="arguments of pytest, behind --")
    asked = parser.parse_args()
    sys.meta_path.insert(0, Modules())
    sys.path.insert(0, str(asked.sources))
    setattr(transformers.AutoTokenizer, "from_pretrained", get_tokenizer)  # noqa: B010
    plugin = Plugin()
    folders = [str(asked.sources / "tests" / name) for name in ("tool_parsers", "reasoning")]
    fixed = ["--noconftest", "--continue-on-collection-errors", "--import-mode=importlib", "-c", "/dev/null"]
    fixed += ["-p", "no:cacheprovider", "-W", "ignore", "-q", "--no-header", "--tb=line"]
    fixed += ["--rootdir", str(asked.sources)]
    pytest.main([*fixed, *(asked.pytest_arguments or folders)], plugins=[plugin])
    total = collections.Counter[str]()
    print(f"\n{'file':45}{'passed':>8}{'failed':>8}{'left out':>10}{'skipped':>9}")
    for name, counts in sorted(plugin.results.items()):
        total += counts
        print(f"{name:45}{counts['passed']:8}{counts['failed']:8}{counts['left out']:10}{counts['skipped']:9}")
    print(f"{'all':45}{total['passed']:8}{total['failed']:8}{total['left out']:10}{total['skipped']:9}")
    for nodeid, reason in plugin.failed.items():
        print(f"{nodeid.split('tests/')[-1]}: {reason}")
    if asked.report:
        failed = sorted(nodeid.split("tests/")[-1] for nodeid in plugin.failed)
        by_file = dict(sorted(plugin.results.items()))
        write_report(asked.report, "vllm_parsers", {"total": total, "by_file": by_file, "failed": failed})
    return 0 if total["passed"] else f"no test of {asked.sources}/tests passed: is that vLLM's source archive?"


if __name__ == "__main__":
    sys.exit(main())
