"""Parts of models that transformers has no code of, in plain torch, to be put into models of transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass
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

    def put_into(self, model: Any) -> None:
        """Makes all attention of a model of transformers attend so."""
        AttentionInterface.register(KIND, _attend)
        model.config._attn_implementation = KIND
        for layer in model.model.layers:
            layer.self_attn.scores = self


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
