"""Outputs that are chosen among more: `use_beam_search`, and `best_of` of completions.

best_of     the prompts run with n = best_of; once all have ended, the n outputs with the highest mean
            log-probability per token are returned
beams       a beam search runs in place of the prompts and requests one token per beam and step; its n best sequences
            become streams that have ended, so that the response is written like any other
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from headrace.frontend.api.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence, beam_search
from headrace.frontend.client.request_stream import (
    LogprobRow,
    RequestListener,
    RequestStream,
    SequenceState,
    nth_row,
    one_row,
)
from headrace.frontend.fleet.decisions import ANYWHERE, Affinity
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.request.checks import CheckedRequest, ModelFacts
from headrace.frontend.request.outputs import LogprobsOfPosition
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.messages import LogprobRows

if TYPE_CHECKING:
    from headrace.frontend.http.server.generation import PreparedRequest


class OutputSelection(msgspec.Struct, frozen=True):
    """How a response's outputs are chosen."""

    num_outputs: int
    """Outputs that are returned for each prompt."""
    beams: BeamSearchParams | None = None
    """Parameters of the beam search; None: the likeliest sampled outputs are chosen."""


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

    def __init__(self, request: PreparedRequest, priority: int, pool: EnginePool, facts: ModelFacts) -> None:
        self.welcome, self.tokenizer = facts.welcome, facts.tokenizer
        self._pool, self._model, self._priority = pool, request.engine.names[0], priority
        self._name = f"{request.id}-{uuid.uuid4().hex}"
        self._affinity = request.affinity if request.affinity != ANYWHERE else Affinity(session=self._name)

    def submit(self, request: CheckedRequest, listener: RequestListener | None = None) -> RequestStream:
        own = msgspec.structs.replace(request, name=f"{self._name}-{request.name}", priority=self._priority)
        stream = self._pool.submit(own, listener, model=self._model, affinity=self._affinity)
        stream.meter = None  # the searches are counted, and not their steps
        return stream


async def search(
    prepared: PreparedRequest,
    requests: Sequence[CheckedRequest],
    selection: OutputSelection,
    pool: EnginePool,
    facts: ModelFacts,
) -> list[RequestStream]:
    """The best sequences for each of the request's prompts, as streams that have ended. Raises HeadraceError if a step
    fails."""
    beams, prompts = selection.beams, [each.prompt for each in requests]
    assert beams is not None, "it asks for the search"
    steps = EngineOfSearch(prepared, requests[0].priority, pool, facts)
    found = await beam_search(steps, prompts, beams, map(str, itertools.count()))
    params = requests[0].params.clone()  # with one output for each of the beams that are returned
    params.n = selection.num_outputs
    return [
        _ended(CheckedRequest(prepared.id, prompt, params), each, beams, facts.tokenizer)
        for prompt, each in zip(prompts, found, strict=True)
    ]


def _ended(
    request: CheckedRequest, found: BeamSearchOutput, beams: BeamSearchParams, tokenizer: Tokenizer | None
) -> RequestStream:
    stream, params = RequestStream(request, tokenizer), request.params
    del stream.sequences[len(found.sequences) :]  # with a small vocabulary, fewer may be found
    start = len(request.prompt.token_ids or ())
    for sequence, beam in zip(stream.sequences, found.sequences, strict=False):
        sequence.token_ids = beam.tokens[start:]
        if params.logprobs is not None:
            sequence.logprob_rows = _rows(sequence.token_ids, beam, params.logprobs)
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
