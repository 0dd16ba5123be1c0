"""The tokenizer of the server under test, over its routes /tokenize and /detokenize, which ours and vLLM's have."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.frontend.bench.http_client import ExchangeError, Pool, Target, Whole
from headrace.frontend.bench.workload import BenchRequest, PromptMaker
from headrace.ipc.failure import OptionError


class ServerTokenizer:
    """For a thread beside the pool's loop, which it was made in."""

    def __init__(self, pool: Pool, target: Target, model: str, ordinary_ids: Sequence[int]) -> None:
        self._pool, self._target, self._model = pool, target, model
        self.ordinary_ids = ordinary_ids
        self._loop = asyncio.get_running_loop()

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self._ask("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        return tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._ask("/detokenize", {"tokens": list(token_ids)})["prompt"]
        return text

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(self._answer(path, body), self._loop).result()

    async def _answer(self, path: str, body: dict[str, Any]) -> Any:
        """Raises OptionError."""
        reader = Whole()
        try:
            await self._pool.send(self._target.post(path, msgspec.json.encode({"model": self._model, **body})), reader)
            if reader.status == 200:
                return json.loads(reader.body)
            problem = f"answered {reader.status}: {reader.body.decode(errors='replace')[:300]}"
        except (ExchangeError, ValueError) as error:
            problem = f"failed: {error}"
        raise OptionError(
            f"chat takes texts, and {self._target.url}{path}, which would make them of the tokens that were drawn, "
            f"{problem}; give --tokenizer FOLDER, or --random-vocab-size where tokens are unknown there, or a dataset "
            "of texts"
        )


async def as_texts(requests: Sequence[BenchRequest], tokenizer: ServerTokenizer, seed: int) -> list[BenchRequest]:
    """Prompts of token ids as texts of as many tokens, as far as that can be. Raises OptionError."""
    maker, numbers = PromptMaker(0, tokenizer), random.Random(seed)

    def make() -> list[BenchRequest]:
        texts = []
        for request in requests:
            prompt, length = request.prompt, request.num_prompt_tokens
            if isinstance(prompt, list):
                prompt, length = maker.prompt(prompt, numbers)
            texts.append(request._replace(prompt=prompt, num_prompt_tokens=length))
        return texts

    return await asyncio.to_thread(make)
