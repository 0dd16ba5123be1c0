"""Beam search as in vLLM: each step is one single-token request per beam, which the prefix cache makes cheap.

At each step every beam is extended by the 2 * beam_width likeliest tokens. Sequences that end in an end-of-sequence
token are complete; the best beam_width of the others continue. After max_tokens steps those are complete too, and the
best beam_width of all complete sequences are returned. A sequence's score is its log-probability / its length **
length_penalty, where the length counts the prompt's tokens and not an end-of-sequence token. The search ends early only
when no beam is left.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterator, Sequence

from headrace.frontend.api.batch import RequestBatch, checked_requests
from headrace.frontend.client.client import RequestClient
from headrace.frontend.request.checks import check
from headrace.frontend.request.lora_request import LoRARequest
from headrace.frontend.request.outputs import CompletionOutput, LogprobsOfPosition, RequestOutput
from headrace.frontend.request.parameters.sampling_fields import ParamsStruct, plain_integer
from headrace.frontend.request.parameters.sampling_params import RequestOutputKind, SamplingParams
from headrace.frontend.request.prompts import Prompt, TokensInput, tokens_input
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Welcome


class BeamSearchParams(ParamsStruct, omit_defaults=True, forbid_unknown_fields=True):
    """How to search. Its constructor raises InvalidRequestError, which names the field."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Has no effect: scores are the model's own log-probabilities, as in vLLM."""
    length_penalty: float = 1.0
    """Above 1 prefers longer sequences, below 1 shorter ones."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the end-of-sequence token."""
    structured_outputs: None = None
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    watermarking: None = None
    allowed_token_ids: None = None

    def __post_init__(self) -> None:
        for name, low in (("beam_width", 1), ("max_tokens", 1)):
            value = getattr(self, name)
            if (count := plain_integer(value)) is None or count < low:
                raise _bad(name, value, f"must be an integer of at least {low}")
            setattr(self, name, count)
        for name in ("temperature", "length_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not _is_finite(value):
                raise _bad(name, value, "must be a finite number")
            setattr(self, name, float(value))
        if self.temperature < 0:
            raise _bad("temperature", self.temperature, "must be at least 0")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "must be True or False")
        for name in ("structured_outputs", "watermarking", "allowed_token_ids"):
            if getattr(self, name):
                raise _bad(name, getattr(self, name), "is not supported; leave it out")


@dataclasses.dataclass
class BeamSearchSequence:
    """A sequence, complete or still growing (a beam)."""

    orig_prompt: TokensInput
    tokens: list[int]
    """Token ids of prompt and output, including an end-of-sequence token."""
    logprobs: list[LogprobsOfPosition]
    """For each output token, the 2 * beam_width candidates of its position."""
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    text: str | None = None
    """The text of the whole sequence; None without a tokenizer."""
    finish_reason: str | None = None
    """stop, length or abort."""
    stop_reason: int | str | None = None
    """The end-of-sequence token that ended it."""

    def get_prompt(self) -> TokensInput:
        """The sequence so far as a prompt."""
        return TokensInput(**{**self.orig_prompt, "prompt_token_ids": self.tokens})


@dataclasses.dataclass
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]
    """The best beam_width sequences, best first."""


class BeamSearchAbort:
    """Ends searches from outside, with the sequences so far."""

    def __init__(self) -> None:
        self.is_asked = False
        self.step: RequestBatch | None = None
        """The requests of the step that runs."""

    def abort(self) -> None:
        self.is_asked = True
        if self.step is not None:
            self.step.abort()


async def beam_search(
    client: RequestClient,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    ids: Iterator[str],
    aborting: BeamSearchAbort | None = None,
) -> list[BeamSearchOutput]:
    """Searches for several tokenised prompts at once. Raises InvalidRequestError, and any request's error."""
    if not isinstance(params, BeamSearchParams):
        raise InvalidRequestError(f"params must be a BeamSearchParams, not {type(params).__name__}")
    welcome = client.welcome
    check_width(params, welcome)
    step = SamplingParams(
        logprobs=2 * params.beam_width,
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    for prompt in prompts:  # a prompt that leaves no room for a token has no step that would be refused
        check("", prompt, step, client)
    ends = frozenset(() if params.ignore_eos else welcome.eos_token_ids)
    searches = [_Search(prompt, params, ends) for prompt in prompts]
    aborting = aborting or BeamSearchAbort()
    for _ in range(params.max_tokens):
        # All beams of a search have the same length, so the first one tells whether max_model_len is reached.
        growing = [each for each in searches if each.is_growing and len(each.beams[0].tokens) < welcome.max_model_len]
        if not growing:
            break
        asked = [each.prompt_of(beam) for each in growing for beam in each.beams]
        requests = checked_requests(client, asked, [step] * len(asked), None, ids)
        aborting.step = RequestBatch(client, requests)
        outputs = iter(await aborting.step.run())
        for each in growing:
            steps = [next(outputs).outputs[0] for _ in each.beams]
            if aborting.is_asked or any(output.finish_reason == "abort" for output in steps):
                each.abort()
            else:
                each.extend([output.logprobs or [] for output in steps])
    tokenizer = client.tokenizer
    decode = tokenizer.decode if tokenizer is not None else None
    found = [search.best() for search in searches]
    for prompt, sequences in zip(prompts, found, strict=True):
        for sequence in sequences:
            tokens = sequence.tokens[prompt.text_start :]
            sequence.text = None if decode is None else decode(tokens, params.skip_special_tokens)
    return [BeamSearchOutput(sequences) for sequences in found]


def check_width(params: BeamSearchParams, welcome: Welcome) -> None:
    """Raises InvalidRequestError if the engine returns too few log-probabilities for this beam_width."""
    if 2 * params.beam_width > min(welcome.max_logprobs, welcome.vocab_size):
        raise _bad(
            "beam_width",
            params.beam_width,
            "needs twice as many log-probabilities per token, and the engine gives at most "
            f"{welcome.max_logprobs} (its option max_logprobs)",
        )


class _Search:
    """The search for one prompt."""

    def __init__(self, prompt: Prompt, params: BeamSearchParams, eos_token_ids: frozenset[int]) -> None:
        self._prompt = prompt
        token_ids = list(prompt.token_ids or ())
        self._asked = tokens_input(token_ids, prompt=prompt.text, cache_salt=prompt.cache_salt or None)
        self.beams = [BeamSearchSequence(self._asked, token_ids, [], prompt.lora_request)]
        self._params, self._eos_token_ids = params, eos_token_ids
        self._complete: list[BeamSearchSequence] = []
        self._is_aborted = False

    @property
    def is_growing(self) -> bool:
        return bool(self.beams) and not self._is_aborted

    def abort(self) -> None:
        """Ends the search with the sequences so far, as a step of one was aborted."""
        self._is_aborted = True

    def prompt_of(self, beam: BeamSearchSequence) -> Prompt:
        prompt = self._prompt
        return Prompt(
            token_ids=beam.tokens, cache_salt=prompt.cache_salt, inputs=prompt.inputs, adapters=prompt.adapters
        )

    def extend(self, logprobs: Sequence[Sequence[LogprobsOfPosition]]) -> None:
        """Extends every beam by one token. logprobs: for each beam, a list with its next position alone."""
        extended: list[BeamSearchSequence] = []
        for beam, (position,) in zip(self.beams, logprobs, strict=True):
            for token_id, logprob in position.items():
                new = BeamSearchSequence(
                    self._asked,
                    [*beam.tokens, token_id],
                    [*beam.logprobs, position],
                    beam.lora_request,
                    cum_logprob=beam.cum_logprob + logprob.logprob,
                )
                if token_id in self._eos_token_ids:
                    new.finish_reason, new.stop_reason = "stop", token_id
                    self._complete.append(new)
                else:
                    extended.append(new)
        self.beams = sorted(extended, key=self._score, reverse=True)[: self._params.beam_width]

    def best(self) -> list[BeamSearchSequence]:
        for beam in self.beams:
            beam.finish_reason = "abort" if self._is_aborted else "length"
        return sorted(self._complete + self.beams, key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, sequence: BeamSearchSequence) -> float:
        length = len(sequence.tokens) - (sequence.finish_reason == "stop")
        return float(sequence.cum_logprob / max(1, length) ** self._params.length_penalty)


def as_request_output(
    request_id: str, prompt: Prompt, found: BeamSearchOutput, params: BeamSearchParams, client: RequestClient
) -> RequestOutput:
    """A search's sequences as a RequestOutput, whose outputs hold the generated part alone."""
    tokenizer, start = client.tokenizer, len(prompt.token_ids or ())
    outputs = []
    for index, sequence in enumerate(found.sequences):
        token_ids = sequence.tokens[start:]
        is_silent = sequence.finish_reason == "stop" and not params.include_stop_str_in_output
        shown = token_ids[:-1] if is_silent else token_ids
        outputs.append(
            CompletionOutput(
                index=index,
                text="" if tokenizer is None else tokenizer.decode(shown, params.skip_special_tokens),
                token_ids=token_ids,
                cumulative_logprob=sequence.cum_logprob,
                logprobs=sequence.logprobs,
                finish_reason=sequence.finish_reason,
                lora_request=sequence.lora_request,
            )
        )
    return RequestOutput(
        request_id=request_id,
        prompt=prompt.text,
        prompt_token_ids=list(prompt.token_ids or ()),
        outputs=outputs,
        finished=True,
        lora_request=prompt.lora_request,
    )


def _is_finite(value: numbers.Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        return False


def _bad(name: str, value: object, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"BeamSearchParams.{name} = {value!r:.100}: {why}")
