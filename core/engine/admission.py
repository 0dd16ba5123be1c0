"""What a request must be to enter the core. The frontend checks too, for better words; the core trusts nobody."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterable
from importlib.metadata import version

import numpy as np

from headrace.core.options.plan import Facts, Plan
from headrace.core.schedule.requests import Request
from headrace.ipc.failure import Failure
from headrace.ipc.messages import SCHEMA_HASH, AddRequest, Refused, Sampling

MOST_BIAS = 1e9
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def nth_seed(seed: int, n: int) -> int:
    """The n-th number of the SplitMix64 sequence that starts at `seed` (Steele, Lea & Flood 2014), 64 bits."""
    z = (seed + n * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class Admission:
    """Checks messages and makes `Request`s of them."""

    def __init__(self, plan: Plan, facts: Facts) -> None:
        self.max_waiting = plan.options.max_waiting_requests
        self._max_model_len = facts.max_model_len
        self._vocab_size = plan.model.vocab_size
        self._max_logprobs = plan.max_logprobs
        self._version = version("headrace")
        self._seed = plan.seed
        self._seeds_drawn = 0

    def check(self, message: AddRequest) -> Failure | None:
        """Why the request can never run here, or None."""
        if not 0 <= message.slot < 1 << 31:
            return self.refusal(f"slot is {message.slot}; it must lie in [0, 2^31)")
        prompt = message.prompt_token_ids
        if prompt.dtype != "int32" or len(prompt.shape) != 1:
            return self.refusal(f"prompt_token_ids must be a flat int32 tensor, not {prompt!r}")
        token_ids = prompt.numpy()
        if len(token_ids) == 0:
            return self.refusal("the prompt is empty; at least one token is needed")
        if len(token_ids) >= self._max_model_len:
            return self.refusal(
                f"the prompt has {len(token_ids)} tokens; with max_model_len {self._max_model_len} at most "
                f"{self._max_model_len - 1} leave room for an answer"
            )
        outside = np.flatnonzero((token_ids < 0) | (token_ids >= self._vocab_size))
        if len(outside):
            return self.refusal(
                f"prompt_token_ids[{outside[0]}] is {token_ids[outside[0]]}, outside the vocabulary of "
                f"{self._vocab_size} tokens"
            )
        if message.output_interval < 1:
            return self.refusal(f"output_interval is {message.output_interval}; it must be at least 1")
        return self._check_sampling(message.sampling)

    def _check_sampling(self, sampling: Sampling) -> Failure | None:
        limits: tuple[tuple[str, float, float, float], ...] = (
            ("max_tokens", sampling.max_tokens, 1, math.inf),
            ("min_tokens", sampling.min_tokens, 0, sampling.max_tokens),
            ("temperature", sampling.temperature, 0, math.inf),
            ("top_p", sampling.top_p, math.ulp(0), 1),
            ("min_p", sampling.min_p, 0, 1),
            ("top_k", sampling.top_k, 0, math.inf),
            ("presence_penalty", sampling.presence_penalty, -2, 2),
            ("frequency_penalty", sampling.frequency_penalty, -2, 2),
            ("repetition_penalty", sampling.repetition_penalty, math.ulp(0), math.inf),
        )
        for name, value, low, high in limits:
            if not low <= value <= high or not math.isfinite(value):  # a NaN compares false with everything
                return self.refusal(f"{name} is {value}; it must lie in [{low:g}, {high:g}]")
        most = self._vocab_size if self._max_logprobs == -1 else self._max_logprobs
        for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
            wanted = self._vocab_size if count == -1 else count
            if wanted is not None and not 0 <= wanted <= most:
                return self.refusal(f"{name} is {count}; this engine's max_logprobs is {self._max_logprobs}")
        return self._check_token_rules(sampling)

    def _check_token_rules(self, sampling: Sampling) -> Failure | None:
        named: tuple[tuple[str, Iterable[int]], ...] = (
            ("allowed_token_ids", sampling.allowed_token_ids),
            ("bad_words", itertools.chain.from_iterable(sampling.bad_words)),
            ("logit_bias", sampling.logit_bias),
        )
        for name, token_ids in named:
            outside = next((each for each in token_ids if not 0 <= each < self._vocab_size), None)
            if outside is not None:
                return self.refusal(f"{name} has token {outside}, outside the vocabulary of {self._vocab_size} tokens")
        if not all(sampling.bad_words):
            return self.refusal("bad_words has a word of no tokens")
        # -inf forbids; what would become +inf in float32 would spoil the row.
        if not all(bias < MOST_BIAS for bias in sampling.logit_bias.values()):
            return self.refusal(f"logit_bias has a number that is not below {MOST_BIAS:g}")
        return None

    def request(self, client: int, message: AddRequest) -> Request:
        """A checked message as a request. Its seed is its own, or the next one drawn from the engine's."""
        seed = message.sampling.seed
        if seed is None:
            self._seeds_drawn += 1
            seed = nth_seed(self._seed, self._seeds_drawn)
        request = Request(
            client=client,
            slot=message.slot,
            request_id=message.request_id,
            token_ids=message.prompt_token_ids.numpy().copy(),  # the frame it arrived in is not kept alive
            sampling=message.sampling,
            seed=seed & _MASK,
        )
        request.cache_salt = message.cache_salt
        request.output_interval = message.output_interval if message.sampling.logprobs is None else 1
        request.arrived_s = time.monotonic()
        return request

    def queue_full(self, wait_s: float) -> Failure:
        retry_after_s = min(max(1.0, wait_s), 600.0)
        return self.refusal(
            f"the queue is full ({self.max_waiting} requests wait); try again in about {retry_after_s:.0f} s",
            retry_after_s=retry_after_s,
        )

    def asleep(self) -> Failure:
        """Waiting for somebody to wake it up would look like a hang to whoever asks, who may be that somebody."""
        return self.refusal("the engine sleeps, and takes no requests until wake_up", kind="EngineAsleepError")

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
