"""Request features that depend on where reasoning ends: `thinking_token_budget`, and structured output after it.

The markers of the reasoning come from the prompt, if it was rendered for a known reasoning format, or else from the
engine's reasoning_config or structured_outputs_config.
"""

from __future__ import annotations

import functools

import msgspec

from headrace.frontend.request.parameters.sampling_fields import bad
from headrace.frontend.request.parameters.sampling_params import SamplingParams
from headrace.frontend.request.prompts import Prompt
from headrace.frontend.text.formats.declaration import FormatError, ReasoningFormat, load_format
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Thinking, Welcome


def thinking_of(
    params: SamplingParams, prompt: Prompt, tokenizer: Tokenizer | None, welcome: Welcome
) -> Thinking | None:
    """The message to the core; None if nothing in the request depends on reasoning. Raises InvalidRequestError."""
    budget = params.thinking_token_budget
    waits = params.structured_outputs is not None and not prompt.reasoning_has_form
    if budget is not None and prompt.reasoning_has_form:
        raise bad("thinking_token_budget", budget, "is not supported with a tool_choice that forces a call")
    if waits and welcome.grammars_hold_in_reasoning:
        if budget is None:
            return None
        why = "needs a form that begins after the reasoning, and this engine's structured_outputs_config has"
        raise bad("thinking_token_budget", budget, f"{why} enable_in_reasoning")
    if budget is None and not waits:
        return None
    declared = _as_configured(prompt.reasoning or _declared(welcome.reasoning_parser), welcome)
    if declared is None or tokenizer is None:
        if budget is None:
            return None
        why = "needs the model's format of reasoning: start the server with a reasoning_parser's name, or the engine"
        raise bad("thinking_token_budget", budget, f"{why} with reasoning_config={{'reasoning_parser': ...}}")
    markers = declared.begin.strip(), declared.end.strip()
    begin, end = (_token_ids(tokenizer, marker) for marker in markers)
    text = prompt.text
    if text is None:
        text = tokenizer.decode(list(prompt.token_ids or ())[prompt.text_start :])
    opened, ended = (text.rfind(marker) if marker else -1 for marker in markers)
    is_open = opened > ended or (declared.starts_open and ended < 0)
    is_over = ended >= 0 and not text[ended + len(markers[1]) :].strip()  # not that of an earlier turn alone
    if not is_open and (not begin or (is_over and waits)):
        return None  # no marker would show its beginning, or the form begins with the answer
    forced = _token_ids(tokenizer, welcome.reasoning_end)
    near = {token_id: data for marker in markers if marker for token_id, data in tokenizer.tokens_near(marker).items()}
    return Thinking(
        end=end,
        begin=begin,
        is_open=is_open,
        budget=budget,
        forced=() if forced == end else forced,
        begin_text=markers[0].encode(),
        end_text=markers[1].encode(),
        near=tuple(near),
        near_texts=tuple(near.values()),
    )


def reads_reasoning(prompt: Prompt, welcome: Welcome) -> bool:
    """Whether reasoning in the answer can be told apart from content, because its markers are known."""
    return _as_configured(prompt.reasoning or _declared(welcome.reasoning_parser), welcome) is not None


def _as_configured(declared: ReasoningFormat | None, welcome: Welcome) -> ReasoningFormat | None:
    """The format with the begin marker of the engine's reasoning_config; without a format, one made of that option's
    markers, or None. Raises InvalidRequestError if the option's end lacks the format's end marker."""
    begin, end = welcome.reasoning_begin, welcome.reasoning_end
    if declared is None:
        return ReasoningFormat(begin=begin, end=end) if begin and end else None
    if end and declared.end.strip() not in end:
        raise InvalidRequestError(
            f"reasoning_config has reasoning_end_str={end!r}, in which the format's own end, {declared.end.strip()!r}, "
            "is missing: no answer would begin after it"
        )
    return msgspec.structs.replace(declared, begin=begin) if begin else declared


@functools.cache
def _declared(name: str) -> ReasoningFormat | None:
    if not name:
        return None
    try:
        declared = load_format(name).reasoning
    except FormatError as error:
        raise InvalidRequestError(f"the engine's options have reasoning_parser={name!r}: {error}") from None
    if declared is None:
        raise InvalidRequestError(f"the engine's options have reasoning_parser={name!r}: it has no reasoning")
    return declared


def _token_ids(tokenizer: Tokenizer, marker: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(marker, add_special_tokens=False)) if marker else ()
