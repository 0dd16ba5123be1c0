"""The calls of `LLM` for vectors of prompts: `embed` and `encode`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.frontend.api.batch import SharedBar, priorities_for, run_requests
from headrace.frontend.client.background import BackgroundLoop
from headrace.frontend.fleet.client import FleetClient
from headrace.frontend.request.lists import elements
from headrace.frontend.request.parameters.pooling_params import PoolingParams
from headrace.frontend.request.pooling_outputs import EmbeddingRequestOutput, PoolingOutput, PoolingRequestOutput
from headrace.frontend.request.pooling_prompts import NOT_POOLING, check_pooling, tokenize_to_pool
from headrace.frontend.request.prompts import parse_prompts, tokenization_of
from headrace.frontend.vllm.unsupported import check_arguments
from headrace.ipc.failure import InvalidRequestError

if TYPE_CHECKING:
    from headrace.frontend.client.client import CoreClient


class PoolingCalls:
    """A part of `LLM`, which sets these attributes."""

    _background: BackgroundLoop
    _client: CoreClient | FleetClient
    _bars: SharedBar
    _request_ids: Iterator[int]
    _check_usable: Callable[[], None]

    def embed(
        self,
        prompts: Any,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int | Sequence[int] | None = None,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt, in order. `prompts` is what `generate` takes.

        truncate_prompt_tokens: most tokens of a prompt to keep; -1 means max_model_len. Prompts are cut at their end,
        unless `tokenization_kwargs` has truncation_side="left". Raises InvalidRequestError before any request runs.
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
        lora_request: None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int | Sequence[int] | None = None,
        **others: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The vectors of each prompt, in order. pooling_task: what they are, by default the model's only task. The rest
        is as in `embed`."""
        self._check_usable()
        check_arguments("encode", {"lora_request": lora_request, **others})
        client = self._client
        if isinstance(client, FleetClient) and not client.is_usable:
            self._background.run(client.until_usable())
        welcome = client.welcome
        if welcome.pooling is None:
            raise InvalidRequestError(f"LLM.encode() and LLM.embed() want a model that pools: {NOT_POOLING}")
        parsed = parse_prompts(prompts)
        params = pooling_params_for(pooling_params, len(parsed), pooling_task, truncate_prompt_tokens)
        how = tokenization_of(tokenization_kwargs)
        tokenize_to_pool(parsed, params, client.tokenizer, how, welcome)
        for index, (prompt, each) in enumerate(zip(parsed, params, strict=True)):
            try:
                check_pooling(prompt, each, welcome)
            except InvalidRequestError as error:
                raise (InvalidRequestError(f"prompts[{index}]: {error}") if len(parsed) > 1 else error) from None
        ranks = priorities_for(priority, len(parsed))
        requests = [
            (str(next(self._request_ids)), prompt, each, rank, 0)
            for prompt, each, rank in zip(parsed, params, ranks, strict=True)
        ]
        with self._bars.open(len(parsed), use_tqdm) as bar:
            outputs: list[Any] = self._background.run(run_requests(client, requests, bar.add), bar.show)
        return outputs


def pooling_params_for(
    given: Any, count: int, task: str | None, truncate_prompt_tokens: int | None = None
) -> list[PoolingParams]:
    """One PoolingParams for each of `count` prompts, as copies with this task. Raises InvalidRequestError."""
    if given is None or isinstance(given, PoolingParams):
        several: Sequence[Any] = [given or PoolingParams()] * count
    else:
        several = elements(given) or ()
        if not several or not all(isinstance(each, PoolingParams) for each in several):
            raise InvalidRequestError(
                f"pooling_params must be a PoolingParams, or a list with one for each prompt, not {given!r:.100}"
            )
        if len(several) != count:
            raise InvalidRequestError(f"there are {count} prompts and {len(several)} pooling_params; give one for each")
    made = [each.clone() for each in several]
    for each in made:
        if task is not None:
            if each.task not in (None, task):
                raise InvalidRequestError(f"PoolingParams.task is {each.task!r}, and the call is for {task!r}")
            each.task = task
        if truncate_prompt_tokens is not None:
            each.truncate_prompt_tokens = truncate_prompt_tokens
        each.verify()
    return made
