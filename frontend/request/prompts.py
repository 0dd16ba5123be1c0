"""Parses prompts in every form that users give, tokenises and truncates them."""

from __future__ import annotations

import array
import operator
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, TypedDict

import msgspec

from headrace.frontend.request.embeds import cut, placed
from headrace.frontend.request.lists import asks_for_nothing, elements
from headrace.frontend.request.lora_request import LoRARequest
from headrace.frontend.request.parameters.sampling_params import SamplingParams
from headrace.frontend.text.formats.declaration import ReasoningFormat
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.adapters import AdapterUse
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Welcome
from headrace.ipc.row_inputs import RowInput
from headrace.ipc.struct_types import threadsafe


class TextPrompt(TypedDict, total=False):
    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    prompt_token_ids: Sequence[int]
    prompt: str
    cache_salt: str


class EmbedsPrompt(TypedDict, total=False):
    """Embeddings in the place of tokens; with prompt_is_token_ids, of those at which it is false."""

    prompt_embeds: Any
    """[num_tokens, hidden_size], a tensor of torch or an array of numpy, of floats"""
    prompt_token_ids: Sequence[int]
    prompt_is_token_ids: Sequence[bool]
    prompt: str
    cache_salt: str


class EmbedsInput(EmbedsPrompt, total=False):
    """A prompt with embeddings in the form that vLLM's renderers return and its engines accept."""

    type: Literal["embeds"]
    is_token_ids: Sequence[bool]


class TokensInput(TokensPrompt, total=False):
    """A prompt in the form that vLLM's renderers return and its engines accept."""

    type: Literal["token"]


PromptType = str | TextPrompt | TokensPrompt | EmbedsPrompt | Sequence[int]


def tokens_input(
    prompt_token_ids: list[int], *, prompt: str | None = None, cache_salt: str | None = None
) -> TokensInput:
    """A prompt of token ids, with its text if that is known."""
    more = {"prompt": prompt, "cache_salt": cache_salt}
    given = {name: value for name, value in more.items() if value is not None}
    return TokensInput(type="token", prompt_token_ids=prompt_token_ids, **given)  # type: ignore[typeddict-item]


def embeds_input(
    prompt_embeds: Any,
    *,
    prompt: str | None = None,
    cache_salt: str | None = None,
    prompt_token_ids: list[int] | None = None,
    is_token_ids: list[bool] | None = None,
) -> EmbedsInput:
    """A prompt of embeddings, with what else is known of it."""
    more = {
        "prompt": prompt,
        "cache_salt": cache_salt,
        "prompt_token_ids": prompt_token_ids,
        "is_token_ids": is_token_ids,
    }
    given = {name: value for name, value in more.items() if value is not None}
    return EmbedsInput(type="embeds", prompt_embeds=prompt_embeds, **given)  # type: ignore[typeddict-item]


NO_FIELDS: Mapping[str, Any] = types.MappingProxyType({})


class Prompt(msgspec.Struct):
    """A prompt in the form that the rest of the frontend uses."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    """None until the text is tokenised. The HTTP completions API stores them `packed`."""
    cache_salt: str = ""
    inputs: tuple[RowInput, ...] = ()
    """What stands in the place of tokens, where `token_ids` has PLACEHOLDER."""
    pooling_fields: Mapping[str, Any] = NO_FIELDS
    """Fields of the task `Pool` that are set with the prompt, such as second_text."""
    adapters: tuple[AdapterUse, ...] = ()
    """What is added to the model's weights for it."""
    lora_request: LoRARequest | None = None
    """The script's object that named the adapter."""
    reasoning: ReasoningFormat | None = None
    """How reasoning is marked in the answer, if the prompt was rendered for a known format."""
    reasoning_has_form: bool = False
    """Whether the request's structured output constrains the reasoning too, as a forced tool call does."""

    @property
    def text_start(self) -> int:
        """The position after its last input, from which on it is of tokens alone."""
        return self.inputs[-1].end if self.inputs else 0


_FORMS = (
    "a prompt is a string, a list of token ids, {'prompt': ...}, {'prompt_token_ids': [...]} or {'prompt_embeds': ...}"
)
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_OF_INPUTS = ("prompt_embeds", "prompt_is_token_ids", "is_token_ids", "row_inputs")


def packed(token_ids: Sequence[int]) -> Sequence[int]:
    """The ids as an int32 array, which the garbage collector does not traverse; unchanged if one is no int32."""
    try:
        return array.array("i", token_ids)
    except (OverflowError, TypeError):
        return token_ids


def parse_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or a list of them (`elements`), as `LLM.generate` takes them. Raises InvalidRequestError."""
    if isinstance(prompts, str | Mapping | Prompt):
        return [parse_prompt(prompts)]
    several = elements(prompts)
    if several is None:
        raise InvalidRequestError(f"{_FORMS}, or a list of these, not {type(prompts).__name__}")
    if several and _is_number(several[0]):
        return [parse_prompt(several)]
    parsed = []
    for index, prompt in enumerate(several):
        try:
            parsed.append(parse_prompt(prompt))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"prompts[{index}]: {error}") from None
    return parsed


def parse_single_prompt(prompt: Any) -> Prompt:
    """For a call that takes a single prompt. Raises InvalidRequestError, with that reason for a list of prompts."""
    several = elements(prompt)
    if several and (isinstance(several[0], str | Mapping) or elements(several[0]) is not None):
        raise InvalidRequestError(f"this takes one prompt, not a list of {len(several)}; {_FORMS}")
    return parse_prompt(prompt if several is None else several)


def parse_prompt(prompt: Any) -> Prompt:
    """Raises InvalidRequestError for an object that is not a prompt, and for unsupported fields of one."""
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if hasattr(prompt, "as_py"):  # an element of a column of pyarrow's
        return parse_prompt(prompt.as_py())
    if not isinstance(prompt, Mapping):
        if (token_ids := elements(prompt)) is None:
            raise InvalidRequestError(f"{_FORMS}, not {type(prompt).__name__}")
        return Prompt(token_ids=_plain_ids(token_ids))
    kind = "token" if prompt.get("prompt_embeds") is None else "embeds"
    for key, value in prompt.items():
        if key in _KEYS or key in _OF_INPUTS or (key, value) == ("type", kind):
            continue
        if not asks_for_nothing(value):
            raise InvalidRequestError(f"the prompt has a field {key!r}, which is not supported; {_FORMS}")
    text, given, salt = (prompt.get(key) for key in _KEYS)
    token_ids = elements(given)
    embeds = prompt.get("prompt_embeds")
    if text is None and given is None and embeds is None:
        raise InvalidRequestError(f"the prompt has neither 'prompt' nor 'prompt_token_ids'; {_FORMS}")
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"'prompt' must be a string, not {type(text).__name__}")
    if given is not None and token_ids is None:
        raise InvalidRequestError(f"'prompt_token_ids' must be a list of integers, not {type(given).__name__}")
    if not isinstance(salt, str | None):
        raise InvalidRequestError(f"'cache_salt' must be a string, not {type(salt).__name__}")
    found = Prompt(
        text=text, token_ids=None if token_ids is None else _plain_ids(token_ids), cache_salt=str(salt or "")
    )
    _add_inputs(found, prompt)
    return found


def _add_inputs(prompt: Prompt, given: Mapping[str, Any]) -> None:
    """Adds a prompt's embeddings, and inputs of other kinds. Raises InvalidRequestError."""
    values, mask = given.get("prompt_embeds"), given.get("prompt_is_token_ids")
    mask = given.get("is_token_ids") if mask is None else mask
    inputs = elements(given.get("row_inputs") or ()) or ()
    if not all(isinstance(each, RowInput) for each in inputs):
        raise InvalidRequestError(
            f"'row_inputs' must be a list of headrace.ipc.row_inputs.RowInput, not {inputs!r:.100}"
        )
    if mask is not None and (mask := elements(mask)) is None:
        raise InvalidRequestError("'prompt_is_token_ids' must be a list of booleans")
    if values is None:
        if mask is not None:
            raise InvalidRequestError("the prompt has 'prompt_is_token_ids' and no 'prompt_embeds'")
        prompt.inputs = tuple(inputs)
        return
    if inputs:
        raise InvalidRequestError("the prompt has 'prompt_embeds' and 'row_inputs'; give one of them")
    prompt.token_ids, prompt.inputs = placed(values, prompt.token_ids, mask)


class Tokenization(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of vLLM's `tokenization_kwargs` that apply to text generation."""

    add_special_tokens: bool = True
    do_lower_case: bool = False
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    """Most tokens to keep; -1 means max_model_len - 1."""
    truncation: bool = False
    max_length: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """With `truncation`, most tokens to keep, under transformers' names; None means max_model_len - 1."""
    truncation_side: Literal["left", "right"] | None = None
    """The end from which tokens are dropped; None: the left one, and of prompts that pool the one that the tokenizer's
    files say, which is the right one if they do not."""
    padding: bool = False

    def __post_init__(self) -> None:
        if self.padding:
            raise ValueError("padding must be false: prompts are not padded")

    def truncates_left(self, by_default: bool) -> bool:
        return by_default if self.truncation_side is None else self.truncation_side == "left"

    def apply(self, prompt: Prompt, welcome: Welcome) -> None:
        """Truncates the prompt's token ids as these fields ask."""
        most = self.max_length if self.truncation else self.truncate_prompt_tokens
        if (self.truncation and most is None) or most == -1:
            most = welcome.max_model_len - 1
        token_ids = prompt.token_ids
        if most is not None and token_ids is not None and len(token_ids) > most:
            _keep(prompt, most, "left" if self.truncates_left(True) else "right")


DEFAULT_TOKENIZATION = Tokenization()


def tokenization_of(given: Mapping[str, Any] | None) -> Tokenization:
    """From a call's `tokenization_kwargs`. Raises InvalidRequestError for unknown fields and bad values."""
    if not given:
        return DEFAULT_TOKENIZATION
    try:
        return msgspec.convert(
            {name: value for name, value in given.items() if value is not None}, threadsafe(Tokenization)
        )
    except (msgspec.ValidationError, AttributeError) as error:
        names = ", ".join(Tokenization.__struct_fields__)
        raise InvalidRequestError(f"tokenization_kwargs: {error}; they may have {names}") from None


class ModelFacts(Protocol):
    """What requests are made and checked with: an engine, or several of one model."""

    @property
    def welcome(self) -> Welcome: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...


def tokenize(prompts: Sequence[Prompt], facts: ModelFacts, how: Tokenization = DEFAULT_TOKENIZATION) -> None:
    """Sets the token ids of prompts that have only text, and truncates prompts as asked. Raises InvalidRequestError
    without a tokenizer, and for text that is not valid Unicode."""
    texts = []
    for prompt in prompts:
        if prompt.token_ids is None:
            texts.append(prompt)
    if texts:
        encode_texts(texts, facts.tokenizer, how)
    if how is not DEFAULT_TOKENIZATION:
        for prompt in prompts:
            how.apply(prompt, facts.welcome)


def encode_texts(texts: Sequence[Prompt], tokenizer: Tokenizer | None, how: Tokenization) -> None:
    """Sets the token ids of prompts, at least one, of which each has only text."""
    if tokenizer is None:
        raise InvalidRequestError(
            "this engine runs without a tokenizer (`skip_tokenizer_init=True`): give prompt_token_ids instead of text"
        )
    strings = list[str]()
    for prompt in texts:
        text = prompt.text or ""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the prompt is not valid Unicode text: {error}") from error
        strings.append(text.lower() if how.do_lower_case else text)
    special = how.add_special_tokens
    encoded = [tokenizer.encode(strings[0], special)] if len(strings) == 1 else tokenizer.encode_batch(strings, special)
    for prompt, token_ids in zip(texts, encoded, strict=True):
        prompt.token_ids = token_ids


def truncate(prompt: Prompt, params: SamplingParams, welcome: Welcome) -> bool:
    """Truncates the prompt to params.truncate_prompt_tokens; returns whether any tokens were dropped."""
    kept, token_ids = params.truncate_prompt_tokens, prompt.token_ids
    if kept is None or token_ids is None:
        return False
    if kept == -1:
        kept = max(1, welcome.max_model_len - (params.max_tokens or 1))
    if len(token_ids) <= kept:
        return False
    _keep(prompt, kept, params.truncation_side or "left")
    return True


def _keep(prompt: Prompt, most: int, truncation_side: str) -> None:
    """Drops all of the prompt's tokens but `most`, at the side. Raises InvalidRequestError."""
    token_ids = prompt.token_ids or ()
    first, last = (0, most) if truncation_side == "right" else (len(token_ids) - most, len(token_ids))
    prompt.token_ids = token_ids[first:last]
    if prompt.inputs:
        prompt.inputs = cut(prompt.inputs, first, last)


def _is_number(value: Any) -> bool:
    """Whether it is one token id, of any integer type, or meant as one."""
    return isinstance(value, int) or (hasattr(value, "__index__") and elements(value) is None)


def _is_token_id(value: Any) -> bool:
    """Whether it is one whole number of 64 bits: an array may have the method, and a class has its objects'."""
    try:
        return not isinstance(value, bool) and abs(operator.index(value)) < 2**63
    except Exception:  # whatever the value's own method raises
        return False


def _plain_ids(token_ids: Sequence[Any]) -> list[int]:
    """The ids as Python integers (numpy's are accepted). Raises InvalidRequestError for the first that is not one."""
    try:
        ids = array.array("q", token_ids).tolist()
    except (TypeError, OverflowError):
        ids = None
    if ids is None or bool in set(map(type, token_ids)):
        for index, token_id in enumerate(token_ids):
            if not _is_token_id(token_id):
                raise InvalidRequestError(f"prompt_token_ids[{index}] is {token_id!r:.100}, which is no token id")
    return ids or []
