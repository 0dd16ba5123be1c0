"""Responses whose outputs are chosen among more: `use_beam_search`, and `best_of` of completions.

best_of     the request's jobs run with n = best_of; once all have ended, the n outputs with the highest mean
            log-probability per token are returned
beams       a beam search runs in place of the jobs and requests one token per beam and step; its n best sequences
            become streams that have ended, so that the response is written like any other
"""

from __future__ import annotations

import itertools
import time
import types
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from headrace.frontend.api.beam_search import (
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
    beam_search,
    check_width,
)
from headrace.frontend.client.request import LogprobRow, RequestStream, SequenceState, nth_row, one_row
from headrace.frontend.fleet.decisions import ANYWHERE, Affinity
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.http.errors import bad_field
from headrace.frontend.http.openai.requests import CompletionRequest, GenerationRequest
from headrace.frontend.request.outputs import LogprobsOfPosition
from headrace.frontend.request.parameters.pooling_params import PoolingParams
from headrace.frontend.request.parameters.sampling_params import FIELDS, GREEDY_BELOW, SamplingParams
from headrace.frontend.request.prompts import Prompt, check_request
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import LogprobRows, Welcome

if TYPE_CHECKING:
    from headrace.frontend.http.openai.generation import Job

BEAMS_READ = frozenset(
    {
        *("n", "temperature", "seed", "max_tokens", "ignore_eos", "include_stop_str_in_output", "detokenize"),
        *("skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "stream_interval"),
        *("skip_reading_prefix_cache", "logprobs"),
    }
)
"""Fields that a beam search reads, or that cannot change its result. Others are refused."""


class OutputSelection(msgspec.Struct, frozen=True):
    """How a response's outputs are chosen."""

    num_outputs: int
    """Outputs that are returned for each prompt."""
    beams: BeamSearchParams | None = None
    """Parameters of the beam search; None: the likeliest sampled outputs are chosen."""


_ALSO_UNREAD = types.MappingProxyType(
    {"structured_outputs": "structured_outputs", "extra_args": "vllm_xargs", "prompt_logprobs": "prompt_logprobs"}
)
"""Fields of SamplingParams that a beam search refuses, and the body's fields that set them."""


def outputs_of(request: GenerationRequest) -> int:
    """How many outputs are returned for a prompt."""
    return 1 if request.n is None else request.n


def width_of(request: GenerationRequest) -> int:
    """How many outputs, or beams, are computed for a prompt."""
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    return outputs_of(request) if best_of is None else best_of


def drop_needless_outputs(request: CompletionRequest, welcome: Welcome) -> None:
    """Drops best_of under greedy sampling, where all outputs are the same."""
    temperature = getattr(request, "temperature", None)
    if temperature is None:
        temperature = welcome.generation_defaults.get("temperature", FIELDS["temperature"].default)
    if temperature < GREEDY_BELOW and not request.use_beam_search and width_of(request) > outputs_of(request):
        request.best_of = None


def check_selection(request: GenerationRequest, most: int) -> None:
    """Checks n, best_of and beam search together. Raises ApiError. most: the server's limit per prompt (max_n)."""
    num_outputs, width = outputs_of(request), width_of(request)
    if num_outputs > width:
        raise bad_field("best_of", f"best_of is {width}, less than n, {num_outputs}")
    if width > max(most, num_outputs):
        raise bad_field(
            "best_of",
            f"best_of is {width}; this server computes at most {most} outputs for a prompt (its option max_n)",
        )
    if request.use_beam_search:
        return
    if request.length_penalty not in (None, 1.0):
        raise bad_field("length_penalty", "length_penalty needs use_beam_search: true")
    if width > num_outputs and request.stream:
        raise bad_field("best_of", "best_of over n cannot be streamed: which outputs are the best is known at the end")


def selection_of(
    request: GenerationRequest, params: SamplingParams, welcome: Welcome, form_field: str
) -> OutputSelection | None:
    """How outputs are chosen; None if all computed outputs are returned. Raises ApiError, which names the field.

    params: those of the request's jobs, in which logprobs (best_of) or n (beams) may be changed. form_field: the field
    that asks for structured output."""
    num_outputs, width = outputs_of(request), width_of(request)
    if not request.use_beam_search:
        if width == num_outputs:
            return None
        if params.logprobs is None and not params.logprob_token_ids:
            params.logprobs = 0  # of the sampled tokens, by which outputs are ranked
        return OutputSelection(num_outputs)
    _refuse_unread(request, params, form_field)
    if (params.logprobs or 0) > 2 * width:
        raise bad_field(
            "logprobs", f"logprobs is {params.logprobs}; a search with {width} beams knows the likeliest {2 * width}"
        )
    try:
        beams = BeamSearchParams(
            beam_width=width,
            max_tokens=params.max_tokens or welcome.max_model_len,
            ignore_eos=params.ignore_eos,
            temperature=params.temperature,
            length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
        check_width(beams, welcome)
    except InvalidRequestError as error:
        name = str(error).removeprefix("BeamSearchParams.").partition(" ")[0]
        field = {"beam_width": "n" if width == num_outputs else "best_of"}.get(name, name)
        raise bad_field(field, str(error).replace(f"BeamSearchParams.{name}", field, 1)) from error
    params.n = num_outputs
    return OutputSelection(num_outputs, beams)


def _refuse_unread(request: GenerationRequest, params: SamplingParams, form_field: str) -> None:
    for declared in FIELDS.values():
        name = declared.name
        if name in BEAMS_READ or getattr(request, name, None) is None:
            continue
        if getattr(params, name) not in (declared.default, None, [], {}):
            raise bad_field(name, f"{name} does nothing with use_beam_search; leave it out")
    for name, asked in _ALSO_UNREAD.items():
        if getattr(params, name) is not None:
            if name == "structured_outputs":
                asked = form_field
            elif name == "prompt_logprobs" and request.prompt_logprobs is None:
                asked = "echo"  # with logprobs
            raise bad_field(asked, f"{asked} does nothing with use_beam_search; leave it out")


def likeliest(streams: Sequence[RequestStream], num_outputs: int) -> Sequence[RequestStream]:
    """Keeps each ended stream's outputs of the highest mean log-probability per token, best first."""
    for stream in streams:
        stream.sequences = sorted(stream.sequences, key=_mean_logprob, reverse=True)[:num_outputs]
        for index, sequence in enumerate(stream.sequences):
            sequence.index = index
    return streams


def _mean_logprob(sequence: SequenceState) -> float:
    """The mean log-probability of the tokens; 0, the highest, for an empty output."""
    rows = sequence.logprob_rows
    return sum(nth_row(told, nth)[1][0] for told, nth in rows) / len(rows) if rows else 0.0


class EngineOfSearch:
    """A `RequestClient` for one request's beam searches, whose steps prefer the engine that caches their prefixes."""

    def __init__(self, pool: EnginePool, model: str, job: Job, welcome: Welcome, tokenizer: Tokenizer | None) -> None:
        self.welcome, self.tokenizer = welcome, tokenizer
        self._pool, self._model, self._job = pool, model, job
        self._name = f"{job.name}-{uuid.uuid4().hex}"
        self._affinity = job.affinity if job.affinity != ANYWHERE else Affinity(session=self._name)

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        priority: int = 0,
        *,
        max_tokens: int | None = None,
    ) -> RequestStream:
        return self._pool.submit(
            f"{self._name}-{request_id}",
            prompt,
            params,
            self._job.priority,
            model=self._model,
            max_tokens=max_tokens,
            affinity=self._affinity,
        )

    def abort_stream(self, stream: RequestStream) -> None:
        self._pool.abort_stream(stream)


async def search(
    jobs: Sequence[Job],
    beams: BeamSearchParams,
    pool: EnginePool,
    model: str,
    welcome: Welcome,
    tokenizer: Tokenizer | None,
) -> list[RequestStream]:
    """The best sequences for each job's prompt, as streams that have ended. Raises HeadraceError if a request fails."""
    engine = EngineOfSearch(pool, model, jobs[0], welcome, tokenizer)
    for job in jobs:
        check_request(job.prompt, SamplingParams(max_tokens=1), welcome)
    found = await beam_search(engine, [job.prompt for job in jobs], beams, itertools.count())
    return [_ended(job, each, beams, tokenizer) for job, each in zip(jobs, found, strict=True)]


def _ended(job: Job, found: BeamSearchOutput, beams: BeamSearchParams, tokenizer: Tokenizer | None) -> RequestStream:
    stream = RequestStream(job.name, job.prompt, job.params, tokenizer, first_slot=0)
    del stream.sequences[len(found.sequences) :]  # with a small vocabulary, fewer may be found
    start = len(job.prompt.token_ids or ())
    for sequence, beam in zip(stream.sequences, found.sequences, strict=False):
        sequence.token_ids = beam.tokens[start:]
        if job.params.logprobs is not None:
            sequence.logprob_rows = _rows(sequence.token_ids, beam, job.params.logprobs)
        is_silent = beam.finish_reason == "stop" and not beams.include_stop_str_in_output
        sequence.finish(beam.finish_reason or "length", beam.stop_reason, silent_last_token=is_silent)
    stream.num_unfinished = 0
    stream.notify(time.monotonic())
    return stream


def _rows(token_ids: Sequence[int], beam: BeamSearchSequence, num_likeliest: int) -> list[tuple[LogprobRows, int]]:
    each = zip(token_ids, beam.logprobs, strict=True)
    return [(one_row(_row(own, position, num_likeliest)), 0) for own, position in each]


def _row(own: int, position: LogprobsOfPosition, num_likeliest: int) -> LogprobRow:
    ranked = sorted(position.items(), key=lambda each: each[1].rank or 0)
    token_ids = [own, *(token_id for token_id, _ in ranked[:num_likeliest])]
    return token_ids, [position[each].logprob for each in token_ids], position[own].rank or 0
