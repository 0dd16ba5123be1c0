"""The decoder on the CPU kernels: a whole step is one program, run by one call in one parallel region."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from headrace.executor.checkpoints.declared_weights import as_declared, with_own_head
from headrace.executor.checkpoints.weights import WeightSource
from headrace.executor.cpu.model import CpuModel, read_model
from headrace.executor.cpu.program import ProgramWriter, StepLimits, WrittenProgram
from headrace.executor.cpu.weights import Blocks, CpuWeights, inner_block
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks.beside import Beside
from headrace.executor.models.blocks.linear_attention import PreparedHeads
from headrace.executor.models.blocks.looped_attention import RotatedHeads
from headrace.executor.models.kv_cache import KVCache
from headrace.executor.models.vocabulary import given_scale, put_given
from headrace.executor.parallel.collectives import SharedCollectives
from headrace.executor.parallel.padding import padded_for
from headrace.executor.parallel.rank_place import SINGLE, RankCoordinates
from headrace.executor.sampling.draws import Chosen, Draws
from headrace.executor.step.adapters import TokenAdapters
from headrace.executor.step.batch import StepArrays
from headrace.executor.step.inputs import BegunBlocks, GivenRows, StepLogits, no_logits
from headrace.executor.step.states import StateArrays
from headrace.ipc.step import TokenMasks
from headrace.kernels.cpu.facade import (
    CACHE_TYPES,
    FLOAT_TYPES,
    GIVEN_ROW,
    MOST_ROW_VALUES,
    PairedRows,
    Runtime,
    SampleBuffers,
    build,
    runtime,
    why_no_attention,
    why_no_latent_attention,
    why_no_prepared_heads,
)


def why_not(spec: ArchSpec, dtype: torch.dtype, place: RankCoordinates = SINGLE) -> str:
    """Why this model cannot run as a program, in a sentence; "" if it can."""
    if place.tp_size > 1 and not isinstance(place.collectives, SharedCollectives):
        return f"the program adds up over its ranks in memory that they share, and these {place.tp_size} share none."
    if place.tp_size > 1 and spec.embedding_width > spec.hidden_size:
        return f"ranks have room for rows of {spec.hidden_size} values, and an embedding's have {spec.embedding_width}."
    if place.dp_size > 1:
        return "its experts are shared with other engines, whose tokens come and go between the ops."
    if dtype not in FLOAT_TYPES or dtype not in CACHE_TYPES:
        return f"the program computes in float32, float16 and bfloat16, not in {dtype}."
    if spec.uses_prompt_lens:
        return "dynamic rotary scaling depends on the length of a prompt, and the program's tables on positions alone."
    if spec.ngrams is not None:
        return "the program embeds tokens alone, not n-grams."
    if not spec.norms_given:
        return "the program norms what is given in the place of tokens, too."
    if spec.stream is not None and spec.stream.why_no_program:
        return spec.stream.why_no_program
    for block in dict.fromkeys(block for layer in spec.layers for block in (layer.mixer, layer.ffn)):
        if reason := block.why_no_program(spec, place.tp_size):
            return reason
        declared = block.declare(spec).values()
        if lacking := [type(each).__name__ for each in declared if not each.program_reader]:
            return f"the program has no op for {', '.join(lacking)}."
        prepared = (each for each in declared if isinstance(each, PreparedHeads | RotatedHeads))
        if reason := next(filter(None, (why_no_prepared_heads(each.head_dim) for each in prepared)), ""):
            return reason
    if spec.hidden_size > MOST_ROW_VALUES:
        return f"the program norms rows of at most {MOST_ROW_VALUES} values, not {spec.hidden_size}."
    for kept in {mixer.cache for mixer in spec.mixers if mixer.cache is not None}:
        reason = why_no_attention(head_dim=kept.key_size) if kept.value_size else why_no_latent_attention(kept.key_size)
        if reason:
            return reason
    return build.why_not() or ""


class CpuDecoder:
    """A decoder-only model on one CPU, or one rank's part of it. Used from one thread.

    Raises ModelError, naming the tensor, when weights and spec disagree; ValueError where `why_not` gives a reason.
    `keep_packed`: matrices keep the types that the checkpoint stores them in. `blocks`: how matrices are quantised as
    they are read.
    """

    def __init__(
        self,
        spec: ArchSpec,
        weights: WeightSource,
        dtype: torch.dtype,
        limits: StepLimits,
        *,
        keep_packed: bool = False,
        blocks: Blocks | None = None,
        used: Runtime | None = None,
        place: RankCoordinates = SINGLE,
    ) -> None:
        if reason := why_not(spec, dtype, place):
            raise ValueError(f"The CPU program cannot be used: {reason}")
        spec = with_own_head(spec, weights, place)
        weights = as_declared(spec, weights)
        block = inner_block(spec, weights, keep_packed=keep_packed, blocks=blocks)
        self.unpadded, self.prefix = spec, spec.names.prefix_in(weights.names())
        spec, weights = padded_for(spec, weights, place, block)
        self.spec, self.dtype, self.limits, self._place = spec, dtype, limits, place
        self.runtime = used or runtime()
        reader = CpuWeights(weights, dtype, self.runtime, place=place, keep_packed=keep_packed, blocks=blocks)
        reader.adapters = limits.adapters
        self._model: CpuModel = read_model(spec, reader)
        self.adapter_tables = reader.adapter_tables
        self.weight_bytes = self._model.nbytes
        """Memory of the weights."""
        self.balanced = self._model.balanced
        self._written: WrittenProgram | None = None
        self._states: StateArrays | None = None
        """Of the last step, until it is repeated."""
        self._adapters: TokenAdapters | None = None
        """Of the last step."""
        self._paired = lru_cache(maxsize=2)(_paired)
        """While sequences generate, each step's rows and its rows of logits have the adapters of the step before."""
        self._logits: list[Tensor] = []
        """Item n is a view of the first n rows of the logits."""
        self._last_states: np.ndarray = np.zeros((0, spec.hidden_size), np.float32)
        """[max_logits, width]: what the head reads, if rows may pool."""

    def bind(self, kv_cache: KVCache) -> WrittenProgram:
        """The program for this cache; written once per cache, at the latest by the first step that uses it."""
        written = self._written
        if written is None or kv_cache is not written.kv_cache:
            writer = ProgramWriter(self._model, kv_cache, self.limits, self.runtime, self._place)
            written = self._written = writer.write()
            self._logits = [written.logits[:count] for count in range(self.limits.max_logits + 1)]
            self._last_states = written.states.numpy()
        return written

    def step(self, arrays: StepArrays, kv_cache: KVCache, draws: Draws | None) -> StepLogits:
        """Runs a step, including the choice of a token for each row of logits."""
        written = self.bind(kv_cache)
        count, num_pooled = len(arrays.logits_indices), len(arrays.pooled_indices)
        self._fill(written, arrays)
        self._enter(written.sampling, draws, count)
        written.sampling.temperature[count : count + num_pooled] = 0.0
        written.program.run_filled(written.buffers)
        written.sampling.is_masked[:count] = 0
        chosen = Chosen(written.sampling.token_ids[:count].copy(), written.sampling.best[:count])
        pooled = self._last_states[count : count + num_pooled] if num_pooled else None
        return StepLogits(self._logits[count], self._logits_at, chosen, pooled)

    def repeat(self, begun: BegunBlocks | None, masks: TokenMasks | None) -> Chosen:
        """Repeats the previous step, which chose one token for each of its sequences, one token further."""
        assert self._written is not None, "a step comes first"
        buffers, sampling = self._written.buffers, self._written.sampling
        count = buffers.step.num_seqs
        buffers.token_ids[:count] = sampling.token_ids[:count]
        for moves_on in (buffers.positions, buffers.seq_lens, sampling.position):
            moves_on[:count] += 1
        buffers.slot_mapping[:, :count] += 1
        if begun is not None:
            first_slots = begun.block_ids * np.int64(self._written.kv_cache.block_size)
            buffers.slot_mapping[:, begun.sequences] = first_slots
            buffers.block_tables[:, begun.sequences, begun.block_indices] = begun.block_ids
        if self._states is not None:
            buffers.take_states(vars(self._states.continued()))
            self._states = None
        self._mask(sampling, masks)
        self._written.program.run_filled(buffers)
        sampling.is_masked[:count] = 0
        return Chosen(sampling.token_ids[:count].copy(), sampling.best[:count])

    def _fill(self, written: WrittenProgram, arrays: StepArrays) -> None:
        buffers = written.buffers
        step, tables = buffers.step, arrays.block_tables
        num_tokens, num_seqs, num_logits = len(arrays.token_ids), len(arrays.seq_lens), len(arrays.logits_indices)
        num_states = num_logits + len(arrays.pooled_indices)
        step.num_tokens, step.num_seqs, step.num_logits = num_tokens, num_seqs, num_states
        step.block_table_stride = buffers.block_tables.shape[2]  # any width, so that a row can gain a block in place
        step.only_highest = not arrays.reads_logits
        buffers.token_ids[:num_tokens] = arrays.token_ids
        buffers.positions[:num_tokens] = arrays.positions
        if self.spec.token_types:
            buffers.token_types[:num_tokens] = 0 if arrays.token_types is None else arrays.token_types
        buffers.slot_mapping[:, :num_tokens] = arrays.slot_mapping
        buffers.query_start[: num_seqs + 1] = arrays.query_start
        buffers.seq_lens[:num_seqs] = arrays.seq_lens
        buffers.take_key_lens(arrays.key_lens)
        buffers.logits_rows[:num_logits] = arrays.logits_indices
        buffers.logits_rows[num_logits:num_states] = arrays.pooled_indices
        buffers.block_tables[:, :num_seqs, : tables.shape[2]] = tables
        self._states = arrays.states
        if arrays.states is not None:
            buffers.take_states(vars(arrays.states))
        self._adapters = arrays.adapters
        self._pair(buffers.logits_rows[:num_states])
        if arrays.given:
            self._put_given(written, arrays)

    def _pair(self, logits_rows: np.ndarray) -> None:
        """Gives the kernels the adapters of the step's tokens, and of these rows of logits."""
        assert self._written is not None, "bind comes first"
        tokens, logits = self._adapters, None
        if tokens is not None:
            logits = tokens.of(logits_rows)
        self._written.buffers.take_adapters(
            *(
                None if each is None else self._paired(len(each.slots), each.slots.tobytes(), each.scales.tobytes())
                for each in (tokens, logits)
            )
        )

    def _put_given(self, written: WrittenProgram, arrays: StepArrays) -> None:
        """Writes row inputs where the program would write token embeddings."""
        if written.embedded is None:
            return
        given = GivenRows.of(arrays.given)
        for each in given:
            written.buffers.token_ids[each.at : each.at + len(each.tensor)] = GIVEN_ROW
            if self._place.tp_rank:  # the ranks' parts are added up
                written.embedded[each.at : each.at + len(each.tensor)] = 0
        if not self._place.tp_rank:
            assert self._model.table is not None, "the first stage has the table"
            put_given(written.embedded, given, self._model.table.dtype, given_scale(self.spec, self.dtype))

    def _enter(self, sampling: SampleBuffers, draws: Draws | None, count: int) -> None:
        if draws is None:
            sampling.temperature[:count] = 0.0
            return
        sampling.temperature[:count] = draws.temperature
        sampling.top_k[:count] = draws.top_k
        sampling.top_p[:count] = draws.top_p
        sampling.min_p[:count] = draws.min_p
        sampling.seed[:count] = draws.seed
        sampling.position[:count] = draws.position
        self._mask(sampling, draws.masks)

    @staticmethod
    def _mask(sampling: SampleBuffers, masks: TokenMasks | None) -> None:
        if masks is not None:
            sampling.is_masked[masks.positions] = 1
            sampling.masks[masks.positions] = masks.bits.reshape(len(masks.positions), -1)

    def _logits_at(self, first: int, last: int) -> Tensor:
        written, most = self._written, self.limits.max_logits
        assert written is not None, "a step comes first"
        written.sampling.temperature[:] = 0.0  # these rows' tokens are not used
        if last - first <= most:
            rows = np.arange(first, last, dtype=np.int32)
            self._pair(rows)
            return written.program.run_logits(rows)
        parts = [(start, min(start + most, last)) for start in range(first, last, most)]
        return torch.cat([self._logits_at(*part).clone() for part in parts])


class CpuDecoderPart(CpuDecoder):
    """One rank's part of a model that several ranks share. Every rank runs the same steps."""

    def step(self, arrays: StepArrays, kv_cache: KVCache, draws: Draws | None) -> StepLogits:
        """As in `CpuDecoder`; any stage but the last sends its hidden states on and returns no logits."""
        place, written = self._place, self.bind(kv_cache)
        hidden = written.hidden[: len(arrays.token_ids)]
        if not place.is_first_stage:
            for part in self._parts(hidden):
                part.copy_(place.link.receive((1, *part.shape), torch.float32)[0])
        if place.is_last_stage:
            computed = super().step(arrays, kv_cache, draws)
            self._check_ranks()
            return computed
        self._fill(written, arrays)
        written.program.run_filled(written.buffers)
        self._check_ranks()
        for part in self._parts(self._left(hidden)):
            place.link.send(part[None])
        return no_logits()

    def _parts(self, stream: Tensor) -> tuple[Tensor, ...]:
        """The link has room for parts of hidden_size columns."""
        return stream.split(self.spec.hidden_size, dim=1)

    def _left(self, stream: Tensor) -> Tensor:
        """What the stage's layers have left of the columns beside the hidden values, with these."""
        if not isinstance(self.spec.stream, Beside):
            return stream
        own, width = (
            self.spec.stream.width_of_rows,
            self.spec.stream.width(self._place.layers(self.spec.num_layers).stop),
        )
        return torch.cat([stream[:, :own], stream[:, stream.shape[1] - (width - own) :]], dim=1)

    def repeat(self, begun: BegunBlocks | None, masks: TokenMasks | None) -> Chosen:
        """As in `CpuDecoder`; not used with pipeline stages."""
        chosen = super().repeat(begun, masks)
        self._check_ranks()
        return chosen

    def _logits_at(self, first: int, last: int) -> Tensor:
        logits = super()._logits_at(first, last)
        self._check_ranks()
        return logits

    def _check_ranks(self) -> None:
        """Raises PeerError where a rank failed to arrive at a collective within the program."""
        if isinstance(self._place.link, SharedCollectives):
            self._place.link.check()


def _paired(most_used: int, slots: bytes, scales: bytes) -> PairedRows:
    """Of the fields of TokenAdapters."""
    return PairedRows.of(
        np.frombuffer(slots, np.int32).reshape(most_used, -1), np.frombuffer(scales, np.float32).reshape(most_used, -1)
    )
