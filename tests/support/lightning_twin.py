"""Ling 2.5 in plain torch: a DeepSeek V3 of transformers in which most layers have lightning attention instead,
computed as a sum over all pairs of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Ling:
    """What Ling 2.5 has and DeepSeek V3 has not."""

    period: int = 2
    """Of as many layers the last has latent attention, and those after the last whole number of these."""
    head_dim: int = 16
    rotated: int = 8
    """Dimensions of a head of lightning attention; 0: none."""
    groups: int = 2
    silu: bool = False
    norms: bool = True
    """Whether queries and keys are normed."""
    qkv_bias: bool = False
    bias: bool = False

    def is_lightning(self, index: int, count: int) -> bool:
        return (index + 1) % self.period > 0 and index < count - count % self.period

    def put_into(self, model: Any) -> None:
        """Replaces the attention of the twin's layers."""
        generator = torch.Generator().manual_seed(1)
        count = model.config.num_hidden_layers
        for index, layer in enumerate(model.model.layers):
            if not self.is_lightning(index, count):
                continue
            layer.self_attn = LightningAttention(self, model.config, index)
            for name, parameter in sorted(layer.self_attn.named_parameters()):
                noise = torch.randn(parameter.shape, generator=generator)
                if "norm" in name:
                    parameter.data = 1 + 0.3 * noise
                else:
                    parameter.data = (0.3 if name.endswith("bias") else 0.25) * noise

    def config(self) -> dict[str, Any]:
        """The fields of its config that the twin's lacks."""
        rotation = {"partial_rotary_factor": self.rotated / self.head_dim} if self.rotated else {"linear_rope": False}
        return rotation | {
            "layer_group_size": self.period, "group_norm_size": self.groups, "head_dim": self.head_dim,
            "use_qk_norm": self.norms, "use_qkv_bias": self.qkv_bias, "use_bias": self.bias, "linear_silu": self.silu,
        }  # fmt: skip


class LightningAttention(nn.Module):
    def __init__(self, ling: Ling, config: Any, index: int) -> None:
        super().__init__()
        self.ling, self.eps, self.theta = ling, config.rms_norm_eps, config.rope_parameters["rope_theta"]
        self.heads = config.num_attention_heads
        hidden, inner = config.hidden_size, self.heads * ling.head_dim
        self.query_key_value = nn.Linear(hidden, 3 * inner, bias=ling.qkv_bias)
        if ling.norms:
            self.query_layernorm, self.key_layernorm = (
                nn.RMSNorm(ling.head_dim, eps=config.rms_norm_eps) for _ in range(2)
            )
        self.g_proj = nn.Linear(hidden, inner, bias=False)
        self.g_norm = nn.RMSNorm(inner)
        self.dense = nn.Linear(inner, hidden, bias=ling.bias)
        self.rates = slopes(self.heads) * (1 - index / (config.num_hidden_layers - 1) + 1e-5)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """hidden_states: [1, num_tokens, hidden]"""
        ling, (x,) = self.ling, hidden_states
        mixed = self.query_key_value(x)
        mixed = F.silu(mixed) if ling.silu else mixed
        query, key, value = mixed.unflatten(1, (3, self.heads, -1)).unbind(1)
        if ling.norms:
            query, key = self.query_layernorm(query), self.key_layernorm(key)
        if ling.rotated:
            query, key = self._rotated(query), self._rotated(key)
        distances = torch.arange(len(x))[:, None] - torch.arange(len(x))
        decays = (-self.rates[:, None, None] * distances).exp().tril()
        scores = torch.einsum("qhd,khd->hqk", query, key) * ling.head_dim**-0.5
        mixed = torch.einsum("hqk,khd->qhd", scores * decays, value).flatten(1)
        groups = mixed.unflatten(1, (ling.groups, -1))
        normed = (groups * (groups.square().mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(1) * self.g_norm.weight
        return self.dense(normed * self.g_proj(x).sigmoid())[None], None

    def _rotated(self, heads: Tensor) -> Tensor:
        half = self.ling.rotated // 2
        angles = torch.arange(len(heads))[:, None] * self.theta ** (-torch.arange(half) / half)
        turned = torch.polar(torch.ones_like(angles), angles)[:, None] * torch.complex(
            heads[..., :half], heads[..., half : 2 * half]
        )
        return torch.cat([turned.real, turned.imag, heads[..., 2 * half :]], dim=-1)


def slopes(num_heads: int) -> Tensor:
    """ALiBi's: those of the next lower power of two, then every other one of the next higher."""
    lower = 2 ** math.floor(math.log2(num_heads))
    own = [2 ** (-8 * (i + 1) / lower) for i in range(lower)]
    between = [2 ** (-8 * (2 * i + 1) / (2 * lower)) for i in range(num_heads - lower)]
    return torch.tensor(own + between)
