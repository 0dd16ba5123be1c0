"""Folders as version 6 of sentence-transformers writes them: one Transformer module for all kinds of models, whose
settings say its task, most tokens in tokenizer_config.json, the activation of scores beside the prompts, and late
interaction as modules. What is wanted is what its classes compute, by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import save_file
from server_here import serving_here
from tiny_encoders import make_pair_tokenizer, save_encoder
from torch import Tensor, nn

from headrace import LLM, InvalidRequestError, ModelError, PoolingParams
from headrace.executor.checkpoints.sentence_folder import sentence_folder

ENGINE: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 12, "use_tqdm_on_load": False}
TEXTS = ["The sky is blue.", "A", "word " * 40, "Il cielo e blu, e il mare anche!"]
PAIRS = [("Who wrote Faust?", "Goethe wrote Faust."), ("A", "b c d."), ("word " * 20, "long " * 30)]
OUTPUTS = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "fill-mask": ("logits", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
    "text-generation": ("logits", "causal_logits"),
}
IDENTITY, TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"
CLASSES = {
    "Transformer": "base.modules.transformer",
    "Dense": "base.modules.dense",
    "Normalize": "base.modules.normalize",
    "Router": "base.modules.router",
    "Pooling": "sentence_transformer.modules.pooling",
    "LayerNorm": "sentence_transformer.modules.layer_norm",
    "SpladePooling": "sparse_encoder.modules.splade_pooling",
    "LogitScore": "cross_encoder.modules.logit_score",
    "MultiVectorMask": "multi_vector_encoder.modules.multi_vector_mask",
    "HierarchicalTokenPooling": "multi_vector_encoder.modules.token_pooling",
}


def write(
    folder: Path,
    *modules: tuple[str, dict[str, Any]],
    task: str = "feature-extraction",
    settings: dict[str, Any] | None = None,
    general: dict[str, Any] | None = None,
    most: int | None = None,
) -> Path:
    """modules: kinds and configs of those behind the Transformer; most: the tokenizer's model_max_length."""
    kinds = ["Transformer", *(kind for kind, _ in modules)]
    paths = [f"{n}_{kind}" if n else "" for n, kind in enumerate(kinds)]
    listed = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.{CLASSES[kind]}.{kind}"}
        for n, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    output, found_as = OUTPUTS[task]
    text = {"method": "forward", "method_output_name": output}
    own = {"transformer_task": task, "modality_config": {"text": text}, "module_output_name": found_as}
    files: dict[str, Any] = {
        "modules.json": listed,
        "sentence_bert_config.json": own | (settings or {}),
        "config_sentence_transformers.json": {"prompts": {}, "default_prompt_name": None, **(general or {})},
    }
    files |= {f"{path}/config.json": config for path, (_, config) in zip(paths[1:], modules, strict=True)}
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    if most is not None:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": most}))
    return folder


def dense(columns: int, rows: int, activation: str = TANH, **config: Any) -> tuple[str, dict[str, Any]]:
    return "Dense", {"in_features": columns, "out_features": rows, "bias": True, "activation_function": activation} | {
        "module_input_name": "sentence_embedding",
        "module_output_name": "sentence_embedding",
        **config,
    }


def save_weights(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Random weights of the folder's layers, by their paths."""
    found, generator = {}, torch.Generator().manual_seed(5)
    for path in sorted(folder.glob("*_Dense")):
        config = json.loads((path / "config.json").read_text())
        rows, columns = config["out_features"], config["in_features"]
        weights = {"linear.weight": 0.2 * torch.randn(rows, columns, generator=generator)}
        if config["bias"]:
            weights["linear.bias"] = torch.randn(rows, generator=generator)
        if config.get("use_residual") and rows != columns:
            weights["residual.weight"] = 0.2 * torch.randn(rows, columns, generator=generator)
        save_file(weights, path / "model.safetensors")
        found[path.name] = weights
    return found


def bert(folder: Path, end: str = "Model", **config: Any) -> Path:
    return encoder(folder, "bert", end, **config)


def encoder(folder: Path, name: str, end: str = "Model", **config: Any) -> Path:
    save_encoder(name, folder, end, **config)
    made = make_pair_tokenizer(folder, "[CLS]", ("[SEP]",), "[SEP]", ("[unused0]",))
    made.add_special_tokens({"mask_token": "[MASK]"})
    made.save_pretrained(folder)
    return folder


def loaded(folder: Path, kind: str = "AutoModel") -> tuple[Any, Any]:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer, getattr(transformers, kind).from_pretrained(folder, attn_implementation="eager").eval()


@torch.inference_mode()
def means(folder: Path, texts: list[str], **how: Any) -> Tensor:
    tokenizer, model = loaded(folder)
    return torch.stack([model(**tokenizer(each, return_tensors="pt", **how))[0][0].mean(0) for each in texts])


@torch.inference_mode()
def logits(folder: Path, pairs: list[tuple[str, str]], **how: Any) -> Tensor:
    tokenizer, model = loaded(folder, "AutoModelForSequenceClassification")
    return torch.cat(
        [model(**tokenizer(*pair, return_tensors="pt", return_token_type_ids=True, **how)).logits[0] for pair in pairs]
    )


def scores(folder: Path, **how: Any) -> Tensor:
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        outputs = [llm.score(*pair, use_tqdm=False, truncate_prompt_tokens=-1, **how) for pair in PAIRS]
        return torch.tensor([output.outputs.score for (output,) in outputs])


MEAN = ("Pooling", {"embedding_dimension": 64, "pooling_mode": "mean", "include_prompt": True})


@pytest.mark.parametrize(
    ("settings", "most", "kept"),
    [
        ({}, 20, 20),
        ({"processing_kwargs": {"text": {"max_length": 12, "truncation": True}}}, 100, 12),
        ({"max_seq_length": 16}, 12, 16),
        ({"processor_kwargs": {"model_max_length": 24, "padding_side": "left"}}, 12, 24),
        ({}, 10**30, 258),
    ],
)
def test_texts_are_cut_where_the_folder_says(tmp_path: Path, settings: dict[str, Any], most: int, kept: int) -> None:
    folder = write(bert(tmp_path), MEAN, ("Normalize", {}), settings=settings, most=most)
    texts = [*TEXTS, "word " * 70]
    wanted = nn.functional.normalize(means(folder, texts, truncation=True, max_length=kept), dim=1)
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        outputs = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
        assert max(len(output.prompt_token_ids) for output in outputs) == kept
    assert (torch.tensor([output.outputs.embedding for output in outputs]) - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_cut_at_the_side_that_the_tokenizer_says(side: str, tmp_path: Path) -> None:
    folder = write(bert(tmp_path), MEAN, most=20)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "truncation_side": side}))
    texts = ["ab " * 20 + "cd " * 20, "cd", "ab " * 3000 + "cd " * 3000]
    wanted = means(folder, texts, truncation=True, max_length=20)
    other = {"truncation_side": "right" if side == "left" else "left"}
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        assert llm.get_tokenizer().truncation_side == side
        found = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
        asked = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False, tokenization_kwargs=other)
    with serving_here(folder=folder, dtype="float32", max_num_seqs=8) as server, server.client() as client:
        body = {"input": texts, "truncate_prompt_tokens": -1}
        served = client.post("/v1/embeddings", json=body).raise_for_status().json()["data"]
    for vectors in ([output.outputs.embedding for output in found], [each["embedding"] for each in served]):
        assert (torch.tensor(vectors) - wanted).abs().max() < 1e-5
    assert (torch.tensor([output.outputs.embedding for output in asked]) - wanted).abs().max() > 0.1


def test_an_unknown_side_is_named(tmp_path: Path) -> None:
    folder = write(bert(tmp_path), MEAN)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "truncation_side": "middle"}))
    with pytest.raises(ModelError, match="truncation_side 'middle'; left or right"):
        LLM(str(folder), in_process=True, **ENGINE)


@pytest.mark.parametrize("ends", [[("Normalize", {})], []])
@pytest.mark.parametrize("kept", [16, 64, 100])
def test_a_folder_may_say_how_many_values_are_kept(kept: int, ends: list[Any], tmp_path: Path) -> None:
    """They are cut from the whole vector, which is not scaled again."""
    folder = write(bert(tmp_path), MEAN, *ends, general={"truncate_dim": kept})
    wanted = means(folder, TEXTS)
    wanted = (nn.functional.normalize(wanted, dim=1) if ends else wanted)[:, :kept]
    with LLM(str(folder), in_process=True, hf_overrides={"is_matryoshka": True}, **ENGINE) as llm:
        found = torch.tensor([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])
        assert (found - wanted).abs().max() < 1e-5
        (token,) = llm.encode(TEXTS[:1], pooling_task="token_embed", use_tqdm=False)
        assert token.outputs.data.shape[1] == 64
        (cut,) = llm.embed(TEXTS[:1], pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
        assert len(cut.outputs.embedding) == 8
        if kept < 64:
            with pytest.raises(InvalidRequestError, match="dimensions"):
                llm.embed(TEXTS[:1], pooling_params=PoolingParams(dimensions=kept + 1), use_tqdm=False)


@pytest.mark.parametrize("ends", [[("Normalize", {})], []])
def test_vectors_may_be_scaled_between_layers(ends: list[Any], tmp_path: Path) -> None:
    normalize: tuple[str, dict[str, Any]] = ("Normalize", {})
    scale = nn.functional.normalize
    folder = write(bert(tmp_path), MEAN, normalize, normalize, dense(64, 32), normalize, dense(32, 8, IDENTITY), *ends)
    first, second = save_weights(folder).values()
    x = scale(torch.tanh(scale(means(folder, TEXTS), dim=1) @ first["linear.weight"].T + first["linear.bias"]), dim=1)
    x = x @ second["linear.weight"].T + second["linear.bias"]
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        found = torch.tensor([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])
    assert (found - (scale(x, dim=1) if ends else x)).abs().max() < 1e-5


def test_a_prompt_may_be_null(tmp_path: Path) -> None:
    folder = write(bert(tmp_path), MEAN, general={"prompts": {"query": None, "document": "d: "}})
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        (plain,) = llm.embed(TEXTS[:1], use_tqdm=False)
        (named,) = llm.embed(TEXTS[:1], pooling_params=PoolingParams(prompt_name="query"), use_tqdm=False)
        assert named.outputs.embedding == plain.outputs.embedding


def test_layers_that_add_what_comes_in(tmp_path: Path) -> None:
    folder = write(
        bert(tmp_path), MEAN, dense(64, 64, use_residual=True), dense(64, 24, use_residual=True), ("Normalize", {})
    )
    first, second = save_weights(folder).values()
    x = means(folder, TEXTS)
    x = torch.tanh(x @ first["linear.weight"].T + first["linear.bias"]) + x
    x = torch.tanh(x @ second["linear.weight"].T + second["linear.bias"]) + x @ second["residual.weight"].T
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        found = torch.tensor([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])
    assert (found - nn.functional.normalize(x, dim=1)).abs().max() < 1e-5


@pytest.mark.parametrize(("name", "is_tied"), [("bert", True), ("bert", False), ("roberta", False), ("mpnet", False)])
def test_a_masked_language_model_pools_its_logits(name: str, tmp_path: Path, *, is_tied: bool) -> None:
    """One that is not tied has two biases, and its matrix' own counts."""
    folder = write(
        encoder(tmp_path, name, "ForMaskedLM", tie_word_embeddings=is_tied),
        ("SpladePooling", {"pooling_strategy": "max", "activation_function": "relu"}),
        task="fill-mask",
        general={"model_type": "SparseEncoder", "similarity_fn_name": None},
    )
    tokenizer, model = loaded(folder, "AutoModelForMaskedLM")
    with torch.inference_mode():
        found = [model(**tokenizer(each, return_tensors="pt")).logits[0] for each in TEXTS]
    wanted = torch.stack([each.relu().log1p().amax(0) for each in found])
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
        assert "embed_sparse" in llm.supported_tasks
    vectors = torch.tensor([output.outputs.embedding for output in outputs])
    assert vectors.shape == wanted.shape
    assert (vectors - wanted).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("activation", "function"),
    [("Sigmoid", torch.sigmoid), ("Tanh", torch.tanh), ("Identity", lambda x: x), (None, torch.sigmoid)],
)
def test_scores_end_as_the_folder_says(tmp_path: Path, activation: str | None, function: Any) -> None:
    general = {"model_type": "CrossEncoder"} | (
        {"activation_fn": f"torch.nn.modules.activation.{activation}"} if activation else {}
    )
    folder = write(
        bert(tmp_path, "ForSequenceClassification", num_labels=1),
        task="sequence-classification",
        general=general,
        most=30,
    )
    wanted = function(logits(folder, PAIRS, truncation=True, max_length=30))
    assert (scores(folder) - wanted).abs().max() < 1e-5


def test_a_prompt_comes_before_the_first_text_of_a_pair(tmp_path: Path) -> None:
    prompts = {"web": "find the web: ", "none": ""}
    folder = write(
        bert(tmp_path, "ForSequenceClassification", num_labels=1),
        task="sequence-classification",
        general={"model_type": "CrossEncoder", "prompts": prompts, "default_prompt_name": "web"},
    )
    wanted = logits(folder, [(prompts["web"] + first, second) for first, second in PAIRS]).sigmoid()
    assert (scores(folder) - wanted).abs().max() < 1e-5
    plain = scores(folder, pooling_params=PoolingParams(prompt_name="none"))
    assert (plain - logits(folder, PAIRS).sigmoid()).abs().max() < 1e-5
    with pytest.raises(InvalidRequestError, match="no prompt with the name 'query'; it has web, none"):
        scores(folder, pooling_params=PoolingParams(prompt_name="query"))


def test_layers_behind_the_pooling_score_pairs(tmp_path: Path) -> None:
    folder = write(
        bert(tmp_path),
        MEAN,
        dense(64, 48, "torch.nn.modules.activation.GELU"),
        dense(48, 1, IDENTITY, module_output_name="scores"),
        general={"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.activation.Sigmoid"},
    )
    first, second = save_weights(folder).values()
    tokenizer, model = loaded(folder)
    with torch.inference_mode():
        states = [
            model(**tokenizer(*pair, return_tensors="pt", return_token_type_ids=True))[0][0].mean(0) for pair in PAIRS
        ]
    x = nn.functional.gelu(torch.stack(states) @ first["linear.weight"].T + first["linear.bias"])
    wanted = (x @ second["linear.weight"].T + second["linear.bias"])[:, 0].sigmoid()
    assert (scores(folder) - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("with_no", [True, False])
def test_logits_of_the_next_token_score_pairs(tmp_path: Path, *, with_no: bool) -> None:
    tiny_models.save("qwen3", tmp_path, tie_word_embeddings=True)
    tokenizer = make_pair_tokenizer(tmp_path, "<s>", ("</s>",), "</s>", ("yes", "no"))
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    config = {"true_token_id": yes, "false_token_id": no if with_no else None, "module_input_name": "causal_logits"}
    general = {"model_type": "CrossEncoder", "activation_fn": IDENTITY}
    write(tmp_path, ("LogitScore", config), task="text-generation", general=general)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        found = [model(torch.tensor([tokenizer(*pair)["input_ids"]])).logits[0, -1] for pair in PAIRS]
    wanted = torch.stack([each[yes] - (each[no] if with_no else 0) for each in found])
    assert (scores(tmp_path) - wanted).abs().max() < 1e-4


FLAT = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}{% if add_generation_prompt %}ok{% endif %}"
PARTS = (
    "{% for m in messages %}<{{ m.role }}> {% for each in m.content %}{{ each.text }}{% endfor %} {% endfor %}"
    "{{ more | default('none') }}"
)


@pytest.mark.parametrize(
    ("template", "how", "variables"),
    [(FLAT, "flat", {"add_generation_prompt": True}), (PARTS, "structured", {"more": "some"}), (FLAT, None, {})],
)
def test_a_chat_template_writes_pairs(
    tmp_path: Path, template: str, how: str | None, variables: dict[str, Any]
) -> None:
    """What it writes at the end stays when a prompt is cut."""
    tiny_models.save("qwen3", tmp_path, tie_word_embeddings=True)
    tokenizer = make_pair_tokenizer(tmp_path, "<s>", ("</s>",), "</s>", ("yes", "no"))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    message = {"method": "forward", "method_output_name": "logits"} | ({"format": how} if how else {})
    settings = {
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}, "message": message},
        "processing_kwargs": {"chat_template": variables | {"restore_suffix": True}},
    }
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    write(
        tmp_path,
        ("LogitScore", {"true_token_id": yes, "false_token_id": no}),
        task="text-generation",
        settings=settings,
        general={"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.activation.Sigmoid"},
        most=60,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()

    def ids(pair: tuple[str, str]) -> list[int]:
        texts = [[{"type": "text", "text": text}] if how == "structured" else text for text in pair]
        chat = [{"role": role, "content": text} for role, text in zip(("query", "document"), texts, strict=True)]
        text = tokenizer.apply_chat_template(chat, tokenize=False, **variables)
        found = tokenizer.encode(text, add_special_tokens=False)
        end = next((each for each in ("ok", " some") if text.endswith(each)), "")
        last = tokenizer.encode(end, add_special_tokens=False)
        return found if len(found) <= 60 else [*found[: 60 - len(last)], *last]

    with torch.inference_mode():
        found = [model(torch.tensor([ids(pair)])).logits[0, -1] for pair in PAIRS]
    wanted = torch.stack([each[yes] - each[no] for each in found]).sigmoid()
    assert (scores(tmp_path) - wanted).abs().max() < 1e-5


def late_folder(folder: Path, mask: dict[str, Any] | None, settings: dict[str, Any], **general: Any) -> Path:
    masks = [] if mask is None else [("MultiVectorMask", mask)]
    names = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    return write(
        bert(folder),
        dense(64, 16, IDENTITY, **names, bias=False),
        *masks,
        ("Normalize", names),
        settings=settings,
        general={"model_type": "MultiVectorEncoder", "similarity_fn_name": None, **general},
    )


@pytest.mark.parametrize(
    ("mask", "settings", "prompts"),
    [
        (None, {}, {"query": "", "document": ""}),
        (
            {"skiplist_words": [",", ".", "!"], "skiplist_tasks": ["document"], "keep_only_token_ids": None},
            {"document_length": 40, "query_expansion": {"strategy": "fixed", "length": 20, "attend": False}},
            {"query": "[unused0]", "document": ""},
        ),
        (
            {"skiplist_words": [",", "."], "skiplist_tasks": ["query", "document"]},
            {
                "query_length": 30,
                "query_expansion": {"strategy": "min", "length": 20, "attend": True, "token": "[unused0]"},
            },
            {"query": "q: ", "document": "d: "},
        ),
        (None, {"query_expansion": {"strategy": "fixed", "length": 20, "attend": False}}, {"query": "q: "}),
    ],
    ids=["plain", "fixed", "at least", "fillers without a mask"],
)
def test_vectors_of_tokens(
    tmp_path: Path, mask: dict[str, Any] | None, settings: dict[str, Any], prompts: dict[str, str]
) -> None:
    folder = late_folder(tmp_path, mask, settings, prompts=prompts)
    (weights,) = save_weights(folder).values()
    tokenizer, model = loaded(folder)
    expansion = settings.get("query_expansion") or {}

    @torch.inference_mode()
    def vectors(text: str, kind: str) -> Tensor:
        fixed = expansion.get("length") if expansion.get("strategy") == "fixed" else settings.get("query_length")
        longest = fixed if kind == "query" else settings.get("document_length")
        how = {"truncation": True, "max_length": longest} if longest else {}
        ids = tokenizer(prompts.get(kind, "") + text, **how)["input_ids"]
        more = max(0, expansion.get("length", 0) - len(ids)) if kind == "query" else 0
        seen = [1] * len(ids) + [int(expansion.get("attend", False))] * more
        kept = torch.tensor([1] * len(ids) + [1 if mask is not None else 0] * more).bool()
        ids += [tokenizer.convert_tokens_to_ids(expansion.get("token") or "[MASK]")] * more
        if mask is not None and kind in mask["skiplist_tasks"]:
            kept &= ~torch.isin(
                torch.tensor(ids), torch.tensor(tokenizer.convert_tokens_to_ids(mask["skiplist_words"]))
            )
        states = model(input_ids=torch.tensor([ids]), attention_mask=torch.tensor([seen]))[0][0]
        return nn.functional.normalize(states[kept] @ weights["linear.weight"].T, dim=-1)

    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        for kind in ("query", "document"):
            params = PoolingParams(prompt_name=kind if kind == "query" else None)
            found = llm.encode(TEXTS, params, pooling_task="token_embed", use_tqdm=False)
            for text, output in zip(TEXTS, found, strict=True):
                wanted = vectors(text, kind)
                assert output.outputs.data.shape == wanted.shape
                assert (output.outputs.data - wanted).abs().max() < 1e-5
        products = vectors(TEXTS[0], "query") @ vectors(TEXTS[3], "document").T
        (scored,) = llm.score(TEXTS[0], TEXTS[3], use_tqdm=False)
        assert scored.outputs.score == pytest.approx(float(products.amax(1).sum()), abs=1e-4)


MESSAGE = {"message": {"method": "forward", "method_output_name": "last_hidden_state", "format": "flat"}}
LOGITS = {"method": "forward", "method_output_name": "logits"}
IMAGE = {"image": {"method": "forward", "method_output_name": None}}
POOLER = {"text": {"method": "forward", "method_output_name": "pooler_output"}}
TOKENS = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
REFUSED: dict[str, tuple[list[tuple[str, dict[str, Any]]], dict[str, Any], str]] = {
    "another output of the model": (
        [MEAN], {"settings": {"modality_config": POOLER, "module_output_name": "sentence_embedding"}}, "pooler_output",
    ),
    "no pooling": ([("Normalize", {})], {}, "none says how a text's vector is made"),
    "images alone": (
        [MEAN], {"settings": {"modality_config": IMAGE}}, "takes image",
    ),
    "a form of messages": (
        [("LogitScore", {"true_token_id": 1})],
        {"task": "text-generation", "settings": {"modality_config": {"message": {"format": "xml", **LOGITS}}}},
        "format 'xml'",
    ),
    "prompts of messages": (
        [("LogitScore", {"true_token_id": 1})],
        {
            "task": "text-generation",
            "settings": {"modality_config": {"message": LOGITS}},
            "general": {"prompts": {"web": "x"}},
        },
        "has prompts, which become messages",
    ),
    "an end that is cut": (
        [("LogitScore", {"true_token_id": 1})],
        {
            "task": "text-generation",
            "settings": {
                "modality_config": {"message": LOGITS},
                "processing_kwargs": {"chat_template": {"restore_suffix": False}},
            },
        },
        "restore_suffix",
    ),
    "a chat template": ([MEAN], {"settings": {"modality_config": MESSAGE}}, "through the chat template"),
    "another task": ([MEAN], {"task": "fill-mask"}, "the transformer_task 'fill-mask'"),
    "an unknown task": ([MEAN], {"settings": {"transformer_task": "retrieval"}}, "the transformer_task 'retrieval'"),
    "no special tokens": (
        [MEAN], {"settings": {"processing_kwargs": {"text": {"add_special_tokens": False}}}},
        "add_special_tokens False",
    ),
    "a stride": ([MEAN], {"settings": {"processing_kwargs": {"common": {"stride": 3}}}}, "'stride'"),
    "lengths of queries": ([MEAN], {"settings": {"query_length": 8}}, "query_length or document_length"),
    "an expansion of one vector": (
        [MEAN], {"settings": {"query_expansion": {"strategy": "fixed", "length": 8}}}, "query_expansion",
    ),
    "an unknown key": ([MEAN], {"settings": {"left_context": 8}}, "the key 'left_context'"),
    "an argument of the config": ([MEAN], {"settings": {"config_args": {"num_hidden_layers": 1}}}, "num_hidden_layers"),
    "a layer of tokens": ([MEAN, dense(64, 8, **TOKENS)], {}, "makes token_embeddings of token_embeddings"),
    "scores of no cross-encoder": ([MEAN, dense(64, 1, module_output_name="scores")], {}, "makes scores of"),
    "a cross-encoder without scores": ([MEAN], {"general": {"model_type": "CrossEncoder"}}, "no Dense at its end"),
    "a Router": ([("Router", {})], {}, "modules.router.Router"),
    "a sparse encoder's largest values": (
        [("SpladePooling", {})], {"task": "fill-mask", "general": {"max_active_dims": 64}}, "max_active_dims 64",
    ),
    "an activation": (
        [], {"task": "sequence-classification", "general": {"activation_fn": "torch.nn.Threshold"}},
        "'torch.nn.Threshold'",
    ),
    "no token for yes": (
        [("LogitScore", {"true_token_id": "yes"})], {"task": "text-generation"}, "true_token_id 'yes'",
    ),
    "joined tokens": (
        [("Normalize", TOKENS), ("HierarchicalTokenPooling", {})], {}, "token_pooling.HierarchicalTokenPooling",
    ),
    "tokens of images": (
        [("MultiVectorMask", {"keep_only_token_ids": [3]})], {"general": {"model_type": "MultiVectorEncoder"}},
        "keep_only_token_ids",
    ),
    "an unknown task of the skiplist": (
        [("MultiVectorMask", {"skiplist_tasks": ["image"]})], {"general": {"model_type": "MultiVectorEncoder"}},
        "skiplist_tasks ['image']",
    ),
    "an unknown expansion": (
        [("Normalize", TOKENS)],
        {"general": {"model_type": "MultiVectorEncoder"}, "settings": {"query_expansion": {"strategy": "most"}}},
        "query_expansion {'strategy': 'most'}",
    ),
    "another comparison of tokens": (
        [("Normalize", TOKENS)], {"general": {"model_type": "MultiVectorEncoder", "similarity_fn_name": "meanmaxsim"}},
        "meanmaxsim",
    ),
    "a layer behind Normalize": (
        [("Normalize", TOKENS), dense(64, 8, **TOKENS)], {"general": {"model_type": "MultiVectorEncoder"}},
        "a layer behind Normalize",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_change_vectors_is_refused_by_name(case: str, tmp_path: Path) -> None:
    modules, how, said = REFUSED[case]
    with pytest.raises(ModelError) as refusal:
        sentence_folder(write(tmp_path, *modules, **how))
    assert said in str(refusal.value)


def test_a_classifier_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = write(bert(tmp_path), task="sequence-classification", general={"model_type": "CrossEncoder"})
    with pytest.raises(ModelError, match=r"BertModel has a classifier \(transformer_task\), and it has none"):
        LLM(str(folder), in_process=True, **ENGINE)


@pytest.mark.parametrize("named", ["MaxSim", "maxsim", "cosine"])
def test_pylates_comparisons_are_taken(named: str, tmp_path: Path) -> None:
    names = {"module_input_name": "token_embeddings"}
    general = {"model_type": "ColBERT", "similarity_fn_name": named, "query_length": 32, "query_prefix": "[Q] "}
    found = sentence_folder(write(tmp_path, dense(64, 8, IDENTITY, **names), general=general))
    assert found is not None
    assert found.late_interaction is not None
    assert (found.late_interaction.query_prefix, found.late_interaction.filled_length) == ("[Q] ", 32)
