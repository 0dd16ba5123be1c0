"""What becomes of a config's keys that a family does not read: they are known not to matter, or refused by name.

read by the family ------------------------------------------------> it computes with them
null, or in Family.ignored or IGNORED -----------------------------> they change nothing, for the reason given there
equal to a key read under another name (ALIASES) ------------------> they say what is known
in Family.assumes or ASSUMED, with one of the values there --------> the family computes so anyway
in those with another value, or in COMPUTED and not off -----------> refused
none of these: a name that no family knows ------------------------> a warning names them
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from headrace.ipc.failure import ModelError
from headrace.ipc.process.log import printable

if TYPE_CHECKING:
    from headrace.executor.models.config import Config
    from headrace.executor.models.families import Family

logger = logging.getLogger(__name__)

_REASONS: Mapping[str, str] = {
    "training alone": """
        activation_dropout altup_coef_clip attention_dropout attention_probs_dropout_prob attn_dropout_prob
        attn_pdrop aux_loss_alpha classifier_dropout dropout emb_dropout_prob emb_pdrop embd_pdrop embed_dropout
        embedding_dropout embedding_fraction gradient_checkpointing hidden_dropout hidden_dropout_prob init_config
        init_device init_method init_std initializer_factor initializer_range input_jitter_noise layerdrop moe_capacity
        moe_dropout_prob moe_use_aux_free output_router_logits resid_dropout resid_pdrop residual_dropout
        router_aux_loss_coef router_jitter_noise router_z_loss_coef seq_aux summary_activation summary_first_dropout
        summary_hidden_size summary_last_dropout summary_proj_to_labels summary_type summary_use_proj use_cache
        z_loss_weight""",
    "of heads of pre-training": """
        directionality emb_size pool_act pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
        pooler_size_per_head pooler_type task_id""",
    "layout of training over devices": "ep_size model_parallel pretraining_tp tensor_parallel",
    "what the file is, and which program wrote it": """
        _commit_hash _diffusers_version _model_name_or_path _name_or_path architectures auto_map custom_pipelines dtype
        finetuning_task
        id2label is_llama_config label2id model_type name_or_path num_labels problem_type quantization_config_source
        task task_specific_params tokenizer_class tokenizer_name torch_dtype transformers_version transformers.js_config
        unsloth_fixed unsloth_version""",
    "tokens: read with the tokenizer and where generation ends": """
        begin_suppress_tokens bos_token_id bos_token decoder_start_token_id eos_token eos_token_id end_token_id
        n_special _pad_token_id forced_bos_token_id forced_eos_token_id mask_token_id max_tokenizer_truncation
        pad_token pad_token_id predict_special_tokens prefix sep_token_id suppress_tokens unk_token_id bad_words_ids""",
    "defaults of generation, which generation_config.json gives": """
        diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
        length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams
        num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate
        temperature top_k top_p typical_p""",
    "how transformers' code runs and what it returns": """
        _attn_implementation _attn_implementation_autoset _experts_implementation _flash_attn_2_enabled
        _from_model_config attn_implementation cache_implementation chunk_size_feed_forward
        cross_attention_hidden_size for_llm_compressor inference_runner is_decoder max_batch_size onnx_safe
        output_attentions output_hidden_states pad_key_length pre_allocate_kv_cache return_dict output_past
        runner_max_sequence_length tf_legacy_loss tie_encoder_decoder tie_weights_ torchscript use_bfloat16
        use_cache_kernel use_cache_quantization use_flash_attn use_return_dict validate_runner_input verbose""",
    "precision and kernels of the original code": """
        attention_softmax_in_fp32 attn_impl bf16 bias_dropout_fusion fp16 fp32 masked_softmax_fusion moe_router_dtype
        reorder_and_upcast_attn scale_attention_softmax_in_fp32 slow_but_exact softmax_in_fp32""",
    "read by executor/checkpoints/formats": "compression_config quantization_config",
    "read by executor/pooling/description.py": """
        is_matryoshka matryoshka_dimensions sbert_ce_default_activation_function sentence_transformers
        classifier_from_token is_original_qwen3_reranker""",
    "further layers, for multi-token prediction, which are not run": """
        index_share_for_mtp_iteration mtp_num_hidden_layers mtp_transformer_layers num_mtp_modules
        num_nextn_predict_layers use_mtp""",
    "other media than text, which are not served": """
        audio_config audio_token_id audio_token_index boa_token_id boi_token_id boi_token_index eoa_token_id
        eoa_token_index eoi_token_id eoi_token_index image_grid_pinpoints image_seq_length image_seq_len
        image_break_token_id image_end_token_id image_token_id image_token_index multimodal_projector_bias
        mm_tokens_per_image projector_hidden_act projector_patch_to_query_dict spatial_merge_size
        use_image_newline_parameter vision_encoder audio_encoder video_token_id video_token_index vision_config
        vision_end_token_id vision_feature_layer vision_feature_select_strategy vision_soft_tokens_per_image
        audio_soft_tokens_per_image vision_aspect_ratio vision_start_token_id vision_token_id visual
        downsample_factor downsample_ratio merged_hidden_size process_image_mode projector_layernorm_eps
        spatial_pool_mode spatial_pool_stride video_seq_length adapter_layer_norm_eps
        alignment_intermediate_size use_image_token""",
    "sizes: the shapes of weights are checked": """
        d_ff ff_factor ffn_dim ffn_hidden_size head_dim initial_context_length intermediate_size
        intermediate_size_mlp mlp_intermediate_size moe_intermediate_size n_ctx n_head_kv num_key_value_heads
        num_kv_heads qk_head_dim shared_intermediate_size""",
    "the trained context before scaling, which the scaled rotations alone need": """
        original_max_position_embeddings""",
    "how a rotary scaling came about": "finetuned",
    "other names of the context's length": """
        max_seq_len max_seq_length max_sequence_length model_max_length n_positions seq_len seq_length""",
    "layers with windows, which are computed where the family has windows": "max_window_layers",
}
IGNORED: Mapping[str, str] = MappingProxyType(
    {name: reason for reason, names in _REASONS.items() for name in names.split()}
)
"""Keys that change no result, with the reason."""
ASSUMED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "add_cross_attention": (False,),
        "apply_yarn_scaling": (True,),
        "attention_factor": (1.0,),
        "attn_factor": (1.0,),
        "causal": (True,),
        "is_causal": (True,),
        "is_encoder_decoder": (False,),
        "embedding_multiplier": (1.0,),
        "extrapolation_factor": (1.0,),
        "factor": (1.0,),
        "logit_scale": (1.0,),
        "logits_scaling": (1.0,),
        "n_group": (1,),
        "partial_rotary_factor": (1.0,),
        "position_embedding_type": ("rope", "rotary"),
        "residual_multiplier": (1.0,),
        "routed_scaling_factor": (1.0,),
        "topk_group": (1,),
        "use_mrope": (False,),
        "rope_interleaved": (False,),
        "rotary_pct": (1.0,),
        "scale_attn_weights": (True,),
    }
)
"""Keys with the values that all families compute with if they do not read them."""
_COMPUTED = """
    H_cycles L_cycles _remove_final_layer_norm a_low_rank_dim activation activation_function activation_sparsity_pattern
    ada_rms_norm_t_cond adapter_rank add_bias_linear add_full_attention_sink_bias add_qkv_bias
    add_swa_attention_sink_bias alibi altup_active_idx altup_correct_scale altup_num_inputs
    apply_residual_connection_post_layernorm attention_bias attention_chunk_size attention_factor attention_gate_func
    attention_head_dim attention_in_multiplier attention_k_eq_v attention_layers attention_multiplier
    attention_other_setting attention_out_bias attention_out_multiplier attention_types attention_value_scale
    attention_window_size attn_config attn_factor attn_layer_indices attn_layer_offset attn_layer_period
    attn_logit_softcapping attn_output_multiplier attn_rotary_emb attn_scale attn_temperature_len
    attn_temperature_tuning attn_type_list beta_fast beta_slow bias block_auto_adjust_ff_dim block_configs block_ff_dim
    block_ffn_dim_multiplier block_multiple_of block_types bskcn_1 bskcn_2 bskcn_3 bskcn_4 bskcn_tv chunk_size clip_qkv
    compress_rate_csa compress_rate_hca compress_rates compress_ratios compress_rope_theta conv1d_width conv_L_cache
    conv_bias conv_kernel decay_low_rank_dim decoder_sparse_step dense_intermediate_size dim_model_base
    do_layer_norm_before emb_neighbor_num emb_split_num embedding_multiplier embedding_multiplier_scale embedding_scale
    enable_bias enable_moe_block expand expansion_ratio expert_ffn_hidden_size expert_layer_offset expert_layer_period
    expert_selection_fn extrapolation_factor ffn_act_fn ffn_config ffn_dim ffn_hidden_size final_logit_softcapping
    first_k_dense_replace floor_scale full_attention_interval full_attn_alpha_factor full_attn_beta_factor
    full_attn_idxs gate_low_rank_dim gating global_attn_every_n_layers group_norm_size hc_eps hc_magnitude hc_mult
    hc_sinkhorn_iters hidden_act hidden_activation hidden_ratio hidden_size_per_head hidden_size_per_layer_input
    high_freq_factor hybrid_layer_pattern hybrid_override_pattern index_block_size index_head_dim index_kpool
    index_local_blocks index_n_heads index_skip_topk_offset index_topk index_topk_blocks index_topk_freq
    index_topk_pattern indexer_types input_mult interleave_moe_layer_step interleaved_sliding_window key_multiplier
    kv_channels kv_lora_rank kv_n_heads laurel_rank layer_group_size layer_norm_elementwise_affine layer_norm_eps
    layer_norm_epsilon layer_rope_theta layer_types layernorm_epsilon layernorm_num_groups layers_block_type
    linear_allow_neg_eigval linear_attn_alpha_factor linear_attn_beta_factor linear_attn_config linear_conv_kernel_dim
    linear_head_dim linear_key_head_dim linear_lower_bound linear_num_heads linear_num_key_heads linear_num_value_heads
    linear_rope linear_silu linear_value_head_dim llama_4_scaling llama_4_scaling_beta llm_config lm_head_bias
    lm_head_multiplier local_size logit_scale logits_scaling logits_soft_cap long_factor long_mscale loop_num
    loop_window_size low_freq_factor lru_width mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_ssm mamba_d_state
    mamba_dt_rank mamba_expand mamba_head_dim mamba_hidden_act mamba_n_groups mamba_n_heads mamba_ngroups
    mamba_norm_before_gate mamba_num_heads mamba_proj_bias mamba_rms_norm mamba_step max_attn_value
    max_position_embeddings mixer_rms_eps mla_scale_kv_lora mla_scale_q_lora mlp_alpha_factor mlp_beta_factor mlp_bias
    mlp_hidden_act mlp_layer_types mlp_multipliers mlp_only_layers moe moe_gate_bias moe_k moe_latent_size
    moe_layer_end_index moe_layer_freq moe_layer_frequency moe_layer_interval moe_layer_start_index moe_layers
    moe_layers_enum moe_normalize_expert_weights moe_num_experts moe_num_shared_experts moe_renormalize
    moe_routed_scaling_factor moe_router_logit_softcapping moe_router_renormalize moe_router_scaling_factor
    moe_shared_expert_intermediate_size moe_top_k mova_num_experts mova_num_experts_per_tok mscale mscale_all_dim
    multi_query multi_query_attention multi_query_group_num multipliers_in_weights mup_enabled mup_scale_factor n_embd
    n_embed n_group n_groups n_head n_inner n_layer n_mamba_heads n_positions n_routed_experts n_shared_experts name
    new_decoder_architecture
    ngram_vocab_size_ratio no_bias no_rope_layer_interval no_rope_layers norm_bias norm_eps norm_epsilon
    norm_expert_weight norm_first norm_topk_prob num_attention_groups num_attention_heads_per_layer num_dense_layers
    num_experts num_experts_per_tok num_hash_layers num_key_value_heads_per_layer num_kv_shared_layers
    num_layers_per_stack num_ln_in_parallel_attn num_local_experts num_mem_blocks num_mtp_layers num_shared_experts
    num_sliding_attention_heads o_groups o_lora_rank original_max_position_embeddings original_rope output_mult
    output_multiplier output_multiplier_scale padded_vocab_size parallel_attn parallel_attn_mlp_res param_sink_number
    param_sink_with_value partial_rotary_factor partial_rotary_factors per_layer_config position_embedding_type
    post_norm_eps prefix_dense_intermediate_size prefix_dense_sliding_window_pattern prefix_lm projectors_bias
    q_lora_rank qk_layernorm qk_ln qk_nope_dim qk_nope_head_dim qk_norm qk_rope_dim qk_rope_head_dim qk_scale_factor
    qkv_bias quantization query_key_norm query_pre_attn_scalar residual_moe residual_multiplier rms_norm_eps
    rope_head_dim rope_interleave rope_local_base_freq rope_local_theta rope_parameters rope_ratio rope_scaling
    rope_theta rotary rotary_dim rotary_emb_base routed_scaling_factor router_bias router_enable_expert_bias
    router_logit_softcapping router_scaling_factor router_score_func sandwich_norm scale_attn_by_inverse_layer_idx
    scale_depth scale_emb scale_embedding scoring_func seq_length share_expert_dim share_expert_dims share_q_dim
    shared_expert_combination_strategy shared_expert_intermediate_size shared_experts_intermediate_size
    shared_intermediate_size short_factor short_mscale sliding_window sliding_window_pattern sliding_window_size
    softmax_scale sparse_attention_freq sparse_block_size sparse_config sparse_index_dim sparse_local_block
    sparse_num_index_heads sparse_topk_blocks ssm_in_multiplier ssm_multipliers ssm_out_multiplier ssm_state_size
    state_size swa_head_dim swa_kv_lora_rank swa_num_attention_heads swa_num_key_value_heads swa_q_lora_rank
    swa_qk_nope_head_dim swa_qk_rope_head_dim swa_rope_theta swa_v_head_dim swiglu_alpha swiglu_limit swiglu_limits
    swiglu_limits_shared text_config tie_embedding tie_word_embeddings tied_embeddings time_step_limit time_step_min
    time_step_rank top_k_experts topk_group topk_method true_head_dim truncate type use_alibi use_attention_gate
    use_bias use_biases use_bidirectional_attention use_conv_bias use_double_wide_mlp use_dsa use_expert_bias
    use_head_wise_attn_gate use_linear_silu use_mem_rope use_mup use_parallel_residual use_post_norm use_qk_norm
    use_qkv_bias use_residual use_sandwich_norm use_shared_attention_adapter use_sliding_window v_channels v_head_dim
    v_low_rank_dim value_dim value_heads_in_turn vocab_size vocab_size_per_layer_input window_size word_embed_proj_dim
    yarn yarn_only_types zero_expert_num
"""
COMPUTED = frozenset(_COMPUTED.split())
"""Keys with which some family computes: where another does not read one, its value must be none of effect."""
ALIASES: tuple[tuple[str, ...], ...] = (
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "moe_k", "experts_per_token", "moe_topk", "num_experts_per_token"),
    ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"),
    ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "rms_norm_eps", "block_norm_eps"),
    ("hidden_size", "n_embd", "n_embed", "d_model", "dim", "block_dim", "conv_dim", "conv_dim_out"),
    ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("hidden_act", "hidden_activation", "activation_function", "activation"),
    ("first_k_dense_replace", "moe_layer_start_index"),
    ("partial_rotary_factor", "rotary_pct", "rope_pct", "rope_percent"),
    ("sliding_window", "sliding_window_size"),
    ("mamba_d_state", "ssm_state_size", "state_size"),
)
"""Names of one field."""


def check_unread(config: Config, family: Family, refuses: bool) -> None:
    """Call when the family has read the config. Raises ModelError, naming the keys, if this says something that the
    family does not compute; warns instead if not `refuses`, of another package's family that reads what it likes, and
    of keys that nobody knows, if the config warns at all."""
    refused, unknown = [], []
    for path, name, value in config.unread():
        if value is None or name in family.ignored or name in IGNORED or _has_been_read(config, path, name, value):
            continue
        known = family.assumes.get(name, ASSUMED.get(name))
        if known is not None:
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in known):
                refused.append(f"{path} is {value!r:.80} where {' or '.join(map(repr, known))} is computed")
        elif name not in COMPUTED and not any(name in names for names in ALIASES):
            unknown += [path] if value is not False else []
        elif value is not False and value != 0 and value not in ([], {}, ""):
            refused.append(f"{path} is {value!r:.80}")
    if refused and not refuses and config.warns:
        logger.warning("nothing reads these keys of the config: %s", printable("; ".join(refused)))
    elif refused and refuses:
        raise ModelError(
            f"the config has keys that this {config['architectures'][0]} does not compute with: "
            + printable("; ".join(refused)),
            hint='a key that does not matter can be set to null: hf_overrides={"KEY": null}',
        )
    if unknown and config.warns:
        logger.warning("the config's keys %s are not known, and nothing reads them", printable(", ".join(unknown)))


def _has_been_read(config: Config, path: str, name: str, value: Any) -> bool:
    """Whether a field of the same section has been read that has this value under another name."""
    return any(value == each for names in ALIASES if name in names for each in _values(config, path, names))


def _values(config: Config, path: str, names: tuple[str, ...]) -> Iterator[Any]:
    section = config.section_at(path.split(".")[:-1])
    return (section.stored(each) for each in names if section.has_read(each))
