"""A request whose prompt arrives in pieces: `AsyncLLM.generate` with an asynchronous generator of StreamingInput.

After each piece the model answers, up to that piece's `max_tokens` or a stop; the next piece is appended to the answer.
The last token of an answer has been sampled but not computed; it is left out of the next prompt, as in vLLM. The engine
sees one request per piece, and finds the earlier tokens in its prefix cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.frontend.request.checks import check
from headrace.frontend.request.outputs import CompletionOutput, RequestOutput
from headrace.frontend.request.parameters.sampling_params import RequestOutputKind, SamplingParams
from headrace.frontend.request.prompts import Prompt
from headrace.ipc.failure import InvalidRequestError, let_interrupts_pass

if TYPE_CHECKING:
    from headrace.frontend.client.client import RequestClient
    from headrace.frontend.client.request_stream import RequestStream

MOST_WAITING = 64
"""Most pieces that are read ahead from the generator while earlier ones are being answered."""


@dataclass
class StreamingInput:
    """One piece: a prompt in any form, and sampling parameters for its answer if they differ from `generate`'s."""

    prompt: Any
    sampling_params: SamplingParams | None = None


def check_streaming_params(params: Any) -> SamplingParams:
    """Raises InvalidRequestError for parameters that a session of several answers does not support."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"streaming input needs a SamplingParams, not {type(params).__name__}")
    for name, is_refused in (
        ("n > 1", params.n > 1),
        ("output_kind FINAL_ONLY", params.output_kind is RequestOutputKind.FINAL_ONLY),
        ("stop strings (stop_token_ids are taken)", bool(params.stop_strings)),
    ):
        if is_refused:
            raise InvalidRequestError(f"Input streaming not currently supported with {name}: leave it out")
    return params


class StreamingSession:
    """One request of several pieces. `prompt_of` returns a piece's tokenised prompt."""

    def __init__(
        self, client: RequestClient, request_id: str, priority: int, prompt_of: Callable[[Any], Awaitable[Prompt]]
    ) -> None:
        self._client, self._request_id, self._priority, self._prompt_of = client, request_id, priority, prompt_of
        self._pieces: asyncio.Queue[StreamingInput | BaseException | None] = asyncio.Queue(MOST_WAITING)
        self._is_aborted = False
        self._is_closed = False
        """The generator ended without an error: `_pieces` holds its last pieces, then None."""
        self._text: str | None = None
        """The texts of the pieces so far; None while token ids alone have come."""
        self._token_ids: list[int] = []
        self._told: CompletionOutput | None = None
        """The joined answers to earlier pieces, for cumulative outputs."""
        self._logprob: float | None = None
        """The sum of the log-probabilities of the answers to earlier pieces; None if no piece asked for them."""

    async def outputs(
        self, pieces: AsyncGenerator[StreamingInput, None], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of all answers; only the last is `finished`. Raises the generator's error, and as
        `AsyncLLM.generate` does."""
        check_streaming_params(params)
        reader = asyncio.create_task(self._read(pieces))
        last: RequestOutput | None = None
        try:
            while (piece := await self._pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                async with contextlib.aclosing(self._answer(piece, params)) as answer:
                    async for last in answer:
                        yield last
                if last is not None and last.finished:
                    return  # aborted, or this was the last piece
            if last is not None or self._is_aborted:
                yield self._end(last, params)
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def _read(self, pieces: AsyncGenerator[StreamingInput, None]) -> None:
        end: BaseException | None = None
        async with contextlib.aclosing(pieces):
            try:
                async for piece in pieces:
                    if not isinstance(piece, StreamingInput):
                        raise InvalidRequestError(
                            f"a streaming input's generator must yield StreamingInput(prompt=...), not {piece!r:.80}"
                        )
                    await self._pieces.put(piece)
            except BaseException as error:
                let_interrupts_pass(error)
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                end = error
        self._is_closed = end is None
        await self._pieces.put(end)

    async def _answer(self, piece: StreamingInput, default: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        params = check_streaming_params(piece.sampling_params or default).clone()
        params.output_kind = default.output_kind
        new = await self._prompt_of(piece.prompt)
        if self._is_aborted:
            return
        if new.inputs:
            raise InvalidRequestError("prompt_embeds not supported for streaming inputs")
        if new.text is not None:
            self._text = (self._text or "") + new.text
        prompt = Prompt(
            token_ids=[*self._token_ids, *(new.token_ids or ())],
            cache_salt=new.cache_salt,
            adapters=new.adapters,
            lora_request=new.lora_request,
        )
        stream = self._client.submit(check(self._request_id, prompt, params, self._client, self._priority))
        told, logprob = self._told, self._logprob
        try:
            async for output in stream:
                output.prompt = self._text
                self._logprob = output.outputs[0].cumulative_logprob = _sum(logprob, output.outputs[0])
                if output.finished:
                    output.finished = self._is_last(stream)
                    self._token_ids = [*(prompt.token_ids or ()), *stream.sequences[0].token_ids[:-1]]
                if params.output_kind is RequestOutputKind.CUMULATIVE:
                    self._told = output.outputs[0] = _joined(told, output.outputs[0])
                yield output
        finally:
            stream.abort()

    def _is_last(self, stream: RequestStream) -> bool:
        was_aborted = stream.sequences[0].finish_reason == "abort"
        return was_aborted or (self._is_closed and self._pieces.qsize() <= 1)

    def abort(self) -> None:
        """Ends the session between two answers. An answer in progress is ended by the client's `abort`."""
        self._is_aborted = True
        while not self._pieces.empty():
            self._pieces.get_nowait()
        self._pieces.put_nowait(None)

    def _end(self, last: RequestOutput | None, params: SamplingParams) -> RequestOutput:
        """The finished output to send when the generator ends after the last answer; it adds no tokens."""
        if last is None:  # it was aborted before the first answer
            last = RequestOutput(self._request_id, None, [], outputs=[CompletionOutput(0, "", [], None, None)])
        output = last.outputs[0]
        if params.output_kind is RequestOutputKind.DELTA:
            output = dataclasses.replace(output, text="", token_ids=[], logprobs=None)
        if self._is_aborted:
            output = dataclasses.replace(output, finish_reason="abort", stop_reason=None)
        return dataclasses.replace(last, outputs=[output], finished=True)


def _sum(earlier: float | None, output: CompletionOutput) -> float | None:
    own = output.cumulative_logprob
    return earlier if own is None else own + (earlier or 0.0)


def _joined(earlier: CompletionOutput | None, output: CompletionOutput) -> CompletionOutput:
    if earlier is None:
        return output
    logprobs = None
    told = [each.logprobs for each in (earlier, output) if each.logprobs is not None]
    if told:
        logprobs = type(told[-1])()
        for each in (earlier, output):  # a piece that asks for none has empty positions
            logprobs.extend([{}] * len(each.token_ids) if each.logprobs is None else each.logprobs)
    text, token_ids = earlier.text + output.text, [*earlier.token_ids, *output.token_ids]
    return dataclasses.replace(output, text=text, token_ids=token_ids, logprobs=logprobs)
