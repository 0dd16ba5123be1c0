"""Nothing that a config says is ignored: each key is changed, and the model changes, it is refused, or it is known not
to matter."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, ClassVar

import published_models
import pytest
import tiny_families
import tiny_mixtures
import tiny_models
import tiny_recurrent
import transformers
from original_configs import ORIGINAL
from thinned import every

from headrace.executor.models.config import Config
from headrace.executor.models.families import families, spec_from_config
from headrace.executor.models.families._unread import ALIASES, ASSUMED, COMPUTED, IGNORED
from headrace.ipc.failure import HeadraceError, ModelError

TABLES = (tiny_models.TINY_MODELS, tiny_families.FAMILIES, tiny_mixtures.FAMILIES, tiny_recurrent.FAMILIES)
LISTS = {
    "layer_types": {
        "full_attn_idxs",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "layer_group_size",
        "global_attn_every_n_layers",
        "use_sliding_window",
        "sliding_window",
    },
    "no_rope_layers": {"no_rope_layer_interval"},
    "mlp_layer_types": {"first_k_dense_replace", "moe_layer_freq"},
    "moe_layers": {"interleave_moe_layer_step"},
    "indexer_types": {"index_topk_freq", "index_topk_pattern", "index_skip_topk_offset"},
}
"""Keys that list the layers, and those from which a config without them derives these."""
OF_NO_EFFECT = {
    "llama_yarn": {"max_position_embeddings"},  # the context is YaRN's original one times its factor
    "deepseek_v3_moe": {"max_position_embeddings"},
    "deepseek_v4": {"max_position_embeddings"},
    "dots3_note": {"partial_rotary_factor"},  # the sizes of heads say it
    "dots3_note_full": {"partial_rotary_factor", "index_head_dim", "index_n_heads", "index_topk"},  # no layer has one
    "deepseek_v2_moe": {"max_position_embeddings"},
    "gpt_oss": {"max_position_embeddings"},
    "falcon_alibi": {"rope_theta"},  # there is no rotation
    "baichuan_13b": {"rope_theta"},
    "baichuan_2": {"rope_theta"},
    "ernie4_5_moe": {"moe_layer_end_index"},  # there is no layer beyond
    "qwen2": {"use_sliding_window", "sliding_window"},  # each is of effect with the other alone
    "qwen3": {"use_sliding_window", "sliding_window"},
    "qwen2_moe": {"use_sliding_window", "sliding_window"},
    "qwen2_moe_some_dense": {"use_sliding_window", "sliding_window"},
    "qwen3_moe": {"use_sliding_window", "sliding_window"},
    "qwen3_moe_some_dense": {"use_sliding_window", "sliding_window"},
    "smollm3": {"use_sliding_window", "sliding_window"},
    "Qwen 2.5": {"max_position_embeddings", "use_sliding_window", "sliding_window"},  # max_window_layers are all layers
    "Qwen 2 VL": {"use_sliding_window", "sliding_window", "mrope_section"},  # sections of positions, equal for text
    "DeepSeek V3": {"max_position_embeddings"},
    "DeepSeek V2 Lite": {"max_position_embeddings"},
    "gpt-oss": {"max_position_embeddings"},
    "Command R": {"max_position_embeddings"},  # model_max_length has the context
    "lfm2_biases": {"block_ffn_dim_multiplier", "block_multiple_of"},  # block_auto_adjust_ff_dim is off
    "mamba2_one_group": {"time_step_limit"},  # infinity
    "granite_swa": {"rope_theta"},  # layer_rope_theta has that of each layer
    "granitemoe_swa": {"rope_theta"},
    "granite_hybrid": {"time_step_limit", "rope_theta"},  # there is no rotation
    "granite_hybrid_dense": {"time_step_limit", "num_experts_per_tok"},  # there are no experts
    "granite_hybrid_attention": {  # there is no recurrent layer, and there are no experts
        *("mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand", "mamba_n_groups"),
        *("mamba_n_heads", "mamba_proj_bias", "time_step_limit", "num_experts_per_tok"),
    },
    "nemotron_h_dense": {  # there are no experts
        *("moe_latent_size", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "n_routed_experts"),
        *("n_shared_experts", "n_group", "topk_group", "norm_topk_prob", "num_experts_per_tok"),
        *("routed_scaling_factor", "time_step_limit"),
    },
    "k2_horizon": {"mova_num_experts_per_tok"},  # there are no experts of values
    "k2_horizon_dense": {  # there are no experts
        *("decoder_sparse_step", "mlp_only_layers", "moe_gate_bias", "mova_num_experts", "mova_num_experts_per_tok"),
        *("norm_topk_prob", "num_experts_per_tok", "num_shared_experts", "router_scaling_factor", "router_score_func"),
    },
    "mamba": {"expand"},  # intermediate_size has it
    "falcon_mamba": {"expand"},
    # Whose size together has a key of its own.
    "nemotron_h": {"time_step_limit", "n_shared_experts"},
    "nemotron_h_latent": {"time_step_limit", "n_shared_experts"},
    "nemotron_h_puzzle": {"n_shared_experts"},
    "falcon_h1": {"time_step_limit", "mamba_norm_before_gate"},  # there is no norm
    "falcon_h1_normed": {"time_step_limit"},
    "gemma4_dense": {"use_double_wide_mlp"},  # no layer reads the cache of another
    "gemma4_experts": {"use_double_wide_mlp"},
    "step3p5": {"rope_theta", "partial_rotary_factors"},  # the last ones are those of a layer that is not run
    "cohere2_moe": {"norm_topk_prob"},  # of sigmoids alone
    "exaone4_full": {"sliding_window_pattern"},  # there is no window
    "param2_moe": {"num_shared_experts"},  # whose size together has a key of its own
    "plamo3": {"sliding_window_pattern"},  # interleaved_sliding_window has that of each layer
    "sarvam_mla": {"max_position_embeddings"},
    "longcat_flash_ngram": {"max_position_embeddings"},
    "telechat3": {"max_position_embeddings", "mscale", "mscale_all_dim"},  # its own temperature has neither
}
"""Keys that the family reads and that change nothing in one of these configs."""


DEEPSEEK = {
    "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid", "seq_aux": True,
    "topk_method": "noaux_tc", "pretraining_tp": 1,
}  # fmt: skip
GPT2 = {
    "n_ctx": 128, "n_special": 0, "predict_special_tokens": True,
    "gradient_checkpointing": False, "summary_type": "cls_index", "scale_attn_weights": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "tokenizer_class": "G",
}  # fmt: skip
LFM2 = {
    "block_dim": 32, "block_mlp_init_scale": 1.0, "block_norm_eps": 1e-5, "block_out_init_scale": 1.0,
    "block_use_swiglu": True, "conv_dim": 32, "conv_dim_out": 32, "full_attn_idxs": [1, 4], "use_pos_enc": True,
}  # fmt: skip
PUBLISHED_KEYS: Mapping[str, dict[str, Any]] = {
    "apertus": {"post_norm": False, "qk_norm": True},
    "axk1": DEEPSEEK,
    "bloom": {
        "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "masked_softmax_fusion": True, "n_inner": None,
        "offset_alibi": 100, "skip_bias_add": True, "skip_bias_add_qkv": False, "unk_token_id": 0,
    },
    "cohere2": {
        "cache_implementation": "hybrid", "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_embedding_sharing": True, "use_qk_norm": False,
        "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True,
    },
    "deepseek_v3_moe": DEEPSEEK,
    "dots1": DEEPSEEK | {"scoring_func": "noaux_tc"},
    "falcon": {"apply_residual_connection_post_layernorm": False, "ff_factor": 4},
    "gpt2": GPT2,
    "gpt_bigcode": GPT2 | {
        "inference_runner": 0, "max_batch_size": None, "max_sequence_length": None, "pad_key_length": True,
        "pre_allocate_kv_cache": False, "runner_max_sequence_length": 128, "validate_runner_input": True,
    },
    "gpt_oss": {"experts_per_token": 3, "initial_context_length": 4096},
    "gptj": GPT2 | {"rotary": True},
    "kimi_k2": DEEPSEEK,
    "lfm2": LFM2 | {"conv_use_xavier_init": True, "block_use_xavier_init": True, "num_heads": 4, "theta": 1e6},
    "lfm2_biases": LFM2,
    "lfm2_moe": {"full_attn_idxs": [1, 4]},
    "lfm2_moe_plain": {"full_attn_idxs": [1, 4]},
    "mamba2": {"norm_before_gate": True, "rms_norm": True, "time_step_init_scheme": "random", "time_step_scale": 1.0},
    "minimax_m2": {
        "attn_type_list": [1, 1], "partial_rotary_factor": 0.5,
        "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
        "mlp_intermediate_size": 64, "mtp_transformer_layers": 1, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid", "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "use_mtp": True,
        "use_qk_norm": True, "use_routing_bias": True,
    },
    "mpt": {"fc_type": "torch", "ffn_config": {"ffn_type": "mptmlp"}, "init_config": {"name": "kaiming_normal_"}},
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
    "qwen": {
        "attn_dropout_prob": 0.0, "bf16": True, "emb_dropout_prob": 0.0, "fp16": False, "fp32": False, "kv_channels": 8,
        "onnx_safe": None, "scale_attn_weights": True, "softmax_in_fp32": False, "use_cache_kernel": False,
        "use_cache_quantization": False, "use_flash_attn": "auto",
    },
    "qwen3": {"use_qk_norm": True},
    "qwen3_moe": {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0},
    "starcoder2": {
        "activation_function": "gelu", "attention_softmax_in_fp32": True, "layer_norm_epsilon": 1e-5,
        "mlp_type": "default", "norm_type": "layer_norm", "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
    },
}  # fmt: skip
"""Keys that published files of these models have besides the fields of transformers' config class."""


@cache
def configs() -> Mapping[str, dict[str, Any]]:
    """All fields of each tiny model's config, as transformers saves it, and the published layouts' own."""
    found: dict[str, dict[str, Any]] = {}
    for table in TABLES:
        for name, tiny in table.items():
            made = getattr(transformers, tiny.config_class)(**(tiny_models.COMMON | tiny.config))
            found[name] = made.to_dict() | {"architectures": [tiny.model_class]}
    found |= {name: published_models.config_of(name) for name in published_models.PUBLISHED}
    return {name: config | PUBLISHED_KEYS.get(name, {}) for name, config in found.items()} | ORIGINAL


NAMES = [*(name for table in TABLES for name in table), *published_models.PUBLISHED, *ORIGINAL]


def others(value: Any) -> list[Any]:
    """Values of the same type as `value` that mean something else; of null, values of several types."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value + 4, 2 if value == 1 else 1]
    if isinstance(value, float):
        return [1.5 * value + 0.25]
    if isinstance(value, str):
        return [value + "_other"]
    if isinstance(value, list) and value:
        return [[*value[:-1], each] for each in others(value[-1])]
    return [True, 3, 0.5, "other"] if value is None else []


def changes(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(key, its value, the fields with another value of it) for every key, also those of objects within."""
    for key, value in fields.items():
        if isinstance(value, dict) and key not in IGNORED:
            for inner, old, changed in changes(value):
                yield inner, old, {**fields, key: changed}
        for each in others(value):
            yield key, value, {**fields, key: each}


@pytest.mark.parametrize("name", every(6, NAMES))
def test_a_changed_key_changes_the_model_or_is_refused_or_is_known_not_to_matter(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = configs()[name]
    spec_from_config(config, warns=True)
    assert "nothing reads them" not in caplog.text
    caplog.set_level(logging.ERROR)
    _walk(name, config)
    if (
        not name.startswith(
            (
                *("gemma3n", "gemma4", "granite_hybrid", "granite_swa", "granitemoe_swa", "mellum", "minimax_m3"),
                *("laguna", "muse", "step3p5", "dots3_note", "rnj1"),
            )
        )
        and LISTS.keys() & config.keys()
    ):  # of these, other lists have the lengths of layers; of the third, all layers are recurrent without the list,
        # none of Mellum's has a window, none of MiniMax M3's has an index, and RNJ 1 has no default
        older = {key: value for key, value in config.items() if key not in LISTS}
        _walk(name, older | {"num_hidden_layers": 8})


def _walk(name: str, config: Mapping[str, Any]) -> None:
    spec, family = spec_from_config(config), families()[config["architectures"][0]]
    known = IGNORED.keys() | family.ignored.keys() | OF_NO_EFFECT.get(name, set())
    known |= {each for key, derived in LISTS.items() if config.get(key) is not None for each in derived}
    silent: dict[str, list[bool]] = {}
    for key, value, changed in changes(config):
        try:
            same = spec_from_config(changed) == spec
        except HeadraceError:
            same = False
        silent.setdefault(key, []).append(same)
        assert value is not None or not same or key in known, f"{key} is null, and {changed.get(key)} changes nothing"
    ignored = {key for key, same in silent.items() if all(same)} - known
    assert not ignored


def test_every_reason_says_why_a_key_does_not_matter() -> None:
    assert all(IGNORED.values())
    assert all(reason for family in families().values() for reason in family.ignored.values())
    assert not IGNORED.keys() & ASSUMED.keys()


class _Asked(Config):
    """Notes the keys that it is asked for, also those that it lacks."""

    asked: ClassVar[set[str]] = set()

    def __getitem__(self, key: str) -> Any:
        _Asked.asked.add(key)
        return super().__getitem__(key)


def test_what_one_family_reads_is_refused_where_another_does_not() -> None:
    for config in configs().values():
        families()[config["architectures"][0]].build(_Asked(config))
    common = {name for names in ALIASES for name in names}
    assert _Asked.asked - COMPUTED - IGNORED.keys() - ASSUMED.keys() - common <= {"max_window_layers"}


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_qkv": 8.0}, "does not compute with: clip_qkv is 8.0"),
        (
            {"attn_logit_softcapping": 50.0, "sliding_window": 128},
            "attn_logit_softcapping is 50.0; sliding_window is 128",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 16}}, "rope_scaling.beta_fast is 16"),
        ({"causal": False}, "causal is False where True is computed"),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 500000.0, and 10000.0"),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
            "rope_type is 'linear' and its type",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor must be a number, got nothing"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 0},
            "sliding_window_pattern must be at least 1, got 0",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e300}}, "factor is 1e\\+300; at most"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e30}}, "rope factor is 1e\\+30; at most"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e8}}, "rope factor 1e\\+08 makes a context of 5.12e\\+10"),
    ],
)
def test_what_a_family_does_not_compute_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config(LLAMA | changes)


DECI: dict[str, dict[str, Any]] = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}
NONSENSE: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": ""}, "hidden_act is ''; supported are silu"),
    ("llama", {"rope_parameters": {"rope_theta": 1e300}}, r"rope_theta is 1e\+300; at most 3\.403e\+38"),
    (
        "llama_yarn",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": -1}},
        "beta_fast must be positive",
    ),
    ("qwen2", {"num_hidden_layers": -1}, "num_hidden_layers must not be negative, got -1"),
    ("qwen2_moe", {"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size must not be negative"),
    ("qwen2_moe", {"mlp_only_layers": [None]}, r"mlp_only_layers must be a list of layers, got \[None\]"),
    ("deepseek_v3_moe", {"n_shared_experts": -1}, "n_shared_experts must not be negative"),
    ("deepseek_v2_moe", {"scoring_func": "tanh"}, "scoring_func is 'tanh'; supported are softmax and sigmoid"),
    ("deepseek_v2_moe", {"topk_method": ""}, "topk_method is ''; supported are greedy and group_limited_greedy"),
    ("ernie4_5_moe", {"moe_layer_end_index": -2}, "moe_layer_end_index must not be negative, got -2"),
    ("dbrx", {"rope_parameters": {"rope_theta": 500.0}}, "rope_theta is 500.0, and 300.0 in its attn_config"),
    ("dbrx", {"rope_parameters": None, "rope_theta": 1e4}, "rope_theta is 10000.0, and 300.0 in its attn_config"),
    ("laguna", {"gating": False}, "gating is False; supported are true, per-head and per-element"),
    ("laguna", {"gating": "per-layer"}, "gating is 'per-layer'; supported are true, per-head and per-element"),
    (
        "laguna",
        {"num_attention_heads_per_layer": [4, 8]},
        r"num_attention_heads_per_layer must have a whole number for each of 4 layers, got \[4, 8\]",
    ),
    (
        "laguna",
        {"num_attention_heads_per_layer": [4, 8, 5, 8]},
        "5 attention heads cannot share 2 key/value heads evenly",
    ),
    ("laguna", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "must have a section sliding_attention"),
    ("laguna", {"rope_parameters": {"rope_theta": 1e4}}, "must have a section full_attention with rope_theta"),
    ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input is True where False"),
    ("laguna", {"swa_attention_sink_enabled": True}, "swa_attention_sink_enabled is True where False"),
    ("laguna", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types must list dense or sparse for each layer"),
    *(
        ("bamba", {"time_step_limit": given}, r"time_step_limit must be two numbers, the lower one first, got")
        for given in (0.5, [0.1], "0, 1", [True, 2.0], [0.5, 0.1], [0.0, {"__float__": "many"}], [0.0, None])
    ),
    ("gemma3", {"layer_types": 4}, "layer_types must be a list of types of layers, got 4"),
    (
        "gemma3",
        {"layer_types": "full_attention"},
        "layer_types must be a list of types of layers, got 'full_at",
    ),
    ("mimo_v2", {"sliding_window": 21}, "sliding_window is 21 and its sliding_window_size 19"),
    ("mimo_v2_5", {"hybrid_layer_pattern": None}, "has no hybrid_layer_pattern, which has 0 or 1 for each layer"),
    ("mimo_v2_5", {"moe_layer_freq": 1}, "moe_layer_freq must have 0 or 1 for each layer, got 1"),
    (
        "mimo_v2_5",
        {"swa_num_key_value_heads": 1, "quantization_config": {"quant_method": "fp8"}},
        "num_key_value_heads is 2, and does not divide 4 heads of queries and 1 of keys",
    ),
    (
        "mimo_v2_5",
        {"quantization_config": {"quant_method": "fp8", "ignored_layers": ["model.layers.0.self_attn.qkv_proj"]}},
        "ignored_layers names qkv_proj; its rows are known in fp8, or with no matrix in fp8",
    ),
    ("nemotron_h_puzzle", {"block_configs": None}, "block_configs must be a list of blocks, got None"),
    ("nemotron_h_puzzle", {"block_configs": [{"block_type": "ffn"}]}, "has block_type 'ffn'; known: mamba, attention"),
    (
        "nemotron_h_puzzle",
        {"block_configs": [{"block_type": "mlp", "mlp_bias": True}]},
        r"block_configs\[0\], of block_type mlp, has mlp_bias; known: intermediate_size",
    ),
    ("nemotron_h_puzzle", {"hybrid_override_pattern": "ME*-EM"}, "hybrid_override_pattern .*contradict each other"),
    ("iquest_loopcoder", {"loop_num": 0}, "loop_num is 0; it must be from 1 to 64"),
    ("iquest_loopcoder", {"head_dim": 8}, "head_dim is 8, and 4 heads of 64 have 16"),
    ("step3", {"moe_layers_enum": "1,x"}, "moe_layers_enum must be a list of layers, got '1,x'"),
    (
        "longcat_flash_ngram",
        {"emb_neighbor_num": 1000},
        "emb_neighbor_num and emb_split_num make 1998 tables; at most 1024",
    ),
    ("longcat_flash_ngram", {"emb_split_num": 0}, "n-grams of up to 4 tokens in 0 tables; at least 2 and 1 are needed"),
    ("longcat_flash_ngram", {"eos_token_id": [2, 3]}, r"eos_token_id must be a whole number, got \[2, 3\]"),
    ("plamo2", {"mamba_step": 1}, "mamba_step is 1; it must be at least 2"),
    ("inkling", {"layer_types": ["conv"] * 4}, r"layer_types must be hybrid or hybrid_sliding for each of 4 layers"),
    ("inkling", {"n_shared_experts": 0}, "0 of 3 experts of a token are those of every token"),
    ("inkling", {"d_rel": 0}, "relative attention's num_profiles must be at least 1, got 0"),
    ("inkling", {"log_scaling_n_floor": 0}, "scores that grow beyond 0 tokens; it must be at least 1"),
    ("inkling", {"conv_kernel_size": 1}, "a convolution's width must be at least 2, got 1"),
    ("inkling", {"swa_v_head_dim": 4}, "values of 4 dimensions beside keys of 8 are not supported"),
    ("inkling", {"q_bias": True}, "q_bias is True where False is computed"),
    ("qwen4_exp", {"ple_layer_ids": [2]}, "ple_layer_ids has 2, a layer of attention"),
    ("qwen4_exp", {"ple_layer_ids": [5]}, r"ple_layer_ids must be from 1 to 4, got \[5\]"),
    ("qwen4_exp", {"ple_embed_dim": 26}, "ple_embed_dim is 26; a multiple of its 4 hashes is needed"),
    ("qwen4_exp", {"heads_per_ngram": 2000}, "make 4000 hashes in each of 2 layers; at least 1 and at most 4096"),
    ("qwen4_exp", {"make_ngram_vocab_size_divisible_by": 0}, "make_ngram_vocab_size_divisible_by must be at least 1"),
    ("qwen4_exp", {"eos_token_id": []}, r"eos_token_id must be a token, at which n-grams end, got \[\]"),
    ("qwen4_exp", {"ple_conv_kernel_size": 1}, "a convolution of 1 taps; it must have at least 2"),
    ("qwen4_exp", {"indexer_budget": 18}, "indexer_budget is 18, which pools of 4 tokens do not fill evenly"),
    ("qwen4_exp", {"indexer_kv_heads": 2}, "indexer_kv_heads is 2; it must be 1"),
    ("qwen4_exp", {"indexer_budget": None}, "has indexer_n_heads and no indexer_budget, which an index needs"),
    (
        "qwen4_exp",
        {"indexer_head_dim": 6},
        "index heads of 6 dimensions; from 8, which are rotated, to 16 are possible",
    ),
    ("qwen4_exp", {"hc_lowrank": 0}, "the stream's rank must be at least 1, got 0"),
    ("codegen", {"n_head": 2}, "n_head is 2; a multiple of 4 can be read"),
    ("solar", {"bskcn_2": [True]}, r"bskcn_2 must be a list of layers, counted from 0, got \[True\]"),
    ("solar", {"bskcn_1": [5]}, "bskcn_3 has layer 4, which needs an equal or smaller one in its bskcn_1"),
    ("arctic", {"moe_layer_frequency": 0}, "moe_layer_frequency must be at least 1, got 0"),
    ("arctic", {"use_residual": False}, "use_residual is False and its parallel_attn_mlp_res True; it is one field"),
    ("grok_2", {"rope_type": "yarn_log"}, "rope_type is 'yarn_log' where 'original' or 'default' is computed"),
    (
        "k2_horizon",
        {"attention_gate_func": "tanh"},
        "attention_gate_func is 'tanh'; supported are silu, softplus and null",
    ),
    ("k2_horizon", {"layernorm_num_groups": 5}, "5 groups of a norm must divide a hidden_size of 32"),
    ("k2_horizon", {"rope_head_dim": 18}, "rope_head_dim must be even, from 2 to head_dim 16, got 18"),
    ("k2_horizon", {"router_score_func": "relu"}, "router_score_func is 'relu'; it is softmax or sigmoid"),
    ("k2_horizon_mova", {"mova_num_experts_per_tok": 7}, "7 of 6 experts of values cannot be chosen for a token"),
    ("pangu_pro", {"v_channels": 25}, "v_channels must be from 1 to 24, the dimensions of keys, got 25"),
    ("pangu_pro", {"param_sink_number": 0}, "param_sink_number must be at least 1, got 0"),
    ("rnj1", {"layer_types": ["sliding_attention"] * 3}, "layer_types must list full_attention or chunked_attention"),
    ("rnj1", {"sliding_window": 1}, "sliding_window must be at least 2, two chunks of a token, got 1"),
    ("solar", {"bskcn_tv": [0.9]}, r"bskcn_tv must be two numbers from 0 to 1, .* got \[0.9\]"),
    ("gpt_neo", {"attention_types": [["global", 3]]}, r"attention_types must be a list of \[kinds, number\]"),
    ("gpt_neo", {"attention_types": [[["global"], 2]]}, "global or local for each of 3 layers"),
    ("gpt_neo", {"attention_types": [[["global"], 3]]}, "attention_types say otherwise"),
    ("deci", {"block_configs": [DECI]}, "block_configs must be a list of 5 layers"),
    ("deci_heads", {"num_key_value_heads_per_layer": [2]}, "neither block_configs nor 2 num_key_value_heads_per_layer"),
    ("exaone4", {"sliding_window_pattern": "LLx"}, "sliding_window_pattern must be a number, or L and G"),
    ("granite", {"embedding_multiplier": 1e300}, r"embedding_multiplier is 1e\+300"),
    ("llama4", {"moe_layers": [7]}, r"moe_layers must be a list of layers from 0 to 3, got \[7\]"),
    ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim must be at least 1"),
    ("smollm3", {"no_rope_layers": [1, 0, 5, 1]}, "no_rope_layers must have 0 or 1 for each layer"),
]


@pytest.mark.parametrize(
    ("attention", "ffn", "message"),
    [
        ({"replace_with_linear": True}, {}, r"block_configs\[1\].attention.replace_with_linear is True; not supported"),
        ({"window_length": 64}, {}, r"attention.window_length is 64"),
        ({"of_mine": 1}, {}, r"attention.of_mine is 1"),
        ({"n_heads_in_group": 3}, {}, r"block_configs\[1\] has groups of 3 of 4 attention heads"),
        ({"n_heads_in_group": None}, {}, r"n_heads_in_group must be a whole number, got nothing"),
        ({}, {"sparsify": [1]}, r"ffn.sparsify is \[1\]"),
        ({}, {"gated": False}, r"ffn.gated is False"),
        ({}, {"moe": {}}, r"ffn.moe is \{\}"),
        ({}, {"hidden_act": "gelu"}, r"ffn.hidden_act is 'gelu'"),
        ({}, {"ffn_mult": None}, r"ffn_mult must be a number, got nothing"),
    ],
)
def test_a_block_of_a_layer_that_is_not_computed_is_refused(
    attention: dict[str, Any], ffn: dict[str, Any], message: str
) -> None:
    config = {key: value for key, value in configs()["deci"].items() if key != "num_hidden_layers"}
    blocks = [DECI, {"attention": DECI["attention"] | attention, "ffn": DECI["ffn"] | ffn}]
    with pytest.raises(ModelError, match=message):
        spec_from_config(config | {"block_configs": blocks, "num_hidden_layers": 2})


@pytest.mark.parametrize(("name", "changes", "message"), NONSENSE)
def test_nonsense_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config(configs()[name] | changes)


def test_mimo_v2_5_has_the_defaults_of_its_own_code() -> None:
    """Unlike MiMo-V2-Flash, whose class in transformers has others."""
    said = {"attention_value_scale": None, "add_swa_attention_sink_bias": False, "partial_rotary_factor": 1.0}
    said |= {"rope_theta": 1e6, "swa_rope_theta": 1e6}
    config = configs()["mimo_v2_5"]
    plain = {key: value for key, value in config.items() if key not in said}
    assert spec_from_config(plain) == spec_from_config(config | said) != spec_from_config(config)
    assert spec_from_config(plain | {"rope_theta": 3e5}) == spec_from_config(
        plain | {"rope_theta": 3e5, "swa_rope_theta": 3e5}
    )


@pytest.mark.parametrize("name", ["minimax_m2", "minimax_m3", "minimax", "bailing_moe_v2", "bailing_moe_v2_5"])
@pytest.mark.parametrize(("share", "fits"), [(0.5, True), (0.52, True), (0.48, True), (0.75, False), (0.25, False)])
@pytest.mark.parametrize("is_outside", [True, False])
def test_a_rotary_dim_and_the_share_of_a_head_say_the_same(
    name: str, share: float, fits: bool, is_outside: bool
) -> None:
    others = {"partial_rotary_factor", "rope_theta"}
    config = {key: value for key, value in configs()[name].items() if key not in others}
    half = config["head_dim"] // 2
    said = {"partial_rotary_factor": share}
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    config |= {"rotary_dim": half, "rope_parameters": rope | ({} if is_outside else said)}
    config |= said if is_outside else {}
    if not fits or (share < 0.5 and not is_outside):  # what is said of a rotation is computed with, and rounded down
        with pytest.raises(ModelError, match=f"rotary_dim is {half} of a head's {2 * half}, and its partial_rotary"):
            spec_from_config(config)
        return
    exact = {key: value for key, value in config.items() if key != "partial_rotary_factor"}
    assert spec_from_config(config) == spec_from_config(exact | {"rope_parameters": rope})


def test_two_names_of_one_field_must_agree() -> None:
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 320}
    assert spec_from_config(gpt2 | {"hidden_size": 64}) == spec_from_config(gpt2)
    with pytest.raises(ModelError, match="n_embd is 64 and its hidden_size 32"):
        spec_from_config(gpt2 | {"hidden_size": 32})
    assert spec_from_config(LLAMA | {"n_layers": 2}) == spec_from_config(LLAMA)


def test_a_key_that_nobody_knows_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    spec_from_config(LLAMA | {"my_note": "x", "rope_scaling": {"rope_type": "default", "of_mine": 3}}, warns=True)
    assert "keys my_note, rope_scaling.of_mine are not known" in caplog.text


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {"position_embedding_type": "rope", "ffn_dim": 96, "use_rms_norm": False}),
        (
            "llama_yarn",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 1.0, "finetuned": True}},
        ),
        ("qwen2", {"attention_bias": True}),
        ("stablelm", {"partial_rotary_factor": 0.25, "rope_pct": 0.25}),
    ],
)
def test_keys_that_say_what_is_computed_anyway_are_taken(
    name: str, more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    spec_from_config(configs()[name] | more, warns=True)
    assert "nothing reads them" not in caplog.text


BLAMED: list[tuple[str, dict[str, Any], str]] = [
    ("laguna", {"head_dim": 0}, r"; the config's head_dim is 0$"),
    ("llama", {"num_hidden_layers": 0}, r"; the config's num_hidden_layers is 0$"),
    ("llama", {"num_key_value_heads": 0}, r"got 0; the config's num_key_value_heads is 0$"),
    ("llama", {"max_position_embeddings": 0}, r"got 0; the config's max_position_embeddings is 0$"),
    ("opt", {"hidden_size": 0}, r"; the config's hidden_size is 0$"),
    ("opt", {"ffn_dim": 0}, r"intermediate_size must be at least 1, got 0; the config's ffn_dim is 0$"),
    ("mistral_window", {"sliding_window": 0}, r"a sliding window of 0; .*; the config's sliding_window is 0$"),
    ("mamba2", {"n_groups": 0}, r"groups must be at least 1, got 0; the config's n_groups is 0$"),
    ("mamba2", {"conv_kernel": 0}, r"; the config's conv_kernel is 0$"),
    ("nemotron_h", {"ssm_state_size": 0}, r"; the config's ssm_state_size is 0$"),
    ("deepseek_v3_moe", {"kv_lora_rank": 0}, r"; the config's kv_lora_rank is 0$"),
    ("qwen3_moe", {"num_experts_per_tok": 0}, r"0 of 5 experts .*; the config's .*num_experts_per_tok is 0"),
    (
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 9},
        r"9 of 4 experts .*; the config's num_experts_per_tok is 9 and num_experts is 4$",
    ),
    (
        "deepseek_v3_moe",
        {"n_group": 3},
        r"8 experts cannot stand in 3 groups; the config's n_routed_experts is 8 and n_group is 3$",
    ),
    (
        "gemma3",
        {"rope_parameters": {"sliding_attention": {"rope_theta": 0}, "full_attention": {"rope_theta": 1e4}}},
        r"rope theta must be above 1, got 0.0; the config's rope_parameters.sliding_attention.rope_theta is 0$",
    ),
]


@pytest.mark.parametrize(("name", "changes", "message"), BLAMED)
def test_fields_that_a_check_of_sizes_is_about_are_named_with_their_values(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config(configs()[name] | changes)


def test_fields_that_are_not_to_blame_are_not_named() -> None:
    with pytest.raises(ModelError) as refusal:
        spec_from_config(configs()["llama"] | {"num_hidden_layers": 0, "bos_token_id": 0, "attention_dropout": 0.0})
    assert str(refusal.value).endswith("there must be at least one layer; the config's num_hidden_layers is 0")
    with pytest.raises(ModelError) as named:
        spec_from_config(configs()["llama"] | {"hidden_act": "cubic", "bos_token_id": 0})
    assert "the config's hidden_act is 'cubic'; supported are" in str(named.value)
    assert "is 0" not in str(named.value)
