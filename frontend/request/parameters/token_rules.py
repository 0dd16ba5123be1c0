"""Checks and tokenises the per-token rules of a request: `allowed_token_ids`, `bad_words` and `logit_bias`."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.frontend.request.parameters.sampling_fields import bad
from headrace.frontend.text.guarded_tokenizer import TokenizingError
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.failure import InvalidRequestError

if TYPE_CHECKING:
    from headrace.frontend.request.parameters.sampling_params import SamplingParams

MOST_BIAS = 1e6
"""Far above any logit: a token with this bias is always chosen. The HTTP server clamps to 100, as OpenAI's API does."""
OPENAI_BIAS = 100.0
_MOST_ID = 2**31 - 1
_MOST_NAMED = 8
"""Most keys that an error message quotes."""
MOST_BAD_WORDS = 1024
MOST_BAD_CHARACTERS = 1 << 14
"""Total for a request: bad words are tokenised in one go on the event loop, while other requests wait."""


def verify_token_rules(params: SamplingParams) -> None:
    """Raises InvalidRequestError for the first of the four fields that is invalid."""
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids and isinstance(params.allowed_token_ids, list | tuple):
            raise bad("allowed_token_ids", [], "allows no token at all; None allows every token")
        verify_token_ids("allowed_token_ids", params.allowed_token_ids)
    if not isinstance(params.bad_words, list | None) or params.bad_words:
        _verify_bad_words(params.bad_words)
    if params.logit_bias is not None:
        _verify_bias(params.logit_bias)
    if params.dry_sequence_breakers is not None:
        _verify_breakers(params.dry_sequence_breakers)


def verify_token_ids(name: str, token_ids: Any) -> None:
    """Raises InvalidRequestError unless this is a list or tuple of at least one token id."""
    if not isinstance(token_ids, list | tuple):
        raise bad(name, token_ids, "must be a list or tuple of token ids")
    if not token_ids:
        raise bad(name, token_ids, "must not be an empty list: that names no token; leave it out")
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) <= _MOST_ID:
        return  # fast: the list may hold a whole vocabulary
    for token_id in token_ids:
        if not _is_id(token_id):
            raise InvalidRequestError(f"SamplingParams.{name} contains {token_id!r:.100}, which is no token id")


def _verify_bad_words(words: Any) -> None:
    if not isinstance(words, list | tuple):
        raise bad("bad_words", words, "must be a list of strings")
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise InvalidRequestError(
                f"SamplingParams.bad_words contains {word!r:.100}: it must contain only strings that are not empty "
                "and not blank"
            )
    if len(words) > MOST_BAD_WORDS or sum(map(len, words)) > MOST_BAD_CHARACTERS:
        raise InvalidRequestError(
            f"SamplingParams.bad_words has {len(words)} words of {sum(map(len, words))} characters: at most "
            f"{MOST_BAD_WORDS} words of {MOST_BAD_CHARACTERS} characters together are taken"
        )


def _verify_bias(logit_bias: Any) -> None:
    if not isinstance(logit_bias, Mapping):
        raise bad("logit_bias", logit_bias, "must be a dict of token ids to numbers")
    for token_id, bias in logit_bias.items():
        if not _is_id(token_id):
            raise InvalidRequestError(f"SamplingParams.logit_bias has the key {token_id!r:.100}, which is no token id")
        if isinstance(bias, bool) or not isinstance(bias, numbers.Real) or not bias <= MOST_BIAS:
            raise InvalidRequestError(
                f"SamplingParams.logit_bias[{token_id}] = {bias!r:.100}: must be a finite number of at most "
                f"{MOST_BIAS:.0f}, or -inf, which forbids the token"
            )


def check_model_limits(params: SamplingParams, vocab_size: int, max_logprobs: int) -> None:
    """Raises InvalidRequestError for token ids outside the vocabulary, and for more log-probabilities than allowed."""
    if params.logprobs is not None or params.prompt_logprobs is not None:
        check_num_logprobs(params, vocab_size, max_logprobs)
    for name in ("allowed_token_ids", "logit_bias", "stop_token_ids", "logprob_token_ids"):
        highest = max(getattr(params, name) or (), default=0)
        if highest >= vocab_size:
            raise InvalidRequestError(
                f"SamplingParams.{name} contains {highest}: the model's token ids are 0 to {vocab_size - 1}"
            )


def check_num_logprobs(params: SamplingParams, vocab_size: int, max_logprobs: int) -> None:
    """Raises InvalidRequestError for more log-probabilities per token than max_logprobs (-1: the vocabulary)."""
    limit = vocab_size if max_logprobs == -1 else max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and (vocab_size if value == -1 else value) > limit:
            whole = f", the whole vocabulary of {vocab_size}" if value == -1 else ""
            raise InvalidRequestError(
                f"SamplingParams.{name} = {value}{whole}: the engine gives at most {limit} per token (its option "
                f"max_logprobs), so this is greater than max allowed: {limit}"
            )


def tokenize_bad_words(
    words: Iterable[str], tokenizer: Any, vocab_size: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The forbidden token sequences: each word alone, and each word after a space.

    The second is left out when it ends in the tokens of the first, which then forbids both. vLLM also leaves it out
    when the space changes the number of tokens, and so allows the word after a space. Raises InvalidRequestError.
    """
    runs: dict[tuple[int, ...], None] = {}
    for word in dict.fromkeys(words):
        alone, spaced = (tuple(_encode(tokenizer, space + word.lstrip())) for space in ("", " "))
        if not alone:
            raise InvalidRequestError(
                f"SamplingParams.bad_words contains {word!r:.100}: words must tokenize to at least one token"
            )
        runs[alone] = None
        if spaced and spaced[-len(alone) :] != alone:
            runs[spaced] = None
    if vocab_size is not None and (outside := [each for run in runs for each in run if each >= vocab_size]):
        raise InvalidRequestError(
            f"SamplingParams.bad_words contains a word with token {outside[0]}: the model's token ids are 0 to "
            f"{vocab_size - 1}"
        )
    return tuple(runs)


DRY_BREAKERS = ("\n", ":", '"', "*")
"""The sequence breakers of DRY's author, used if a request names none."""
MOST_BREAKERS, MOST_BREAKER_CHARACTERS = 64, 64


def _verify_breakers(texts: Any) -> None:
    name = "dry_sequence_breakers"
    if not isinstance(texts, list | tuple):
        raise bad(name, texts, "must be a list of strings")
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= MOST_BREAKER_CHARACTERS:
            raise bad(name, texts, f"must contain only strings of 1 to {MOST_BREAKER_CHARACTERS} characters")
    if len(texts) > MOST_BREAKERS:
        raise bad(name, texts, f"may have at most {MOST_BREAKERS} strings")


def bad_words_of(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> Any:
    """The token sequences that the parameters' bad_words forbid. Raises InvalidRequestError."""
    if tokenizer is not None:
        return tokenize_bad_words(params.bad_words or (), tokenizer, vocab_size)
    if (runs := params.bad_words_token_ids) is None:
        raise InvalidRequestError(
            "SamplingParams.bad_words needs a tokenizer, and this engine runs without one: call update_from_tokenizer "
            "on the parameters, or use logit_bias"
        )
    return tuple(map(tuple, runs))


def breakers_of(texts: Sequence[str] | None, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The last token of each text when it follows a letter, as DRY's author does it: the tokeniser then adds no space
    before the text. Raises InvalidRequestError."""
    if tokenizer is None:
        if texts:
            raise bad("dry_sequence_breakers", texts, "needs a tokenizer, and this engine runs without one")
        return ()
    texts = DRY_BREAKERS if texts is None else texts
    return tuple(dict.fromkeys(_encode(tokenizer, "a" + text)[-1] for text in texts))


def openai_bias(logit_bias: Any) -> Any:
    """A logit_bias with JSON's text keys made integers and values clamped to -100 to 100. Raises InvalidRequestError.

    Values of other types are returned unchanged, for `verify_token_rules` to refuse.
    """
    if not isinstance(logit_bias, Mapping):
        return logit_bias
    found: dict[int, Any] = {}
    wrong: list[Any] = []
    for key, bias in logit_bias.items():
        try:
            token_id = int(key)
        except (TypeError, ValueError):
            wrong.append(key)
            continue
        is_number = isinstance(bias, numbers.Real)
        found[token_id] = min(OPENAI_BIAS, max(-OPENAI_BIAS, bias)) if is_number else bias
    if wrong:
        named = ", ".join(f"{key!r:.100}" for key in wrong[:_MOST_NAMED])
        more = f" and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise InvalidRequestError(f"SamplingParams.logit_bias has keys that are no token ids: {named}{more}")
    return found


def _encode(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the request contains what is no valid Unicode text: {error}") from error
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except TokenizingError as error:
        raise InvalidRequestError(str(error).replace("the prompt", f"the request's text {text!r:.100}", 1)) from None


def _is_id(value: Any) -> bool:
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
        return False
    return 0 <= int(value) <= _MOST_ID
