"""The one decoder: an `ArchSpec` and its weights as a forward pass over a step's tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace import kernels
from headrace.executor.checkpoints.weights import WeightSource
from headrace.executor.cpu.batch import Draws, StepArrays
from headrace.executor.models.arch import ArchSpec, LayerSpec, NormSpec
from headrace.executor.models.inputs import StepInputs, StepLogits, no_logits, step_in_two
from headrace.executor.models.kv_cache import KVCache
from headrace.executor.models.layers import (
    CheckedWeights,
    ChooseKernel,
    ColumnParallel,
    Heads,
    MergedColumnParallel,
    QKVParallel,
    RowParallel,
    VocabParallelEmbedding,
    VocabParallelHead,
    fusable,
)
from headrace.executor.models.rotary import Rotary
from headrace.executor.parallel.padding import padded_for
from headrace.executor.parallel.rank_place import SINGLE, RankPlace
from headrace.kernels.reference.attention import AttentionParams, PagedBatch
from headrace.kernels.reference.rotary_cache import LayerCache, Rotation


@dataclass(frozen=True, eq=False)
class Step:
    """What every layer of one forward pass shares."""

    batch: PagedBatch
    cos_sin: tuple[tuple[Tensor, Tensor], ...]
    """One pair per distinct rotary spec, each [num_tokens, rotary_dim / 2] float32"""


class Norm:
    """RMS or layer norm, with the residual's addition before it."""

    def __init__(self, weights: CheckedWeights, name: str, size: int, spec: NormSpec) -> None:
        weight = weights.vector(f"{name}.weight", size, spec.weight_offset) if spec.affine else None
        self.eps = spec.eps
        self._weights: tuple[Tensor | None, ...]
        if spec.kind == "rms":
            ones = torch.ones(size, device=weights.device)
            self._weights = (weight if weight is not None else ones,)
        else:
            self._weights = (weight, weights.vector(f"{name}.bias", size) if spec.affine else None)
        self._op = weights.kernel(f"{spec.kind}_norm", size=size)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x and residual [..., size] -> (norm of their sum, their sum)"""
        normed, total = self._op(x, residual, *self._weights, self.eps)
        return normed, total

    @property
    def weight(self) -> Tensor | None:
        """[size] float32, the offset added."""
        return self._weights[0]

    @property
    def parameters(self) -> tuple[Tensor, float]:
        """Of an RMS norm: weight and eps."""
        assert self.weight is not None, "an RMS norm without one has ones"
        return self.weight, self.eps


class Attention:
    def __init__(
        self, weights: CheckedWeights, prefix: str, spec: ArchSpec, layer: LayerSpec, place: RankPlace
    ) -> None:
        names = spec.names
        heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        qkv_names = (prefix + names.query, prefix + names.key, prefix + names.value)
        self.qkv = QKVParallel(weights, qkv_names, spec.hidden_size, heads, spec.attention_bias, place)
        self.output = RowParallel(
            weights, prefix + names.output, spec.num_heads * spec.head_dim, spec.hidden_size, spec.output_bias, place
        )
        self.query_norm = self.key_norm = None
        if spec.qk_norm:
            self.query_norm = Norm(weights, prefix + names.query_norm, spec.head_dim, spec.norm)
            self.key_norm = Norm(weights, prefix + names.key_norm, spec.head_dim, spec.norm)
        self._rope_index = spec.ropes.index(layer.rope) if layer.rope is not None else None
        self._params = AttentionParams(spec.attention_scale, layer.sliding_window, spec.attention_soft_cap)
        self._rotate = weights.kernel("rotary", head_dim=spec.head_dim)
        self._write = weights.kernel("write_cache", head_dim=spec.head_dim)
        # The three before attention as one kernel, where the device has it: they are small, and each costs a launch.
        fusable = self.query_norm is None or spec.norm.kind == "rms"
        self._prepare = weights.fused_kernel("rotary_and_write", head_dim=spec.head_dim) if fusable else None
        facts = {"head_dim": spec.head_dim, "num_heads": self.qkv.num_heads, "num_kv_heads": self.qkv.num_kv_heads}
        self._attend = weights.kernel("paged_attention", **facts)
        self._cascade = weights.fused_kernel("cascade_attention", sliding_window=layer.sliding_window, **facts)

    def __call__(self, x: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """x [num_tokens, hidden] -> [num_tokens, hidden]; writes the tokens' keys and values into the cache."""
        return self.output(self.attend(*self.qkv(x), step, cache))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """What `qkv` returns -> [num_tokens, num_heads * head_dim]"""
        if self._prepare is not None:
            query = self._prepare(query, key, value, self._rotation(step), cache, step.batch)
        else:
            if self.query_norm is not None and self.key_norm is not None:
                query, key = self.query_norm(query)[0], self.key_norm(key)[0]
            if self._rope_index is not None:
                query, key = self._rotate(query, key, *step.cos_sin[self._rope_index])
            self._write(key, value, cache.keys, cache.values, step.batch, cache.scales)
        attend = self._attend if self._cascade is None or step.batch.shared_tokens is None else self._cascade
        attended = attend(query, cache.keys, cache.values, step.batch, self._params, cache.scales)
        return attended.view(len(query), -1)

    def _rotation(self, step: Step) -> Rotation:
        cos, sin = (None, None) if self._rope_index is None else step.cos_sin[self._rope_index]
        if self.query_norm is None or self.key_norm is None:
            return Rotation(cos, sin)
        query_norm, key_norm = self.query_norm, self.key_norm
        return Rotation(cos, sin, query_norm=query_norm.weight, key_norm=key_norm.weight, eps=query_norm.eps)


class Mlp:
    def __init__(self, weights: CheckedWeights, prefix: str, spec: ArchSpec, place: RankPlace) -> None:
        names, hidden, inner = spec.names, spec.hidden_size, spec.intermediate_size
        self.up: MergedColumnParallel | ColumnParallel
        if spec.gated_mlp:
            gate_up = (prefix + names.gate, prefix + names.up)
            self.up = MergedColumnParallel(weights, gate_up, hidden, inner, spec.mlp_bias, place)
        else:
            self.up = ColumnParallel(weights, prefix + names.up, hidden, inner, spec.mlp_bias, place)
        self.down = RowParallel(weights, prefix + names.down, inner, hidden, spec.mlp_bias, place)
        op = "activate_and_multiply" if spec.gated_mlp else "activate"
        self._activate = weights.kernel(op, kind=spec.activation)
        self.kind = spec.activation

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden] -> [num_tokens, hidden]"""
        return self.down(self._activate(self.up(x), self.kind))


class Layer:
    """Attention and MLP around a residual stream, `hidden`, of which `delta` is the part not yet added.

    The addition waits for the next norm, so that one kernel does both.
    """

    def __init__(
        self, weights: CheckedWeights, prefix: str, spec: ArchSpec, layer: LayerSpec, place: RankPlace
    ) -> None:
        names, size, norm = spec.names, spec.hidden_size, spec.norm
        self.attention = Attention(weights, prefix, spec, layer, place)
        self.mlp = Mlp(weights, prefix, spec, place)
        self.attention_norm = Norm(weights, prefix + names.attention_norm, size, norm)
        self.mlp_norm = Norm(weights, prefix + names.mlp_norm, size, norm)
        self.attention_post_norm = self.mlp_post_norm = None
        if spec.norm_placement == "sandwich":
            self.attention_post_norm = Norm(weights, prefix + names.attention_post_norm, size, norm)
            self.mlp_post_norm = Norm(weights, prefix + names.mlp_post_norm, size, norm)
        # Ranks add their parts after each matrix, and other norms do not begin one.
        plain = norm.kind == "rms" and spec.norm_placement == "pre" and spec.gated_mlp and place.world_size == 1
        parts = (self.attention.qkv, self.attention.output, self.mlp.up, self.mlp.down)
        self._fusable = fusable([part.weight for part in parts]) if plain else ()
        self._most_fused_rows = min((weight.most_fused_rows for weight in self._fusable), default=0)

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, step: Step, cache: LayerCache
    ) -> tuple[Tensor, Tensor | None]:
        """hidden, delta: [num_tokens, hidden] -> the same after this layer"""
        if len(hidden) <= self._most_fused_rows:
            return self._fused(hidden if delta is None else hidden + delta, step, cache), None
        normed, hidden = self.attention_norm(hidden, delta)
        delta = self.attention(normed, step, cache)
        if self.attention_post_norm is not None:
            delta, _ = self.attention_post_norm(delta)
        normed, hidden = self.mlp_norm(hidden, delta)
        delta = self.mlp(normed)
        if self.mlp_post_norm is not None:
            delta, _ = self.mlp_post_norm(delta)
        return hidden, delta

    def _fused(self, hidden: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """Of few tokens, whose matrices' kernels take in the norms before them and the additions after them."""
        qkv, output, gate_up, down = self._fusable
        joined = qkv.apply_fused(hidden, norm=self.attention_norm.parameters)
        attended = self.attention.attend(*self.attention.qkv.split(joined), step, cache)
        hidden = output.apply_fused(attended, residual=hidden)
        inner = gate_up.apply_fused(hidden, norm=self.mlp_norm.parameters, activation=self.mlp.kind)
        return down.apply_fused(inner, residual=hidden)


class PostNormLayer(Layer):
    """The original transformer's order: each norm follows the addition, and its result is the stream."""

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, step: Step, cache: LayerCache
    ) -> tuple[Tensor, Tensor | None]:
        hidden, _ = self.attention_norm(self.attention(hidden, step, cache), hidden)
        hidden, _ = self.mlp_norm(self.mlp(hidden), hidden)
        return hidden, None


CallLayer = Callable[[Tensor, Tensor | None, Step, LayerCache], tuple[Tensor, Tensor | None]]
"""A `Layer`, or what does more around one."""
KeepLayer = Callable[[int, Layer], CallLayer]


class Decoder:
    """A decoder-only model, or one rank's part of it.

    Raises ModelError, naming the tensor, when weights and spec disagree, and where ranks cannot share the model.
    """

    def __init__(
        self,
        spec: ArchSpec,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        place: RankPlace = SINGLE,
        choose: ChooseKernel = kernels.choose,
        keep: KeepLayer | None = None,
    ) -> None:
        """keep: is given each layer as it is read, and gives what is called in its place."""
        spec, weights = padded_for(spec, weights, place)
        checked = CheckedWeights(weights, dtype, torch.device(device), choose)
        prefix = spec.names.prefix_in(checked)
        self.spec, self.dtype, self.device, self._place = spec, dtype, torch.device(device), place
        self._embedding: VocabParallelEmbedding | None = None
        self._positions: Tensor | None = None
        self._project_in: ColumnParallel | None = None
        self._project_out: ColumnParallel | None = None
        self._norm: Norm | None = None
        self._head: VocabParallelHead | None = None
        if place.is_first_stage or (place.is_last_stage and spec.tied_head):
            self._embedding = VocabParallelEmbedding(
                checked,
                prefix + spec.names.embedding,
                spec.vocab_size,
                spec.embedding_width,
                spec.embedding_scale,
                place,
            )
        if place.is_first_stage:
            self._read_beginning(checked, prefix)
        kind = PostNormLayer if spec.norm_placement == "post" else Layer
        self._layers: list[CallLayer] = []
        for i in place.layers(spec.num_layers):
            layer = kind(checked, f"{prefix}layers.{i}.", spec, spec.layers[i], place)
            self._layers.append(layer if keep is None else keep(i, layer))
        if place.is_last_stage:
            self._read_end(checked, prefix)
        self._rotaries = tuple(Rotary(rope, self.device) for rope in spec.ropes)
        checked.check_all_used(not_read(spec, place, prefix))
        self.weight_bytes = checked.nbytes
        """Memory that the weights take."""

    def _read_beginning(self, checked: CheckedWeights, prefix: str) -> None:
        spec, names, hidden = self.spec, self.spec.names, self.spec.hidden_size
        if spec.learned_position_offset is not None:
            rows = spec.max_positions + spec.learned_position_offset
            self._positions = checked.matrix(f"{prefix}{names.positions}.weight", rows, hidden)
        if (width := spec.embedding_width) != hidden:
            self._project_in = ColumnParallel(checked, prefix + names.project_in, width, hidden, False, SINGLE)

    def _read_end(self, checked: CheckedWeights, prefix: str) -> None:
        spec, names, hidden = self.spec, self.spec.names, self.spec.hidden_size
        if spec.final_norm:
            self._norm = Norm(checked, prefix + names.final_norm, hidden, spec.norm)
        if (width := spec.embedding_width) != hidden:
            self._project_out = ColumnParallel(checked, prefix + names.project_out, hidden, width, False, SINGLE)
        head = next((n for n in names.lm_heads if f"{n}.weight" in checked), names.lm_heads[0])
        tied = self._embedding if spec.tied_head else None
        self._head = VocabParallelHead(checked, head, tied, (spec.vocab_size, width), self._place)

    choose = None
    """The sampler's own torch ops choose."""

    def step(self, arrays: StepArrays, kv_cache: KVCache, draws: Draws | None) -> StepLogits:
        """Runs a step, as the runner asks for it."""
        inputs = StepInputs.on(self.device, arrays)
        if self._place.is_last_stage:
            return step_in_two(self, inputs, kv_cache)
        self.forward(inputs, kv_cache)
        return no_logits()

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, kv_cache: KVCache) -> Tensor:
        """The hidden state of every token, after the final norm: [num_tokens, hidden] in the model's dtype.

        Writes the tokens' keys and values into `kv_cache`. A stage that is not the last sends its states on, and
        returns them.
        """
        hidden, delta = self._embed(inputs) if self._place.is_first_stage else self._receive(len(inputs.token_ids))
        step = Step(inputs.paged_batch, tuple(rotary.cos_sin(inputs) for rotary in self._rotaries))
        for layer, cache in zip(self._layers, kv_cache.layers, strict=True):
            hidden, delta = layer(hidden, delta, step, cache)
        if not self._place.is_last_stage:
            self._place.link.send(torch.stack([hidden] if delta is None else [hidden, delta]))
            return hidden
        if self._norm is not None:
            return self._norm(hidden, delta)[0]
        return hidden if delta is None else hidden + delta

    def _embed(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        """The stream, [num_tokens, hidden], to which nothing is to be added yet."""
        assert self._embedding is not None, "the first stage has the embedding"
        hidden = self._embedding(inputs.token_ids)
        if self._project_in is not None:
            hidden = self._project_in(hidden)
        if self._positions is not None:
            hidden = hidden + self._positions[inputs.positions + (self.spec.learned_position_offset or 0)]
        return hidden, None

    def _receive(self, num_tokens: int) -> tuple[Tensor, Tensor | None]:
        """What the layers of the stage before returned."""
        count = 1 if self.spec.norm_placement == "post" else 2
        received = self._place.link.receive((count, num_tokens, self.spec.hidden_size), self.dtype).to(self.device)
        return received[0], received[1] if count == 2 else None

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden], rows of what `forward` returned -> [n, vocab_size] float32, soft cap applied."""
        assert self._head is not None, "the last stage has the head"
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        logits = self._head(hidden).float()
        cap = self.spec.final_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def not_read(spec: ArchSpec, place: RankPlace, prefix: str) -> list[str]:
    """Patterns of tensors that a checkpoint may hold and this rank does not read."""
    names, own = spec.names, place.layers(spec.num_layers)
    # A tied checkpoint may carry a copy of the embedding as its head.
    excused = names.lm_heads if spec.tied_head or not place.is_last_stage else ()
    if not place.is_first_stage:
        excused += tuple(prefix + name for name in (names.embedding, names.positions, names.project_in))
    if not place.is_last_stage:
        excused += tuple(prefix + name for name in (names.final_norm, names.project_out))
    others = [f"{prefix}layers.{i}." for i in range(spec.num_layers) if i not in own]
    patterns = [rf"^{re.escape(name)}\.(weight|bias)$" for name in excused]
    return [*names.ignorable, *patterns, *(f"^{re.escape(start)}" for start in others)]
