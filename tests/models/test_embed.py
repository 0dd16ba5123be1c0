"""Embeddings of decoders by the last token, beside transformers' own hidden states."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from rank_threads import RankThreads, pool_for_each_rank
from safetensors.torch import load_file, save_file
from server_here import serving_here
from thinned import every
from tiny_encoders import make_pair_tokenizer, save_encoder
from tiny_gguf import save_gguf

from headrace import LLM, AsyncLLM, InvalidRequestError, ModelError, OptionError, PoolingParams, SamplingParams
from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.models.implementations import find_model

__all__ = ["pool_for_each_rank"]  # a fixture of the tests with ranks

THREADS = f"{RankThreads.__module__}:{RankThreads.__name__}"
LENGTHS = (1, 3, 15, 16, 17, 257, 700)
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 704,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 200,
    "use_tqdm_on_load": False,
}
LAST = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}
QWEN3 = {"max_position_embeddings": 704, "tie_word_embeddings": True}


def as_sentence_folder(
    folder: Path,
    pooling: dict[str, Any] | None = None,
    kinds: Sequence[str] = ("Transformer", "Pooling", "Normalize"),
) -> Path:
    """Adds the files that sentence-transformers writes beside a model such as Qwen3-Embedding."""
    places = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [
        {
            "idx": n,
            "name": str(n),
            "path": places.get(kind, f"{n}_{kind}"),
            "type": f"sentence_transformers.models.{kind}",
        }
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(LAST if pooling is None else pooling))
    prompts = {"prompts": {"query": "Instruct: find it\nQuery:", "document": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


def with_end(folder: Path) -> Path:
    """Makes the folder's tokenizer append its end token to every text, as Qwen3-Embedding's does."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    end = next(each["id"] for each in tokenizer["added_tokens"] if each["content"] == "</s>")
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [end], "tokens": ["</s>"]}},
    }
    file.write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embed")
    return with_end(as_sentence_folder(tiny_models.save("qwen3", path, tokenizer=True, **QWEN3)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without the files of sentence-transformers."""
    return tiny_models.save("qwen3", tmp_path_factory.mktemp("plain"), tokenizer=True, **QWEN3)


def prompts_of() -> list[list[int]]:
    return [[(7 * n + 3 * length + 11) % 300 + 3 for n in range(length)] for length in LENGTHS]


@cache
def _model(folder: Path) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def expected(folder: Path, prompts: list[list[int]], *, normalized: bool = True) -> torch.Tensor:
    with torch.inference_mode():
        last = [_model(folder)(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in prompts]
    found = torch.stack(last)
    return torch.nn.functional.normalize(found, dim=1) if normalized else found


def vectors(llm: LLM, prompts: Any, **given: Any) -> torch.Tensor:
    return torch.tensor([output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False, **given)])


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found - wanted).abs().max() < 1e-5
    assert torch.nn.functional.cosine_similarity(found, wanted).min() > 0.99999


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), in_process=True, **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def both(plain: Path) -> Iterator[LLM]:
    """An engine that generates and pools."""
    with LLM(str(plain), in_process=True, runner="generate", convert="embed", **ENGINE) as llm:
        yield llm


def test_vectors_are_those_of_transformers(llm: LLM, folder: Path) -> None:
    prompts = prompts_of()
    assert_close(vectors(llm, prompts), expected(folder, prompts))
    assert llm.supported_tasks == ("embed", "token_embed")


def test_a_prompt_gives_the_same_bits_alone_in_a_batch_and_after_a_hit(llm: LLM) -> None:
    prompts = prompts_of()
    alone = [vectors(llm, [prompt])[0] for prompt in prompts]
    assert torch.equal(torch.stack(alone[::-1]), vectors(llm, prompts[::-1]))
    (again,) = llm.embed([prompts[-1]], use_tqdm=False)
    assert again.num_cached_tokens == 688, "all blocks but the one of the last token"
    assert torch.equal(torch.tensor(again.outputs.embedding), alone[-1])
    skipping = PoolingParams(skip_reading_prefix_cache=True)
    (whole,) = llm.embed([prompts[-1]], use_tqdm=False, pooling_params=skipping)
    assert (whole.num_cached_tokens, torch.tensor(whole.outputs.embedding).equal(alone[-1])) == (0, True)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 24},
        {"num_gpu_blocks_override": 50, "max_num_batched_tokens": 64},
        {"async_scheduling": True, "max_num_batched_tokens": 100},
        {"enable_chunked_prefill": False},
    ],
    ids=["chunks", "few blocks", "ahead", "whole prompts"],
)
def test_how_prompts_are_divided_changes_no_bit(llm: LLM, folder: Path, options: dict[str, Any]) -> None:
    prompts = prompts_of()
    with LLM(str(folder), in_process=True, **(ENGINE | options)) as other:
        assert torch.equal(vectors(other, prompts), vectors(llm, prompts))


def test_nine_long_texts_at_once_are_those_of_each_alone(llm: LLM, folder: Path) -> None:
    """Of vLLM's PR 48214, where a step's buffers were filled again while a chunk was still reading them."""
    texts = ["".join(chr(97 + (number * 7 + at * at) % 26) for at in range(32_766)) for number in range(9)]
    cut = {"truncate_prompt_tokens": -1}
    alone = torch.cat([vectors(llm, [text], **cut) for text in texts])
    options = {"async_scheduling": True, "max_num_batched_tokens": 256}
    with LLM(str(folder), in_process=True, **(ENGINE | options)) as other:
        assert torch.equal(vectors(other, texts, **cut), alone)
        with pytest.raises(InvalidRequestError, match=r"prompts\[0\]: the prompt has \d+ tokens"):
            other.embed(texts, use_tqdm=False)
        assert torch.equal(vectors(other, texts[:2], **cut), alone[:2]), "nothing is left behind"


@pytest.mark.parametrize("size", [(2, 1), (1, 2)], ids=["tensor parallel", "pipeline"])
def test_two_ranks(pool_for_each_rank: None, folder: Path, size: tuple[int, int]) -> None:
    prompts = prompts_of()
    ranks = {"tensor_parallel_size": size[0], "pipeline_parallel_size": size[1]}
    with LLM(str(folder), in_process=True, distributed_executor_backend=THREADS, **(ENGINE | ranks)) as llm:
        assert_close(vectors(llm, prompts), expected(folder, prompts))


@pytest.mark.system
def test_an_engine_in_a_process_of_its_own_and_async_calls(folder: Path) -> None:
    prompts = prompts_of()

    async def embed() -> tuple[Any, list[torch.Tensor]]:
        async with AsyncLLM(str(folder), **ENGINE) as llm:
            assert await llm.get_supported_tasks() == ("embed", "token_embed")

            async def one(prompt: Any, **given: Any) -> Any:
                (output,) = [each async for each in llm.encode(prompt, PoolingParams(task="embed"), **given)]
                return output

            found = await asyncio.gather(*(one(prompt) for prompt in prompts))
            with pytest.raises(InvalidRequestError, match="--runner generate"):
                await anext(llm.generate([5, 6]))
            return found, [each.outputs.data for each in found]

    outputs, data = asyncio.run(embed())
    assert [each.prompt_token_ids for each in outputs] == prompts
    assert all(each.finished for each in outputs)
    assert_close(torch.stack(data), expected(folder, prompts))


def test_rows_that_generate_and_rows_that_pool_share_an_engine(both: LLM, plain: Path) -> None:
    prompts, greedy = prompts_of(), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    assert both.supported_tasks == ("generate", "embed")
    alone = [both.generate([p], greedy, use_tqdm=False)[0].outputs[0].token_ids for p in prompts[:4]]
    assert_close(vectors(both, prompts), expected(plain, prompts))

    both.enqueue(prompts[:4], greedy)
    seeded = SamplingParams(max_tokens=12, temperature=1.0, seed=3, logprobs=2, prompt_logprobs=1)
    both.enqueue(prompts[3:5], seeded)
    between = vectors(both, prompts)
    outputs = both.wait_for_completion(use_tqdm=False)
    assert_close(between, expected(plain, prompts))
    assert [each.outputs[0].token_ids for each in outputs[:4]] == alone
    again = both.generate(prompts[3:5], seeded, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in outputs[4:]] == [each.outputs[0].token_ids for each in again]


def test_the_appended_end_token_is_the_one_that_is_pooled(llm: LLM, folder: Path) -> None:
    (output,) = llm.embed("hello world", use_tqdm=False)
    assert output.prompt_token_ids[-1] == 1
    assert_close(torch.tensor([output.outputs.embedding]), expected(folder, [output.prompt_token_ids]))
    (without,) = llm.embed("hello world", use_tqdm=False, tokenization_kwargs={"add_special_tokens": False})
    assert without.prompt_token_ids == output.prompt_token_ids[:-1]


def test_truncation_keeps_the_beginning_and_the_end_token(llm: LLM) -> None:
    text = "the quick brown fox jumps over the lazy dog " * 120
    (whole,) = llm.embed(text[:300], use_tqdm=False)
    (cut,) = llm.embed(text[:300], use_tqdm=False, truncate_prompt_tokens=10)
    assert cut.prompt_token_ids == [*whole.prompt_token_ids[:9], 1]
    (left,) = llm.embed(
        text[:300], use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 10, "truncation_side": "left"}
    )
    assert left.prompt_token_ids == whole.prompt_token_ids[-10:]
    (most,) = llm.embed(text, use_tqdm=False, pooling_params=PoolingParams(truncate_prompt_tokens=-1))
    assert (len(most.prompt_token_ids), most.prompt_token_ids[-1]) == (704, 1)
    with pytest.raises(InvalidRequestError, match=r"max_model_len is 704 .* truncate_prompt_tokens=-1"):
        llm.embed(text, use_tqdm=False)


def test_outputs_have_vllms_fields(llm: LLM) -> None:
    config = llm.llm_engine.vllm_config.model_config
    assert (config.embedding_size, config.runner_type) == (64, "pooling")
    (encoded,) = llm.encode([[5, 6, 7]], pooling_task="embed", use_tqdm=False)
    (embedded,) = llm.embed([[5, 6, 7]], use_tqdm=False)
    assert encoded.outputs.data.shape == (64,)
    assert encoded.outputs.data.tolist() == embedded.outputs.embedding
    assert repr(encoded.outputs) == f"PoolingOutput(data={encoded.outputs.data!r})"
    assert (embedded.outputs.hidden_size, repr(embedded.outputs)) == (64, "EmbeddingOutput(hidden_size=64)")
    assert (encoded.prompt_token_ids, encoded.finished, encoded.num_cached_tokens) == ([5, 6, 7], True, 0)
    assert llm.encode([[5, 6, 7]], use_tqdm=False)[0].outputs == encoded.outputs, "the model's one task is the default"


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"dimensions": 8}, "does not support Matryoshka embeddings; dimensions must be unset"),
        ({"task": "classify"}, r"Unsupported task: 'classify' .*Classification API is not supported by this model"),
        ({"task": "token_classify"}, r"Unsupported task: 'token_classify' "),
        ({"task": "plugin"}, "No IOProcessor plugin installed"),
    ],
)
def test_parameters_that_the_model_cannot_follow(llm: LLM, params: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        llm.encode([[5, 6]], PoolingParams(**params), use_tqdm=False)


@pytest.mark.parametrize(
    ("prompts", "why"),
    [
        ([[5], []], r"prompts\[1\]: .*cannot be empty"),
        ([[5], [3200]], r"prompts\[1\]: prompt_token_ids\[0\] is 3200"),
        ([[5], [5] * 705], r"prompts\[1\]: the prompt has 705 tokens"),
        ([{"prompt": 4}], "'prompt' must be a string"),
    ],
)
def test_bad_prompts_are_named_before_any_runs(llm: LLM, prompts: Any, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        llm.embed(prompts, use_tqdm=False)
    assert vectors(llm, [[5] * 704]).shape == (1, 64), "as many as max_model_len are right"


def test_a_model_that_generates_says_how_it_may_pool_and_the_other_way_round(llm: LLM, plain: Path) -> None:
    with pytest.raises(InvalidRequestError, match="generation is only supported for generative models"):
        llm.generate([[5, 6]], use_tqdm=False)
    with LLM(str(plain), in_process=True, **ENGINE) as generating:
        assert generating.supported_tasks == ("generate",)
        with pytest.raises(InvalidRequestError, match="Try passing `--runner pooling`"):
            generating.embed([[5, 6]], use_tqdm=False)


def test_use_activation_and_its_former_names(llm: LLM, folder: Path) -> None:
    prompts = prompts_of()[:3]
    wanted = expected(folder, prompts, normalized=False)
    for name in ("use_activation", "normalize"):
        found = vectors(llm, prompts, pooling_params=PoolingParams(**{name: False}))
        assert (found - wanted).abs().max() < 1e-4
        assert (found.norm(dim=1) - 1).abs().min() > 0.1


def test_dimensions_are_cut_before_the_vector_is_scaled(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts, overrides = prompts_of()[:3], {"matryoshka_dimensions": [8, 32], "is_matryoshka": True}
    options = {"runner": "pooling", "hf_overrides": overrides, "pooler_config": {"dimensions": 32}}
    with LLM(str(plain), in_process=True, **ENGINE, **options) as llm:
        raw = expected(plain, prompts, normalized=False)
        found = vectors(llm, prompts, pooling_params=PoolingParams(dimensions=8))
        assert_close(found, torch.nn.functional.normalize(raw[:, :8], dim=1))
        assert vectors(llm, prompts).shape == (3, 32), "pooler_config's, where a request does not say"
        with pytest.raises(InvalidRequestError, match=r"only supports Matryoshka dimensions \[8, 32\], got 16"):
            llm.embed([[5]], use_tqdm=False, pooling_params=PoolingParams(dimensions=16))
    assert "matryoshka" not in caplog.text


@pytest.mark.parametrize("name", every(2, ["qwen3", "llama_biases", "gpt2", "gpt_neox", "gemma3"]))
def test_a_folder_that_the_base_model_wrote_pools_by_itself(name: str, tmp_path: Path) -> None:
    """`Qwen3Model` and the like, as sentence-transformers saves a model: no head, and no prefix of names."""
    tiny_models.save(name, tmp_path / "whole")
    folder = tmp_path / "base"
    tiny_models.build(name).base_model.save_pretrained(folder)
    (written,) = json.loads((folder / "config.json").read_text())["architectures"]
    assert written.endswith("Model")
    prompts = [[token % 100 for token in prompt] for prompt in prompts_of()[:3]]
    options = ENGINE | {"max_model_len": 48, "skip_tokenizer_init": True}
    with LLM(str(tmp_path / "whole"), in_process=True, runner="pooling", **options) as whole:
        wanted = vectors(whole, prompts)
    with LLM(str(folder), in_process=True, **options) as llm:
        assert llm.supported_tasks == ("embed", "token_embed")
        assert torch.equal(vectors(llm, prompts), wanted)
    config = json.loads((tmp_path / "whole" / "config.json").read_text()) | {"architectures": [written]}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    with LLM(str(tmp_path / "whole"), in_process=True, **options) as prefixed:
        assert torch.equal(vectors(prefixed, prompts), wanted)


def test_a_checkpoint_as_the_base_model_writes_it(folder: Path, tmp_path: Path, llm: LLM) -> None:
    """Without a head, and with names that lack its prefix, as Qwen3-Embedding's and gte-Qwen2's have them."""
    for file in folder.rglob("*"):
        if file.is_file():
            (tmp_path / file.relative_to(folder)).parent.mkdir(exist_ok=True)
            (tmp_path / file.relative_to(folder)).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("model."): each for name, each in weights.items() if name != "lm_head.weight"}
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(str(tmp_path), in_process=True, **ENGINE) as bare_llm:
        assert torch.equal(vectors(bare_llm, prompts_of()), vectors(llm, prompts_of()))


@pytest.mark.parametrize(
    ("pooling", "kinds", "error", "why"),
    [
        ({"pooling_mode": "lasttoken"}, None, None, "LAST"),
        ({"pooling_mode_max_tokens": True}, None, None, "MAX"),
        ({"pooling_mode_foo_tokens": True}, None, ModelError, "asks for pooling_mode_foo_tokens, which is not known"),
        (LAST | {"pooling_mode_foo": True}, None, ModelError, "asks for pooling_mode_foo, which is not known"),
        ({"pooling_mode_mean_tokens": False}, None, ModelError, "pooling_mode_mean_tokens is false, and no other"),
        ({"pooling_mode_cls_token": False}, None, None, "MEAN"),
        ({"word_embedding_dimension": 64}, None, None, "MEAN"),
        (
            {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True},
            None,
            None,
            "MEAN+LAST",
        ),
        ({"pooling_mode": ["cls", "foo"]}, None, ModelError, "pooling type CLS.foo, which is not computed here"),
        ({"pooling_mode": ["cls", "ALL"]}, None, ModelError, "pooling type CLS.ALL, which is not computed here"),
        ({"pooling_mode": [1]}, None, ModelError, "a word or a list of words is expected"),
        (LAST, ("Transformer", "Pooling", "CNN"), ModelError, "the module 'sentence_transformers.models.CNN'"),
        (LAST | {"word_embedding_dimension": 32}, None, ModelError, "vectors of 32 values"),
    ],
    ids=[
        "new form",
        "max",
        "unknown",
        "unknown beside known",
        "all off",
        "cls off",
        "no mode",
        "joined",
        "joined with an unknown one",
        "joined with tokens",
        "no words",
        "unknown module",
        "width",
    ],
)
def test_what_the_folder_says_is_followed_or_refused(
    folder: Path, pooling: dict[str, Any], kinds: tuple[str, ...] | None, error: Any, why: str
) -> None:
    as_sentence_folder(folder, pooling, *([kinds] if kinds else []))
    options = Options(model=str(folder))
    try:
        if error is None:
            found = find_model(open_checkpoint(options), options).tasks.pooling
            assert found is not None
            assert (found.tokens, found.activate) == (why, True)
        else:
            with pytest.raises(error, match=why):
                find_model(open_checkpoint(options), options)
    finally:
        as_sentence_folder(folder)


@pytest.mark.parametrize(
    ("number", "options", "tokens"),
    [
        (1, {}, "MEAN"),
        (2, {}, "CLS"),
        (3, {}, "LAST"),
        (0, {}, None),
        (0, {"runner": "pooling"}, "ALL"),
        (1, {"pooler_config": {"pooling_type": "LAST"}}, "LAST"),
        (1, {"runner": "generate"}, None),
        (4, {"runner": "generate"}, None),
    ],
)
def test_a_gguf_file_pools_as_it_says(number: int, options: dict[str, Any], tokens: str | None, tmp_path: Path) -> None:
    path = save_gguf(tiny_models.build("qwen3"), tmp_path / "m.gguf", tokenizer={"qwen3.pooling_type": number})
    given = Options(model=str(path), **options)
    found = find_model(open_checkpoint(given), given).tasks.pooling
    assert (None if found is None else found.tokens) == tokens


@pytest.mark.parametrize("number", [4, 9])
def test_a_gguf_files_pooling_that_is_not_computed_is_named(number: int, tmp_path: Path) -> None:
    path = save_gguf(tiny_models.build("qwen3"), tmp_path / "m.gguf", tokenizer={"qwen3.pooling_type": number})
    options = Options(model=str(path))
    with pytest.raises(ModelError, match=rf"key qwen3\.pooling_type is {number}.*; 0 \(ALL\), 1 \(MEAN\), 2"):
        find_model(open_checkpoint(options), options)


@pytest.mark.parametrize("path", ["../1_Pooling", "1_Pooling/../../x", "/etc"])
def test_a_module_outside_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    from headrace.executor.checkpoints.sentence_folder import sentence_folder

    as_sentence_folder(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[1]["path"] = path
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=f"path {path!r}.* leaves the folder"):
        sentence_folder(tmp_path)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pooler_config": {"pooling_type": "LAST"}}, "add runner=pooling"),
        ({"runner": "pooling", "pooler_config": {"pooling": "LAST"}}, "known keys are task, pooling_type"),
        ({"runner": "pooling", "pooler_config": {"logit_mean": 1.0}}, "scores of a classifier"),
        ({"runner": "pooling", "convert": "none"}, "use convert=embed"),
        ({"runner": "pooling", "pooler_config": {"dimensions": 8}}, "is_matryoshka"),
        ({"task": "transcription"}, "models take text alone"),
        ({"runner": "pooling", "convert": "classify"}, "Qwen3ForCausalLM has none; architectures with one end with"),
    ],
)
def test_options_that_contradict_each_other_or_ask_for_what_is_missing(
    plain: Path, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(OptionError, match=why):
        LLM(str(plain), in_process=True, **(ENGINE | options))


@pytest.mark.parametrize(
    ("options", "normalized"),
    [
        ({"task": "embed"}, True),
        ({"convert": "embed"}, True),
        ({"runner": "pooling", "override_pooler_config": {"normalize": False}}, False),
    ],
)
def test_retired_and_short_spellings(plain: Path, options: dict[str, Any], *, normalized: bool) -> None:
    with LLM(str(plain), in_process=True, **(ENGINE | options)) as llm:
        wanted = expected(plain, [[5, 6, 7]], normalized=normalized)
        assert (vectors(llm, [[5, 6, 7]]) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["llama_gqa_tied", "gemma2", "opt_projected_post_norm", "gpt2"])
def test_other_decoders(name: str, tmp_path: Path) -> None:
    folder = tiny_models.save(name, tmp_path)
    prompts = [[token % 100 for token in prompt] for prompt in prompts_of()[:5]]
    options = ENGINE | {"max_model_len": 48, "skip_tokenizer_init": True, "runner": "pooling"}
    with LLM(str(folder), in_process=True, **options) as llm:
        assert_close(vectors(llm, prompts), expected(folder, prompts))


@pytest.mark.parametrize("kind", ["MEAN", "CLS"])
def test_other_kinds_of_pooling(plain: Path, kind: str) -> None:
    prompts = prompts_of()
    with torch.inference_mode():
        states = [_model(plain)(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    wanted = torch.stack([each.mean(0) if kind == "MEAN" else each[0] for each in states])
    options = ENGINE | {"runner": "pooling", "pooler_config": {"pooling_type": kind}}
    with LLM(str(plain), in_process=True, **options) as llm:
        found = vectors(llm, prompts)
        assert_close(found, torch.nn.functional.normalize(wanted, dim=1))
        (again,) = llm.embed([prompts[-1]], use_tqdm=False)
        assert (again.num_cached_tokens, torch.tensor(again.outputs.embedding).equal(found[-1])) == (0, True)
    with LLM(str(plain), in_process=True, **(options | {"max_num_batched_tokens": 24})) as chunked:
        assert torch.equal(vectors(chunked, prompts), found)
    with pytest.raises(OptionError, match="add runner=pooling"):
        LLM(str(plain), in_process=True, **(options | {"runner": "generate", "convert": "embed"}))


@pytest.mark.parametrize("name", ["qwen3", "llama_biases"])
def test_a_model_whose_tokens_attend_to_those_after_them(name: str, tmp_path: Path) -> None:
    """As gte-Qwen2's do: `is_causal` is false in the config."""
    folder = tiny_models.save(name, tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"is_causal": False}
    (folder / "config.json").write_text(json.dumps(config))
    prompts = [[token % 100 for token in prompt] for prompt in prompts_of()[:6]]
    options = ENGINE | {"max_model_len": 300, "skip_tokenizer_init": True, "runner": "pooling"}
    with LLM(str(folder), in_process=True, **options) as llm:
        found = vectors(llm, prompts)
        assert torch.equal(found[:3], torch.cat([vectors(llm, [prompt]) for prompt in prompts[:3]]))
        assert not llm.engine.enable_prefix_caching
    assert_close(found, expected(folder, prompts))  # transformers reads the same key
    with pytest.raises(ModelError, match="runner=pooling"):
        LLM(str(folder), in_process=True, **(options | {"runner": "generate"}))
    with pytest.raises(OptionError, match="attend to those after them"):
        LLM(str(folder), in_process=True, max_num_batched_tokens=64, **options)


@pytest.mark.parametrize("pooling", ["avg", "cls", "last"])
def test_nvidias_bidirectional_llama_pools_as_its_config_says(pooling: str, tmp_path: Path) -> None:
    folder = tiny_models.save("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"is_causal": False}
    (folder / "config.json").write_text(json.dumps(config))
    prompts = [[token % 100 for token in prompt] for prompt in prompts_of()[:6]]
    with torch.inference_mode():
        states = [_model(folder)(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    pooled = torch.stack([{"avg": each.mean(0), "cls": each[0], "last": each[-1]}[pooling] for each in states])
    scores = torch.randn(1, pooled.shape[1], generator=torch.Generator().manual_seed(0))
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    del config["is_causal"]
    options = ENGINE | {"max_model_len": 300, "skip_tokenizer_init": True}
    for kind in ("LlamaBidirectionalModel", "LlamaBidirectionalForSequenceClassification"):
        named = {"architectures": [kind], "model_type": "llama_bidirec", "pooling": pooling, "num_labels": 1}
        (folder / "config.json").write_text(json.dumps(config | named | {"temperature": 0.2}))
        classifies = kind.endswith("Classification")
        added = {"score.weight": scores} if classifies else {}
        save_file(weights | added, folder / "model.safetensors", metadata={"format": "pt"})
        with LLM(str(folder), in_process=True, **options) as llm:
            if classifies:
                found = torch.tensor([output.outputs.probs for output in llm.classify(prompts, use_tqdm=False)])
                assert (found - (pooled @ scores.T).sigmoid()).abs().max() < 1e-5
            else:
                assert_close(vectors(llm, prompts), torch.nn.functional.normalize(pooled, dim=1))


def test_a_row_whose_states_are_not_finite_fails_alone(plain: Path, tmp_path: Path) -> None:
    folder = tiny_models.save("qwen3", tmp_path, **QWEN3)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][77] = float("inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    options = ENGINE | {"runner": "pooling", "skip_tokenizer_init": True}

    async def embed() -> list[Any]:
        async with AsyncLLM(str(folder), **options) as llm:

            async def one(prompt: list[int]) -> Any:
                return await anext(llm.encode(prompt))

            return await asyncio.gather(*map(one, ([5, 6], [5, 77], [7, 8])), return_exceptions=True)

    first, broken, third = asyncio.run(embed())
    assert "the hidden states of its prompt are not finite" in str(broken)
    wanted = expected(plain, [[5, 6], [7, 8]])
    assert_close(torch.stack([first.outputs.data, third.outputs.data]), wanted)


def test_a_long_text_is_embedded_in_chunks(tmp_path: Path) -> None:
    """As vLLM does: each chunk counts by its tokens."""
    save_encoder("bert", tmp_path)
    make_pair_tokenizer(tmp_path, "[CLS]", ("[SEP]",), "[SEP]")
    as_sentence_folder(tmp_path, {"word_embedding_dimension": 64, "pooling_mode": "mean"})
    tokens = [5 + each % 60 for each in range(75)]
    limits: dict[str, Any] = {"dtype": "float32", "max_model_len": 32}
    pooler = {"enable_chunked_processing": True, "max_embed_len": 80}
    with serving_here(folder=tmp_path, pooler_config=pooler, **limits) as server, server.client() as client:

        def vectors(given: Any, **more: Any) -> torch.Tensor:
            answer = client.post("/v1/embeddings", json={"input": given, **more})
            assert answer.status_code == 200, answer.text
            return torch.tensor([each["embedding"] for each in answer.json()["data"]])

        parts = vectors([tokens[:32], tokens[32:64], tokens[64:]])
        wanted = (parts * torch.tensor([[32.0], [32.0], [11.0]])).sum(0) / 75
        short, found, again = vectors([tokens[:9], tokens, tokens])
        assert torch.equal(found, again)
        assert torch.equal(short, vectors([tokens[:9]])[0])
        assert (found - wanted / wanted.norm()).abs().max() < 1e-6
        raw = vectors([tokens], use_activation=False)[0]
        whole = vectors([tokens[:32], tokens[32:64], tokens[64:]], use_activation=False)
        assert (raw - (whole * torch.tensor([[32.0], [32.0], [11.0]])).sum(0) / 75).abs().max() < 1e-6
        answer = client.post("/v1/embeddings", json={"input": tokens, "encoding_format": "bytes_only"})
        assert torch.equal(torch.frombuffer(bytearray(answer.content), dtype=torch.float32), found)
        answer = client.post("/v1/embeddings", json={"input": [tokens, tokens]}).json()
        assert answer["usage"]["prompt_tokens"] == 150
        name = client.get("/v1/models").json()["data"][0]["id"]
        text = client.post("/v2/embed", json={"texts": ["word " * 15], "truncate": "NONE", "model": name}).json()
        assert "meta" in text, text
        assert text["meta"]["billed_units"]["input_tokens"] > 32, text
        refused = client.post("/v1/embeddings", json={"input": [5] * 81})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 80 tokens" in refused.text
        assert client.post("/pooling", json={"input": tokens, "task": "token_embed"}).status_code == 400
        assert len(vectors([tokens], truncate_prompt_tokens=-1)) == 1
