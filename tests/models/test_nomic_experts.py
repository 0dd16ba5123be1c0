"""Nomic's second embedding model, of which transformers has no class: its mixture of experts computed here in torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from rank_threads import pool_for_each_rank
from safetensors.torch import save_file
from tiny_gguf import finish
from torch import Tensor
from torch.nn import functional as F

from headrace import LLM
from headrace.ipc.failure import ModelError, OptionError

__all__ = ["pool_for_each_rank"]

HIDDEN, INNER, HEADS, LAYERS, EXPERTS, CHOSEN, VOCABULARY = 48, 80, 4, 4, 4, 2, 300
CONFIG: dict[str, Any] = {
    "activation_function": "gelu", "add_pooling_layer": False, "architectures": ["NomicBertModel"], "attn_pdrop": 0.0,
    "bos_token_id": None, "causal": False, "dense_seq_output": True, "embd_pdrop": 0.1, "eos_token_id": None,
    "expert_choice_router": False, "ffn_div": 1, "fused_bias_fc": True, "fused_dropout_add_ln": True,
    "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "max_trained_positions": 256, "mlp_fc1_bias": True,
    "mlp_fc2_bias": True, "model_type": "nomic_bert", "moe_every_n_layers": 2, "moe_impl": "megablocks",
    "moe_normalize_expert_weights": False, "moe_resid_pdrop": 0.0, "moe_top_k": CHOSEN, "n_embd": HIDDEN,
    "n_head": HEADS, "n_inner": INNER, "n_layer": LAYERS, "n_positions": 256, "num_experts": EXPERTS,
    "num_shared_experts": 0, "pad_token_id": 1, "pad_vocab_size_multiple": 64, "parallel_block": False,
    "parallel_block_tied_norm": False, "prenorm": False, "qkv_proj_bias": True, "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.0, "rotary_emb_base": 10000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "router_aux_loss_coef": 0.1,
    "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "summary_activation": None,
    "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
    "summary_use_proj": True, "torch_dtype": "float32", "transformers_version": "4.44.2", "type_vocab_size": 1,
    "use_cache": True, "use_flash_attn": True, "use_rms_norm": None, "use_xentropy": True, "vocab_size": VOCABULARY,
}  # fmt: skip
"""As it is published, but for sizes."""
ENGINE: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "in_process": True}
PROMPTS = [[5 + (7 * at + 3 * length) % 290 for at in range(length)] for length in (1, 2, 17, 64, 130)]


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCABULARY, HIDDEN),
        "embeddings.token_type_embeddings.weight": (1, HIDDEN),
    }
    norms = ["emb_ln"]
    for layer in range(LAYERS):
        at = f"encoder.layers.{layer}."
        linear = {"attn.Wqkv": (3 * HIDDEN, HIDDEN), "attn.out_proj": (HIDDEN, HIDDEN)}
        if layer % 2:
            shapes[f"{at}mlp.router.layer.weight"] = (EXPERTS, HIDDEN)
            shapes |= {f"{at}mlp.experts.mlp.{name}": (EXPERTS * INNER, HIDDEN) for name in ("w1", "w2")}
            shapes[f"{at}mlp.experts.bias"] = (HIDDEN,)
        else:
            linear |= {"mlp.fc1": (INNER, HIDDEN), "mlp.fc2": (HIDDEN, INNER)}
        shapes |= {f"{at}{name}.weight": shape for name, shape in linear.items()}
        shapes |= {f"{at}{name}.bias": shape[:1] for name, shape in linear.items()}
        norms += [f"{at}norm1", f"{at}norm2"]
    shapes |= {f"{name}.{kind}": (HIDDEN,) for name in norms for kind in ("weight", "bias")}
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Tensor]) -> Path:
    folder = tmp_path_factory.mktemp("nomic") / "model"
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def states(state: dict[str, Tensor], prompt: list[int]) -> Tensor:
    """The last hidden states, [num_tokens, HIDDEN]."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (HIDDEN,), state[f"{name}.weight"], state[f"{name}.bias"], 1e-5)

    def rotated(x: Tensor) -> Tensor:
        half = HIDDEN // HEADS // 2
        angles = torch.arange(len(prompt))[:, None] * 10000.0 ** (-torch.arange(half) / half)
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def experts(at: str, x: Tensor) -> Tensor:
        scores = F.linear(x, state[f"{at}router.layer.weight"]).softmax(-1)
        weights, chosen = scores.topk(CHOSEN)
        up, down = (state[f"{at}experts.mlp.{name}"].view(EXPERTS, INNER, HIDDEN) for name in ("w1", "w2"))
        inner = F.gelu(torch.einsum("th,eih->tei", x, up))
        results = torch.einsum("tei,eih->teh", inner, down)
        found = torch.zeros_like(x)
        for place in range(CHOSEN):
            found += weights[:, place, None] * results[torch.arange(len(x)), chosen[:, place]]
        return found + state[f"{at}experts.bias"]

    x = state["embeddings.word_embeddings.weight"][prompt] + state["embeddings.token_type_embeddings.weight"][0]
    x = norm("emb_ln", x)
    for layer in range(LAYERS):
        at = f"encoder.layers.{layer}."
        query, key, value = linear(f"{at}attn.Wqkv", x).view(len(prompt), 3, HEADS, -1).unbind(1)
        heads = [each.transpose(0, 1) for each in (rotated(query), rotated(key), value)]
        mixed = F.scaled_dot_product_attention(*heads).transpose(0, 1).flatten(1)
        x = norm(f"{at}norm1", x + linear(f"{at}attn.out_proj", mixed))
        ffn = experts(f"{at}mlp.", x) if layer % 2 else linear(f"{at}mlp.fc2", F.gelu(linear(f"{at}mlp.fc1", x)))
        x = norm(f"{at}norm2", x + ffn)
    return x


def found_by(model: Path, **options: Any) -> list[Tensor]:
    with LLM(str(model), **(ENGINE | options)) as llm:
        outputs = llm.encode(PROMPTS, pooling_task="token_embed", use_tqdm=False)
        return [output.outputs.data for output in outputs]


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_are_those_of_the_formula(folder: Path, state: dict[str, Tensor], ranks: int) -> None:
    world = (
        {} if ranks == 1 else {"tensor_parallel_size": 2, "distributed_executor_backend": "rank_threads:RankThreads"}
    )
    for prompt, found in zip(PROMPTS, found_by(folder, **world), strict=True):
        torch.testing.assert_close(found, F.normalize(states(state, prompt), dim=1), atol=1e-5, rtol=0)


def test_a_gguf_file_is_read_as_its_folder(tmp_path: Path, state: dict[str, Tensor]) -> None:
    """The converter leaves out the experts' bias."""
    state = {name: torch.zeros_like(each) if name.endswith("experts.bias") else each for name, each in state.items()}
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "nomic-bert-moe")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(CHOSEN)
    writer.add_moe_every_n_layers(2)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.NOMIC_BERT_MOE, LAYERS)
    for name, tensor in state.items():
        stem, suffix = (name, "weight") if name.endswith(("w1", "w2")) else name.rsplit(".", 1)
        if (own := names.get_name(stem)) is None:
            assert stem.endswith("experts")
            continue
        values = tensor.view(EXPERTS, INNER, HIDDEN) if stem.endswith(("w1", "w2")) else tensor
        values = values.transpose(1, 2) if stem.endswith("w2") else values
        writer.add_tensor(f"{own}.{suffix}", values.squeeze(0).contiguous().numpy())
    file = finish(writer, tmp_path / "model.gguf")
    for prompt, found in zip(PROMPTS, found_by(file), strict=True):
        torch.testing.assert_close(found, F.normalize(states(state, prompt), dim=1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_shared_experts": 1}, "num_shared_experts"),
        ({"expert_choice_router": True}, "expert_choice_router"),
        ({"ffn_div": 2}, "ffn_div"),
        ({"activation_function": "swiglu"}, "mlp_fc1_bias"),
        ({"num_experts": 3}, "320 rows|240 rows"),
    ],
)
def test_what_is_computed_otherwise_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises((ModelError, OptionError), match=said):
        found_by(model)
