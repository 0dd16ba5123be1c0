"""Prompt embeddings: a user's rows of values in the place of a prompt's tokens, as `RowInput`s.

They come as tensors of torch or numpy in Python, and over HTTP as files of torch.save or safetensors in base64. Only
their shape and type are checked here; the core looks at the values.
"""

from __future__ import annotations

import binascii
import math
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.frontend.request.parameters.sampling_fields import plain_integer
from headrace.frontend.request.tensor_files import TensorFileError, read_tensor
from headrace.ipc.codec import DTYPES, Tensor
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import Welcome
from headrace.ipc.row_inputs import FLOATS, PLACEHOLDER, PROMPT_EMBEDS, RowInput, prompt_embeds_input, rows_of

NOT_ENABLED = "You must set `--enable-prompt-embeds` to input `prompt_embeds`."
"""vLLM's words, which clients written for it look for."""
MOST_BYTES = 1 << 30
"""Of the embeddings of one prompt; a message may be as large."""


def tensor_of(value: Any) -> Tensor:
    """The values of a tensor of torch, or of an array of numpy or of another library with the buffer protocol.

    Raises InvalidRequestError for anything else, and for values that are no floats.
    """
    if isinstance(value, Tensor):
        return value
    if type(value).__module__.partition(".")[0] == "torch" or hasattr(value, "detach"):
        array, dtype = _host_array(value)
    else:
        array, dtype = value, ""
    try:
        view = memoryview(array)
    except (TypeError, ValueError, BufferError):
        raise InvalidRequestError(
            f"prompt_embeds must be a tensor of shape (seq_len, hidden_size), not {type(array).__name__}"
        ) from None
    found = dtype or {"f": "float32", "e": "float16", "d": "float64"}.get(view.format.lstrip("<=@"), view.format)
    check_floats(found)
    data = view.cast("B") if view.c_contiguous and view.nbytes else memoryview(view.tobytes())
    return Tensor(found, view.shape or (), memoryview(bytes(data)))  # a copy: the caller may change the array


def _host_array(tensor: Any) -> tuple[Any, str]:
    """A torch tensor as an array in the host's memory, and the name of its dtype."""
    dtype = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
    check_floats(dtype)
    try:
        torch = sys.modules["torch"]
        tensor = tensor.detach().cpu().resolve_neg().contiguous()
        return (tensor.view(torch.int16) if dtype == "bfloat16" else tensor).numpy(), dtype
    except Exception as error:  # of a tensor whose values are not in memory row by row: sparse, nested, meta, ...
        raise InvalidRequestError(
            f"`prompt_embeds` must be a dense tensor with values; those of one with the layout "
            f"{getattr(tensor, 'layout', None)} on the device {getattr(tensor, 'device', None)} cannot be read: "
            f"{str(error).partition(chr(10))[0]:.200}"
        ) from error


def check_floats(dtype: str) -> None:
    if dtype not in FLOATS:
        raise InvalidRequestError(
            f"`prompt_embeds` dtype {dtype} is not a floating-point type that is read; these are {', '.join(FLOATS)}"
        )


def two_dimensional(shape: tuple[int, ...]) -> tuple[int, int]:
    """The shape without a batch of one in front. Raises InvalidRequestError for other shapes."""
    rows = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
    if len(rows) != 2:
        raise InvalidRequestError(
            f"`prompt_embeds` must be a 2D tensor of shape (num_tokens, hidden_size); got shape {shape}."
        )
    return rows[0], rows[1]


def decoded(text: str, welcome: Welcome) -> Tensor:
    """The tensor of a file in base64, [num_positions, width], which the engine can take. Raises InvalidRequestError."""
    check_enabled(welcome)
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"`prompt_embeds` is not base64: {error}") from None

    def check(shape: tuple[int, ...], dtype: str) -> None:
        check_floats(dtype)
        check_shape(two_dimensional(shape), dtype, welcome)

    try:
        values = read_tensor(data, check)
    except TensorFileError as error:
        raise InvalidRequestError(f"`prompt_embeds` could not be deserialized as a torch tensor: {error}") from None
    return Tensor(values.dtype, two_dimensional(values.shape), values.data)


def check_enabled(welcome: Welcome) -> None:
    if PROMPT_EMBEDS not in welcome.row_inputs:
        raise InvalidRequestError(NOT_ENABLED)


def check_shape(shape: tuple[int, int], dtype: str, welcome: Welcome) -> None:
    """Raises InvalidRequestError for embeddings that no prompt of the engine can have."""
    if shape[1] != welcome.input_width:
        raise InvalidRequestError(
            f"`prompt_embeds` hidden_size {shape[1]} does not match the model's hidden_size {welcome.input_width}."
        )
    num_bytes = math.prod(shape) * DTYPES[dtype][1]
    if num_bytes > MOST_BYTES:
        raise InvalidRequestError(f"`prompt_embeds` has {num_bytes} bytes; a prompt may have {MOST_BYTES}")


def placed(values: Any, token_ids: Sequence[int] | None, mask: Any) -> tuple[list[int], tuple[RowInput, ...]]:
    """The token ids and inputs of a prompt with embeddings. values: as `tensor_of` takes; mask: true where a token id
    counts, and false where a row of the embeddings does, None for rows everywhere. Raises InvalidRequestError."""
    whole = tensor_of(values)
    whole = Tensor(whole.dtype, two_dimensional(whole.shape), whole.data)
    if not (count := whole.shape[0]):
        raise InvalidRequestError("prompt_embeds has no rows: the prompt cannot be empty, give at least one")
    if token_ids is not None and len(token_ids) != count:
        raise InvalidRequestError(
            f"Prompt token ids and prompt embeds had different lengths prompt_token_ids={len(token_ids)} "
            f"prompt_embeds={count}"
        )
    if mask is None:
        return [PLACEHOLDER] * count, (prompt_embeds_input(whole),)
    if token_ids is None:
        raise InvalidRequestError("prompt_is_token_ids needs prompt_token_ids besides prompt_embeds")
    if len(mask) != count:
        raise InvalidRequestError(
            f"prompt_is_token_ids must have the same length as prompt_embeds: it has {len(mask)}, and they {count}"
        )
    for at, each in enumerate(mask):
        if not (type(each).__name__ in ("bool", "bool_") or plain_integer(each) in (0, 1)):  # bool_ is numpy's
            raise InvalidRequestError(f"prompt_is_token_ids[{at}] is {each!r:.100}; it must be a boolean, or 0 or 1")
    ids, inputs, start = list(token_ids), [], 0
    while start < count:
        end = start
        while end < count and bool(mask[end]) == bool(mask[start]):
            end += 1
        if not mask[start]:
            ids[start:end] = [PLACEHOLDER] * (end - start)
            inputs.append(prompt_embeds_input(rows_of(whole, start, end), start))
        start = end
    return ids, tuple(inputs)


def cut(inputs: Sequence[RowInput], first: int, last: int) -> tuple[RowInput, ...]:
    """The inputs of a prompt of which only the positions [first, last) are kept.

    Raises InvalidRequestError for one that it would divide, of a kind other than prompt embeddings: only its class can
    read its content.
    """
    kept = []
    for each in inputs:
        begin, end = max(first, each.start), min(last, each.end)
        if (begin, end) == (each.start, each.end):
            kept.append(msgspec.structs.replace(each, start=begin - first))
        elif begin < end:
            if each.kind != PROMPT_EMBEDS:
                raise InvalidRequestError(
                    f"truncate_prompt_tokens keeps positions {first} to {last - 1} of the prompt and would divide its "
                    f"input of kind {each.kind!r} at {each.start} to {each.end - 1}; keep all or none of an input"
                )
            (values,) = each.tensors
            kept.append(prompt_embeds_input(rows_of(values, begin - each.start, end - each.start), begin - first))
    return tuple(kept)
