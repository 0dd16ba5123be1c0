"""Tensors in files of torch.save and safetensors, read without either; hostile files are refused in words."""

from __future__ import annotations

import io
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save
from thinned import every
from torch import Tensor

from headrace.frontend.request.tensor_files import read_tensor
from headrace.ipc.failure import InvalidRequestError


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def read(data: bytes) -> Tensor:
    found = read_tensor(data, lambda shape, dtype: None)
    if not found.data.nbytes:
        return torch.empty(found.shape, dtype=getattr(torch, found.dtype))
    return torch.frombuffer(bytearray(found.data), dtype=getattr(torch, found.dtype)).reshape(found.shape)


WHOLE = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", every(2, [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64]))
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t[2:5],
        lambda t: t[:, 3:6],
        lambda t: t.T,
        lambda t: t[::2, ::3],
        lambda t: t[:1].expand(4, 8),
        lambda t: t[:, :1].expand(6, 5),
        lambda t: t[None],
        lambda t: t[:0],
        lambda t: t[1],
        lambda t: t[3:4, 2:3],
    ],
)
def test_every_dense_tensor_of_torch_is_read_as_it_was(dtype: torch.dtype, view: Callable[[Tensor], Tensor]) -> None:
    tensor = view((WHOLE * 100).to(dtype))
    for protocol in (2, 4, 5):
        assert torch.equal(read(saved(tensor, pickle_protocol=protocol)), tensor)


def test_a_parameter_and_a_file_of_safetensors_are_read() -> None:
    assert torch.equal(read(saved(torch.nn.Parameter(WHOLE))), WHOLE)
    assert torch.equal(read(save({"any name": WHOLE.half()}, {"made": "by hand"})), WHOLE.half())


class Runs:
    """A pickle of it calls a function when it is loaded by pickle."""

    def __reduce__(self) -> Any:
        return (print, ("it ran",))


def zipped(pickled: bytes, stored: bytes = b"", compression: int = zipfile.ZIP_STORED, parts: int = 0) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/data/0", stored)
        for number in range(parts):
            archive.writestr(f"a/more/{number}", b"")
    return file.getvalue()


def number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def described(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> bytes:
    """A pickle as torch's, of a tensor in a storage of 8 floats."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x08tQ"
    sizes = b"".join(b"(" + b"".join(map(number, each)) + b"t" for each in (shape, strides))
    rest = b"\x89ccollections\nOrderedDict\n)RtR."
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset) + sizes + rest


FLOATS = struct.pack("<8f", *range(8))


def test_the_handmade_description_is_one_that_is_read() -> None:
    assert read(zipped(described((2, 4), (4, 1)), FLOATS)).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (saved({"a": WHOLE}), "SETITEM"),
        (saved([WHOLE]), "instruction"),
        (saved(Runs()), "would call .*print"),
        (saved(WHOLE.to_sparse()), "would call torch.serialization._get_layout|_rebuild_sparse"),
        (saved(WHOLE.to(torch.complex64)), "it has values of torch.ComplexFloatStorage"),
        (saved(WHOLE, _use_new_zipfile_serialization=False), "before 1.6"),
        (pickle.dumps(Runs()), "pickle"),
        (saved("text"), "one tensor is expected"),
        (zipped(described((2, 4), (4, 1)), FLOATS, zipfile.ZIP_DEFLATED), "compressed"),
        (zipped(described((2, 4), (4, 1)), FLOATS, parts=300), "more than 256 parts"),
        (zipped(described((2, 5), (5, 1)), FLOATS), "storage has 32 bytes"),
        (zipped(described((2, 4), (4, 1), 1), FLOATS), "storage has 32 bytes"),
        (zipped(described((2, 4), (4, 1)), FLOATS[:-4]), "storage has 28 bytes"),
        (zipped(described((-2, 4), (4, 1)), FLOATS), "no sizes"),
        (zipped(described((2, 4), (4,)), FLOATS), "no dense tensor"),
        (zipped(b"\x80\x02K\x01"), "damaged"),
        (zipped(b""), "damaged"),
        (zipped(b"\x80\x02" + b"(" * 60000 + b"t."), "damaged|one tensor"),
        (zipped(b"\x80\x02X\xff\xff\xff\x7f."), "damaged"),
        (zipped(b"\x80\x02\x8b\xff\xff\xff\x7f."), "damaged"),
        (zipped(b"\x80\x02K\x01r\xff\xff\xff\xff."), "one tensor"),
        (saved(WHOLE)[:200], "damaged"),
        (b"", "neither"),
        (b"PK\x03\x04", "damaged"),
        (b"\x93NUMPY", "neither"),
        (save({"a": WHOLE, "b": WHOLE.clone()}), "it has 2 tensors"),
        (save({"a": WHOLE.long()})[:-8], "needs others|of values"),
        (struct.pack("<Q", 1 << 40) + b"{}", "header would have"),
        (struct.pack("<Q", 2) + b"{}", "it has 0 tensors"),
        (struct.pack("<Q", 3) + b"{]}", "no JSON"),
        (struct.pack("<Q", 14) + b'{"a": {"x": 1}}'[:14] + b"", "no JSON"),
        (struct.pack("<Q", 16) + b'{"a": {"x": 1} }', "describes no tensor|needs others"),
    ],
)
def test_whatever_is_no_dense_tensor_is_refused_with_the_reason(
    data: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        read(data)
    assert "it ran" not in capsys.readouterr().out


def test_a_small_file_of_a_vast_tensor_needs_no_memory() -> None:
    vast = zipped(described((1000000, 1000000), (0, 0)), FLOATS)

    def check(shape: tuple[int, ...], dtype: str) -> None:
        raise InvalidRequestError(f"{shape} of {dtype}")

    tracemalloc.start()
    with pytest.raises(InvalidRequestError, match=r"\(1000000, 1000000\) of float32"):
        read_tensor(vast, check)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_cut_and_changed_files_end_in_words() -> None:
    whole = saved(WHOLE[:2, :3].clone())
    num_refused = 0
    for at in range(0, len(whole), 3):
        for data in (whole[:at], whole[:at] + bytes((whole[at] ^ 0x55,)) + whole[at + 1 :]):
            try:
                read(data)
            except InvalidRequestError:
                num_refused += 1
    assert num_refused > len(whole) // 3
