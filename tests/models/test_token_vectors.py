"""Vectors of tokens and over the vocabulary, beside transformers: late interaction (ColBERT), SPLADE, bge-m3's three
outputs, and process rewards."""

from __future__ import annotations

import json
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import load_file, save_file
from server_here import serving_here
from test_embed import as_sentence_folder
from thinned import every
from tiny_encoders import make_pair_tokenizer, save_encoder
from torch import Tensor, nn
from torch.nn.functional import normalize

from headrace import LLM, InvalidRequestError, ModelError, OptionError, PoolingParams
from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.models.families import CLASSIFIERS, causal_architecture, has_no_head
from headrace.executor.models.implementations import find_model

ENGINE: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 12, "use_tqdm_on_load": False}
QUERY = "Who wrote Faust?"
DOCUMENTS = ["Goethe wrote Faust . And , more", "The sky is blue !", "a", "word " * 90]
WIDTH, QUERY_LENGTH, DOCUMENT_LENGTH = 24, 32, 60


def tokenizer_of(folder: Path, prefixes: tuple[str, ...] = ()) -> Any:
    """Writes a tokenizer with a mask token, and with prefixes as added tokens."""
    made = make_pair_tokenizer(folder, "[CLS]", ("[SEP]",), "[SEP]", ("[unused0]", "[unused1]"))
    made.add_special_tokens({"mask_token": "[MASK]"})
    made.add_tokens([each for each in prefixes if each])
    made.save_pretrained(folder)
    return made


def pylate_folder(name: str, folder: Path, **settings: Any) -> Path:
    """A folder as pylate saves it."""
    save_encoder(name, folder, **({"local_attention": 80} if name == "modernbert" else {}))
    written = {
        "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": QUERY_LENGTH,
        "document_length": DOCUMENT_LENGTH, "attend_to_expansion_tokens": False,
        "skiplist_words": list(string.punctuation), "do_query_expansion": True, **settings,
    }  # fmt: skip
    tokenizer_of(folder, (written["query_prefix"], written["document_prefix"]))
    kinds = (("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense"))
    modules = [{"idx": n, "name": str(n), "path": path, "type": kind} for n, (path, kind) in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {}, **written}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 31, "do_lower_case": False}))
    (folder / "1_Dense").mkdir()
    dense = {"in_features": 64, "out_features": WIDTH, "bias": False, "use_residual": False}
    kind = "torch.nn.modules.linear.Identity"
    (folder / "1_Dense" / "config.json").write_text(json.dumps({**dense, "activation_function": kind}))
    weight = torch.randn(WIDTH, 64, generator=torch.Generator().manual_seed(1))
    save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors")
    return folder


class Colbert:
    """What pylate's class computes: the marker behind [CLS], queries filled up with [MASK], punctuation of documents
    left out, vectors of length 1."""

    def __init__(self, folder: Path, weight: Tensor, settings: dict[str, Any]) -> None:
        self.tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        kind = json.loads((folder / "config.json").read_text())["architectures"][0].replace("HF_ColBERT", "BertModel")
        self.model = getattr(transformers, kind).from_pretrained(folder, attn_implementation="eager").eval()
        self.weight, self.settings = weight, settings

    def vectors(self, text: str, *, is_query: bool) -> Tensor:
        kind = "query" if is_query else "document"
        prefix, length = self.settings[f"{kind}_prefix"], self.settings[f"{kind}_length"]
        ids = self.tokenizer(text, truncation=True, max_length=length - bool(prefix))["input_ids"]
        if prefix:
            ids = [ids[0], self.tokenizer.convert_tokens_to_ids(prefix), *ids[1:]]
        seen, kept = [1] * len(ids), [True] * len(ids)
        if is_query and self.settings["do_query_expansion"]:
            more = length - len(ids)
            ids += [self.tokenizer.mask_token_id] * more
            seen += [int(self.settings["attend_to_expansion_tokens"])] * more
            kept += [True] * more
        elif not is_query:
            skipped = set(self.tokenizer.convert_tokens_to_ids(self.settings["skiplist_words"]))
            skipped.discard(self.tokenizer.unk_token_id)
            kept = [each not in skipped for each in ids]
        with torch.inference_mode():
            found = self.model(input_ids=torch.tensor([ids]), attention_mask=torch.tensor([seen])).last_hidden_state[0]
        return normalize(found[torch.tensor(kept)] @ self.weight.T, dim=-1)

    def score(self, query: str, document: str) -> float:
        products = self.vectors(query, is_query=True) @ self.vectors(document, is_query=False).T
        return float(products.amax(1).sum())


SETTINGS: dict[str, Any] = {
    "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": QUERY_LENGTH,
    "document_length": DOCUMENT_LENGTH, "attend_to_expansion_tokens": False,
    "skiplist_words": list(string.punctuation), "do_query_expansion": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changed"),
    every(
        2,
        [
            ("bert", {}),
            ("modernbert", {}),
            ("distilbert", {"attend_to_expansion_tokens": True}),
            ("bert", {"do_query_expansion": False, "skiplist_words": []}),
            ("bert", {"query_prefix": "", "document_prefix": ""}),
        ],
    ),
)
def test_late_interaction_is_pylates(tmp_path: Path, name: str, changed: dict[str, Any]) -> None:
    folder = pylate_folder(name, tmp_path, **changed)
    weight = load_file(folder / "1_Dense" / "model.safetensors")["linear.weight"]
    reference = Colbert(folder, weight, SETTINGS | changed)
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        assert llm.supported_tasks == ("token_embed",)
        params = PoolingParams(prompt_name="query")
        (query,) = llm.encode([QUERY], params, pooling_task="token_embed", use_tqdm=False)
        wanted = reference.vectors(QUERY, is_query=True)
        assert query.outputs.data.shape == wanted.shape
        assert (query.outputs.data - wanted).abs().max() < 1e-5
        found = llm.encode(DOCUMENTS, pooling_task="token_embed", use_tqdm=False)
        for document, output in zip(DOCUMENTS, found, strict=True):
            wanted = reference.vectors(document, is_query=False)
            assert output.outputs.data.shape == wanted.shape
            assert (output.outputs.data - wanted).abs().max() < 1e-5
        scores = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
        assert scores == pytest.approx([reference.score(QUERY, each) for each in DOCUMENTS], abs=1e-4)
        alone = [llm.score(QUERY, each, use_tqdm=False)[0].outputs.score for each in DOCUMENTS]
        assert alone == scores
        queries = [QUERY, DOCUMENTS[2]]
        several = llm.score(queries, DOCUMENTS[:2], use_tqdm=False)
        wanted_scores = [reference.score(*pair) for pair in zip(queries, DOCUMENTS[:2], strict=True)]
        assert [each.outputs.score for each in several] == pytest.approx(wanted_scores, abs=1e-4)


@pytest.mark.parametrize("said", [{}, {"colbert_dim": WIDTH}, {"projection_dim": WIDTH}])
def test_colberts_own_folder_may_have_no_metadata(tmp_path: Path, said: dict[str, int]) -> None:
    save_encoder("bert", tmp_path)
    tokenizer_of(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **said, "architectures": ["HF_ColBERT"]}))
    weights = {f"bert.{name}": value for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file({**weights, "linear.weight": torch.ones(WIDTH, 64)}, tmp_path / "model.safetensors")
    with LLM(str(tmp_path), in_process=True, **ENGINE) as llm:
        (output,) = llm.encode(["a b"], pooling_task="token_embed", use_tqdm=False)
        assert output.outputs.data.shape[-1] == WIDTH


def test_colberts_own_folder_and_its_routes(tmp_path: Path) -> None:
    """A BERT with one layer more in its checkpoint, and metadata of how texts are written."""
    save_encoder("bert", tmp_path)
    tokenizer_of(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    weight = torch.randn(WIDTH, 64, generator=torch.Generator().manual_seed(1))
    weights = {f"bert.{name}": value for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file({**weights, "linear.weight": weight}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    metadata = {
        "query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": QUERY_LENGTH,
        "doc_maxlen": DOCUMENT_LENGTH, "dim": WIDTH, "mask_punctuation": True, "attend_to_mask_tokens": False,
    }  # fmt: skip
    (tmp_path / "artifact.metadata").write_text(json.dumps(metadata))
    reference = Colbert(tmp_path, weight, SETTINGS | {"query_prefix": "[unused0]", "document_prefix": "[unused1]"})
    wanted = [reference.score(QUERY, each) for each in DOCUMENTS]
    with serving_here(folder=tmp_path, dtype="float32") as server, server.client() as client:
        scores = client.post("/score", json={"queries": QUERY, "documents": DOCUMENTS}).json()["data"]
        assert [each["score"] for each in scores] == pytest.approx(wanted, abs=1e-4)
        results = client.post("/rerank", json={"query": QUERY, "documents": DOCUMENTS, "top_n": 2}).json()["results"]
        best = sorted(range(len(DOCUMENTS)), key=lambda index: -wanted[index])[:2]
        assert [each["index"] for each in results] == best
        texts = client.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS}).json()
        assert [each["index"] for each in texts][:2] == best
        (vectors,) = client.post("/embed_all", json={"inputs": DOCUMENTS[0]}).json()
        assert (torch.tensor(vectors) - reference.vectors(DOCUMENTS[0], is_query=False)).abs().max() < 1e-5
        pooled = client.post("/pooling", json={"input": QUERY, "input_type": "search_query"}).json()["data"][0]["data"]
        assert (torch.tensor(pooled) - reference.vectors(QUERY, is_query=True)).abs().max() < 1e-5
        refused = client.post("/score", json={"queries": QUERY, "documents": [""]})
        assert refused.status_code == 200, "it has its markers"


def test_a_token_whose_window_has_nothing_that_is_seen_gets_numbers(tmp_path: Path) -> None:
    """Of a query that is filled up beyond the window of ModernBERT's local layers."""
    folder = pylate_folder("modernbert", tmp_path, query_length=200)
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        params = PoolingParams(prompt_name="query")
        (query,) = llm.encode(["a"], params, pooling_task="token_embed", use_tqdm=False)
        assert query.outputs.data.shape == (200, WIDTH)
        assert bool(query.outputs.data.isfinite().all())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"query_length": "x"}, "query_length 'x', which is no int"),
        ({"do_query_expansion": "yes"}, "do_query_expansion 'yes', which is no bool"),
        ({"query_length": 1 << 30}, "fill queries up to 1073741824 tokens, and the model takes at most"),
    ],
)
def test_settings_that_cannot_be_followed_are_named(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    pylate_folder("bert", tmp_path, **changed)
    with pytest.raises(ModelError, match=said):
        LLM(str(tmp_path), in_process=True, **ENGINE)


def test_a_marker_that_the_tokenizer_lacks_is_named(tmp_path: Path) -> None:
    pylate_folder("bert", tmp_path)
    general = json.loads((tmp_path / "config_sentence_transformers.json").read_text())
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({**general, "query_prefix": "[X] "}))
    with (
        LLM(str(tmp_path), in_process=True, **ENGINE) as llm,
        pytest.raises(InvalidRequestError, match=r"the tokenizer has no token '\[X\] '"),
    ):
        llm.score(QUERY, DOCUMENTS, use_tqdm=False)


# --- SPLADE -----------------------------------------------------------------------------------------------------------


def splade_folder(name: str, folder: Path, **pooling: Any) -> Path:
    save_encoder(name, folder, "ForMaskedLM")
    make_pair_tokenizer(folder, "[CLS]", ("[SEP]",), "[SEP]")
    package = "sentence_transformers.sparse_encoder.models"
    kinds = (("", f"{package}.MLMTransformer"), ("1_SpladePooling", f"{package}.SpladePooling"))
    modules = [{"idx": n, "name": str(n), "path": path, "type": kind} for n, (path, kind) in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_SpladePooling").mkdir(exist_ok=True)
    config = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": None, **pooling}
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps(config))
    return folder


def splade(folder: Path, text: str, *, twice: bool = False) -> Tensor:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits[0]
    found = torch.log1p(logits.relu())
    return (torch.log1p(found) if twice else found).amax(0)


@pytest.mark.parametrize(
    ("name", "pooling"),
    every(2, [("bert", {}), ("distilbert", {}), ("roberta", {}), ("mpnet", {}), ("modernbert", {}),
     ("bert", {"activation_function": "log1p_relu"})]),
)  # fmt: skip
def test_splades_vectors_are_those_of_transformers(tmp_path: Path, name: str, pooling: dict[str, Any]) -> None:
    folder, texts = splade_folder(name, tmp_path, **pooling), [QUERY, DOCUMENTS[0], "word " * 40]
    wanted = torch.stack([splade(folder, text, twice=bool(pooling)) for text in texts])
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        assert llm.supported_tasks == ("embed", "embed_sparse")
        found = torch.tensor([each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)])
        assert (found - wanted).abs().max() < 1e-4
        sparse = llm.encode(texts, pooling_task="embed_sparse", use_tqdm=False)
        for dense, output in zip(found, sparse, strict=True):
            pairs = output.outputs.data
            assert pairs[:, 0].long().tolist() == dense.nonzero()[:, 0].tolist()
            assert torch.equal(pairs[:, 1], dense[dense > 0])
        alone = [llm.encode([text], pooling_task="embed_sparse", use_tqdm=False)[0].outputs.data for text in texts]
        assert all(torch.equal(one, each.outputs.data) for one, each in zip(alone, sparse, strict=True))
        products = [each.outputs.score for each in llm.score(texts[0], texts[1:], use_tqdm=False)]
        assert products == pytest.approx([float(wanted[0] @ each) for each in wanted[1:]], rel=1e-4)


def test_sparse_vectors_over_http(tmp_path: Path) -> None:
    folder = splade_folder("bert", tmp_path)
    dense = splade(folder, QUERY)
    with serving_here(folder=folder, dtype="float32") as server, server.client() as client:
        (pairs,) = client.post("/embed_sparse", json={"inputs": QUERY}).json()
        assert [each["index"] for each in pairs] == dense.nonzero()[:, 0].tolist()
        assert [each["value"] for each in pairs] == pytest.approx(dense[dense > 0].tolist(), abs=1e-4)
        pooled = client.post("/pooling", json={"input": [QUERY], "task": "embed_sparse"}).json()["data"][0]["data"]
        assert pooled == pairs


@pytest.mark.parametrize(
    ("pooling", "said"),
    [
        ({"pooling_strategy": "sum"}, "pooling_strategy 'sum', which is not computed here; known: max"),
        ({"activation_function": "gelu"}, "activation_function 'gelu'; known: relu, log1p_relu"),
    ],
)
def test_other_splade_poolings_are_refused_by_name(tmp_path: Path, pooling: dict[str, Any], said: str) -> None:
    splade_folder("bert", tmp_path, **pooling)
    with pytest.raises(ModelError, match=said):
        LLM(str(tmp_path), in_process=True, **ENGINE)


# --- bge-m3 -----------------------------------------------------------------------------------------------------------


def test_bge_m3_has_three_outputs_of_one_call(tmp_path: Path) -> None:
    save_encoder("xlm_roberta", tmp_path, bos_token_id=0, eos_token_id=2)
    make_pair_tokenizer(tmp_path, "<s>", ("</s>", "</s>"), "</s>")
    as_sentence_folder(tmp_path, {"word_embedding_dimension": 64, "pooling_mode_cls_token": True})
    generator = torch.Generator().manual_seed(2)
    colbert, sparse = (
        {"weight": torch.randn(rows, 64, generator=generator), "bias": torch.randn(rows, generator=generator)}
        for rows in (64, 1)
    )
    torch.save(colbert, tmp_path / "colbert_linear.pt")
    torch.save(sparse, tmp_path / "sparse_linear.pt")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    model = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with LLM(str(tmp_path), in_process=True, **ENGINE) as llm:
        task = "embed&embed_sparse&token_embed"
        outputs = llm.encode(DOCUMENTS[:3], pooling_task=task, use_tqdm=False)
        for text, output in zip(DOCUMENTS[:3], outputs, strict=True):
            ids = tokenizer(text)["input_ids"]
            with torch.inference_mode():
                states = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
            found = output.outputs.data
            assert (found["embed"] - normalize(states[0], dim=0)).abs().max() < 1e-5
            vectors = normalize(states[1:] @ colbert["weight"].T + colbert["bias"], dim=-1)
            assert (found["token_embed"] - vectors).abs().max() < 1e-5
            weights: dict[int, float] = {}
            for token, weight in zip(
                ids, (states @ sparse["weight"].T + sparse["bias"]).relu()[:, 0].tolist(), strict=True
            ):
                if token not in (0, 1, 2, 3) and weight > 0:
                    weights[token] = max(weight, weights.get(token, 0.0))
            assert found["embed_sparse"][:, 0].long().tolist() == sorted(weights)
            assert found["embed_sparse"][:, 1].tolist() == pytest.approx(
                [weights[t] for t in sorted(weights)], abs=1e-5
            )
        for kind in task.split("&"):
            each = llm.encode(DOCUMENTS[:3], pooling_task=kind, use_tqdm=False)
            assert all(torch.equal(a.outputs.data, b.outputs.data[kind]) for a, b in zip(each, outputs, strict=True))
        with pytest.raises(InvalidRequestError, match="embed&nonsense"):
            llm.encode(DOCUMENTS, pooling_task="embed&nonsense", use_tqdm=False)
        params = PoolingParams(returned_token_ids=[0, 1])
        with pytest.raises(InvalidRequestError, match="returned_token_ids has 1; each token has 1 values, 0 to 0"):
            llm.encode(DOCUMENTS[:1], params, pooling_task="token_classify", use_tqdm=False)
        params = PoolingParams(returned_token_ids=[0])
        (weighed,) = llm.encode(DOCUMENTS[:1], params, pooling_task="token_classify", use_tqdm=False)
        assert weighed.outputs.data.shape == (len(weighed.prompt_token_ids) - 2,)
    pooler = {"task": "token_classify"}
    with LLM(str(tmp_path), in_process=True, pooler_config=pooler, **ENGINE) as llm:
        (alone,) = llm.encode(DOCUMENTS[:1], use_tqdm=False)
        assert torch.equal(alone.outputs.data, weighed.outputs.data)
        (unknown,) = llm.encode([{"prompt_token_ids": [0, 7, 1, 8, 2]}], use_tqdm=False)
        assert len(unknown.outputs.data) == 3, "of all tokens between the first and the last, as vLLM's"
    with serving_here(folder=tmp_path, dtype="float32") as server, server.client() as client:
        (item,) = client.post("/pooling", json={"input": DOCUMENTS[0], "task": task}).json()["data"]
        assert list(item["data"]) == task.split("&")
        assert item["data"]["embed"] == outputs[0].outputs.data["embed"].tolist()
        (pairs,) = client.post("/embed_sparse", json={"inputs": DOCUMENTS[0]}).json()
        assert pairs == item["data"]["embed_sparse"]


# --- process rewards --------------------------------------------------------------------------------------------------


def test_process_rewards_are_of_the_tokens_that_end_steps(tmp_path: Path) -> None:
    plain = tiny_models.build("qwen2")
    config = plain.config.__class__(**{**plain.config.to_dict(), "num_labels": 3})
    model = transformers.Qwen2ForTokenClassification(config).eval()
    model.save_pretrained(tmp_path)
    prompt, step = [5, 6, 9, 7, 8, 9, 9, 4], 9
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt])).logits[0]
    given: dict[str, Any] = {"skip_tokenizer_init": True, **ENGINE}
    with LLM(str(tmp_path), in_process=True, **given) as llm:
        params = PoolingParams(step_tag_id=step, use_activation=False)
        (output,) = llm.encode([prompt], params, pooling_task="token_classify", use_tqdm=False)
        assert (output.outputs.data - logits[[2, 5, 6]]).abs().max() < 1e-4
        params = PoolingParams(step_tag_id=step, returned_token_ids=[2, 0])
        (output,) = llm.encode([prompt], params, pooling_task="token_classify", use_tqdm=False)
        assert (output.outputs.data - logits[[2, 5, 6]][:, [2, 0]].softmax(-1)).abs().max() < 1e-5
        with pytest.raises(InvalidRequestError, match="returned_token_ids has 3; each token has 3 values, 0 to 2"):
            llm.encode([prompt], PoolingParams(returned_token_ids=[3]), pooling_task="token_classify", use_tqdm=False)
    pooler = {"tok_pooling_type": "STEP", "step_tag_id": step, "returned_token_ids": [1]}
    with LLM(str(tmp_path), in_process=True, pooler_config=pooler, **given) as llm:
        (output,) = llm.reward([prompt], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
        assert (output.outputs.data - logits[[2, 5, 6]][:, [1]]).abs().max() < 1e-4
    with pytest.raises(OptionError, match="this classifier has 3 of each token"):
        LLM(str(tmp_path), in_process=True, pooler_config={**pooler, "returned_token_ids": [7]}, **given)


def test_a_classifier_of_texts_may_be_computed_of_each_token(tmp_path: Path) -> None:
    config = tiny_models.build("qwen2").config
    model = transformers.Qwen2ForSequenceClassification(
        config.__class__(**{**config.to_dict(), "num_labels": 3})
    ).eval()
    model.save_pretrained(tmp_path)
    prompt = [5, 6, 9, 7, 8]
    with torch.inference_mode():
        wanted = model.score(model.model(input_ids=torch.tensor([prompt])).last_hidden_state)[0]
    given: dict[str, Any] = {"in_process": True, "skip_tokenizer_init": True, **ENGINE}
    with LLM(str(tmp_path), pooler_config={"task": "token_classify"}, **given) as llm:
        (output,) = llm.encode([prompt], PoolingParams(use_activation=False), use_tqdm=False)
        assert (output.outputs.data - wanted).abs().max() < 1e-4
        (output,) = llm.encode([prompt], pooling_task="token_classify", use_tqdm=False)
        assert (output.outputs.data - wanted.softmax(-1)).abs().max() < 1e-5
        with pytest.raises(InvalidRequestError, match="Unsupported task: 'classify'"):
            llm.classify([prompt], use_tqdm=False)


@pytest.mark.parametrize(("end", "labels"), [("ForRewardModel", 1), ("ForProcessRewardModel", 2)])
def test_reward_models_have_a_head_of_two_layers(tmp_path: Path, end: str, labels: int) -> None:
    """As Qwen2.5-Math-RM and -PRM are published."""
    model = tiny_models.build("qwen2").eval()
    width, prompt = model.config.hidden_size, [5, 6, 9, 7, 8]
    torch.manual_seed(3)
    head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, labels)).eval()
    weights = {f"score.{name}": value for name, value in head.state_dict().items()}
    weights |= {name: value for name, value in model.state_dict().items() if not name.startswith("lm_head")}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {**model.config.to_dict(), "architectures": [f"Qwen2{end}"], "num_labels": labels}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.inference_mode():
        wanted = head(model.model(input_ids=torch.tensor([prompt])).last_hidden_state)[0]
    with LLM(str(tmp_path), in_process=True, skip_tokenizer_init=True, **ENGINE) as llm:
        (output,) = llm.reward([prompt], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
        assert (output.outputs.data - wanted).abs().max() < 1e-4
        (output,) = llm.reward([prompt], use_tqdm=False)
        wanted = wanted.softmax(-1) if labels > 1 else wanted.sigmoid()
        assert (output.outputs.data - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("end", [*CLASSIFIERS, "Model"])
def test_every_kind_of_head_is_of_the_model_that_generates(end: str) -> None:
    config = {"architectures": [f"InternLM2{end}"]}
    assert causal_architecture(config) == "InternLM2ForCausalLM"
    assert has_no_head(config)
    assert causal_architecture({"architectures": ["ColBERTLfm2Model"]}) == "Lfm2ForCausalLM"


@pytest.mark.parametrize(
    ("base", "end", "name"),
    [
        ("bert", "ForMaskedLM", "BertSpladeSparseEmbeddingModel"),
        ("xlm_roberta", "Model", "BgeM3EmbeddingModel"),
        ("xlm_roberta", "Model", "ColBERTJinaRobertaModel"),
        ("modernbert", "Model", "ColBERTModernBertModel"),
    ],
)
def test_names_that_vllm_has_users_give_in_hf_overrides(tmp_path: Path, base: str, end: str, name: str) -> None:
    options = Options(model=str(save_encoder(base, tmp_path, end)))
    plain = find_model(open_checkpoint(options), options)
    named = msgspec.structs.replace(options, hf_overrides={"architectures": [name]})
    found = find_model(open_checkpoint(named), named)
    assert replace(found.spec, architecture=plain.spec.architecture) == plain.spec
    assert found.tasks.pooling is not None
    assert ("embed_sparse" in found.tasks.pooling.kinds) == name.startswith("BertSplade")
