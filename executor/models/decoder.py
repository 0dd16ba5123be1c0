"""`Decoder`: computes any `ArchSpec` eagerly, op by op: the forward pass over a step's tokens, and their logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace import kernels
from headrace.core.options.adapters import AdapterLimits
from headrace.executor.checkpoints.declared_weights import as_declared, with_own_head
from headrace.executor.checkpoints.weights import WeightSource
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks import Linear, Norm
from headrace.executor.models.eager import (
    ChooseKernel,
    EagerEmbeddingDeltas,
    EagerLinear,
    EagerNorm,
    EagerWeights,
    Layer,
    SharedInputs,
)
from headrace.executor.models.eager_ngrams import EagerNGrams
from headrace.executor.models.kv_cache import KVCache
from headrace.executor.models.rotary import Rotary
from headrace.executor.models.vocabulary import (
    EagerStream,
    VocabParallelEmbedding,
    VocabParallelHead,
    given_scale,
    put_given,
    stream_scale,
)
from headrace.executor.parallel.padding import padded_for
from headrace.executor.parallel.rank_place import SINGLE, RankCoordinates
from headrace.executor.sampling.draws import Draws
from headrace.executor.step.batch import StepArrays
from headrace.executor.step.inputs import StepAdapters, StepInputs, StepLogits, no_logits, step_in_two
from headrace.kernels.expert_places import replica_keys
from headrace.kernels.reference.rotary_cache import LayerCache

CallLayer = Callable[[Tensor, Tensor | None, SharedInputs, LayerCache], tuple[Tensor, Tensor | None]]
"""A `Layer`, or a wrapper around one."""
KeepLayer = Callable[[int, Layer], CallLayer]


class Decoder:
    """A decoder-only model, or one rank's part of it.

    Raises ModelError, naming the tensor, if weights and spec disagree, or if the ranks cannot share the model.
    """

    def __init__(
        self,
        spec: ArchSpec,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        place: RankCoordinates = SINGLE,
        choose: ChooseKernel = kernels.choose,
        keep: KeepLayer | None = None,
        adapters: AdapterLimits | None = None,
    ) -> None:
        """keep: called as keep(index, layer) once a layer is read; its result is called in the layer's place."""
        spec = with_own_head(spec, weights, place)
        self.unpadded = spec
        spec, weights = padded_for(spec, as_declared(spec, weights), place)
        checked = EagerWeights(weights, dtype, torch.device(device), place, choose, spec.ropes)
        checked.adapters = adapters
        self.adapter_tables = checked.adapter_tables
        self.prefix = prefix = spec.names.prefix_in(checked)
        self.spec, self.dtype, self.device, self._place = spec, dtype, torch.device(device), place
        self._embedding: VocabParallelEmbedding | None = None
        self._embedding_deltas: EagerEmbeddingDeltas | None = None
        self._positions: Tensor | None = None
        self._token_types: Tensor | None = None
        self._ngrams: EagerNGrams | None = None
        self._project_in: EagerLinear | None = None
        self._project_out: EagerLinear | None = None
        self._embedding_norm: EagerNorm | None = None
        self._norm: EagerNorm | None = None
        self._head: VocabParallelHead | None = None
        if place.is_first_stage or (place.is_last_stage and spec.tied_head):
            self._embedding = VocabParallelEmbedding(
                checked,
                prefix + spec.names.embedding,
                spec.vocab_size,
                spec.embedding_width,
                stream_scale(spec, dtype),
                place,
            )
        self._stream = None if spec.stream is None else EagerStream(checked, spec, spec.stream, prefix)
        if place.is_first_stage:
            self._read_beginning(checked, prefix)
        self._layers: list[CallLayer] = []
        self._sharing: list[Layer] = []  # layers whose experts are divided among engine cores
        read: dict[str, Layer] = {}
        for i in place.layers(spec.num_layers):
            if (at := spec.layer_prefix(prefix, i)) in read:
                layer = read[at].again(spec.layers[i])
            else:
                layer = read[at] = Layer(checked, at, spec, spec.layers[i])
            self._layers.append(layer if keep is None else keep(i, layer))
            if place.exchange is not None:
                self._sharing.append(layer)
        if place.is_last_stage:
            self._read_end(checked, prefix)
        self._rotaries = tuple(Rotary(rope, self.device) for rope in spec.ropes)
        checked.check_rest(spec, prefix)
        self.weight_bytes = checked.nbytes
        """Memory that the weights take."""
        self.balanced = tuple(checked.balanced)
        """Experts that load balancing may move between ranks."""

    def _read_beginning(self, checked: EagerWeights, prefix: str) -> None:
        spec, names, hidden = self.spec, self.spec.names, self.spec.hidden_size
        if checked.adapters is not None and checked.adapts_all:
            deltas = EagerEmbeddingDeltas(checked.adapters, stream_scale(spec, self.dtype))
            self._embedding_deltas = checked.adapter_tables[prefix + names.embedding] = deltas
        if spec.ngrams is not None:
            self._ngrams = checked.read(spec.ngrams, prefix)
        if spec.learned_position_offset is not None:
            rows = spec.max_positions + spec.learned_position_offset
            self._positions = checked.matrix(f"{prefix}{names.positions}.weight", rows, hidden)
        if spec.token_types:
            self._token_types = checked.matrix(f"{prefix}{names.token_types}.weight", spec.token_types, hidden)
        if spec.embedding_norm:
            self._embedding_norm = EagerNorm(checked, Norm.of_stream(spec, names.embedding_norm), prefix)
        if (width := spec.embedding_width) != hidden:
            self._project_in = EagerLinear.read(checked, Linear(((names.project_in, hidden),), width), prefix)

    def _read_end(self, checked: EagerWeights, prefix: str) -> None:
        spec, names, hidden = self.spec, self.spec.names, self.spec.hidden_size
        if spec.final_norm:
            self._norm = EagerNorm(checked, Norm.of_stream(spec, names.final_norm, spec.logit_scale), prefix)
        if (width := spec.embedding_width) != hidden:
            self._project_out = EagerLinear.read(checked, Linear(((names.project_out, width),), hidden), prefix)
        if not spec.has_head:
            return
        head = next((n for n in names.lm_heads if f"{n}.weight" in checked), names.lm_heads[0])
        tied = self._embedding if spec.tied_head else None
        self._head = VocabParallelHead(checked, head, tied, (spec.vocab_size, width), spec.head_bias, self._place)

    def step(self, arrays: StepArrays, kv_cache: KVCache, draws: Draws | None) -> StepLogits:
        """Computes one step for the model runner: writes the cache, returns logits. Ignores `draws`."""
        inputs = StepInputs.on(self.device, arrays)
        if self._place.is_last_stage:
            return step_in_two(self, inputs, kv_cache)
        self.forward(inputs, kv_cache)
        return no_logits()

    @torch.inference_mode()
    def compute_for_others(self) -> None:
        """Computes this core's experts in a step in which it has no tokens but other cores that share them do."""
        for layer in self._sharing:
            layer.compute_for_others(self.dtype)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, kv_cache: KVCache) -> Tensor:
        """The hidden state of every token, after the final norm: [num_tokens, hidden] in the model's dtype.

        Writes the tokens' keys and values into `kv_cache`. A pipeline stage that is not the last sends its hidden
        states to the next one, and returns them.
        """
        hidden, delta = self._embed(inputs) if self._place.is_first_stage else self._receive(len(inputs.token_ids))
        cos_sin = tuple(rotary.cos_sin(inputs) for rotary in self._rotaries)
        keys = replica_keys(inputs.token_ids, inputs.positions) if self.balanced else None
        memo: dict[str, Any] = {}
        shared = cos_sin, keys, inputs.states, inputs.adapters, memo, inputs.token_ids, inputs.earlier_ids
        steps = [SharedInputs(batch, *shared) for batch in inputs.batches]
        for layer, cache, group in zip(self._layers, kv_cache.layers, kv_cache.groups, strict=True):
            hidden, delta = layer(hidden, delta, steps[group], cache)
        if not self._place.is_last_stage:
            self._send(hidden, delta)
            return hidden
        if self._stream is not None:
            hidden = self._stream.end(hidden, inputs.adapters)
        if self._norm is not None:
            return self._norm(hidden, delta)[0]
        return hidden if delta is None else hidden + delta

    def _embed(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        """The stream before the first layer, [num_tokens, hidden], and no delta."""
        assert self._embedding is not None, "the first stage has the embedding"
        hidden, norms_first = self._embedding(inputs.token_ids), not self.spec.norms_given
        if not norms_first:
            hidden = self._adapted(inputs, hidden)
        if self._ngrams is not None:
            assert inputs.earlier_ids is not None, "the rank's batch has them"
            hidden = self._ngrams(inputs.token_ids, inputs.earlier_ids, hidden)
        if norms_first:  # adapters add to what transformers' embedding layer returns
            hidden = hidden if self._embedding_norm is None else self._embedding_norm(hidden)[0]
            hidden = self._adapted(inputs, hidden)
        if inputs.given:
            put_given(hidden, inputs.given, self.dtype, given_scale(self.spec, self.dtype))
        if self._project_in is not None:
            hidden = self._project_in(hidden, inputs.adapters)
        if self._positions is not None:
            hidden = hidden + self._positions[inputs.positions + (self.spec.learned_position_offset or 0)]
        if self._token_types is not None:
            hidden = hidden + self._token_types[0 if inputs.token_types is None else inputs.token_types]
        if self._embedding_norm is not None and not norms_first:
            hidden = self._embedding_norm(hidden)[0]
        if self._stream is not None:
            hidden = self._stream.begin(inputs.token_ids, hidden, inputs.adapters)
        return hidden, None

    def _adapted(self, inputs: StepInputs, embedded: Tensor) -> Tensor:
        """Embeddings with what the tokens' adapters add to them."""
        if inputs.adapters is None or self._embedding_deltas is None:
            return embedded
        return self._embedding_deltas.added(inputs.token_ids, embedded, inputs.adapters)

    def _send(self, hidden: Tensor, delta: Tensor | None) -> None:
        """Sends to the next stage. A `Stream` is sent in parts of hidden_size columns, for which the link has room."""
        if self.spec.stream is None:
            self._place.link.send(torch.stack([hidden] if delta is None else [hidden, delta]))
            return
        for part in hidden.split(self.spec.hidden_size, dim=1):
            self._place.link.send(part[None].contiguous())

    def _receive(self, num_tokens: int) -> tuple[Tensor, Tensor | None]:
        """(hidden, delta) of the previous stage's last layer."""
        if (stream := self.spec.stream) is not None:
            width, most = stream.width(self._place.layers(self.spec.num_layers).start), self.spec.hidden_size
            sizes = [min(most, width - first) for first in range(0, width, most)]
            parts = [self._place.link.receive((1, num_tokens, size), self.dtype)[0] for size in sizes]
            return torch.cat(parts, dim=1).to(self.device), None
        count = 1 if self.spec.norm_placement == "post" else 2
        received = self._place.link.receive((count, num_tokens, self.spec.hidden_size), self.dtype).to(self.device)
        return received[0], received[1] if count == 2 else None

    @torch.inference_mode()
    def last_states(self, hidden: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """hidden [n, hidden], rows of a result of `forward` -> [n, width]: what the head reads. adapters: of these
        rows' tokens."""
        return hidden if self._project_out is None else self._project_out(hidden, adapters)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """hidden [n, hidden], rows of a result of `forward` -> [n, vocab_size] float32, soft cap applied. adapters: of
        these rows' tokens."""
        assert self._head is not None, "the last stage has the head"
        logits = self._head(self.last_states(hidden, adapters), adapters).float()
        cap = self.spec.final_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap
