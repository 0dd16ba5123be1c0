"""SamplingParams.logprob_token_ids: the log-probabilities of exactly these tokens, besides the sampled one's."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models

from headrace import LLM, InvalidRequestError, SamplingParams

ASKED = [9, 250, 3]
MODEL = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "max_logprobs": -1}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("model")
    tiny_models.save("llama", folder)
    with LLM(str(folder), in_process=True, num_gpu_blocks_override=64, **MODEL) as llm:
        yield llm


def test_the_tokens_that_are_asked_for_have_their_log_probabilities_in_a_mixed_batch(llm: LLM) -> None:
    common = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
    whole, asked, few, both = llm.generate(
        [[5, 6, 7]] * 4,
        [
            SamplingParams(logprobs=-1, **common),
            SamplingParams(logprob_token_ids=ASKED, **common),
            SamplingParams(logprobs=2, **common),
            SamplingParams(logprobs=2, logprob_token_ids=ASKED, **common),
        ],
        use_tqdm=False,
    )
    assert asked.outputs[0].token_ids == whole.outputs[0].token_ids
    assert both.outputs[0].logprobs == asked.outputs[0].logprobs, "over HTTP logprobs is what asks for any"
    assert SamplingParams(logprobs=2, logprob_token_ids=ASKED).to_wire(4).logprobs == 0, "as the message says"
    for all_of_them, chosen, two in zip(
        whole.outputs[0].logprobs, asked.outputs[0].logprobs, few.outputs[0].logprobs, strict=True
    ):
        sampled = next(iter(chosen))
        assert list(chosen) == [sampled, *(token for token in ASKED if token != sampled)]
        assert chosen[sampled].rank == 1
        for token, found in chosen.items():
            assert found.logprob == pytest.approx(all_of_them[token].logprob, abs=1e-5)
            assert found.rank is None or token == sampled
        assert set(two) <= set(all_of_them)
        assert len(two) in (2, 3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logprob_token_ids": [-1]}, "logprob_token_ids contains -1"),
        ({"logprob_token_ids": []}, "names no token"),
        ({"logprob_token_ids": [tiny_models.VOCAB_SIZE]}, "the model's token ids are 0 to"),
    ],
)
def test_what_is_no_list_of_the_models_tokens_is_refused_by_name(llm: LLM, fields, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        llm.generate([[5, 6]], SamplingParams(max_tokens=1, **fields), use_tqdm=False)
