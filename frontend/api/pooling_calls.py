"""The calls of `LLM` for vectors, classes and scores of prompts: `embed`, `encode`, `classify`, `reward`, `score`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.frontend.api.batch import RequestBatch, SharedBar, checked_requests
from headrace.frontend.client.background import BackgroundLoop
from headrace.frontend.request.lists import one_for_each
from headrace.frontend.request.lora_request import LoRARequest
from headrace.frontend.request.pair_prompts import (
    PairTemplate,
    late_prompts,
    paired,
    query_vectors,
    scoring_task,
    shortened,
    similarity,
    tokenize_pairs,
)
from headrace.frontend.request.parameters.pooling_params import PoolingParams
from headrace.frontend.request.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from headrace.frontend.request.pooling_prompts import DOCUMENT, NOT_POOLING, QUERY, most_tokens, tokenize_to_pool
from headrace.frontend.request.prompts import Prompt, Tokenization, parse_prompts, tokenization_of
from headrace.frontend.vllm.unsupported import check_arguments
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Welcome

if TYPE_CHECKING:
    from headrace.frontend.fleet.pool import EnginePool


class PoolingCalls:
    """A part of `LLM`, which sets these attributes."""

    _background: BackgroundLoop
    _client: EnginePool
    _bars: SharedBar
    _request_ids: Iterator[str]
    _check_usable: Callable[[], None]

    def embed(
        self,
        prompts: Any,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int | Sequence[int] | None = None,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt, in order. `prompts` is what `generate` takes.

        truncate_prompt_tokens: most tokens of a prompt to keep; -1 means max_model_len. Prompts are cut at their end,
        unless `tokenization_kwargs` has truncation_side="left" or, where it has none, the tokenizer's files. Raises
        InvalidRequestError before any request runs.
        """
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="embed",
            tokenization_kwargs=tokenization_kwargs,
            truncate_prompt_tokens=truncate_prompt_tokens,
            priority=priority,
            **others,
        )
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    def encode(
        self,
        prompts: Any,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int | Sequence[int] | None = None,
        **others: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The vectors of each prompt, in order. pooling_task: what they are, by default the model's first task; several
        tasks, joined by `&`, are computed at once. The rest is as in `embed`."""
        check_arguments("encode", others)
        client = self._pooling_client("LLM.encode() and LLM.embed()")
        parsed = parse_prompts(prompts)
        params = pooling_params_for(pooling_params, len(parsed), pooling_task, truncate_prompt_tokens)
        how = tokenization_of(tokenization_kwargs)
        tokenize_to_pool(parsed, params, client.tokenizer, how, client.welcome)
        self._use_loras(parsed, lora_request)
        return self._pool(parsed, params, priority, use_tqdm)

    def classify(
        self,
        prompts: Any,
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **others: Any,
    ) -> list[ClassificationRequestOutput]:
        """The classes' probabilities of each prompt, in order, by a classifier. The rest is as in `encode`."""
        outputs = self.encode(prompts, pooling_params, use_tqdm=use_tqdm, pooling_task="classify", **others)
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    def reward(
        self,
        prompts: Any,
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **others: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The rewards of each prompt's tokens, in order, by a reward model. The rest is as in `encode`."""
        return self.encode(prompts, pooling_params, use_tqdm=use_tqdm, pooling_task="token_classify", **others)

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
        chat_template: str | None = None,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """The score of each pair of texts, 1:1, 1:N or N:N: of a classifier with one label, which reads both, or the
        similarity of their embeddings. truncate_prompt_tokens: as in `embed`, of both texts together for a classifier.
        chat_template: writes the prompts of a classifier, of messages of the roles query and document. Texts may be
        {"content": [{"type": "text", "text": ...}]}. Raises InvalidRequestError before any request runs."""
        check_arguments("score", others)
        client = self._pooling_client("LLM.score()")
        pairs: Sequence[tuple[str, str]] = paired(data_1, data_2)
        task = scoring_task(client.welcome)
        if isinstance(pooling_params, PoolingParams) and any(most_of_texts := pooling_params.most_of_texts()):
            pairs = shortened(pairs, most_of_texts, client.tokenizer)
            pooling_params = pooling_params.clone()
            pooling_params.extra_kwargs = None
        how = tokenization_of(tokenization_kwargs)
        if chat_template is not None and task != "classify":
            raise InvalidRequestError(
                "chat_template writes pairs for a classifier that reads both texts, and this model compares vectors"
            )
        if task == "embed":
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            embedded = self.encode(
                texts,
                pooling_params,
                use_tqdm=use_tqdm,
                lora_request=lora_request,
                pooling_task=task,
                tokenization_kwargs=tokenization_kwargs,
                truncate_prompt_tokens=truncate_prompt_tokens,
            )
            return compared(pairs, dict(zip(texts, embedded, strict=True)), client.welcome)
        if task == "token_embed":
            (params,) = pooling_params_for(pooling_params, 1, task, truncate_prompt_tokens)
            return self._late_scores(pairs, params, how, use_tqdm, lora_request)
        (params,) = pooling_params_for(pooling_params, 1, task, truncate_prompt_tokens)
        most = most_tokens(how, params, client.welcome)
        template = None if chat_template is None else PairTemplate(chat_template)
        prompts = tokenize_pairs(
            pairs, client.tokenizer, client.welcome, most, how, prompt_name=params.prompt_name, template=template
        )
        self._use_loras(prompts, lora_request)
        outputs = self._pool(prompts, [params] * len(prompts), None, use_tqdm)
        return [ScoringRequestOutput.from_base(output) for output in outputs]

    def _late_scores(
        self,
        pairs: Sequence[tuple[str, str]],
        params: PoolingParams,
        how: Tokenization,
        use_tqdm: bool | Callable[..., Any],
        lora_request: Any,
    ) -> list[ScoringRequestOutput]:
        client = self._client
        queries = list(dict.fromkeys(query for query, _ in pairs))
        asked = late_prompts(queries, params, client, how, QUERY)
        self._use_loras(asked, lora_request)
        embedded = self._pool(asked, [params] * len(queries), None, use_tqdm)
        of_query = {query: each.outputs for query, each in zip(queries, embedded, strict=True)}
        prompts = late_prompts([document for _, document in pairs], params, client, how, DOCUMENT)
        for prompt, (query, _) in zip(prompts, pairs, strict=True):
            prompt.pooling_fields = {**prompt.pooling_fields, "compared_with": query_vectors(of_query[query])}
        self._use_loras(prompts, lora_request)
        outputs = self._pool(prompts, [params] * len(prompts), None, use_tqdm)
        return [ScoringRequestOutput.from_base(output) for output in outputs]

    def _use_loras(self, prompts: Sequence[Prompt], lora_request: Any) -> None:
        """Gives prompts the adapters of the argument `lora_request`. Raises HeadraceError."""
        if lora_request is not None:
            self._background.run(self._client.adapters.give(prompts, lora_request))

    def _pooling_client(self, what: str) -> EnginePool:
        """The client, once it can be used. Raises InvalidRequestError for a model that does not pool."""
        self._check_usable()
        client = self._client
        if client.may_wait:
            self._background.run(client.until_usable())
        if client.welcome.pooling is None:
            raise InvalidRequestError(f"{what}: {NOT_POOLING}")
        return client

    def _pool(
        self,
        parsed: Sequence[Prompt],
        params: Sequence[PoolingParams],
        priority: int | Sequence[int] | None,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        client = self._client
        requests = checked_requests(client, parsed, params, priority, self._request_ids)
        with self._bars.open(len(parsed), use_tqdm) as bar:
            outputs: list[Any] = self._background.run(RequestBatch(client, requests, bar.add).run(), bar.show)
        return outputs


def compared(
    pairs: Sequence[tuple[str, str]],
    embedded: Mapping[str, PoolingRequestOutput[PoolingOutput]],
    welcome: Welcome,
) -> list[ScoringRequestOutput]:
    """The scores of pairs whose texts are embedded."""
    assert welcome.pooling is not None, "it embeds"
    scores = []
    for pair in pairs:
        first, second = (embedded[text] for text in pair)
        alike = similarity(welcome.pooling, first.outputs.values, second.outputs.values)
        tokens = first.prompt_token_ids + second.prompt_token_ids
        cached = first.num_cached_tokens + second.num_cached_tokens
        name = f"{first.request_id}_{second.request_id}"
        scores.append(ScoringRequestOutput(name, ScoringOutput(alike), tokens, cached, finished=True))
    return scores


def pooling_params_for(
    given: Any, count: int, task: str | None, truncate_prompt_tokens: int | None = None
) -> list[PoolingParams]:
    """One PoolingParams for each of `count` prompts, as copies with this task. Raises InvalidRequestError."""
    several = one_for_each(PoolingParams() if given is None else given, PoolingParams, "pooling_params", count)
    copies = {key: each.clone() for key, each in {id(each): each for each in several}.items()}
    for each in copies.values():
        if task is not None:
            if each.task not in (None, task):
                raise InvalidRequestError(f"PoolingParams.task is {each.task!r}, and the call is for {task!r}")
            each.task = task
        if truncate_prompt_tokens is not None:
            each.truncate_prompt_tokens = truncate_prompt_tokens
        each.verify()
    return [copies[id(each)] for each in several]
