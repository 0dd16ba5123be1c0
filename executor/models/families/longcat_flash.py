"""LongCat-Flash: two sublayers of latent attention and a dense FFN in each layer, and experts beside the second one,
some of which return what they are given. LongCat-Flash-Lite embeds n-grams, too."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.blocks import Routing
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.blocks.latent import LatentAttention
from headrace.executor.models.blocks.ngrams import NGrams
from headrace.executor.models.blocks.shortcut import LatentAttentionAfter, ShortcutFfn
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import activation, flag, integer, number, positive
from headrace.executor.models.families._latent import latent_like
from headrace.ipc.failure import ModelError

PLAIN, WITH_NGRAMS = "LongcatFlashForCausalLM", "LongcatFlashNgramForCausalLM"
SUBLAYERS = 2
MOST_TABLES = 1024
NAMES = WeightNames(
    sublayers=SUBLAYERS,
    gate="mlps.gate_proj",
    up="mlps.up_proj",
    down="mlps.down_proj",
    router="mlp.router.classifier",
    router_correction="mlp.router.e_score_correction_bias",
    ignorable=(*WeightNames.ignorable, r"^model\.mtp\."),
)
OTHER_NAMES = {
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "expert_ffn_hidden_size",
    "num_experts_per_tok": "moe_topk",
}


def build(config: Config) -> ArchSpec:
    own = config.renamed(**OTHER_NAMES)
    config = {"rope_interleave": True, "rms_norm_eps": 1e-5, "rope_theta": 1e7, "hidden_act": "silu"} | own
    config = config | {"num_hidden_layers": SUBLAYERS * integer(config, "num_layers")}
    num_idle, kind = integer(config, "zero_expert_num", 0), activation(config, "hidden_act", "silu")
    experts = Experts(
        integer(config, "n_routed_experts"),
        Routing(
            integer(config, "num_experts_per_tok"),
            "softmax",
            renormalise=flag(config, "norm_topk_prob", False),
            scale=number(config, "routed_scaling_factor", 1.0),
        ),
        integer(config, "moe_intermediate_size"),
        kind,
        router_bias=flag(config, "router_bias", False),
        correction="vector",
    )
    dense = Dense(integer(config, "intermediate_size"), kind)
    first, second = ShortcutFfn(dense, experts, num_idle), ShortcutFfn(dense, None)
    idle = "|".join(str(experts.num_experts + index) for index in range(num_idle))  # which transformers writes too
    names = replace(NAMES, ignorable=(*NAMES.ignorable, *([rf"\.mlp\.experts\.({idle})\."] if idle else ())))
    spec = latent_like(config, lambda index: second if index % SUBLAYERS else first, names=names)
    hidden, layers = spec.hidden_size, []
    scaled: tuple[tuple[str, float], ...] = ()
    for index, layer in enumerate(spec.layers):
        mixer = layer.mixer
        assert isinstance(mixer, LatentAttention)
        if mixer.query_rank and flag(config, "mla_scale_q_lora", True):
            mixer = replace(mixer, scale=mixer.scale * (hidden / mixer.query_rank) ** 0.5)
        if flag(config, "mla_scale_kv_lora", True):
            scaled = ((f"{NAMES.latent_norm}.weight", (hidden / mixer.latent_dim) ** 0.5),)
        after = LatentAttentionAfter(**vars(mixer)) if index % SUBLAYERS else mixer
        layers.append(replace(layer, mixer=after))
    ngrams = _ngrams(config, hidden) if config["architectures"] == [WITH_NGRAMS] else None
    return replace(spec, layers=tuple(layers), scaled=scaled, ngrams=ngrams)


def _ngrams(config: Config, hidden: int) -> NGrams | None:
    """None if the config has no tables of n-grams."""
    if config.get("ngram_vocab_size_ratio") is None:
        config.pass_over("emb_neighbor_num", "emb_split_num")
        return None
    longest, splits = integer(config, "emb_neighbor_num"), integer(config, "emb_split_num")
    vocab_size, tables = integer(config, "vocab_size"), max(1, (longest - 1) * splits)
    if tables > MOST_TABLES:
        raise ModelError(f"the config's emb_neighbor_num and emb_split_num make {tables} tables; at most {MOST_TABLES}")
    first_rows = int(positive(config, "ngram_vocab_size_ratio") * vocab_size) + 1
    end_id = integer(config, "eos_token_id", 2)
    return NGrams(longest, splits, first_rows, hidden // tables, hidden, vocab_size, end_id)


FAMILY = Family(
    (PLAIN, WITH_NGRAMS),
    build,
    ignored={
        "num_hidden_layers": "num_layers says it",
        "num_key_value_heads": "latent attention has none",
        "emb_neighbor_num": "of LongCat-Flash-Lite's n-grams, which have an architecture of their own",
    },
    assumes={"zero_expert_type": ("identity",), "attention_method": ("MLA",), "topk_method": ("noaux_tc",)},
)
