"""Prompts of pairs of texts, which scores are of: a classifier reads both at once, embeddings are compared."""

from __future__ import annotations

import itertools
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.frontend.request.parameters.pooling_params import PoolingParams
from headrace.frontend.request.pooling_outputs import PoolingOutput
from headrace.frontend.request.pooling_prompts import NOT_POOLING, cut, cuts_left, prompt_before, tokenize_to_pool
from headrace.frontend.request.prompts import DEFAULT_TOKENIZATION, ModelFacts, Prompt, Tokenization
from headrace.frontend.text.chat_template import text_parts
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.codec import Tensor
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import PairFormat, Pooling, Welcome

PAIR_ROLES = ("query", "document")
"""Of the messages that a template for pairs gets, as vLLM's do."""


class PairTemplate(NamedTuple):
    """A chat template that writes a pair of texts as one prompt."""

    template: str
    variables: Mapping[str, Any] = types.MappingProxyType({})
    are_parts: bool = False
    """A message's content is a list of parts; else a text."""
    is_whole: bool = False
    """The template writes the special tokens too, and what it writes at the end stays when a prompt is cut; else the
    tokenizer adds its own, as for vLLM."""


_FIELD = re.compile(r"\{(?:instruction|query|document)\}")


def scoring_task(welcome: Welcome) -> str:
    """The task whose results make scores: classify, of pairs, embed, or token_embed, whose vectors are compared one by
    one. Raises InvalidRequestError if there is none."""
    pooling = welcome.pooling
    if pooling is None:
        raise InvalidRequestError(f"scores are of models that pool: {NOT_POOLING}")
    for kind in ("embed", "token_embed"):
        if kind in pooling.kinds:
            return kind
    if "classify" not in pooling.kinds:
        raise InvalidRequestError(
            f"This model does not support the Scoring API: its tasks are {', '.join(pooling.kinds)}; it needs classify "
            "with one label, or embed"
        )
    if pooling.width != 1:
        raise InvalidRequestError(
            f"Scoring API is only enabled for num_labels == 1, and this classifier has {pooling.width} labels"
        )
    return "classify"


def shortened(
    pairs: Sequence[tuple[str, str]],
    most: tuple[int, int],
    tokenizer: Tokenizer | None,
    enough: Callable[[str, int], str] = lambda text, most: text,
) -> Sequence[tuple[str, str]]:
    """The pairs, whose first texts have at most most[0] tokens and their second ones most[1]; 0: all. enough: as much
    of a text as has so many tokens, or more."""
    if tokenizer is None or not any(most):
        return pairs

    def cut(text: str, num_tokens: int) -> str:
        return tokenizer.beginning(enough(text, num_tokens), num_tokens) if num_tokens else text

    by_side = [{text: cut(text, num) for text in {pair[side] for pair in pairs}} for side, num in enumerate(most)]
    return [(by_side[0][first], by_side[1][second]) for first, second in pairs]


def paired(data_1: Any, data_2: Any) -> list[tuple[str, str]]:
    """The pairs of 1:1, 1:N or N:N texts. Raises InvalidRequestError."""
    one, several = _texts(data_1, "data_1"), _texts(data_2, "data_2")
    if len(one) not in (1, len(several)):
        raise InvalidRequestError(
            f"Input lengths must be either 1:1, 1:N or N:N; data_1 has {len(one)} texts and data_2 {len(several)}"
        )
    return list(zip(one * len(several) if len(one) == 1 else one, several, strict=True))


def _texts(given: Any, name: str) -> list[str]:
    found = [given] if isinstance(given, str | Mapping) else list(given) if isinstance(given, Sequence) else []
    if not found:
        raise InvalidRequestError(f"{name} must be a text or a list of at least one, not {given!r:.80}")
    return [_text(each, f"{name}[{index}]") for index, each in enumerate(found)]


def _text(given: Any, where: str) -> str:
    """A text, or that of vLLM's {"content": [{"type": "text", "text": ...}]}."""
    if isinstance(given, str):
        return given
    parts = given.get("content") if isinstance(given, Mapping) else None
    if not isinstance(parts, Sequence) or isinstance(parts, str):
        raise InvalidRequestError(
            f'{where} must be a text or {{"content": [{{"type": "text", "text": ...}}]}}, not {type(given).__name__}'
        )
    return "\n".join(text_parts(parts, f"{where}.content"))


def tokenize_pairs(
    pairs: Sequence[tuple[str, str]],
    tokenizer: Tokenizer | None,
    welcome: Welcome,
    most_tokens: int | None = None,
    how: Tokenization | None = None,
    instruction: str | None = None,
    prompt_name: str | None = None,
    template: PairTemplate | None = None,
) -> list[Prompt]:
    """One prompt for each pair, as the tokenizer joins two texts. most_tokens: the longer text is cut to fit into it.
    prompt_name: of what comes before the first text; None: the folder's default. template: writes pairs in the place of
    the tokenizer and of the form that the model is known to have. Raises InvalidRequestError."""
    if tokenizer is None:
        raise InvalidRequestError(
            "this engine runs without a tokenizer (`skip_tokenizer_init=True`), and scores are of texts"
        )
    pooling = welcome.pooling
    assert pooling is not None, "scoring_task comes first"
    if before := prompt_before(prompt_name, pooling):
        pairs = [(before + first, second) for first, second in pairs]
    if pooling.lower_case:
        pairs = [(first.lower(), second.lower()) for first, second in pairs]
    from_left = cuts_left(how or DEFAULT_TOKENIZATION, tokenizer)
    if template is None and (chat := pooling.pair_chat) is not None:
        template = PairTemplate(tokenizer.get_chat_template(None), chat.variables, chat.are_parts, is_whole=True)
    if template is not None:
        return _rendered(pairs, template, tokenizer, most_tokens, from_left=from_left)
    if pooling.pair_format is not None:
        return _written(pairs, pooling.pair_format, tokenizer, most_tokens, instruction)
    encoded = tokenizer.encode_pairs(pairs, most_tokens, from_left=from_left)
    prompts = [Prompt(token_ids=token_ids) for token_ids, _ in encoded]
    if pooling.has_token_types:
        for prompt, (_, second) in zip(prompts, encoded, strict=True):
            prompt.pooling_fields = {"second_text": second}
    return prompts


def _rendered(
    pairs: Sequence[tuple[str, str]],
    template: PairTemplate,
    tokenizer: Tokenizer,
    most_tokens: int | None,
    *,
    from_left: bool,
) -> list[Prompt]:
    pairs = [*pairs, ("a", "b"), ("c", "d")] if template.is_whole and most_tokens is not None else pairs
    chats = [[{"role": role, "content": text} for role, text in zip(PAIR_ROLES, pair, strict=True)] for pair in pairs]
    form: dict[str, Any] = {"chat_template_content_format": "openai"} if template.are_parts else {}
    texts = list(tokenizer.render_chats(chats, chat_template=template.template, **form, **template.variables))
    end = list[int]()
    if template.is_whole and most_tokens is not None:
        end = tokenizer.encode(_common_end(texts.pop(), texts.pop()), False)
    prompts = []
    for text, encoded in zip(texts, tokenizer.encode_batch(texts, not template.is_whole), strict=True):
        token_ids = list(encoded)
        if most_tokens is not None and len(token_ids) > most_tokens:
            if template.is_whole:
                token_ids = [*token_ids[: max(0, most_tokens - len(end))], *end][:most_tokens]
            else:
                token_ids = cut(token_ids, tokenizer.encode(text, False), most_tokens, from_left=from_left)
        prompts.append(Prompt(token_ids=token_ids))
    return prompts


def _common_end(first: str, second: str) -> str:
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(reversed(first), reversed(second), strict=False))
    return "".join(letter for letter, _ in alike)[::-1]


def _written(
    pairs: Sequence[tuple[str, str]],
    form: PairFormat,
    tokenizer: Tokenizer,
    most_tokens: int | None,
    instruction: str | None,
) -> list[Prompt]:
    said, prompts = form.instruction if instruction is None else instruction, list[Prompt]()
    said = form.instructed.replace("{instruction}", said) if said else ""
    for query, document in pairs:
        given = {"{instruction}": said, "{query}": query, "{document}": document}
        texts = [_FIELD.sub(lambda found: given[found.group()], segment) for segment in form.segments]  # noqa: B023
        cut_at = form.cut
        if query.startswith(texts[0].partition("\n")[0]):
            texts, cut_at = _own_segments(query + document, texts[0], texts[-1]), 1
        segments = tokenizer.encode_batch(texts, False)
        if most_tokens is not None:
            others = sum(map(len, segments)) - len(segments[cut_at])
            segments[cut_at] = segments[cut_at][: max(0, most_tokens - others)]
        prompts.append(Prompt(token_ids=[each for segment in segments for each in segment]))
    return prompts


def _own_segments(whole: str, opening: str, closing: str) -> list[str]:
    """Of a pair that the client has written in the model's form already, as examples of vLLM do: what is before the
    part to be cut, that part, and what is behind it."""
    first, last = opening if whole.startswith(opening) else "", closing if whole.endswith(closing) else ""
    return [first, whole[len(first) : len(whole) - len(last)], last]


def late_prompts(
    texts: Sequence[str], params: PoolingParams, facts: ModelFacts, how: Tokenization, prompt_name: str
) -> list[Prompt]:
    """Prompts of queries, or of documents, whose tokens' vectors are compared."""
    prompts, params = [Prompt(text=text) for text in texts], params.clone()
    params.prompt_name = prompt_name
    tokenize_to_pool(prompts, [params] * len(prompts), facts.tokenizer, how, facts.welcome)
    return prompts


def query_vectors(query: PoolingOutput) -> Tensor:
    """The vectors of a query's tokens: with them as the task's `compared_with`, a document's result is its score."""
    assert query.width is not None, "it has a vector for each token"
    return Tensor("float32", (len(query.values) // query.width, query.width), query.values.cast("B"))


def similarity(pooling: Pooling, first: Sequence[float], second: Sequence[float]) -> float:
    """How alike two embeddings are, as the folder says; more is more alike."""
    if pooling.similarity == "euclidean":
        return -(sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) ** 0.5)
    if pooling.similarity == "manhattan":
        return -sum(abs(a - b) for a, b in zip(first, second, strict=True))
    product = _dot(first, second)
    if pooling.similarity == "dot":
        return product
    lengths = (_dot(first, first) * _dot(second, second)) ** 0.5
    return product / lengths if lengths else 0.0


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))
