"""Adapters of models that pool, against peft: classifiers that it saved whole, vectors, scores, and HTTP's routes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_models
import torch
import transformers
from peft_adapters import PeftModels
from safetensors.torch import load_file, save_file
from server_here import serving_here
from test_encoders import prompts_of
from thinned import every
from tiny_encoders import make_pair_tokenizer, save_encoder

from headrace import LLM, HeadraceError, LoRARequest, PoolingParams, RequestFailedError
from headrace.frontend.http.options import ServeOptions

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 12,
    "use_tqdm_on_load": False,
    "enable_lora": True,
    "max_loras": 2,
}
SERVED = {key: value for key, value in ENGINE.items() if key != "use_tqdm_on_load"}
PROMPTS = prompts_of((1, 5, 17, 40))
LOGITS = PoolingParams(use_activation=False)
SEQUENCE, TOKEN = "ForSequenceClassification", "ForTokenClassification"


def checkpoint(folder: Path, name: str, end: str) -> Any:
    """Writes a classifier with three labels, and returns it as transformers computes it."""
    if name in tiny_models.TINY_MODELS:
        plain = tiny_models.build(name)
        kind = getattr(transformers, type(plain).__name__.replace("ForCausalLM", end))
        torch.manual_seed(3)
        model = kind(plain.config.__class__(**{**plain.config.to_dict(), "num_labels": 3})).eval()
        model.base_model.load_state_dict(plain.base_model.state_dict())
        model.save_pretrained(folder)
    else:
        save_encoder(name, folder, end, num_labels=3)
    return getattr(transformers, f"AutoModel{end}").from_pretrained(folder, dtype=torch.float32).eval()


def logits_of(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.as_tensor(model(input_ids=torch.tensor([prompt])).logits[0])


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", SEQUENCE, {"task_type": "SEQ_CLS"}),
    ("qwen2", TOKEN, {"task_type": "TOKEN_CLS", "target_modules": ["q_proj", "down_proj"]}),
    ("bert", SEQUENCE, {"task_type": "SEQ_CLS"}),  # with factors for bert.pooler.dense
    ("roberta", SEQUENCE, {"task_type": "SEQ_CLS"}),  # a classifier of two layers
    ("bert", TOKEN, {"task_type": "TOKEN_CLS", "use_rslora": True, "target_modules": ["query", "dense"]}),
    ("llama", SEQUENCE, {"target_modules": ["score", "v_proj"]}),  # factors for the classifier
    ("bert", SEQUENCE, {"target_modules": ["value", "classifier"], "bias": "lora_only", "use_dora": True, "size": 0.1}),
    ("modernbert", SEQUENCE, {"target_modules": ["Wqkv", "Wo"], "modules_to_save": ["classifier", "head"]}),
]


@pytest.mark.parametrize(("name", "end", "config"), every(2, CASES))
def test_classes_are_those_of_the_adapters_own_classifier(
    name: str, end: str, config: dict[str, Any], tmp_path: Path
) -> None:
    base = checkpoint(tmp_path / "model", name, end)
    models = PeftModels(base, tmp_path)
    loras = [LoRARequest(each, n, str(models.make(each, seed=n, **config))) for n, each in enumerate(("a", "b"), 1)]
    given = [loras[0], None, loras[1], loras[0]]
    task = "classify" if end == SEQUENCE else "token_classify"
    with LLM(str(tmp_path / "model"), in_process=True, skip_tokenizer_init=True, **ENGINE) as llm:

        def logits(prompts: list[list[int]], asked: list[LoRARequest | None]) -> list[torch.Tensor]:
            outputs = llm.encode(prompts, LOGITS, pooling_task=task, use_tqdm=False, lora_request=asked)
            return [torch.as_tensor(output.outputs.data) for output in outputs]

        found, plain = logits(PROMPTS, given), logits(PROMPTS, [None] * 4)
        assert torch.equal(found[1], plain[1]), "the model alone beside others"
        for prompt, lora, own in zip(PROMPTS, given, found, strict=True):
            wanted = logits_of(models.adapted(lora.lora_name) if lora else base, prompt)
            assert (own - wanted).abs().max() <= 1e-4 * wanted.abs().max()
            assert torch.equal(logits([prompt], [lora])[0], own), "alone"
        assert (found[0] - plain[0]).abs().max() > 1e-2


def test_classifiers_follow_new_weights_and_adapters_keep_their_own(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path / "0", SEQUENCE, num_labels=3)
    save_encoder("bert", tmp_path / "1", SEQUENCE, seed=1, num_labels=3)
    kind = transformers.AutoModelForSequenceClassification
    bases = [kind.from_pretrained(tmp_path / f"{seed}", dtype=torch.float32).eval() for seed in (0, 1)]
    first, second = (PeftModels(base, tmp_path) for base in bases)
    lora = LoRARequest("a", 1, str(first.make("a", task_type="SEQ_CLS", bias="lora_only", use_dora=True, size=0.1)))
    second.take("a")
    with LLM(str(tmp_path / "0"), in_process=True, skip_tokenizer_init=True, **ENGINE) as llm:
        for number, models in enumerate((first, second, first)):
            if number:
                llm.reload_weights(str(tmp_path / f"{number % 2}"))
            for name, asked in (("", None), ("a", lora)):
                (output,) = llm.encode(PROMPTS[:1], LOGITS, pooling_task="classify", use_tqdm=False, lora_request=asked)
                wanted = logits_of(models.adapted(name), PROMPTS[0])
                assert (torch.as_tensor(output.outputs.data) - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_a_classifier_of_another_shape_is_refused(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "model", "llama", SEQUENCE)
    path = PeftModels(base, tmp_path).make("a", task_type="SEQ_CLS")
    tensors = load_file(path / "adapter_model.safetensors")
    changes: list[tuple[dict[str, Any], dict[str, torch.Tensor], str]] = [
        ({}, {"base_model.model.score.weight": torch.ones(5, 64)}, r"score is of a matrix of \[5, 64\].*\[3, 64\]"),
        ({}, {"base_model.model.score.bias": torch.ones(3)}, "score has a bias, and the model's has none"),
        ({"alora_invocation_tokens": [5]}, {}, "activated.*classifier"),
    ]
    with LLM(str(tmp_path / "model"), in_process=True, skip_tokenizer_init=True, **ENGINE) as llm:
        for number, (config, changed, message) in enumerate(changes, 1):
            other = tmp_path / f"other {number}"
            other.mkdir()
            told = json.loads((path / "adapter_config.json").read_text()) | config
            (other / "adapter_config.json").write_text(json.dumps(told))
            save_file(tensors | changed, other / "adapter_model.safetensors")
            with pytest.raises(RequestFailedError, match=message):
                llm.encode(
                    PROMPTS[0],
                    pooling_task="classify",
                    use_tqdm=False,
                    lora_request=LoRARequest("a", number, str(other)),
                )
    tiny_models.save("llama", tmp_path / "causal")
    with (
        LLM(str(tmp_path / "causal"), in_process=True, skip_tokenizer_init=True, **ENGINE) as llm,
        pytest.raises(HeadraceError, match="no matrices that adapters change under the names score"),
    ):
        llm.add_lora(LoRARequest("a", 1, str(path)))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_encoder("bert", tmp_path_factory.mktemp("bert"), SEQUENCE, num_labels=1)
    make_pair_tokenizer(folder, "[CLS]", ("[SEP]",), "[SEP]")
    return folder


@pytest.fixture(scope="module")
def models(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> PeftModels:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(bert, dtype=torch.float32).eval()
    models = PeftModels(model, tmp_path_factory.mktemp("adapters"))
    models.make("ranker", task_type="SEQ_CLS")
    return models


QUERY, DOCUMENTS = "Who wrote Faust?", ["Goethe wrote Faust.", "The sky is blue", "a"]


def scores(bert: Path, model: Any) -> list[float]:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(bert)
    found = []
    for document in DOCUMENTS:
        encoded = tokenizer(QUERY, document, return_tensors="pt", return_token_type_ids=True)
        with torch.inference_mode():
            found.append(float(model(**encoded).logits.sigmoid()))
    return found


def test_scores_and_classes_of_texts_take_an_adapter(bert: Path, models: PeftModels) -> None:
    lora, base = LoRARequest("ranker", 1, str(models.folder / "ranker")), models.adapted("")
    with LLM(str(bert), in_process=True, **ENGINE) as llm:
        found = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False, lora_request=lora)]
        assert found == pytest.approx(scores(bert, models.adapted("ranker")), abs=1e-5)
        plain = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
        assert plain == pytest.approx(scores(bert, base), abs=1e-5)
        mixed = llm.classify(["a", "a"], use_tqdm=False, lora_request=[lora, None])
        assert mixed[0].outputs.probs != mixed[1].outputs.probs


@pytest.fixture(scope="module")
def client(bert: Path, models: PeftModels) -> Iterator[httpx.Client]:
    options = ServeOptions(port=0, lora_modules=(f"ranker={models.folder}/ranker",))
    with serving_here(options, folder=bert, **SERVED) as server, server.client() as client:
        yield client


def test_routes_of_scores_and_classes_take_an_adapter_as_their_model(
    client: httpx.Client, bert: Path, models: PeftModels
) -> None:
    for model, reference in (("ranker", models.adapted("ranker")), (str(bert), models.adapted(""))):
        wanted = scores(bert, reference)
        scored = client.post("/score", json={"model": model, "queries": QUERY, "documents": DOCUMENTS}).json()
        assert [each["score"] for each in scored["data"]] == pytest.approx(wanted, abs=1e-5)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            ranked = client.post(path, json={"model": model, "query": QUERY, "documents": DOCUMENTS}).json()
            by_index = {each["index"]: each["relevance_score"] for each in ranked["results"]}
            assert [by_index[n] for n in range(3)] == pytest.approx(wanted, abs=1e-5)
            assert ranked["model"] == model
        for path, key in (("/classify", "probs"), ("/pooling", "data")):
            (found,) = client.post(path, json={"model": model, "input": "a b c"}).json()["data"]
            (base,) = client.post(path, json={"input": "a b c"}).json()["data"]
            assert (found[key] == base[key]) == (model != "ranker")


def test_vectors_take_an_adapter_in_python_and_over_http(tmp_path: Path) -> None:
    folder = save_encoder("bert", tmp_path / "model")
    make_pair_tokenizer(folder, "[CLS]", ("[SEP]",), "[SEP]")
    base = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    made = PeftModels(base, tmp_path)
    path = str(made.make("domain", target_modules=["query", "value", "output.dense"]))
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        given = [LoRARequest("domain", 1, path), None]
        found = [each.outputs.embedding for each in llm.embed([PROMPTS[2]] * 2, use_tqdm=False, lora_request=given)]
        for vector, model in zip(found, (made.adapted("domain"), base), strict=True):
            with torch.inference_mode():
                states = model(input_ids=torch.tensor([PROMPTS[2]])).last_hidden_state[0]
            assert vector == pytest.approx(torch.nn.functional.normalize(states[0], dim=0).tolist(), abs=1e-5)
    options = ServeOptions(port=0, lora_modules=(f"domain={path}",))
    with serving_here(options, folder=folder, **SERVED) as server, server.client() as client:

        def embedding(model: str) -> list[float]:
            answer = client.post("/v1/embeddings", json={"model": model, "input": PROMPTS[2]}).json()
            assert answer["model"] == model
            return list(answer["data"][0]["embedding"])

        assert embedding("domain") == pytest.approx(found[0], abs=1e-6)
        assert embedding(str(folder)) == pytest.approx(found[1], abs=1e-6)
        asked = client.post("/v1/embeddings", json={"input": PROMPTS[2], "task": "domain"}).json()
        assert asked["data"][0]["embedding"] == pytest.approx(found[0], abs=1e-6)
        refused = client.post("/v1/embeddings", json={"input": PROMPTS[2], "task": "retrieval.query"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "task")
        assert refused.json()["error"]["message"].endswith("the model's adapters are: domain")
