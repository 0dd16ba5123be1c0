"""The changes that llama.cpp's converter makes to a checkpoint's tensors before it names them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from gguf_keys import PERMUTED, deci_heads, first
from torch import Tensor

Config = Mapping[str, Any]
WITH_COLUMNS = ("mamba2", "granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe")
"""Whose vectors of heads become columns."""
HYBRIDS = ("granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe", "jamba", "kimi-linear")
OFFSET = ("gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe", "step35")
ALPHAS = {"alpha_p": "xielu.alpha_p", "alpha_n": "xielu.alpha_n", "beta": "xielu.beta", "eps": "xielu.eps"}
BLOCKS = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.(\d+)\.")


def converted(arch: str, state: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The converted tensors, under the names of gguf's tables or, where these lack them, under their names in the
    file."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for own, part in _parts(arch, name, tensor, config):
            found[own] = _adjusted(arch, own, part, config)
    return _stacked(found)


def converted_factors(
    arch: str, factors: Mapping[str, tuple[Tensor, Tensor]], config: Config
) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, B) of an adapter's modules, as `converted`: a B's rows are those of its matrix, and an A stays."""
    firsts, seconds = dict[str, Tensor](), dict[str, Tensor]()
    for module, (a, b) in factors.items():
        for own, part in _parts(arch, f"{module}.weight", b, config):
            firsts[own], seconds[own] = a, _adjusted(arch, own, part, config)
    firsts, seconds = _stacked(firsts), _stacked(seconds)
    return {own: (firsts[own], seconds[own]) for own in firsts}


def alphas(tensors: dict[str, Tensor]) -> dict[str, list[float]]:
    """Removes the tensors that GGUF stores as metadata, and returns their values per layer."""
    found: dict[str, list[float]] = {}
    for name in sorted(name for name in tensors if ".act_fn." in name):
        found.setdefault(ALPHAS[name.rpartition(".")[2]], []).append(float(tensors.pop(name).float()))
    return found


def _parts(arch: str, name: str, tensor: Tensor, config: Config) -> Iterator[tuple[str, Tensor]]:
    if arch in ("bloom", "chatglm"):
        name = name.removeprefix("transformer.")
    start, _, last = name.rpartition(".")
    block = BLOCKS.match(name)
    blk = f"blk.{block[1]}." if block else ""
    if arch == "gpt-oss" and (start.endswith(".experts") or last == "sinks"):
        yield from _gpt_oss(start, last, tensor)
    elif arch == "llama4" and start.endswith(".experts"):
        yield from _llama4(start, last, tensor)
    elif "query_key_value" in name and arch == "bailingmoe":
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        size = config["hidden_size"] // heads
        parts = tensor.split((heads * size, groups * size, groups * size))
        for letter, part, count in zip("qkv", parts, (heads, groups, 0), strict=True):
            yield f"{blk}attn_{letter}.weight", _permuted(part, count) if count else part
    elif "query_key_value" in name and arch not in ("chatglm", "bailingmoe2"):
        yield name, _ungrouped(tensor, _qkv_parts(arch, config))
    elif name.endswith(("attention.wqkv.weight", "self_attn.W_pack.weight")):
        groups = config["num_key_value_heads"] if "wqkv" in name else 1
        heads = config["num_attention_heads"]
        head_dim = config["hidden_size"] // heads
        sizes = (heads // groups * head_dim, head_dim, head_dim) if "wqkv" in name else (config["hidden_size"],) * 3
        parts = tensor.unflatten(0, (groups, -1)).split(sizes, dim=1)
        for letter, part, count in zip("qkv", parts, (heads, groups if "wqkv" in name else heads, 0), strict=True):
            flat = part.flatten(0, 1)
            yield f"{blk}attn_{letter}.weight", _permuted(flat, count) if count else flat
    elif arch in ("deepseek2", "glm-dsa", "mistral4") and name.endswith("kv_b_proj.weight"):
        yield from _halves(name, tensor, config)
    elif arch == "dbrx" and ".experts.mlp." in name:
        count = config["ffn_config"]["moe_num_experts"]
        parts, own = tensor.unflatten(0, (count, -1)), {"w1": "gate", "v1": "up", "w2": "down"}[last]
        yield f"{blk}ffn_{own}_exps.weight", parts.transpose(1, 2) if last == "w2" else parts
    elif arch in ("rwkv7", "plamo2", "plamo3"):
        yield from (_rwkv7 if arch == "rwkv7" else _plamo)(name, tensor, blk)
    elif arch in ("mamba", "mamba2") and ".mixer." in name:
        yield from _mamba(arch, name, last, tensor, blk, config)
    elif arch in (*HYBRIDS, "granitemoe"):
        yield from _hybrid(arch, name, last, tensor, blk, config)
    elif ".linear_attn." in name:
        yield from _delta(arch, name, last, tensor, blk, config)
    else:
        yield from _renamed(arch, name, tensor, blk)


RWKV_NAMES = {
    "attn_norm": "attn_norm", "ffn_norm": "attn_norm_2", "attn.g_norm": "time_mix_ln", "attn.k_k": "time_mix_k_k",
    "attn.k_a": "time_mix_k_a", "attn.r_k": "time_mix_r_k", "attn.r_proj": "time_mix_receptance",
    "attn.k_proj": "time_mix_key", "attn.v_proj": "time_mix_value", "attn.o_proj": "time_mix_output",
    "ffn.x_k": "channel_mix_lerp_k", "ffn.key": "channel_mix_key", "ffn.value": "channel_mix_value",
}  # fmt: skip


def _rwkv7(name: str, tensor: Tensor, blk: str) -> Iterator[tuple[str, Tensor]]:
    """The first layer gets weights that nothing reads: those of rates in the place of those of values."""
    if not blk or ".pre_norm." in name:
        yield name, tensor
        return
    kind = "bias" if name.endswith(".bias") else "weight"
    part = BLOCKS.sub("", name).removesuffix(f".{kind}")
    if part.startswith("attn.x_"):
        yield f"{blk}time_mix_lerp_fused.{'rwkvag'.index(part[-1])}.weight", tensor
    elif low := re.fullmatch(r"attn\.(\w)_lora\.lora\.([02])", part):
        own = 0 if kind == "bias" else 1 + int(low[2]) // 2
        yield f"{blk}time_mix_{low[1]}{own}.weight", tensor
        if low[1] == "a" and blk == "blk.0.":
            yield f"{blk}time_mix_v{own}.weight", tensor
    else:
        yield f"{blk}{RWKV_NAMES[part]}.{kind}", tensor.flatten() if part == "attn.r_k" else tensor


PLAMO_OFFSETS = {"post_mixer_norm": 1 / 5, "post_mlp_norm": 1 / 5**1.5}
PLAMO_VECTORS = {"B_norm_weight": "ssm_b_norm", "C_norm_weight": "ssm_c_norm", "dt_norm_weight": "ssm_dt_norm"}
"""Which files have without an ending, as the norms after blocks."""


def _plamo(name: str, tensor: Tensor, blk: str) -> Iterator[tuple[str, Tensor]]:
    last = name.rpartition(".")[2]
    part = BLOCKS.sub("", name).removesuffix(".weight")
    if last in PLAMO_VECTORS:
        yield f"{blk}{PLAMO_VECTORS[last]}", tensor
    elif last in ("q_weight", "k_weight"):
        yield f"{blk}attn_{last[0]}_norm.weight", tensor
    elif last == "A_log":
        yield f"{blk}ssm_a", -tensor.exp()
    elif last == "D":
        yield f"{blk}ssm_d", tensor
    elif last == "dt_bias":
        yield f"{blk}ssm_dt.bias", tensor
    elif part in PLAMO_OFFSETS:
        own = "post_attention_norm" if part == "post_mixer_norm" else "post_ffw_norm"
        yield f"{blk}{own}", tensor + PLAMO_OFFSETS[part]
    elif part.endswith("norm"):
        yield name, tensor + 1
    else:
        yield name, tensor.squeeze(1) if tensor.ndim == 3 else tensor


def _renamed(arch: str, name: str, tensor: Tensor, blk: str) -> Iterator[tuple[str, Tensor]]:
    start, _, last = name.rpartition(".")
    if arch == "mistral4" and start.endswith(".experts"):
        yield f"{name}.weight", tensor
    elif arch == "deepseek2" and last == "gate_up_proj":  # apart in Mistral's own layout
        yield from zip((f"{start}.gate_proj.weight", f"{start}.up_proj.weight"), tensor.chunk(2, dim=1), strict=True)
    elif arch == "deepseek2" and start.endswith(".experts"):
        yield f"{name}.weight", tensor
    elif arch == "lfm2moe" and ".experts." in name:
        yield name.removeprefix("model."), tensor
    elif arch == "gemma4" and last in ("scale", "per_expert_scale"):
        yield f"{blk}{'ffn_gate_inp' if last == 'scale' else 'ffn_down_exps'}.scale", tensor
    elif last == "layer_scalar" or (arch == "gemma4" and start.endswith(".experts")):
        yield f"{name}.weight", tensor
    elif last in ("expert_bias", "router_bias"):
        yield f"{name}.bias", tensor
    elif last == "e_score_correction_bias":
        yield f"{start}.e_score_correction.bias", tensor
    elif last.endswith(("_scale", "attention_sink_bias")):
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


def _halves(name: str, tensor: Tensor, config: Config) -> Iterator[tuple[str, Tensor]]:
    """Of latent attention's up-projection."""
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
    keys, values = tensor.unflatten(0, (heads, -1)).split((nope, config["v_head_dim"]), dim=1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values


def _hybrid(arch: str, name: str, last: str, tensor: Tensor, blk: str, config: Config) -> Iterator[tuple[str, Tensor]]:
    if ".shared_mlp." in name:
        kind = "_shexp" if config["num_local_experts"] else ""
        parts = zip(("gate", "up"), tensor.chunk(2), strict=True) if ".input_linear." in name else [("down", tensor)]
        yield from ((f"{blk}ffn_{part}{kind}.weight", each) for part, each in parts)
    elif name.endswith(".input_linear.weight"):
        gates, ups = tensor.chunk(2, dim=1)
        yield f"{blk}ffn_gate_exps.weight", gates
        yield f"{blk}ffn_up_exps.weight", ups
    elif name.endswith(".output_linear.weight"):
        yield f"{blk}ffn_down_exps.weight", tensor
    elif name.endswith("kv_b_proj.weight"):
        yield from _halves(name, tensor, config)
    elif arch == "kimi-linear" and name.endswith("_conv1d.weight"):
        yield name, tensor.reshape(1, tensor.shape[0], 1, -1)
    elif arch == "kimi-linear" and ".layers.0.block_sparse_moe." in name:  # the dense FFN, which transformers saves so
        yield name.replace("block_sparse_moe", "mlp"), tensor
    elif last == "e_score_correction_bias":
        yield f"{name.removesuffix('_bias')}.bias", tensor
    elif ".experts." in name:  # under the name of other families' experts
        yield re.sub(r"backbone|model", "model", re.sub(r"mixer|feed_forward", "mlp", name), count=1), tensor
    else:
        yield from _mamba(arch, name, last, tensor, blk, config)


def _mamba(arch: str, name: str, last: str, tensor: Tensor, blk: str, config: Config) -> Iterator[tuple[str, Tensor]]:
    if last == "A_log":
        yield f"{blk}ssm_a", -tensor.exp()[:, None] if arch in WITH_COLUMNS else -tensor.exp()
    elif last == "D":
        yield f"{blk}ssm_d", tensor[:, None] if arch in WITH_COLUMNS else tensor
    elif last == "dt_bias":
        yield f"{blk}ssm_dt.bias", tensor
    elif name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        yield name, tensor.unflatten(0, (config.get("n_groups") or config["mamba_n_groups"], -1))
    else:
        yield name, tensor.squeeze(1) if tensor.ndim == 3 else tensor


def in_turn(name: str, tensor: Tensor, config: Config) -> Tensor:
    """A tensor of gated delta networks with the heads of values in an order in which they use those of keys in turn."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    columns = 2 * keys * config["linear_key_head_dim"]

    def turned(tensor: Tensor) -> Tensor:
        """tensor [heads * n, ...]"""
        return tensor.unflatten(0, (keys, heads // keys, -1)).transpose(0, 1).flatten(0, 2)

    if name.endswith(("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight")):
        return torch.cat([tensor[:columns], turned(tensor[columns:])])
    if name.endswith("linear_attn.out_proj.weight"):
        return turned(tensor.T).T
    of_heads = ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight", "in_proj_z.weight")
    return turned(tensor) if name.endswith(tuple(f"linear_attn.{each}" for each in of_heads)) else tensor


def _delta(arch: str, name: str, last: str, tensor: Tensor, blk: str, config: Config) -> Iterator[tuple[str, Tensor]]:
    """Qwen 3 Next's projections become two, and Qwen 3.5's heads of values use those of keys in turn."""
    if arch != "qwen3next":
        tensor = in_turn(name, tensor, config)
    if name.endswith("in_proj_qkvz.weight"):
        keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
        inner = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
        parts = tensor.unflatten(0, (keys, -1)).split((size, size, inner, inner), dim=1)
        *mixed, gate = (part.flatten(0, 1) for part in parts)
        yield f"{blk}attn_qkv.weight", torch.cat(mixed)
        yield f"{blk}attn_gate.weight", gate
    elif last == "A_log":
        yield f"{blk}ssm_a", -tensor.exp()
    elif last == "dt_bias":
        yield f"{blk}ssm_dt.bias", tensor
    else:
        yield name, tensor


def _gpt_oss(start: str, last: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if last == "sinks":
        yield f"{start}.sinks.weight", tensor
        return
    kind = "bias" if last.endswith("_bias") else "weight"
    upright = tensor if kind == "bias" else tensor.transpose(1, 2)
    if last.startswith("gate_up_proj"):
        yield f"{start}.gate_proj.{kind}", upright[:, ::2]
        yield f"{start}.up_proj.{kind}", upright[:, 1::2]
    else:
        yield f"{start}.down_proj.{kind}", upright


def _llama4(start: str, last: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    upright = tensor.transpose(1, 2)
    if last == "gate_up_proj":
        gates, ups = upright.chunk(2, dim=1)
        yield f"{start}.gate_proj.weight", gates
        yield f"{start}.up_proj.weight", ups
    else:
        yield f"{start}.down_proj.weight", upright


def _qkv_parts(arch: str, config: Config) -> tuple[int, tuple[int, int, int]]:
    """The number of groups, and the rows of queries, keys and values in each."""
    heads = first(config, "heads")
    head_dim = first(config, "hidden") // heads
    if arch != "falcon":
        return heads, (head_dim,) * 3
    groups = config.get("num_kv_heads") or 1 if config["new_decoder_architecture"] else 1
    return groups, (heads // groups * head_dim, head_dim, head_dim)


def _ungrouped(tensor: Tensor, parts: tuple[int, tuple[int, int, int]]) -> Tensor:
    """Reorders grouped rows: all queries, then all keys, then all values."""
    groups, sizes = parts
    return torch.cat([part.flatten(0, 1) for part in tensor.unflatten(0, (groups, -1)).split(sizes, dim=1)])


def _permuted(tensor: Tensor, heads: int) -> Tensor:
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _multiplied(name: str, tensor: Tensor, config: Config) -> Tensor:
    """Falcon-H1's multipliers become a part of the weights."""
    inputs = config["attention_in_multiplier"]
    factors = {
        "gate_proj": config["mlp_multipliers"][0],
        "down_proj": config["mlp_multipliers"][1],
        "q_proj": inputs,
        "k_proj": inputs * config["key_multiplier"],
        "v_proj": inputs,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    stem = name.split(".")[-2]
    if stem == "in_proj":
        shared = config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = (config["mamba_d_ssm"],) * 2 + (shared,) * 2 + (config["mamba_n_heads"],)
        parts = zip(tensor.split(sizes), config["ssm_multipliers"], strict=True)
        return torch.cat([part * factor for part, factor in parts]) * config["ssm_in_multiplier"]
    return tensor * factors.get(stem, 1.0)


def _adjusted(arch: str, name: str, tensor: Tensor, config: Config) -> Tensor:
    if arch in OFFSET and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return tensor + 1
    if arch == "falcon-h1":
        return _multiplied(name, tensor, config)
    if arch == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return tensor.T
    if arch == "deci" and ".k_proj." in name:
        return _permuted(tensor, deci_heads(config)[int(name.split(".")[2])])
    if arch in PERMUTED and arch != "exaone" and name.split(".")[-2] in ("q_proj", "k_proj"):
        return _permuted(tensor, config[f"num_{'attention' if '.q_proj.' in name else 'key_value'}_heads"])
    return tensor


def _stacked(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stacks each matrix of a layer's experts into one tensor, as the converter does, and Gemma 3n's AltUp
    projections."""
    found: dict[str, Tensor] = {}
    stacks: dict[str, list[tuple[int, Tensor]]] = {}
    for name, tensor in state.items():
        match = re.fullmatch(
            r"(.*\.experts|.*\.time_mix_lerp_fused|.*altup_(?:unembed_)?projections)\.(\d+)\.(.*)", name
        )
        if match:
            stacks.setdefault(f"{match[1]}.{match[3]}", []).append((int(match[2]), tensor))
        else:
            found[name] = tensor
    for name, stack in stacks.items():
        stack.sort(key=lambda each: each[0])
        assert [number for number, _ in stack] == list(range(len(stack)))
        found[name] = torch.stack([tensor for _, tensor in stack])
    return found
