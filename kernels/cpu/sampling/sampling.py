"""Sampling of tokens from logits on the CPU kernels, in a program or as a separate op, and log-probabilities."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.cpu.linear.linear import ROWS_FIXED, Runtime, runtime
from headrace.kernels.cpu.ops import why_no_op
from headrace.kernels.cpu.runtime.pointers import pointer
from headrace.kernels.cpu.sampling.args import LogprobArgs, SampleArgs
from headrace.kernels.reference.sampling import DeviceChosen, DeviceDraws, TokenLogprobs
from headrace.kernels.registry import Version


class SampleBuffers:
    """The sampling parameters of each row of logits, written before a run, and the sampled tokens, read after it.

    A temperature of 0 is greedy; the row's other parameters are then not read. top_k 0, top_p 1 and min_p 0 keep all.
    `position` is that of the token to be sampled, prompt included. If is_masked is 1, the logits of tokens whose bit
    in the row's mask is 0 become -inf. `best` is the row's highest logit, NaN if the row contains a NaN; if it is not
    finite, the row's token id is meaningless.
    """

    def __init__(self, runtime: Runtime, num_rows: int, vocab_size: int) -> None:
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int64)
        self.top_p = np.ones(num_rows, np.float64)
        self.min_p = np.zeros(num_rows, np.float64)
        self.seed = np.zeros(num_rows, np.uint64)
        self.position = np.zeros(num_rows, np.int64)
        self.is_masked = np.zeros(num_rows, np.int32)
        self.masks = np.zeros((num_rows, -(-vocab_size // 32)), np.int32)
        self.token_ids = np.zeros(num_rows, np.int32)
        self.best = np.zeros(num_rows, np.float32)
        self._vocab_size = vocab_size
        dll = runtime.library.dll
        dll.hr_sample_workspace_bytes.restype = ctypes.c_int64
        dll.hr_sample_workspace_bytes.argtypes = [ctypes.c_int64, ctypes.c_int]
        size = dll.hr_sample_workspace_bytes(vocab_size, runtime.pool.num_threads)
        self._workspace = torch.empty(size + 64, dtype=torch.uint8)

    def args(self, logits: Tensor, rows: int = ROWS_FIXED, highest: Tensor | None = None) -> SampleArgs:
        """The arguments of `hr_op_sample` over logits [num_rows or fewer, vocab_size] float32.

        highest: `Buffer.highest`, which is read in place of the logits in steps with `only_highest`.
        """
        if logits.dtype != torch.float32 or logits.shape[1] != self._vocab_size or logits.stride(1) != 1:
            raise ValueError(f"logits are float32 rows of {self._vocab_size}, not {logits.dtype} {list(logits.shape)}.")
        return SampleArgs(
            logits=pointer(logits),
            stride=logits.stride(0),
            vocab_size=self._vocab_size,
            num_rows=len(logits),
            temperature=self.temperature.ctypes.data,
            top_k=self.top_k.ctypes.data,
            top_p=self.top_p.ctypes.data,
            min_p=self.min_p.ctypes.data,
            seeds=self.seed.ctypes.data,
            positions=self.position.ctypes.data,
            token_ids=self.token_ids.ctypes.data,
            best=self.best.ctypes.data,
            # 64-byte aligned
            workspace=-(-pointer(self._workspace) // 64) * 64,
            rows=rows,
            highest=None if highest is None else pointer(highest),
            highest_rows=0 if highest is None else highest.shape[1],
            is_masked=self.is_masked.ctypes.data,
            masks=self.masks.ctypes.data,
        )


def sample(runtime: Runtime, logits: Tensor, buffers: SampleBuffers) -> None:
    """Samples a token for each row of logits [n, vocab_size] float32, into the first n rows of `buffers`."""
    if len(logits) > len(buffers.token_ids):
        raise ValueError(f"{len(logits)} rows of logits; these buffers have room for {len(buffers.token_ids)}.")
    runtime.pool.run_op("hr_op_sample", buffers.args(logits))


def choose_tokens(logits: Tensor, draws: DeviceDraws) -> DeviceChosen:
    """As `reference.sampling.choose_tokens`."""
    used = runtime()
    buffers = SampleBuffers(used, len(logits), logits.shape[1])
    read = ("temperature", "position") if draws.may_draw else ()
    for name in (*read, *(("top_k", "top_p", "min_p") if draws.may_truncate else ())):
        getattr(buffers, name)[:] = getattr(draws, name).numpy()
    buffers.seed[:] = draws.seed.numpy().view(np.uint64)
    sample(used, logits, buffers)
    return DeviceChosen(torch.from_numpy(buffers.token_ids), torch.from_numpy(buffers.best))


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """As `reference.sampling.token_logprobs`; a row's results do not depend on the others. No logit is NaN."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    (num_rows, vocab_size), used = logits.shape, runtime()
    out = TokenLogprobs(
        torch.empty((num_rows, 1 + num_top), dtype=torch.int32),
        torch.empty((num_rows, 1 + num_top), dtype=torch.float32),
        torch.empty(num_rows, dtype=torch.int32),
    )
    own = token_ids.long().contiguous()
    candidates = torch.empty(used.pool.num_threads * vocab_size, dtype=torch.int64)  # a float and a token id each
    args = LogprobArgs(
        logits=pointer(logits),
        stride=logits.stride(0),
        vocab_size=vocab_size,
        num_rows=num_rows,
        own=pointer(own),
        num_top=num_top,
        token_ids=pointer(out.token_ids),
        logprobs=pointer(out.logprobs),
        ranks=pointer(out.ranks),
        workspace=pointer(candidates),
    )
    used.pool.run_op("hr_op_token_logprobs", args)
    return out


def _why_not(
    device: torch.device | None = None, dtype: torch.dtype | None = None, captured: bool = False, **_: Any
) -> str:
    if captured:
        return "the CPU's sampler is no torch op, so a graph cannot record it."
    if dtype != torch.float32:
        return f"the CPU's sampler reads logits in float32, not in {dtype}."
    return why_no_op(device, dtype)


VERSIONS = (
    Version("choose_tokens", "cpu_native", choose_tokens, _why_not),
    Version("token_logprobs", "cpu_native", token_logprobs, _why_not),
)
