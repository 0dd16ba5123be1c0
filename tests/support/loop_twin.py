"""IQuest-Coder-Loop in plain torch, with the modules of a Llama of transformers."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

LOOPS, WINDOW = 3, 30


def loop(model: Any) -> None:
    """The model's layers run LOOPS times, with gates of their own."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    gates = [torch.nn.Linear(config.head_dim, config.num_attention_heads) for _ in model.model.layers]
    for parameter in (each for gate in gates for each in gate.parameters()):
        parameter.data.normal_(0, 0.5, generator=generator)
    model.model.gate_projections = torch.nn.ModuleList(gates)
    model.model.forward = partial(_forward, model.model)


def _forward(model: Any, ids: Tensor, use_cache: bool) -> Any:
    hidden, positions = model.embed_tokens(ids), torch.arange(ids.shape[1])[None]
    rotation, first = model.rotary_emb(hidden, positions), dict[int, Any]()
    for run in range(LOOPS):
        for index, layer in enumerate(model.layers):
            hidden = hidden + _attention(model, index, layer.input_layernorm(hidden), rotation, first, run)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return SimpleNamespace(last_hidden_state=model.norm(hidden))


def _attention(model: Any, index: int, x: Tensor, rotation: Any, first: dict[int, Any], run: int) -> Tensor:
    """first: the keys and values of the first run, by layer, which this function fills in."""
    block = model.layers[index].self_attn
    query, key, value = (
        each(x).unflatten(-1, (-1, block.head_dim)).transpose(1, 2)
        for each in (block.q_proj, block.k_proj, block.v_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *rotation)
    count = x.shape[1]
    causal = torch.ones(count, count, dtype=torch.bool).tril()
    attend = partial(torch.nn.functional.scaled_dot_product_attention, query, enable_gqa=True)
    if not run:
        first[index] = key, value
        mixed = attend(key, value, attn_mask=causal)
    else:
        everything = attend(*first[index], attn_mask=causal)
        near = attend(key, value, attn_mask=causal.triu(1 - WINDOW))
        projection = model.gate_projections[index]
        logits = torch.einsum("bhtd,hd->bht", query, projection.weight) + projection.bias[:, None]
        gate = logits.sigmoid()[..., None]
        mixed = everything * gate + near * (1 - gate)
    return block.o_proj(mixed.transpose(1, 2).flatten(2))
