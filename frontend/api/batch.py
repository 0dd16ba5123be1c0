"""Runs many requests at once: submits them, waits for them and returns their outputs in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headrace.frontend.api.inputs.prompts import Prompt, check_request
from headrace.frontend.api.outputs import RequestOutput
from headrace.frontend.api.parameters.sampling_params import RequestOutputKind, SamplingParams
from headrace.frontend.client.client import RequestClient
from headrace.frontend.client.request import RequestStream
from headrace.ipc.failure import HeadraceError, InvalidRequestError, RequestFailedError

MAX_IN_FLIGHT = 8192
"""Most requests of one batch that the core has at a time: enough to keep any engine busy, and below the bound of its
waiting queue."""


async def run_batch(
    client: RequestClient,
    prompts: Sequence[Prompt],
    sampling_params: Any,
    priority: Any,
    ids: Iterator[int],
    use_tqdm: bool | Callable[..., Any],
) -> list[RequestOutput]:
    """The final outputs of tokenised prompts, in order. The other arguments are those of `LLM.generate`.

    Raises InvalidRequestError before anything is submitted. The first error of a request is raised at once. On an error
    or a cancellation, the remaining requests are aborted.
    """
    defaults = _defaults(client)
    params = params_for(sampling_params, defaults, len(prompts), RequestOutputKind.FINAL_ONLY)
    priorities = priorities_for(priority, len(prompts))
    limits = [_check(client, index, prompts, params) for index in range(len(prompts))]
    if not prompts:
        return []
    room = asyncio.Semaphore(MAX_IN_FLIGHT)
    all_ended = asyncio.get_running_loop().create_future()
    num_left = len(prompts)

    def ended(stream: RequestStream) -> None:
        nonlocal num_left
        num_left -= 1
        room.release()
        if stream.error is None:
            bar.add(stream)
        if not all_ended.done():
            if stream.error is not None:
                all_ended.set_exception(_naming(streams.index(stream), len(prompts), stream.error))
            elif num_left == 0:
                all_ended.set_result(None)

    streams: list[RequestStream] = []
    with ProgressBar(len(prompts), use_tqdm) as bar:
        try:
            for prompt, each, rank, limit in zip(prompts, params, priorities, limits, strict=True):
                await room.acquire()
                if all_ended.done():
                    break
                stream = client.submit(str(next(ids)), prompt, each, rank, max_tokens=limit)
                stream.on_done = ended
                streams.append(stream)
            await all_ended
            return [await stream.final() for stream in streams]
        finally:
            for stream in streams:
                stream.on_done = None
                client.abort_stream(stream)


async def enqueue_batch(
    client: RequestClient, prompts: Sequence[Prompt], sampling_params: Any, priority: Any, ids: Iterator[int]
) -> list[RequestStream]:
    """Submits tokenised prompts as `run_batch` does, without waiting for their outputs."""
    defaults = _defaults(client)
    params = params_for(sampling_params, defaults, len(prompts), RequestOutputKind.FINAL_ONLY)
    priorities = priorities_for(priority, len(prompts))
    limits = [_check(client, index, prompts, params) for index in range(len(prompts))]
    return [
        client.submit(str(next(ids)), prompt, each, rank, max_tokens=limit)
        for prompt, each, rank, limit in zip(prompts, params, priorities, limits, strict=True)
    ]


async def finish_batch(
    client: RequestClient, streams: Sequence[RequestStream], use_tqdm: bool | Callable[..., Any]
) -> list[RequestOutput]:
    """The final outputs of submitted requests, in order. Raises the first error, and aborts the other requests."""
    outputs = []
    with ProgressBar(len(streams), use_tqdm) as bar:
        try:
            for stream in streams:
                outputs.append(await stream.final())
                bar.add(stream)
        finally:
            for stream in streams:
                client.abort_stream(stream)
    return outputs


class ProgressBar:
    """Shows how many requests have finished, and output tokens per second."""

    def __init__(self, total: int, shown: bool | Callable[..., Any]) -> None:
        self._total, self._shown = total, shown
        self._num_tokens = 0

    def __enter__(self) -> ProgressBar:
        self._bar: Any = None
        if self._shown:
            from tqdm import tqdm

            make = self._shown if callable(self._shown) else tqdm
            self._bar = make(total=self._total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(count)

    def add(self, stream: RequestStream) -> None:
        if self._bar is None:
            return
        self._num_tokens += stream.metrics.num_generation_tokens
        elapsed_s = self._bar.format_dict["elapsed"] or 1e-9
        self._bar.set_postfix_str(f"{self._num_tokens / elapsed_s:.1f} output tok/s", refresh=False)
        self._bar.update()


def _defaults(client: RequestClient) -> SamplingParams:
    """The default parameters, with the fields that the model's generation config sets."""
    fields: dict[str, Any] = {**client.welcome.generation_defaults}
    return SamplingParams(**fields)


def _check(client: RequestClient, index: int, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> int:
    """The most tokens that request `index` can generate. Raises InvalidRequestError, with the index if there are
    several."""
    try:
        return check_request(prompts[index], params[index], client.welcome)
    except InvalidRequestError as error:
        raise _naming(index, len(prompts), error) from error


def _naming(index: int, count: int, error: HeadraceError) -> HeadraceError:
    """The error of one request, prefixed with its prompt's index if there are several."""
    if count == 1 or not isinstance(error, InvalidRequestError | RequestFailedError):
        return error
    named = type(error)(f"prompts[{index}]: {error}", failure=error.failure)
    named.__cause__ = error
    return named


def params_for(given: Any, default: SamplingParams, count: int, kind: RequestOutputKind) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts: copies with this output kind. Raises InvalidRequestError."""
    if given is None:
        given = default
    if isinstance(given, SamplingParams):
        return [_copy(given, kind)] * count
    if not isinstance(given, Sequence) or not all(isinstance(each, SamplingParams) for each in given):
        raise InvalidRequestError(
            f"sampling_params must be a SamplingParams, or a list with one for each prompt, not {given!r:.100}"
        )
    if len(given) != count:
        raise InvalidRequestError(f"there are {count} prompts and {len(given)} sampling_params; give one for each")
    return [_copy(each, kind) for each in given]


def priorities_for(given: Any, count: int) -> list[int]:
    if given is None:
        return [0] * count
    if isinstance(given, int):
        return [given] * count
    if not isinstance(given, Sequence) or len(given) != count:
        raise InvalidRequestError(f"priority must be an integer, or a list with one for each of the {count} prompts")
    return list(given)


def _copy(params: SamplingParams, kind: RequestOutputKind) -> SamplingParams:
    params = params.clone()
    params.output_kind = kind
    return params
