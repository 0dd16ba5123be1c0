"""Parts of models that transformers has no code of, in plain torch, to be put into models of transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

KIND = "written"


@dataclass(frozen=True)
class Scores:
    """How attention's scores follow from queries and keys, over whole sequences."""

    cap: float | None = None
    grow_after: int | None = None
    """The scores of tokens at later positions p are multiplied by log2(p) / log2(grow_after), after the cap."""
    chunk: int | None = None
    """A token attends to its chunk of as many tokens, and to the one before it."""

    def put_into(self, model: Any, chunked: str = "") -> None:
        """Makes attention of a model of transformers attend so. chunked: the type of layers that have chunks."""
        AttentionInterface.register(KIND, _attend)
        model.config._attn_implementation = KIND
        for index, layer in enumerate(model.model.layers):
            whole = self.chunk is not None and model.config.layer_types[index] != chunked
            layer.self_attn.scores = replace(self, chunk=None) if whole else self


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, dim], key and value with fewer heads -> [1, tokens, heads, dim]"""
    rule: Scores = module.scores
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    positions = torch.arange(query.shape[2])
    if rule.cap is not None:
        scores = rule.cap * torch.tanh(scores / rule.cap)
    if rule.grow_after is not None:
        factors = [max(1.0, math.log2(max(1, p)) / math.log2(rule.grow_after)) for p in positions.tolist()]
        scores = scores * torch.tensor(factors)[:, None]
    visible = positions <= positions[:, None]
    if rule.chunk is not None:
        visible &= positions // rule.chunk >= positions[:, None] // rule.chunk - 1
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2), None


def randomise(module: nn.Module, seed: int) -> None:
    """As `tiny_models.make` does for the rest of a model."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(module.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * noise if "norm" in name else 0.3 * noise


class GatedFfn(nn.Module):
    def __init__(self, hidden: int, inner: int, activation: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj, self.activation = nn.Linear(inner, hidden, bias=False), activation

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return result


class GroupedNorm(nn.Module):
    """An RMS norm of each group of columns, with the weights of another norm."""

    def __init__(self, norm: Any, groups: int, eps: float) -> None:
        super().__init__()
        self.weight, self.groups, self.eps = norm.weight, groups, eps

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.unflatten(-1, (self.groups, -1))
        normed = grouped / (grouped.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return normed.flatten(-2) * self.weight


class ValueAttention(nn.Module):
    """K2 Horizon's attention, with all rotated: values of experts, or of one matrix; gates; heads' own norms."""

    def __init__(self, config: Any, num_experts: int, num_chosen: int, scale: float, gate: str, norms: bool) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
        self.q_proj, self.k_proj = nn.Linear(hidden, queries, bias=False), nn.Linear(hidden, keys, bias=False)
        self.o_proj, self.gate_proj = nn.Linear(queries, hidden, bias=False), nn.Linear(hidden, queries, bias=False)
        if num_experts:
            self.v_router = nn.Linear(hidden, num_experts)
            self.v_experts = nn.ModuleList([nn.Linear(hidden, keys, bias=False) for _ in range(num_experts)])
        else:
            self.v_proj = nn.Linear(hidden, keys, bias=False)
        if norms:
            self.q_norm, self.k_norm = nn.RMSNorm(queries), nn.RMSNorm(keys)
        self.num_chosen, self.scale, self.gate, self.dim, self.norms = num_chosen, scale, gate, dim, norms
        self.eps = config.rms_norm_eps

    def values(self, x: Tensor) -> Tensor:
        if not hasattr(self, "v_router"):
            single: Tensor = self.v_proj(x)
            return single
        scores = torch.sigmoid(x @ self.v_router.weight.T)
        chosen = (scores + self.v_router.bias).topk(self.num_chosen).indices
        shares = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        shares = shares / shares.sum(-1, keepdim=True) * self.scale
        products = torch.stack([F.silu(each(x)) for each in self.v_experts], dim=-1)
        return (products @ shares[..., None])[..., 0]

    def heads(self, x: Tensor, norm: str) -> Tensor:
        heads = x.unflatten(-1, (-1, self.dim))
        if self.norms:
            heads = heads / (heads.square().mean(-1, keepdim=True) + self.eps).sqrt()
            heads = heads * getattr(self, norm).weight.unflatten(0, (-1, self.dim))
        return heads.transpose(1, 2)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> tuple[Tensor, None]:
        x, (cos, sin) = hidden_states, position_embeddings
        query, key = self.heads(self.q_proj(x), "q_norm"), self.heads(self.k_proj(x), "k_norm")
        value = self.values(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        query, key = (
            each * cos[:, None]
            + torch.cat([-each[..., self.dim // 2 :], each[..., : self.dim // 2]], -1) * sin[:, None]
            for each in (query, key)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        gates = self.gate_proj(x)
        gates = F.silu(gates) if self.gate == "silu" else torch.log2(1 + torch.exp2(gates))
        return self.o_proj(attended.transpose(1, 2).flatten(2) * gates), None


class SinkAttention(nn.Module):
    """openPangu Pro V2's attention: sinks before the tokens, and the first dimensions rotated as neighbouring pairs."""

    def __init__(self, config: Any, turned: int, head_dim: int, value_dim: int, num_sinks: int) -> None:
        super().__init__()
        heads, kv_heads, hidden = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
        self.sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * value_dim)
        self.qkv_proj, self.o_proj = (
            nn.Linear(hidden, sum(self.sizes), bias=False), nn.Linear(heads * value_dim, hidden, bias=False)
        )  # fmt: skip
        self.k_layernorm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.param_sink_key = nn.Parameter(torch.empty(num_sinks, kv_heads, head_dim))
        self.param_sink_value = nn.Parameter(torch.empty(num_sinks, kv_heads, value_dim))
        self.turned, self.head_dim, self.value_dim = turned, head_dim, value_dim
        self.theta = config.rope_parameters["rope_theta"]

    def rotated(self, x: Tensor) -> Tensor:
        """x [1, tokens, heads, head_dim]"""
        angles = torch.arange(x.shape[1])[:, None] / self.theta ** (torch.arange(0, self.turned, 2) / self.turned)
        pairs = torch.view_as_complex(x[..., : self.turned].unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)
        return torch.cat([turned, x[..., self.turned :]], dim=-1)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        parts = self.qkv_proj(hidden_states).split(self.sizes, dim=-1)
        query, key = (each.unflatten(-1, (-1, self.head_dim)) for each in parts[:2])
        query, key = self.rotated(query), self.rotated(self.k_layernorm(key))
        value, count = parts[2].unflatten(-1, (-1, self.value_dim)), query.shape[1]
        key = torch.cat([self.k_layernorm(self.param_sink_key)[None], key], dim=1)
        value = torch.cat([self.param_sink_value[None], value], dim=1)
        sinks = key.shape[1] - count
        visible = torch.arange(-sinks, count) <= torch.arange(count)[:, None]
        attended = F.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (query, key, value)), attn_mask=visible, enable_gqa=True
        )
        return self.o_proj(attended.transpose(1, 2).flatten(2)), None


class EarlyExpertsLayer(nn.Module):
    """Arctic's layer, with the parts of a layer of Mixtral: experts of its input beside the others."""

    def __init__(self, layer: Any, inner: int) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.input_layernorm = layer.self_attn, layer.mlp, layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        hidden = len(self.input_layernorm.weight)
        self.residual_mlp = GatedFfn(hidden, inner, F.silu)
        self.residual_layernorm = type(layer.input_layernorm)(hidden, layer.input_layernorm.variance_epsilon)
        randomise(self.residual_mlp, inner)
        randomise(self.residual_layernorm, inner)
        self.residual_layernorm.weight.data.add_(1.0)

    def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
        attended = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **given)[0]
        dense: Tensor = self.residual_mlp(self.residual_layernorm(attended))
        experts: Tensor = self.mlp(self.post_attention_layernorm(hidden_states))
        return attended + dense + experts


class GrokFfn(nn.Module):
    """Experts by the capped logits of their router; in Grok 2, beside a dense FFN."""

    def __init__(self, hidden: int, inner: int, num_experts: int, num_chosen: int, cap: float, dense: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.experts = nn.ModuleList([GatedFfn(hidden, inner, F.gelu) for _ in range(num_experts)])
        self.mlp = GatedFfn(hidden, dense, F.gelu) if dense else None
        self.num_chosen, self.cap = num_chosen, cap

    def forward(self, x: Tensor) -> Tensor:
        probabilities = (self.cap * torch.tanh(self.gate(x) / self.cap)).softmax(-1)
        shares = probabilities.where(probabilities >= probabilities.topk(self.num_chosen).values[..., -1:], 0.0)
        if self.mlp is None:
            shares = shares / shares.sum(-1, keepdim=True)
        routed = torch.stack([expert(x) for expert in self.experts], dim=-1) @ shares[..., None]
        return routed[..., 0] if self.mlp is None else (routed[..., 0] + self.mlp(x)) / 2**0.5
