"""Checks of new requests. The core trusts no client: a request must lie within its fields' ranges (ipc/ranges.py) and
within the limits of the model and the options. The frontend has its own checks, whose errors are in the user's terms.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from headrace import __version__
from headrace.core.options.plan import Facts, Plan
from headrace.core.schedule.requests import Request
from headrace.ipc.failure import SHUT_DOWN, Failure
from headrace.ipc.messages import SCHEMA_HASH, AddRequest, Generate, Pool, Refused, Sampling
from headrace.ipc.plugins import has_logits_processors, step_feature_entries
from headrace.ipc.prefix_names import PrefixKey
from headrace.ipc.ranges import FLOAT32, VOCABULARY, checks_of, names_marked, out_of_range
from headrace.ipc.row_inputs import problem_of

FIELD = "SamplingParams"
"""Prefix of an invalid field's name in an error; `InvalidRequestError.parameter` finds the name by it."""
GREEDY_BELOW = 1e-5
"""Lower temperatures count as greedy, since dividing logits by them would overflow."""
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def nth_seed(seed: int, n: int) -> int:
    """The n-th number of the SplitMix64 sequence that starts at `seed` (Steele, Lea & Flood 2014), 64 bits."""
    z = (seed + n * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def signed(seed: int) -> int:
    """An unsigned 64-bit seed as the signed 64-bit number of the wire."""
    return seed - (1 << 64) if seed >> 63 else seed


def _token_ids(value: Any) -> Iterable[int]:
    """All token ids in a collection of token ids, a collection of tuples of them, or a dict with token ids as keys."""
    return itertools.chain.from_iterable(each if isinstance(each, tuple) else (each,) for each in value)


class Admission:
    """Checks AddRequest messages and makes `Request`s from them."""

    def __init__(self, plan: Plan, facts: Facts) -> None:
        self.max_waiting = plan.options.max_waiting_requests
        self.max_of_client = plan.options.max_client_requests
        self._model = plan.model.name
        self._max_model_len = facts.max_model_len
        self._vocab_size = plan.model.vocab_size
        self._generates, self._pooling = plan.model.generates, plan.model.pooling
        self._whole_prompts = plan.model.whole_prompts
        self._max_logprobs = plan.max_logprobs
        self._row_inputs, self._input_width, self._dtype = plan.row_inputs, plan.model.input_width, plan.dtype
        self._plan = plan
        self.use_weights(plan.model.weights)
        self._reads_extra_args = has_logits_processors(plan.options.logits_processors) or bool(step_feature_entries())
        self._last_pool: tuple[Pool | None, Pool | None] = (None, None)
        """The task that passed the checks last, which the next request often has too; and as it is scheduled."""
        checks_of(AddRequest)  # now, so that the first request need not wait for it
        self._token_fields = names_marked(Sampling, VOCABULARY)
        self._version = __version__
        self._seed = plan.seed
        self._seeds_drawn = 0

    def use_weights(self, weights: str) -> None:
        """Requests that come from now on are computed with the weights of this identity."""
        self._version_of_weights = self._plan.model_version(weights)

    def check(self, message: AddRequest) -> Failure | None:
        """Why the request can never run here, or None."""
        task, prompt = message.task, message.prompt_token_ids
        is_checked = task == self._last_pool[0]
        if (problem := out_of_range(message, task if is_checked else None)) is not None:
            return self.refusal(problem)
        if isinstance(task, Pool):
            if not is_checked and (refusal := self._check_pooling(task)) is not None:
                return refusal
        elif not self._generates:
            return self.refusal(f"the task is to generate, and {self._model} runs for pooling alone (runner=pooling)")
        if prompt.dtype != "int32" or len(prompt.shape) != 1:
            return self.refusal(f"prompt_token_ids must be a flat int32 tensor, not {prompt!r}")
        token_ids = prompt.numpy()
        if len(token_ids) <= message.num_resumed_tokens:
            return self.refusal("the prompt is empty; at least one token is needed")
        if isinstance(task, Generate) and len(token_ids) == self._max_model_len:
            return self.refusal(
                f"the prompt has {len(token_ids)} tokens; with max_model_len {self._max_model_len} at most "
                f"{self._max_model_len - 1} leave room for an answer"
            )
        if len(token_ids) > self._max_model_len:
            return self.refusal(
                f"the prompt has {len(token_ids)} tokens, more than max_model_len {self._max_model_len}"
            )
        if token_ids.view(np.uint32).max() >= self._vocab_size:  # one below 0 is then above all
            outside = np.flatnonzero((token_ids < 0) | (token_ids >= self._vocab_size))
            return self.refusal(
                f"prompt_token_ids[{outside[0]}] is {token_ids[outside[0]]}, outside the vocabulary of "
                f"{self._vocab_size} tokens"
            )
        if message.inputs and (failure := self._check_inputs(message)) is not None:
            return failure
        if message.adapters and self._plan.adapters is None:
            return self.refusal("adapters are given, and this engine takes none: start it with enable_lora")
        if isinstance(task, Pool):
            return (
                self.refusal("a request that pools has no output to go on from") if message.num_resumed_tokens else None
            )
        failure = self._check_sampling(task.sampling)
        return failure or (self._check_resumed(message, task.sampling) if message.num_resumed_tokens else None)

    def _check_inputs(self, message: AddRequest) -> Failure | None:
        num_prompt_tokens = len(message.prompt_token_ids) - message.num_resumed_tokens
        if problem := problem_of(message.inputs, num_prompt_tokens, self._row_inputs, self._input_width, self._dtype):
            return self.refusal(problem)
        if isinstance(message.task, Generate) and message.task.sampling.prompt_logprobs is not None:
            return self.refusal(f"{FIELD}.prompt_logprobs is asked of a prompt whose inputs are not all tokens")
        return None

    def _check_pooling(self, task: Pool) -> Failure | None:
        """Whether the model does what the task asks for."""
        asked = ", ".join(task.kinds)
        if self._pooling is None or not task.kinds or not set(task.kinds) <= set(self._pooling.kinds):
            known = ", ".join(
                [*(["generate"] if self._generates else []), *(self._pooling.kinds if self._pooling else ())]
            )
            return self.refusal(f"the task is to pool ({asked}), and this engine's tasks for {self._model} are {known}")
        if (task.compared_with is not None or task.num_keys is not None) and task.kinds != ("token_embed",):
            return self.refusal(f"compared_with and num_keys are of token_embed, not of {asked}")
        if task.num_keys is not None and not self._whole_prompts:
            return self.refusal(
                f"num_keys is given: tokens that fill a query up and are not attended to (query_expansion) are of "
                f"models that attend to all tokens, and {self._model} attends to earlier ones alone"
            )
        if (task.columns or task.steps_end_at is not None) and task.kinds != ("token_classify",):
            return self.refusal(f"steps_end_at and columns are of token_classify, not of {asked}")
        width = self._pooling.width_of(task.kinds[0])
        if task.columns and max(task.columns) >= width:
            return self.refusal(f"columns has {max(task.columns)}, and vectors have {width} values")
        if (others := task.compared_with) is not None:
            width = min(width, task.dimensions or width)
            if others.dtype != "float32" or len(others.shape) != 2 or others.shape[1] != width:
                return self.refusal(f"compared_with must be float32 [n, {width}], not {others!r}")
            if not np.isfinite(others.numpy()).all():
                return self.refusal("compared_with has values that are not finite")
        if task.second_text is not None and not self._pooling.has_token_types:
            return self.refusal(f"second_text is given, and {self._model} has one type of tokens")
        if task.dimensions is not None and task.dimensions > self._pooling.width:
            return self.refusal(f"dimensions is {task.dimensions}, and vectors have {self._pooling.width} values")
        return None

    def _check_resumed(self, message: AddRequest, sampling: Sampling) -> Failure | None:
        most = sampling.max_tokens
        if sampling.seed is None:
            return self.refusal("a request that goes on here must bring the seed that it had")
        if message.num_resumed_tokens >= most:
            return self.refusal(f"{message.num_resumed_tokens} tokens are there already, of max_tokens {most}")
        return None

    def _check_sampling(self, sampling: Sampling) -> Failure | None:
        if sampling.min_tokens > sampling.max_tokens:
            return self.refusal(
                f"{FIELD}.min_tokens is {sampling.min_tokens}, more than max_tokens, {sampling.max_tokens}"
            )
        most = self._vocab_size if self._max_logprobs == -1 else self._max_logprobs
        for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
            wanted = self._vocab_size if count == -1 else count
            if wanted is not None and not 0 <= wanted <= most:
                return self.refusal(f"{FIELD}.{name} is {count}; this engine's max_logprobs is {self._max_logprobs}")
        if sampling.extra_args and not self._reads_extra_args:
            return self.refusal(
                f"{FIELD}.extra_args has {', '.join(sampling.extra_args)}, and this engine has no logits processors to "
                "read them, nor step features of other packages: start it with logits_processors"
            )
        for name in self._token_fields:
            if not (value := getattr(sampling, name)):
                continue
            outside = next((each for each in _token_ids(value) if each >= self._vocab_size), None)
            if outside is not None:
                return self.refusal(
                    f"{FIELD}.{name} has token {outside}, outside the vocabulary of {self._vocab_size} tokens"
                )
        if (thinking := sampling.thinking) is not None:
            if not thinking.end:
                return self.refusal("thinking has an end of no tokens")
            named = (*thinking.begin, *thinking.end, *thinking.forced)
            outside = next((each for each in named if each >= self._vocab_size), None)
            if outside is not None:
                return self.refusal(f"thinking has token {outside}; the vocabulary has {self._vocab_size} tokens")
        if not all(sampling.bad_words):
            return self.refusal(f"{FIELD}.bad_words has a word of no tokens")
        return None

    def request(self, client: int, message: AddRequest) -> Request:
        """Makes a `Request` from a checked message. Without a seed of its own it gets the next one of the engine's
        sequence."""
        num_prompt_tokens = len(message.prompt_token_ids) - message.num_resumed_tokens
        task, seed = message.task, 0
        if isinstance(task, Generate):
            task = Generate(sampling=self._fitted(task.sampling, num_prompt_tokens))
            if task.sampling.seed is None:
                self._seeds_drawn += 1
                seed = nth_seed(self._seed, self._seeds_drawn)
            else:
                seed = task.sampling.seed
        else:
            task = self._scheduled(task)
        request = Request(
            client=client,
            slot=message.slot,
            request_id=message.request_id,
            token_ids=message.prompt_token_ids.numpy().copy(),  # the frame it arrived in is not kept alive
            task=task,
            seed=seed & _MASK,
        )
        if message.num_resumed_tokens:  # as after a preemption
            request.num_sent, request.num_prompt_tokens = request.num_prompt_tokens, num_prompt_tokens
        request.output_interval = message.output_interval if request.sampling.logprobs is None else 1
        request.prefix_key = PrefixKey(message.cache_salt, self._version_of_weights, (), message.inputs)
        request.arrived_s = time.monotonic()
        return request

    def _scheduled(self, task: Pool) -> Pool:
        """A checked task, which skips the prefix cache if it reads the states of all tokens."""
        given, scheduled = self._last_pool
        if task == given and scheduled is not None:
            return scheduled
        scheduled = task
        if task.of_tokens or (self._pooling is not None and self._pooling.reads_all):
            scheduled = msgspec.structs.replace(task, skip_reading_prefix_cache=True)
        if task.compared_with is None:  # else it holds the memory of vectors
            self._last_pool = task, scheduled
        return scheduled

    def _fitted(self, sampling: Sampling, num_prompt_tokens: int) -> Sampling:
        """Clamps values to the model's length and vocabulary, only where that does not change the answer."""
        room = self._max_model_len - num_prompt_tokens
        return msgspec.structs.replace(
            sampling,
            max_tokens=min(sampling.max_tokens, room),
            min_tokens=min(sampling.min_tokens, room),
            top_k=sampling.top_k if 0 < sampling.top_k < self._vocab_size else 0,
            temperature=sampling.temperature if sampling.temperature >= GREEDY_BELOW else 0.0,
            logit_bias=sampling.logit_bias
            and {t: bias if bias >= -FLOAT32 else -math.inf for t, bias in sampling.logit_bias.items()},
        )

    def queue_full(self, wait_s: float) -> Failure:
        retry_after_s = min(max(1.0, wait_s), 600.0)
        return self.refusal(
            f"the queue is full ({self.max_waiting} requests wait); try again in about {retry_after_s:.0f} s",
            retry_after_s=retry_after_s,
        )

    def too_many(self, wait_s: float) -> Failure:
        return self.refusal(
            f"this client has {self.max_of_client} unfinished requests, as many as one may have (max_client_requests)",
            retry_after_s=min(max(1.0, wait_s), 600.0),
        )

    def shutting_down(self) -> Failure:
        return self.refusal("the engine is shutting down and takes no new requests", kind=SHUT_DOWN)

    def asleep(self) -> Failure:
        """A refusal while the engine sleeps. Waiting would look like a hang, and the caller may be the one that has to
        wake the engine up."""
        return self.refusal("the engine is sleeping: it accepts no requests before wake_up", kind="EngineAsleepError")

    def refusal(self, why: str, *, retry_after_s: float = 0.0, kind: str = "InvalidRequestError") -> Failure:
        return Failure(
            message=why,
            type="QueueFullError" if retry_after_s else kind,
            process="engine-core",
            pid=os.getpid(),
            phase="admission",
            retry_after_s=retry_after_s,
        )

    def protocol_error(self, failure: Failure) -> Refused:
        return Refused(failure=failure, schema_hash=SCHEMA_HASH, version=self._version)
