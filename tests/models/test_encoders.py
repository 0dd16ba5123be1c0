"""Encoders beside transformers' own: hidden states pooled, and classes, in float32."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_embed import as_sentence_folder, assert_close, vectors
from thinned import every
from tiny_encoders import ENCODERS, JINA_BERT, VOCAB_SIZE, encoder_config, save_encoder
from torch import Tensor

from headrace import LLM, InvalidRequestError, ModelError, PoolingParams
from headrace.executor.models.families import spec_from_config

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 130, 200)
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 12,
    "use_tqdm_on_load": False,
    "skip_tokenizer_init": True,
}
MEAN = {"word_embedding_dimension": 64, "pooling_mode": "mean"}


def prompts_of(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [[(7 * n + 3 * length + 11) % (VOCAB_SIZE - 10) + 5 for n in range(length)] for length in lengths]


@cache
def reference(folder: Path, kind: str = "AutoModel") -> Any:
    if kind == "AutoModel":
        (kind,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def states(folder: Path, prompt: list[int]) -> Tensor:
    with torch.inference_mode():
        found = reference(folder)(input_ids=torch.tensor([prompt])).last_hidden_state[0]
    return torch.as_tensor(found)


@pytest.fixture(scope="module", params=list(ENCODERS))
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_encoder(request.param, tmp_path_factory.mktemp(request.param))
    return as_sentence_folder(folder, MEAN)


def test_vectors_are_those_of_transformers_and_depend_on_nothing_else(encoder: Path) -> None:
    prompts = prompts_of()
    wanted = torch.nn.functional.normalize(torch.stack([states(encoder, each).mean(0) for each in prompts]), dim=1)
    with LLM(str(encoder), in_process=True, **ENGINE) as llm:
        found = vectors(llm, prompts)
        assert_close(found, wanted)
        assert torch.equal(vectors(llm, prompts[::-1]).flip(0), found), "in another order"
        alone = torch.cat([vectors(llm, [each]) for each in prompts])
        assert torch.equal(alone, found), "alone"
        (tokens,) = llm.encode([prompts[-1]], pooling_task="token_embed", use_tqdm=False)
        each = torch.nn.functional.normalize(states(encoder, prompts[-1]), dim=1)
        assert_close(tokens.outputs.data, each)


def test_a_prompt_may_be_as_long_as_the_model_and_no_longer(encoder: Path) -> None:
    with LLM(str(encoder), in_process=True, **ENGINE) as llm:
        most = llm.model_config.max_model_len
        assert most is not None
        (longest,) = prompts_of((most,))
        assert_close(
            vectors(llm, [longest]), torch.nn.functional.normalize(states(encoder, longest).mean(0)[None], dim=1)
        )
        with pytest.raises(InvalidRequestError, match=f"has {most + 1} tokens, and max_model_len is {most}"):
            llm.embed([[*longest, 5]], use_tqdm=False)
        short_and_cut = llm.embed([[5], longest + longest], truncate_prompt_tokens=-1, use_tqdm=False)
        assert [len(output.prompt_token_ids) for output in short_and_cut] == [1, most]


CLASSIFIERS = [
    ("bert", "ForSequenceClassification", 3),
    ("bert", "ForSequenceClassification", 1),
    ("bert", "ForTokenClassification", 5),
    ("roberta", "ForSequenceClassification", 2),
    ("roberta", "ForTokenClassification", 4),
    ("xlm_roberta", "ForSequenceClassification", 1),
    ("xlm_roberta", "ForTokenClassification", 3),
    ("distilbert", "ForSequenceClassification", 2),
    ("distilbert", "ForTokenClassification", 3),
    ("mpnet", "ForSequenceClassification", 3),
    ("modernbert", "ForSequenceClassification", 1),
    ("modernbert", "ForTokenClassification", 3),
    ("nomic_bert", "ForSequenceClassification", 2),
    ("gte", "ForSequenceClassification", 1),
    ("gte", "ForTokenClassification", 3),
    ("jina_v3", "ForSequenceClassification", 2),
    ("jina_v3", "ForTokenClassification", 3),
    ("eurobert", "ForSequenceClassification", 3),
    ("eurobert", "ForTokenClassification", 3),
]


@pytest.mark.parametrize(("name", "end", "labels"), every(3, CLASSIFIERS))
def test_classes_are_those_of_transformers(tmp_path: Path, name: str, end: str, labels: int) -> None:
    save_encoder(name, tmp_path, end, num_labels=labels)
    check_classifier(tmp_path, f"AutoModel{end}")


def test_modernbert_classifies_the_mean_where_its_config_says_so(tmp_path: Path) -> None:
    save_encoder("modernbert", tmp_path, "ForSequenceClassification", num_labels=3, classifier_pooling="mean")
    check_classifier(tmp_path, "AutoModelForSequenceClassification")


@pytest.mark.parametrize("pooling", ["bos", "mean"])
def test_eurobert_classifies_a_pooled_state_where_its_config_says_so(tmp_path: Path, pooling: str) -> None:
    save_encoder("eurobert", tmp_path, "ForSequenceClassification", num_labels=3, classifier_pooling=pooling)
    check_classifier(tmp_path, "AutoModelForSequenceClassification")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("qwen3", "Qwen3ForSequenceClassification"), ("llama", "LlamaForSequenceClassification"),
     ("qwen2", "Qwen2ForTokenClassification"), 
     ("gemma3", "Gemma3TextForSequenceClassification"),
     *((name, f"{stem}ForTokenClassification") for name, stem in {
         "gpt2": "GPT2", "gpt_neox": "GPTNeoX", "gpt_neo": "GPTNeo", "gpt_bigcode": "GPTBigCode", "falcon": "Falcon",
         "bloom": "Bloom", "mpt": "Mpt", "biogpt": "BioGpt"}.items())],
)  # fmt: skip
def test_decoders_with_classifiers(tmp_path: Path, name: str, kind: str) -> None:
    plain = tiny_models.build(name)
    model = getattr(transformers, kind)(plain.config.__class__(**{**plain.config.to_dict(), "num_labels": 3})).eval()
    torch.manual_seed(3)
    model.base_model.load_state_dict(plain.base_model.state_dict())
    model.save_pretrained(tmp_path)
    check_classifier(tmp_path, "AutoModel" + kind[kind.index("For") :])


def check_classifier(folder: Path, kind: str) -> None:
    of_tokens = kind.endswith("ForTokenClassification")
    task = "token_classify" if of_tokens else "classify"
    prompts = [[5 + token % 120 for token in prompt] for prompt in prompts_of((1, 5, 17, 120))]
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        assert llm.supported_tasks == (task,)
        params = PoolingParams(use_activation=False)
        outputs = llm.encode(prompts, params, pooling_task=task, use_tqdm=False)
        found = [output.outputs.data for output in outputs]
        again = llm.encode(prompts[::-1], params, pooling_task=task, use_tqdm=False)[::-1]
        assert all(torch.equal(one, other.outputs.data) for one, other in zip(found, again, strict=True))
        activated = [output.outputs.data for output in llm.encode(prompts, pooling_task=task, use_tqdm=False)]
    model = reference(folder, kind)
    for prompt, logits, probabilities in zip(prompts, found, activated, strict=True):
        with torch.inference_mode():
            wanted = model(input_ids=torch.tensor([prompt])).logits[0]
        assert (logits - wanted).abs().max() < 1e-4
        shares = wanted.sigmoid() if wanted.shape[-1] == 1 else wanted.softmax(-1)
        assert (probabilities - shares).abs().max() < 1e-5


@pytest.mark.parametrize("task", [None, "retrieval.query"])
def test_jina_3_as_published_has_one_task_merged(tmp_path: Path, task: str | None) -> None:
    """Matrices are parametrizations with the factors of all tasks; without a name it is vLLM's."""
    tasks, rank, alpha = ["retrieval.query", "text-matching"], 4, 2
    merged = save_encoder("jina_v3", tmp_path / "merged")
    weights, state = load_file(merged / "model.safetensors"), dict[str, Tensor]()
    generator = torch.Generator().manual_seed(1)
    for name, weight in list(weights.items()):
        if weight.dim() != 2 or name.startswith("pooler"):
            state[f"roberta.{name}"] = weight
            continue
        rows, columns = weight.shape
        is_embedding = "embeddings" in name
        first, second = ((rows, rank), (rank, columns)) if is_embedding else ((rank, columns), (rows, rank))
        a, b = (0.3 * torch.randn(2, *shape, generator=generator) for shape in (first, second))
        stem = f"roberta.{name.removesuffix('.weight')}.parametrizations.weight."
        state |= {f"{stem}original": weight, f"{stem}0.lora_A": a, f"{stem}0.lora_B": b}
        at = tasks.index(task or "text-matching")
        weights[name] = weight + alpha / rank * (a[at] @ b[at] if is_embedding else b[at] @ a[at])
    save_file(weights, merged / "model.safetensors")
    folder = tmp_path / "published"
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    config = json.loads((merged / "config.json").read_text())
    del config["rope_parameters"]
    config |= {
        "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "position_embedding_type": "rotary",
        "rotary_emb_base": 20000.0, "lora_adaptations": tasks, "lora_alpha": alpha, "lora_rank": rank,
        "lora_dropout_p": 0.0, "lora_main_params_trainable": False, "task_instructions": {}, "use_flash_attn": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | ({} if task is None else {"default_task": task})))
    found = []
    for each in (merged, folder):
        as_sentence_folder(each, MEAN)
        if each == folder:
            modules = (folder / "modules.json").read_text()
            own = modules.replace("sentence_transformers.models.Transformer", "custom_st.Transformer")
            (folder / "modules.json").write_text(own)
        with LLM(str(each), in_process=True, **ENGINE) as llm:
            found.append(vectors(llm, prompts_of((1, 17, 64))))
    assert_close(found[1], found[0])
    (folder / "config.json").write_text(json.dumps(config | {"default_task": "other"}))
    with pytest.raises(ModelError, match=r"default_task is 'other'; its lora_adaptations are retrieval\.query, text-"):
        LLM(str(folder), in_process=True, **ENGINE)


def test_jina_reranker_2_is_xlm_roberta_under_other_names(tmp_path: Path) -> None:
    folder, prompts = save_encoder("xlm_roberta", tmp_path, "ForSequenceClassification", num_labels=1), prompts_of()
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        wanted = [output.outputs.probs for output in llm.classify(prompts, use_tqdm=False)]
    weights = load_file(folder / "model.safetensors")
    names = {
        "embeddings.LayerNorm": "emb_ln", "encoder.layer.": "encoder.layers.",
        "attention.output.dense": "mixer.out_proj", "attention.output.LayerNorm": "norm1",
        "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2", "output.LayerNorm": "norm2",
    }  # fmt: skip
    for kind in ("weight", "bias"):
        for layer in range(3):
            stem = f"roberta.encoder.layer.{layer}."
            parts = [weights.pop(f"{stem}attention.self.{each}.{kind}") for each in ("query", "key", "value")]
            weights[f"{stem}mixer.Wqkv.{kind}"] = torch.cat(parts)
    for old, new in names.items():
        weights = {name.replace(old, new): each for name, each in weights.items()}
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"position_embedding_type": "absolute", "use_flash_attn": True}
    (folder / "config.json").write_text(json.dumps(config))
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        assert [output.outputs.probs for output in llm.classify(prompts, use_tqdm=False)] == wanted


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("modernbert", {"position_embedding_type": "absolute"}),
        ("t5_gated", {"n_positions": None, "output_past": True}),
        ("bert", {"directionality": "bidi", "pooler_type": "first_token_transform", "pooler_fc_size": 768}),
        ("ernie", {"pool_act": "tanh", "task_id": 0}),
        ("distilbert", {"tie_weights_": True}),
    ],
)
def test_keys_of_published_configs_that_change_nothing(
    name: str, more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = encoder_config(name) | more
    found = spec_from_config({key: value for key, value in config.items() if value is not None}, warns=True)
    plain = spec_from_config(encoder_config(name))
    assert replace(found, max_positions=plain.max_positions, layers=plain.layers) == plain
    assert "not known, and nothing reads them" not in caplog.text


def test_a_colbert_may_be_of_xlm_roberta() -> None:
    """As jina-colbert-v2 is published."""
    of_jina = {"model_type": "xlm-roberta", "position_embedding_type": "rotary", "rotary_emb_base": 20000.0}
    config = {key: value for key, value in encoder_config("jina_v3").items() if key != "rope_parameters"} | of_jina
    plain = spec_from_config(config | {"architectures": ["XLMRobertaModel"]})
    found = spec_from_config(config | {"architectures": ["HF_ColBERT"]})
    assert replace(found, architecture=plain.architecture) == plain


def test_jina_bert_has_alibi_to_both_sides_and_a_gated_ffn(tmp_path: Path) -> None:
    """Its code is not in transformers: the reference is BERT's of transformers with what differs put in."""
    generator, weights = torch.Generator().manual_seed(0), dict[str, Tensor]()

    def matrix(name: str, *shape: int) -> Tensor:
        weights[name] = 0.3 * torch.randn(shape, generator=generator)
        return weights[name]

    def linear(name: str, rows: int, columns: int, *, bias: bool = True) -> Any:
        weight = matrix(f"{name}.weight", rows, columns)
        added = matrix(f"{name}.bias", rows) if bias else None
        return lambda x: torch.nn.functional.linear(x, weight, added)

    def norm(name: str) -> Any:
        weight, bias = matrix(f"{name}.weight", 48), matrix(f"{name}.bias", 48)
        return lambda x: torch.nn.functional.layer_norm(x, (48,), weight, bias, 1e-12)

    words, types = (
        matrix("embeddings.word_embeddings.weight", VOCAB_SIZE, 48),
        "embeddings.token_type_embeddings.weight",
    )
    first_type, first_norm, layers = matrix(types, 2, 48)[0], norm("embeddings.LayerNorm"), []
    for at in (f"encoder.layer.{index}." for index in range(2)):
        heads = [linear(f"{at}attention.self.{part}", 48, 48) for part in ("query", "key", "value")]
        out, behind = linear(f"{at}attention.output.dense", 48, 48), norm(f"{at}attention.output.LayerNorm")
        gated, down = linear(f"{at}mlp.gated_layers", 160, 48, bias=False), linear(f"{at}mlp.wo", 48, 80)
        layers.append((heads, out, behind, gated, down, norm(f"{at}mlp.layernorm")))
    slopes = torch.tensor([1 / 16, 1 / 256, 1 / 4])  # of three heads: two of two, and the first of four

    def compute(prompt: list[int]) -> Tensor:
        x, places = first_norm(words[prompt] + first_type), torch.arange(len(prompt))
        bias = -slopes[:, None, None] * (places[:, None] - places).abs()
        for heads, out, behind, gated, down, last in layers:
            query, key, value = (each(x).view(-1, 3, 16).transpose(0, 1) for each in heads)
            shares = (query @ key.transpose(1, 2) / 4 + bias).softmax(-1)
            x = behind(x + out((shares @ value).transpose(0, 1).reshape(-1, 48)))
            gate, up = gated(x).chunk(2, dim=-1)
            x = last(x + down(torch.nn.functional.gelu(gate) * up))
        return torch.nn.functional.normalize(x.mean(0), dim=0)

    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(JINA_BERT))
    as_sentence_folder(tmp_path, {**MEAN, "word_embedding_dimension": 48})
    prompts = prompts_of((1, 17, 200))
    with LLM(str(tmp_path), in_process=True, **ENGINE) as llm:
        assert_close(vectors(llm, prompts), torch.stack([compute(each) for each in prompts]))


def test_vectors_with_int8_weights_are_those_of_floats_nearly(tmp_path: Path) -> None:
    folder, prompts = save_encoder("bert", tmp_path / "model"), prompts_of()
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        exact = vectors(llm, prompts)
    with LLM(str(folder), in_process=True, quantization="int8", **ENGINE) as llm:
        found = vectors(llm, prompts)
        assert torch.equal(vectors(llm, prompts[::-1]).flip(0), found), "in another order"
        assert torch.equal(torch.cat([vectors(llm, [each]) for each in prompts]), found), "alone"
    assert torch.cosine_similarity(exact, found).min() > 0.999
    assert not torch.equal(exact, found)
