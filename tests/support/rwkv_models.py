"""A tiny RWKV-7 in flash-linear-attention's layout, and its logits in float64: of the paper's equations, token by token
(Peng et al. 2025, section 4). Neither transformers nor an installed package has it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

VOCAB, HIDDEN, HEAD, INNER, LAYERS = 128, 32, 8, 64, 3
RANKS = {"w_lora": 6, "a_lora": 5, "v_lora": 4, "g_lora": 7}
CONFIG: dict[str, Any] = {
    "architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "head_dim": HEAD, "num_hidden_layers": LAYERS, "intermediate_size": INNER, "hidden_act": "sqrelu",
    "norm_eps": 1e-5, "norm_first": True, "norm_bias": True, "attn": None, "attn_mode": "chunk", "fuse_norm": True,
    "decay_low_rank_dim": RANKS["w_lora"], "a_low_rank_dim": RANKS["a_lora"], "v_low_rank_dim": RANKS["v_lora"],
    "gate_low_rank_dim": RANKS["g_lora"], "value_dim": [HIDDEN] * LAYERS, "bos_token_id": 0, "eos_token_id": 1,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, std: float = 0.25, mean: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=generator) * std + mean

    found = {"model.embeddings.weight": draw(VOCAB, HIDDEN, std=0.5), "lm_head.weight": draw(VOCAB, HIDDEN)}
    norms = ["model.norm", "model.layers.0.pre_norm"]
    for i in range(LAYERS):
        at = f"model.layers.{i}.attn"
        norms += [f"model.layers.{i}.attn_norm", f"model.layers.{i}.ffn_norm", f"{at}.g_norm"]
        found |= {f"{at}.x_{name}": draw(1, 1, HIDDEN, mean=0.5) for name in "rwkvag"}
        found |= {f"{at}.{name}": draw(HIDDEN, mean=0.7) for name in ("k_k", "k_a")}
        found[f"{at}.r_k"] = draw(HIDDEN // HEAD, HEAD)
        found |= {f"{at}.{name}_proj.weight": draw(HIDDEN, HIDDEN) for name in "rkvo"}
        for name, rank in RANKS.items():
            if name == "v_lora" and i == 0:
                continue
            found[f"{at}.{name}.lora.0.weight"] = draw(rank, HIDDEN)
            found[f"{at}.{name}.lora.2.weight"] = draw(HIDDEN, rank)
            if name != "g_lora":
                found[f"{at}.{name}.lora.2.bias"] = draw(HIDDEN, std=1.0)
        found[f"model.layers.{i}.ffn.x_k"] = draw(HIDDEN, mean=0.5)
        found[f"model.layers.{i}.ffn.key.weight"] = draw(INNER, HIDDEN)
        found[f"model.layers.{i}.ffn.value.weight"] = draw(HIDDEN, INNER)
    for name in norms:
        found |= {f"{name}.weight": draw(HIDDEN, mean=1.0), f"{name}.bias": draw(HIDDEN)}
    return found


def save(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def logits(token_ids: list[int]) -> Tensor:
    """[tokens, VOCAB] float64"""
    held = {name: each.double() for name, each in weights().items()}
    x = held["model.embeddings.weight"][torch.tensor(token_ids)]
    x, first = _norm(held, "model.layers.0.pre_norm", x), None
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        mixed, first = _time_mix(held, f"{at}.attn", _norm(held, f"{at}.attn_norm", x), first)
        x = x + mixed
        normed = _norm(held, f"{at}.ffn_norm", x)
        inner = _between(normed, held[f"{at}.ffn.x_k"]) @ held[f"{at}.ffn.key.weight"].T
        x = x + inner.relu().square() @ held[f"{at}.ffn.value.weight"].T
    return _norm(held, "model.norm", x) @ held["lm_head.weight"].T


def _norm(held: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, (HIDDEN,), held[f"{name}.weight"], held[f"{name}.bias"], 1e-5)


def _between(x: Tensor, share: Tensor) -> Tensor:
    before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
    return x + (before - x) * share


def _time_mix(held: dict[str, Tensor], at: str, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    parts = {name: _between(x, held[f"{at}.x_{name}"].view(-1)) for name in "rwkvag"}
    r, k, v = (parts[name] @ held[f"{at}.{name}_proj.weight"].T for name in "rkv")

    def low(name: str, of: str, activation: Any = lambda each: each) -> Tensor:
        inner = activation(parts[of] @ held[f"{at}.{name}.lora.0.weight"].T) @ held[f"{at}.{name}.lora.2.weight"].T
        return inner + held.get(f"{at}.{name}.lora.2.bias", 0.0)

    decay = torch.exp(-math.exp(-0.5) * low("w_lora", "w", torch.tanh).sigmoid())
    if first is None:
        first = v
    else:
        v = v + (first - v) * low("v_lora", "v").sigmoid()
    rate, gate = low("a_lora", "a").sigmoid(), low("g_lora", "g", torch.sigmoid)
    heads = (len(x), HIDDEN // HEAD, HEAD)
    removal = F.normalize((k * held[f"{at}.k_k"]).view(heads), dim=-1)
    k = k * (1 + (rate - 1) * held[f"{at}.k_a"])
    r, k, v, decay, rate = (each.reshape(heads) for each in (r, k, v, decay, rate))
    state, outputs = torch.zeros(HIDDEN // HEAD, HEAD, HEAD, dtype=torch.float64), []
    for t in range(len(x)):
        # S (diag(w) - kk (a kk)^T) + v k^T
        change = torch.diag_embed(decay[t]) - removal[t][..., None] * (rate[t] * removal[t])[:, None]
        state = state @ change + v[t][..., None] * k[t][:, None]
        outputs.append((state @ r[t][..., None]).squeeze(-1))
    mixed = F.group_norm(
        torch.stack(outputs).flatten(1),
        HIDDEN // HEAD,
        held[f"{at}.g_norm.weight"],
        held[f"{at}.g_norm.bias"],
        HEAD * 1e-5,
    )
    mixed = mixed + ((r * k * held[f"{at}.r_k"]).sum(-1, keepdim=True) * v).flatten(1)
    return (mixed * gate) @ held[f"{at}.o_proj.weight"].T, first
