"""Parses the answers of `LLM.chat` and `AsyncLLM.chat` as the server does: reasoning, content and tool calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.frontend.request.outputs import AnswerMessage, CompletionOutput, RequestOutput
from headrace.frontend.request.parameters.structured_outputs import StructuredOutputsParams, schema_of_answer
from headrace.frontend.text.chat_template import RenderedChat
from headrace.ipc.failure import InvalidRequestError

if TYPE_CHECKING:
    from headrace.frontend.request.parameters.sampling_params import SamplingParams
    from headrace.frontend.request.prompts import Prompt
    from headrace.frontend.text.formats.declaration import ReasoningFormat
    from headrace.frontend.text.formats.output_formats import OutputFormats
    from headrace.frontend.text.formats.parser import OutputParser
    from headrace.frontend.text.tokenizer import Tokenizer


class AnswerReader:
    """Parses the answers to one conversation."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: str, options: Mapping[str, Any], parsers: Mapping[str, str]
    ) -> None:
        """options: the arguments of apply_chat_template that rendered the prompt. parsers: from `take_parsers`. Raises
        OptionError for an unknown format."""
        self._tokenizer = tokenizer
        self._token_ids: dict[int, list[int]] = {}
        self._make_parser: Callable[[], OutputParser] | None = None
        self._strict: Callable[[Any], str | None] | None = None
        """For tools with `strict`: the grammar of answers, or None if nothing can hold calls to their schemas. Takes
        the schema of answers that are no calls, or None."""
        self._reasoning: ReasoningFormat | None = None
        tools = options.get("tools")
        if not tools and not parsers:
            return
        from headrace.frontend.text.formats.output_formats import ToolChoice

        template = tokenizer.get_chat_template(options.get("chat_template"), tools)
        rendered, choice = RenderedChat(prompt, template), ToolChoice(_as_openai(tools or ()))
        known = _formats(parsers.get("tool_call_parser", "auto"), parsers.get("reasoning_parser"))
        formats = known.of(rendered, choice).as_written(prompt, tokenizer)
        self._make_parser = formats.parser_factory(tokenizer, rendered, choice)
        if choice.asks_for_strict:
            self._reasoning = formats.reasoning

            def grammar(or_json: Any) -> str | None:
                return formats.grammar(tokenizer, rendered, choice, several=True, or_json=or_json)

            self._strict = grammar if formats.can_hold_calls(tokenizer) else lambda or_json: None

    @property
    def is_strict(self) -> bool:
        """Whether a tool has `strict`, so that answers need a form."""
        return self._strict is not None

    def constrain(self, prompt: Prompt, params: SamplingParams) -> SamplingParams:
        """The parameters with a form in which calls fit their tools' schemas, if a tool has `strict`; the prompt then
        says how reasoning before that form is marked. Raises InvalidRequestError if that cannot be."""
        if self._strict is None:
            return params
        form, or_json = params.structured_outputs, schema_of_answer(params.structured_outputs)
        if form is not None and or_json is None:
            raise InvalidRequestError(
                "tools: a tool has `strict`, beside which SamplingParams.structured_outputs can be a JSON schema alone"
            )
        if (grammar := self._strict(or_json)) is None:
            raise InvalidRequestError(
                "tools: a tool has `strict`, and nothing can hold calls to its schema: the chat template speaks for no "
                "known format of calls. Name one as tool_call_parser, or leave `strict` out"
            )
        prompt.reasoning = self._reasoning
        held = params.clone()
        held.structured_outputs = StructuredOutputsParams(grammar=grammar)
        return held

    def read(self, request: RequestOutput, *, is_delta: bool = False) -> None:
        """Sets `message` of each finished output. is_delta: outputs hold only their new part."""
        if self._make_parser is None:
            return
        for output in request.outputs:
            token_ids = output.token_ids
            if is_delta:
                token_ids = self._token_ids.setdefault(output.index, [])
                token_ids += output.token_ids
            if output.finish_reason is not None:
                output.message = self._message(output, token_ids)

    def _message(self, output: CompletionOutput, token_ids: Sequence[int]) -> AnswerMessage:
        from headrace.frontend.request.message import message_of

        assert self._make_parser is not None
        # Decoded again, since markers may be special tokens, which the output's text leaves out.
        text = self._tokenizer.decode(token_ids)
        if isinstance(stop := output.stop_reason, str) and not output.text.endswith(stop):
            text = text[: text.rfind(stop)]
        parser = self._make_parser()
        return message_of(parser.read(text, output.finish_reason, stop))


@functools.cache
def _formats(tool_call_parser: str, reasoning_parser: str | None) -> OutputFormats:
    from headrace.frontend.text.formats.output_formats import OutputFormats

    return OutputFormats(tool_call_parser, reasoning_parser)


def _as_openai(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Tools in OpenAI's shape, for parsing. Templates may take other shapes; a tool without a name is left out."""
    functions = [each.get("function", each) for each in tools]
    return [{"type": "function", "function": each} for each in functions if "name" in each] or None


def take_parsers(given: dict[str, Any]) -> dict[str, str]:
    """Removes the names of formats from chat's arguments and returns them. Raises InvalidRequestError."""
    names = ("tool_call_parser", "reasoning_parser")
    taken = {name: value for name in names if (value := given.pop(name, None)) is not None}
    for name, value in taken.items():
        if not isinstance(value, str):
            raise InvalidRequestError(f"{name} must be the name of a format, not {value!r:.100}")
    return taken
