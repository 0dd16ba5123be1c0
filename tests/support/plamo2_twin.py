"""PLaMo 2's mixers in plain torch, for a Gemma 3 of transformers, whose other parts are PLaMo 2's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

HEADS, STATE, WIDTH, STEP, RANK = 6, 16, 4, 2, 64
"""Of the recurrence; its width is that of the convolution. Layers 1, 3, ... attend."""


def with_mixers(model: Any) -> None:
    config = model.config
    for index, layer in enumerate(model.model.layers):
        if index % STEP != STEP // 2:
            layer.self_attn = Mixer(config.hidden_size, config.head_dim, config.rms_norm_eps)
        else:
            layer.self_attn.q_norm = HeadNorm(config.num_attention_heads, config.head_dim, config.rms_norm_eps)
            layer.self_attn.k_norm = HeadNorm(config.num_key_value_heads, config.head_dim, config.rms_norm_eps)


def _normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _drawn(index: int, *shape: int, mean: float = 0.0, std: float = 0.3) -> torch.nn.Parameter:
    return torch.nn.Parameter(mean + std * torch.randn(shape, generator=torch.Generator().manual_seed(index)))


class HeadNorm(torch.nn.Module):
    """Of [batch, heads, tokens, head_dim]."""

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = _drawn(heads, heads, head_dim, mean=1.0), eps

    def forward(self, x: Tensor) -> Tensor:
        return _normed(x, self.eps) * self.weight[:, None]


class Mixer(torch.nn.Module):
    def __init__(self, hidden: int, head_dim: int, eps: float) -> None:
        super().__init__()
        inner, self.head_dim, self.eps = HEADS * head_dim, head_dim, eps
        self.in_proj = _drawn(1, 2 * inner, hidden)
        self.conv1d = _drawn(2, inner, 1, WIDTH, std=0.5)
        self.bcdt_proj = _drawn(3, 2 * STATE + RANK, inner)
        self.dt_proj = _drawn(4, HEADS, RANK, std=0.1)
        self.out_proj = _drawn(5, hidden, inner)
        self.A_log, self.D, self.dt_bias = (_drawn(6 + index, HEADS, std=1.0) for index in range(3))
        self.B_norm_weight, self.C_norm_weight = (_drawn(9 + index, STATE, mean=1.0) for index in range(2))
        self.dt_norm_weight = _drawn(11, RANK, mean=1.0)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        x = hidden_states[0]
        gate, mixed = (x @ self.in_proj.T).unflatten(-1, (HEADS, 2, self.head_dim)).unbind(-2)
        padded = functional.pad(mixed.flatten(1).T, (WIDTH - 1, 0))
        mixed = functional.silu(functional.conv1d(padded, self.conv1d, groups=len(self.conv1d))).T
        b, c, low = (_normed(each, self.eps) for each in (mixed @ self.bcdt_proj.T).split((STATE, STATE, RANK), dim=-1))
        b, c = b * self.B_norm_weight, c * self.C_norm_weight
        steps = functional.softplus((low * self.dt_norm_weight) @ self.dt_proj.T + self.dt_bias)
        heads, state, found = mixed.unflatten(-1, (HEADS, -1)), torch.zeros(HEADS, self.head_dim, STATE), []
        for token, step in enumerate(steps):
            added = (step[:, None] * heads[token])[..., None] * b[token]
            state = state * torch.exp(step * -self.A_log.exp())[:, None, None] + added
            found.append(state @ c[token] + self.D[:, None] * heads[token])
        result = torch.stack(found) * functional.silu(gate)
        return (result.flatten(1) @ self.out_proj.T)[None], None
