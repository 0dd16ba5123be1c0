"""Scores and classes of texts, beside transformers: pairs with token types, two separators, truncation, yes or no."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_models
import torch
import transformers
from server_here import serving_here
from test_embed import as_sentence_folder
from tiny_encoders import make_pair_tokenizer, save_encoder

from headrace import LLM, InvalidRequestError, ModelError, OptionError, PoolingParams
from headrace.frontend.http.options import ServeOptions

ENGINE: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 12, "use_tqdm_on_load": False}
QUERY = "Who wrote Faust?"
DOCUMENTS = ["Goethe wrote Faust.", "The sky is blue", "a", "word " * 30]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_encoder("bert", tmp_path_factory.mktemp("bert"), "ForSequenceClassification", num_labels=1)
    make_pair_tokenizer(folder, "[CLS]", ("[SEP]",), "[SEP]")
    return folder


@pytest.fixture(scope="module")
def xlm_roberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_encoder("xlm_roberta", tmp_path_factory.mktemp("xlmr"), "ForSequenceClassification", num_labels=1)
    make_pair_tokenizer(folder, "<s>", ("</s>", "</s>"), "</s>")
    return folder


def expected(folder: Path, pairs: list[tuple[str, str]], **how: Any) -> list[float]:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for pair in pairs:
        encoded = tokenizer(*pair, return_tensors="pt", **how)
        with torch.inference_mode():
            found.append(float(model(**encoded).logits.sigmoid()))
    return found


@pytest.fixture(scope="module")
def electra(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_encoder("electra", tmp_path_factory.mktemp("electra"), "ForSequenceClassification", num_labels=1)
    make_pair_tokenizer(folder, "[CLS]", ("[SEP]",), "[SEP]")
    return folder


@pytest.mark.parametrize("name", ["bert", "xlm_roberta", "electra"])
def test_a_cross_encoder_scores_pairs_as_its_tokenizer_joins_them(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        found = [output.outputs.score for output in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
        assert found == pytest.approx(expected(folder, [(QUERY, each) for each in DOCUMENTS]), abs=1e-5)
        assert [llm.score(QUERY, each, use_tqdm=False)[0].outputs.score for each in DOCUMENTS] == found, "alone"
        cut = llm.score(QUERY, DOCUMENTS, truncate_prompt_tokens=40, use_tqdm=False)
        wanted = expected(folder, [(QUERY, each) for each in DOCUMENTS], truncation=True, max_length=40)
        assert [output.outputs.score for output in cut] == pytest.approx(wanted, abs=1e-5)
        assert max(len(output.prompt_token_ids) for output in cut) == 40
        with pytest.raises(InvalidRequestError, match="either 1:1, 1:N or N:N; data_1 has 2 texts and data_2 4"):
            llm.score(["a", "b"], DOCUMENTS, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match=r"data_2 must be a text or a list of at least one, not \[\]"):
            llm.score("a", [], use_tqdm=False)


@pytest.mark.parametrize("said", [{"model_input_names": ["input_ids", "attention_mask"]}, {}])
def test_a_tokenizer_may_not_tell_two_texts_apart(bert: Path, tmp_path: Path, said: dict[str, Any]) -> None:
    """By its settings, or as the general class of tokenizers."""
    folder = Path(shutil.copytree(bert, tmp_path / "bert"))
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["model_input_names"]
    file.write_text(json.dumps(settings | said))
    wanted = expected(folder, [(QUERY, each) for each in DOCUMENTS])
    assert wanted != pytest.approx(expected(bert, [(QUERY, each) for each in DOCUMENTS]), abs=1e-3)
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        found = [output.outputs.score for output in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
        assert found == pytest.approx(wanted, abs=1e-5)


def test_a_pairs_texts_may_be_shortened(bert: Path) -> None:
    with LLM(str(bert), in_process=True, **ENGINE) as llm:
        cuts = PoolingParams(extra_kwargs={"max_tokens_per_query": 3, "max_tokens_per_doc": 5})
        (whole,), (cut,) = (
            llm.score(QUERY, DOCUMENTS[0], pooling_params=params, use_tqdm=False) for params in (None, cuts)
        )
        assert len(cut.prompt_token_ids) == 3 + 3 + 5
        assert cut.prompt_token_ids[1:4] == whole.prompt_token_ids[1:4]
        with pytest.raises(InvalidRequestError, match=r"are of LLM\.score"):
            llm.classify(QUERY, pooling_params=cuts, use_tqdm=False)
    for given, said in (({"max_tokens_per_doc": -1}, "max_tokens_per_doc must be a non-negative"), ({"x": 1}, "takes")):
        with pytest.raises(InvalidRequestError, match=said):
            PoolingParams(extra_kwargs=given)


def test_a_copy_with_a_classifier_has_no_template_of_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-Reranker-0.6B-seq-cls"
    config = tiny_models.build("qwen3").config.__class__(
        **{**tiny_models.build("qwen3").config.to_dict(), "num_labels": 1}
    )
    transformers.Qwen3ForSequenceClassification(config).eval().save_pretrained(folder)
    make_pair_tokenizer(folder, "<s>", ("</s>", "</s>"), "</s>")
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        (output,) = llm.score(QUERY, DOCUMENTS[0], use_tqdm=False)
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        assert output.prompt_token_ids == tokenizer(QUERY, DOCUMENTS[0]).input_ids


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["bert", "xlm_roberta"])
def test_an_encoders_tokenizer_says_how_long_texts_are(
    name: str, side: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Of folders without sentence-transformers' files too, as its CrossEncoder reads them."""
    folder = Path(shutil.copytree(request.getfixturevalue(name), tmp_path / name))
    file = folder / "tokenizer_config.json"
    given = {"model_max_length": 24, "truncation_side": side}
    file.write_text(json.dumps(json.loads(file.read_text()) | given))
    wanted = expected(folder, [(QUERY, each) for each in DOCUMENTS], truncation=True)
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        found = llm.score(QUERY, DOCUMENTS, truncate_prompt_tokens=-1, use_tqdm=False)
        assert [output.outputs.score for output in found] == pytest.approx(wanted, abs=1e-5)
        with pytest.raises(InvalidRequestError, match="24"):
            llm.score(QUERY, DOCUMENTS[3], use_tqdm=False)


def test_embeddings_are_compared_where_there_is_no_classifier(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    make_pair_tokenizer(tmp_path, "[CLS]", ("[SEP]",), "[SEP]")
    as_sentence_folder(tmp_path, {"word_embedding_dimension": 64, "pooling_mode": "mean"})
    prompts = {"prompts": {"query": "ask: "}, "default_prompt_name": "query", "similarity_fn_name": "dot"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with LLM(str(tmp_path), in_process=True, **ENGINE) as llm:
        one, *others = (torch.tensor(each.outputs.embedding) for each in llm.embed([QUERY, *DOCUMENTS], use_tqdm=False))
        (plain,) = llm.embed([{"prompt_token_ids": llm.get_tokenizer().encode(f"ask: {QUERY}")}], use_tqdm=False)
        assert torch.equal(torch.tensor(plain.outputs.embedding), one), "behind the default prompt"
        found = [output.outputs.score for output in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
        assert found == pytest.approx([float(one @ each) for each in others], abs=1e-6)


def test_a_reranker_that_answers_yes_or_no_is_known_by_its_name(tmp_path: Path) -> None:
    folder = tiny_models.save("qwen3", tmp_path / "Qwen3-Reranker-tiny", tie_word_embeddings=True)
    words = ("yes", "no", "<|im_start|>", "<|im_end|>")
    tokenizer = make_pair_tokenizer(folder, "<s>", ("</s>",), "</s>", words)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    begin = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    end = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    task = "Given a web search query, retrieve relevant passages that answer the query"
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    wanted = []
    for document in DOCUMENTS[:3]:
        texts = (begin, f"<Instruct>: {task}\n<Query>: {QUERY}\n<Document>: {document}", end)
        ids = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        wanted.append(float(logits[[no, yes]].softmax(0)[1]))
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        outputs = llm.score(QUERY, DOCUMENTS[:3], use_tqdm=False)
        assert [output.outputs.score for output in outputs] == pytest.approx(wanted, abs=1e-5)
        assert outputs[-1].num_cached_tokens > 0, "documents of a query share its tokens"
        query = f"{begin}<Instruct>: {task}\n<Query>: {QUERY}\n"
        written = llm.score(query, [f"<Document>: {each}{end}" for each in DOCUMENTS[:3]], use_tqdm=False)
        assert [each.outputs.score for each in written] == [each.outputs.score for each in outputs]
        (cut,) = llm.score(query, f"<Document>: {'word ' * 900}{end}", use_tqdm=False, truncate_prompt_tokens=200)
        closing = tokenizer.encode(end, add_special_tokens=False)
        assert cut.prompt_token_ids[-len(closing) :] == closing
        assert len(cut.prompt_token_ids) == 200


@pytest.mark.parametrize("instruction", [None, "be strict"])
def test_mxbais_reranker_is_known_by_its_name(instruction: str | None, tmp_path: Path) -> None:
    folder = tiny_models.save("qwen2", tmp_path / "mxbai-rerank-base-v2", tie_word_embeddings=True)
    tokenizer = make_pair_tokenizer(folder, "<s>", ("</s>",), "</s>", ("<|im_start|>", "<|im_end|>"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    begin = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    asked = f"instruction: {instruction}\nquery: {QUERY}" if instruction else f"query: {QUERY}"
    task = (
        "You are a search relevance expert who evaluates how well documents match search queries. For each "
        "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
        "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:"
    )
    yes, no = tokenizer.convert_tokens_to_ids(["1", "0"])
    wanted = []
    for document in DOCUMENTS[:3]:
        texts = (f"{begin}<|im_start|>user\n", asked, "\n", f"document: {document}", "\n", task)
        ends = (*texts, "<|im_end|>\n<|im_start|>assistant\n")
        ids = [token for text in ends for token in tokenizer.encode(text, add_special_tokens=False)]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        wanted.append(float((logits[yes] - logits[no]).sigmoid()))
    with serving_here(folder=folder, dtype="float32", max_num_seqs=8) as server, server.client() as client:
        body = {"queries": QUERY, "documents": DOCUMENTS[:3], "instruction": instruction}
        found = client.post("/score", json=body).json()["data"]
    assert [each["score"] for each in found] == pytest.approx(wanted, abs=1e-5)


TEMPLATE = (
    "{%- set q = messages | selectattr('role', 'eq', 'query') | first %}"
    "{%- set d = messages | selectattr('role', 'eq', 'document') | first %}"
    "{{ instruction | default('none') }} <Q> {{ q.content }} <D> {{ d.content }}"
)


def of_texts(folder: Path, texts: list[str], **how: Any) -> list[float]:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        found = [model(**tokenizer(text, return_tensors="pt", **how)) for text in texts]
    return [float(each.logits.sigmoid()) for each in found]


def test_a_template_writes_pairs(bert: Path, tmp_path: Path) -> None:
    """As vLLM's: of messages of the roles query and document, in LLM.score and as an option of the server."""
    texts = [f"none <Q> {QUERY} <D> {each}" for each in DOCUMENTS]
    with LLM(str(bert), in_process=True, **ENGINE) as llm:
        found = llm.score(QUERY, DOCUMENTS, chat_template=TEMPLATE, use_tqdm=False)
        assert [each.outputs.score for each in found] == pytest.approx(of_texts(bert, texts), abs=1e-5)
        cut = llm.score(QUERY, DOCUMENTS, chat_template=TEMPLATE, use_tqdm=False, truncate_prompt_tokens=30)
        wanted = of_texts(bert, texts, truncation=True, max_length=30)
        assert [each.outputs.score for each in cut] == pytest.approx(wanted, abs=1e-5)
        assert [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, chat_template=None, use_tqdm=False)] == (
            pytest.approx(expected(bert, [(QUERY, each) for each in DOCUMENTS]), abs=1e-5)
        )
        with pytest.raises(InvalidRequestError, match="no such role"):
            llm.score("a", "b", chat_template="{{ raise_exception('no such role') }}", use_tqdm=False)
    (tmp_path / "pairs.jinja").write_text(TEMPLATE)
    options = ServeOptions(port=0, chat_template=str(tmp_path / "pairs.jinja"))
    with serving_here(options, folder=bert, dtype="float32") as server, server.client() as client:
        body = {"queries": QUERY, "documents": DOCUMENTS}
        scores = client.post("/score", json=body).json()["data"]
        assert [each["score"] for each in scores] == pytest.approx(of_texts(bert, texts), abs=1e-5)
        for more in ({"instruction": "some"}, {"chat_template_kwargs": {"instruction": "some"}}):
            scores = client.post("/score", json=body | more).json()["data"]
            wanted = of_texts(bert, [text.replace("none", "some") for text in texts])
            assert [each["score"] for each in scores] == pytest.approx(wanted, abs=1e-5)
        refused = client.post("/score", json=body | {"chat_template_kwargs": {"tools": []}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize("config", [{"logit_mean": 0.7}, {"logit_mean": -0.3, "logit_sigma": 2.5}, {"logit_sigma": 4}])
def test_logits_are_calibrated_before_their_activation(bert: Path, config: dict[str, float]) -> None:
    given = expected(bert, [(QUERY, each) for each in DOCUMENTS])
    logits = torch.tensor(given, dtype=torch.float64).logit()
    wanted = (logits - config.get("logit_mean", 0)) / config.get("logit_sigma", 1)
    with LLM(str(bert), in_process=True, pooler_config=config, **ENGINE) as llm:
        found = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
        assert found == pytest.approx(wanted.sigmoid().tolist(), abs=1e-5)
        plain = llm.score(QUERY, DOCUMENTS, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
        assert [each.outputs.score for each in plain] == pytest.approx(wanted.tolist(), abs=1e-4)


@pytest.mark.parametrize("config", [{"logit_sigma": 0}, {"logit_mean": float("nan")}, {"logit_sigma": float("inf")}])
def test_a_calibration_that_is_none_is_named(bert: Path, config: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(config))} is"):
        LLM(str(bert), in_process=True, pooler_config=config, **ENGINE)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"sentence_transformers": {"activation_fn": 5}}, "the activation of scores is 5; known: Identity"),
        ({"sentence_transformers": ["Identity"]}, r"sentence_transformers is \['Identity'\]; an object is expected"),
        ({"sbert_ce_default_activation_function": ["Tanh"]}, r"the activation of scores is \['Tanh'\]; known"),
    ],
)
def test_an_activation_that_is_none_is_named(bert: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        LLM(str(bert), in_process=True, hf_overrides=config, **ENGINE)


def test_texts_of_scores_may_be_parts(bert: Path) -> None:
    def parts(*texts: str) -> dict[str, Any]:
        return {"content": [{"type": "text", "text": text} for text in texts]}

    with LLM(str(bert), in_process=True, **ENGINE) as llm:
        wanted = llm.score(QUERY, DOCUMENTS[:2], use_tqdm=False)
        found = llm.score(parts(QUERY), [parts(DOCUMENTS[0]), DOCUMENTS[1]], use_tqdm=False)
        assert [each.outputs.score for each in found] == [each.outputs.score for each in wanted]
        with pytest.raises(InvalidRequestError, match=r"data_2\[0\].content\[0\] has the type 'image_url'"):
            llm.score("a", {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match=r"data_1\[1\] must be a text or .*, not int"):
            llm.score(["a", 5], ["b", "c"], use_tqdm=False)


@pytest.fixture(scope="module")
def client(bert: Path) -> Iterator[httpx.Client]:
    with serving_here(folder=bert, dtype="float32", max_num_seqs=8) as server, server.client() as client:
        yield client


def test_routes_of_scores(client: httpx.Client, bert: Path) -> None:
    wanted = expected(bert, [(QUERY, each) for each in DOCUMENTS])
    for path, names in (("/score", ("queries", "documents")), ("/v1/score", ("text_1", "text_2"))):
        answer = client.post(path, json=dict(zip(names, (QUERY, DOCUMENTS), strict=True))).json()
        assert [item["score"] for item in answer["data"]] == pytest.approx(wanted, abs=1e-5)
        assert {"id", "object", "created", "model", "data", "usage"} == answer.keys()
    order = sorted(range(4), key=lambda index: -wanted[index])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = client.post(path, json={"query": QUERY, "documents": [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]}).json()
        assert [item["index"] for item in answer["results"]] == order
        assert answer["results"][0]["document"] == {"text": DOCUMENTS[order[0]]}
    best = client.post("/rerank", json={"query": QUERY, "documents": DOCUMENTS, "top_n": 1, "return_documents": False})
    assert [item["index"] for item in best.json()["results"]] == order[:1]
    assert "document" not in best.json()["results"][0]
    classes = client.post("/classify", json={"input": DOCUMENTS[:2]}).json()["data"]
    assert [(item["label"], item["num_classes"]) for item in classes] == [("LABEL_0", 1)] * 2


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"queries": "a"}, "documents"),
        ("/score", {"queries": "a", "text_1": "b", "documents": "c"}, "queries"),
        ("/score", {"queries": ["a", "b"], "documents": ["c"]}, "queries"),
        ("/score", {"queries": "a", "documents": []}, "documents"),
        ("/score", {"queries": "a", "documents": "word " * 400}, "documents[0]"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b", {"url": "c"}]}, "documents[1]"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/score", {"queries": "a", "documents": "b", "instruction": "c"}, "instruction"),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "instruction"),
        ("/score", {"queries": "a", "documents": "b", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ("/classify", {"input": []}, "input"),
        ("/pooling", {"input": "a", "task": "nope"}, "task"),
        ("/v1/embeddings", {"input": "a"}, "model"),
    ],
)
def test_bad_input_is_named(client: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
