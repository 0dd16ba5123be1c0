"""From a checkpoint's config to an ArchSpec: published configs, old and new field names, and wrong ones."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from thinned import every
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.executor.models.arch import RopeSpec, TokenCache
from headrace.executor.models.families import causal_architecture, families, own_family, spec_from_config
from headrace.executor.models.families._lacking import LACKING
from headrace.executor.models.rotary import inverse_frequencies
from headrace.ipc.failure import ModelError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


FALCON = {
    "hidden_size": 64, "vocab_size": 320, "alibi": False, "bias": False, "layer_norm_epsilon": 1e-5,
    "num_attention_heads": 4, "num_hidden_layers": 2,
}  # fmt: skip
REFINED_WEB = {
    name: value for name, value in FALCON.items() if name not in ("num_attention_heads", "num_hidden_layers")
} | {"n_head": 4, "n_layer": 2}
DEFAULTS_OF_STABLELM = LLAMA | {"layer_norm_eps": 1e-5, "use_qkv_bias": True, "rms_norm_eps": None}


@pytest.mark.parametrize(
    ("name", "old", "today"),
    [
        ("RWForCausalLM", REFINED_WEB | {"multi_query": True}, FALCON | {"multi_query": True}),
        (
            "RWForCausalLM",
            REFINED_WEB | {"n_head_kv": 2},
            FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
        ),
        (
            "StableLMEpochForCausalLM",
            {key: value for key, value in DEFAULTS_OF_STABLELM.items() if key != "layer_norm_eps"}
            | {"norm_eps": 1e-6, "rope_pct": 0.5},
            DEFAULTS_OF_STABLELM | {"layer_norm_eps": 1e-6, "partial_rotary_factor": 0.5},
        ),
    ],
)
def test_an_older_config_is_the_model_of_its_later_name(name: str, old: dict[str, Any], today: dict[str, Any]) -> None:
    later = {"RWForCausalLM": "FalconForCausalLM", "StableLMEpochForCausalLM": "StableLmForCausalLM"}[name]
    expected = spec_from_config(today | {"architectures": [later]})
    assert spec_from_config(old | {"architectures": [name]}) == replace(expected, architecture=name)


def test_every_family_of_the_design_is_known() -> None:
    wanted = {"Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "SmolLM3", "OPT"}
    assert {f"{name}ForCausalLM" for name in wanted} <= families().keys()


@pytest.mark.parametrize(
    "name", every(2, sorted(name for name in families() if name.endswith(("ForCausalLM", "LMHeadModel"))))
)
def test_every_family_has_the_architecture_of_its_model_without_a_head(name: str) -> None:
    base = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Model"
    assert causal_architecture({"architectures": [base]}) == name


def test_the_model_without_a_head_of_text_and_of_several_media() -> None:
    assert causal_architecture({"architectures": ["Gemma3TextModel"]}) == "Gemma3ForCausalLM"
    assert causal_architecture({"architectures": ["Gemma3Model"], "text_config": {"a": 1}}) == (
        "Gemma3ForConditionalGeneration"
    )
    assert causal_architecture({"architectures": ["RwkvModel"]}) is None
    assert causal_architecture({"model_type": "rwkv"}) is None, "which transformers may compute"
    assert causal_architecture({"architectures": ["InternVLChatModel"]}) is None, "a family has this name itself"


def test_each_architecture_is_found_without_the_modules_of_the_others() -> None:
    assert {name: own_family(name) for name in families()} == dict(families())
    assert own_family("NoSuchForCausalLM") is None
    program = (
        "import sys; from headrace.executor.models import families\n"
        "assert families.own_family('LlamaForCausalLM') is not None\n"
        "print(*(name.rpartition('.')[2] for name in sys.modules if name.startswith(families.__name__ + '.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = {name for name in done.stdout.split() if not name.startswith("_")}
    assert "llama" in imported
    assert "gemma3" not in imported


def test_what_a_family_lacks_is_said_of_architectures_without_one() -> None:
    assert not LACKING.keys() & families().keys()
    assert all(LACKING.values())


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"ReformerModelWithLMHead is not supported; known: .*LlamaForCausalLM"):
        spec_from_config({"architectures": ["ReformerModelWithLMHead"]})
    with pytest.raises(ModelError, match=r"RwkvForCausalLM is not supported \(RWKV 4's recurrence\); known: "):
        spec_from_config({"architectures": ["RwkvForCausalLM"]})
    configs: tuple[dict[str, Any], ...] = ({}, {"architectures": []}, {"architectures": None})
    for nameless in configs:
        with pytest.raises(ModelError, match=r'neither "architectures" nor "model_type", which name the kind of'):
            spec_from_config(nameless)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        ({"head_dim": 0}, "head_dim, or hidden_size / num_attention_heads, must be at least 1, got 0"),
        ({"hidden_size": 2}, "head_dim, or hidden_size / num_attention_heads, must be at least 1, got 0"),
        ({"num_hidden_layers": 0}, "at least one layer"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number, got '64'"),
        ({"hidden_size": None}, "hidden_size must be a whole number, got nothing"),
        ({"vocab_size": -5}, "vocab_size must not be negative, got -5"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"head_dim": 7}, "7 rotary dimensions must be even"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'; supported are silu"),
        ({"rms_norm_eps": 0}, "eps must be between 0 and 1, got 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ({"rope_theta": float("nan")}, "rope_theta must be a number, got nan"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "type 'spiral' is not supported; known: default, linear"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor must be a list of numbers, got None"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a number, got nothing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor must be positive, got -1"),
        ({"rope_scaling": "linear"}, "must be a mapping, got 'linear'"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps is 10+.*; at most 3.403e.38 can be computed with"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most 4,096 can be computed with"),
        ({"num_attention_heads": 10**7}, "num_attention_heads is 10000000; at most 65,536"),
        ({"vocab_size": 2**40}, "vocab_size is 1099511627776; at most 2,147,483,647"),
        ({"rope_scaling": LLAMA3_ROPE | {"type": "llama3", "low_freq_factor": 5.0}}, "high_freq_factor not below"),
    ],
)
def test_a_wrong_config_is_refused_with_the_field_and_its_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config(LLAMA | change)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["MistralConsolidated"], "dim": 64},
            r"config's n_heads \(or num_attention_heads\) must be .*, got nothing",
        ),
        ({"architectures": ["MistralConsolidated"], "dim": "x", "n_heads": 4}, "config's dim must be .*, got 'x'"),
        (
            {"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": "4"},
            "config's n_head must be .*, got '4'",
        ),
        (
            {"architectures": ["BloomForCausalLM"], "hidden_size": 64, "n_head": 4, "n_layer": 10**9},
            "config's n_layer is 1000000000",
        ),
        ({"architectures": ["BloomForCausalLM"], "n_head": 4, "hidden_size": 0.5}, "config's hidden_size must be"),
    ],
)
def test_a_wrong_field_is_called_as_the_file_calls_it(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config(config)


def test_contexts_of_dual_chunk_attention_end_at_the_first_chunk(caplog: pytest.LogCaptureFixture) -> None:
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 1_010_000}
    dual = {
        "chunk_size": 262_144, "local_size": 8192, "original_max_position_embeddings": 262_144,
        "sparse_attention_config": {"0": {}}, "sparse_attention_enabled": True, "sparse_attention_threshold": 32_768,
        "sparse_attention_last_q": 64,
    }  # fmt: skip
    spec = spec_from_config(qwen | {"dual_chunk_attention_config": dual}, warns=True)
    assert spec == replace(spec_from_config(qwen), max_positions=262_144 - 8192)
    assert "1010000 tokens with dual chunk attention" in caplog.text
    assert "contexts end at its first 253952" in caplog.text
    assert "nothing reads them" not in caplog.text
    assert "are not known" not in caplog.text
    short = qwen | {"max_position_embeddings": 4096, "dual_chunk_attention_config": dual}
    assert spec_from_config(short).max_positions == 4096
    with pytest.raises(ModelError, match="dual_chunk_attention_config has chunks of 0 tokens besides the local ones"):
        spec_from_config(qwen | {"dual_chunk_attention_config": {"chunk_size": 1024, "local_size": 1024}})


def test_layer_types_that_are_short_or_unknown_are_refused() -> None:
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
    with pytest.raises(ModelError, match="2 layers but 1 layer_types"):
        spec_from_config(qwen | {"layer_types": ["full_attention"]})
    with pytest.raises(ModelError, match="layer types linear_attention are not supported"):
        spec_from_config(qwen | {"layer_types": ["linear_attention", "full_attention"]})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3_ROPE},
            {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3_ROPE,
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
        ),
    ],
)
def test_old_and_new_rope_fields_mean_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert spec_from_config(LLAMA | old) == spec_from_config(LLAMA | {"rope_parameters": new})


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "llama3", **LLAMA3_ROPE},
        {"rope_type": "llama3", **LLAMA3_ROPE, "factor": 16.0, "high_freq_factor": 1.0},  # Llama 4's
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 128, "truncate": False},
        {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.7},
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25},
    ],
)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_frequencies_equal_transformers(parameters: dict[str, Any], head_dim: int) -> None:
    parameters = {"rope_theta": 500000.0} | parameters
    config = LlamaConfig(**LLAMA, head_dim=head_dim, rope_parameters=dict(parameters))
    expected, attention_factor = ROPE_INIT_FUNCTIONS[str(parameters["rope_type"])](config, None)
    rope = spec_from_config(LLAMA | {"head_dim": head_dim, "rope_parameters": parameters}).layers[0].mixer.rope
    assert rope is not None
    torch.testing.assert_close(inverse_frequencies(rope), expected, atol=0, rtol=1e-5)
    assert rope.attention_factor == pytest.approx(attention_factor)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        (None, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "dynamic", "factor": 2.0}, 1024),
        ({"rope_type": "llama3"} | LLAMA3_ROPE, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
    ],
)
def test_the_context_includes_rope_scaling(scaling: dict[str, Any] | None, context: int) -> None:
    assert spec_from_config(LLAMA | {"rope_scaling": scaling}).max_positions == context


def test_gemma3_reads_the_sparse_text_config_of_a_multimodal_checkpoint() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec = spec_from_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    theirs = Gemma3TextConfig(**text)
    assert [layer.sliding_window is not None for layer in spec.layers] == [
        kind == "sliding_attention" for kind in theirs.layer_types
    ]
    assert spec.layers[0].mixer.rope == RopeSpec(10_000.0, 256)
    assert spec.layers[5].mixer.rope == RopeSpec(1_000_000.0, 256, "linear", factor=8.0)
    assert (spec.vocab_size, spec.num_heads, spec.mixers[0].cache) == (262_208, 8, TokenCache(4, 256, 256))
    assert (spec.max_positions, spec.tied_head, spec.num_layers) == (131_072, True, 34)
    assert (spec.mixers[0].cache.rows, spec.mixers[0].cache.elements) == (2 * 4, 2 * 4 * 256)


def test_smollm3_leaves_every_fourth_layer_without_rotary_positions() -> None:
    config = LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 8}
    assert [layer.mixer.rope is None for layer in spec_from_config(config).layers] == [False, False, False, True] * 2


def test_a_command_rs_context_is_that_of_model_max_length() -> None:
    for name in ("CohereForCausalLM", "Cohere2ForCausalLM"):
        config = LLAMA | {"architectures": [name]}
        config["layer_norm_eps"] = config.pop("rms_norm_eps")
        assert spec_from_config(config).max_positions == 512
        assert spec_from_config(config | {"model_max_length": 131072}).max_positions == 131072


def test_a_null_window_is_none_even_where_the_config_turns_windows_on() -> None:
    config = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "max_window_layers": 1, "use_sliding_window": True}
    assert [layer.sliding_window for layer in spec_from_config(config).layers] == [None, 4096]
    assert not any(layer.sliding_window for layer in spec_from_config(config | {"sliding_window": None}).layers)


def test_qwen2_slides_only_where_the_config_turns_it_on() -> None:
    config = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 1}
    assert [layer.sliding_window for layer in spec_from_config(config).layers] == [None, None]
    on = config | {"use_sliding_window": True}
    assert [layer.sliding_window for layer in spec_from_config(on).layers] == [None, 64]


LONGROPE: dict[str, Any] = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [float(i) for i in range(1, 9)]}


def test_longrope_rotates_as_transformers_does_in_short_and_in_long_contexts() -> None:
    config = LLAMA | {"max_position_embeddings": 4096, "original_max_position_embeddings": 512}
    spec = spec_from_config(config | {"rope_scaling": LONGROPE})
    parameters = {key: value for key, value in LONGROPE.items() if key != "type"}
    parameters |= {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 512}
    theirs = LlamaConfig(**config, rope_parameters=parameters)
    for max_model_len, seq_len in ((512, 512), (513, 513), (None, 4096)):
        rope = spec.for_context(max_model_len).layers[0].mixer.rope
        expected, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, None, seq_len=seq_len)
        assert rope is not None
        torch.testing.assert_close(inverse_frequencies(rope), expected, atol=0, rtol=1e-5)
        assert rope.attention_factor == pytest.approx(attention_factor)
