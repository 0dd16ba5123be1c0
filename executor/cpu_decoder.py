"""The decoder on the CPU kernels: a whole step is one program, run with one call in one parallel region."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.executor.arch import ArchSpec
from headrace.executor.batch import StepArrays
from headrace.executor.cpu_layers import CpuModel, read_model
from headrace.executor.cpu_program import ProgramWriter, StepLimits
from headrace.executor.cpu_weights import CpuWeights
from headrace.executor.inputs import StepLogits
from headrace.executor.kv_cache import KVCache
from headrace.executor.weights import WeightSource
from headrace.kernels.cpu import build
from headrace.kernels.cpu.linear import ACTIVATIONS, FLOAT_TYPES, Runtime, runtime
from headrace.kernels.cpu.ops import CACHE_TYPES, MOST_ROW_VALUES, why_no_attention
from headrace.kernels.cpu.program_run import Program
from headrace.kernels.cpu.program_run import StepArrays as ProgramArrays


def why_not(spec: ArchSpec, dtype: torch.dtype, tp_size: int = 1) -> str:
    """Why this model cannot run as a program here, in a sentence; "" when it can."""
    if tp_size != 1:
        return f"the program computes a model on one rank, not on {tp_size}."
    if dtype not in FLOAT_TYPES or dtype not in CACHE_TYPES:
        return f"the program computes in float32, float16 and bfloat16, not in {dtype}."
    if spec.uses_prompt_lens:
        return "dynamic rotary scaling depends on the length of a prompt, and the program's tables on positions alone."
    if spec.activation not in ACTIVATIONS:
        return f"the activation {spec.activation} is unknown to the kernels; there are {', '.join(ACTIVATIONS)}."
    if spec.qk_norm and not (spec.norm.kind == "rms" and spec.norm.affine):
        return "the program norms queries and keys by RMS norms with weights alone."
    if spec.hidden_size > MOST_ROW_VALUES:
        return f"the program norms rows of at most {MOST_ROW_VALUES} values, not {spec.hidden_size}."
    return why_no_attention(head_dim=spec.head_dim) or build.why_not() or ""


class CpuDecoder:
    """A decoder-only model on one CPU. Used from one thread.

    Raises ModelError, naming the tensor, when weights and spec disagree; ValueError where `why_not` has a reason.
    `keep_packed`: matrices keep the types that the checkpoint stores them in, and `dtype` is that of the KV cache.
    """

    def __init__(
        self,
        spec: ArchSpec,
        weights: WeightSource,
        dtype: torch.dtype,
        limits: StepLimits,
        *,
        keep_packed: bool = False,
        used: Runtime | None = None,
    ) -> None:
        if reason := why_not(spec, dtype):
            raise ValueError(f"The CPU program cannot be used: {reason}")
        self.spec, self.dtype, self._limits = spec, dtype, limits
        self.runtime = used or runtime()
        self._model: CpuModel = read_model(spec, CpuWeights(weights, dtype, self.runtime, keep_packed=keep_packed))
        self.weight_bytes = self._model.nbytes
        """Memory that the weights take."""
        self._kv_cache: KVCache | None = None
        self._program: Program | None = None

    def bind(self, kv_cache: KVCache) -> Program:
        """The program over this cache, which it keeps. A step does this when the cache is new to it."""
        if self._program is None or kv_cache is not self._kv_cache:
            self._program = ProgramWriter(self._model, kv_cache, self._limits, self.runtime).write()
            self._kv_cache = kv_cache
        return self._program

    def step(self, arrays: StepArrays, kv_cache: KVCache) -> StepLogits:
        """Runs a step, as the runner asks for it. The logits are the program's own memory."""
        program = self.bind(kv_cache)
        step = ProgramArrays(
            token_ids=arrays.token_ids.astype(np.int32),
            positions=arrays.positions.astype(np.int32),
            slot_mapping=arrays.slot_mapping,
            query_start=arrays.query_start,
            seq_lens=arrays.seq_lens,
            block_tables=np.ascontiguousarray(arrays.block_tables),
            logits_rows=arrays.logits_indices.astype(np.int32),
        )
        return StepLogits(program.run(step), self._logits_at)

    def _logits_at(self, first: int, last: int) -> Tensor:
        program, most = self._program, self._limits.max_logits
        assert program is not None, "a step comes first"
        if last - first <= most:
            return program.run_logits(np.arange(first, last, dtype=np.int32))
        parts = [(start, min(start + most, last)) for start in range(first, last, most)]
        return torch.cat([self._logits_at(*part).clone() for part in parts])
