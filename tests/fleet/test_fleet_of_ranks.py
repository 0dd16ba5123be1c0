"""Data-parallel engines of several ranks each: of a dense model, which share nothing with each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models
from patience import wait_until

from headrace import LLM, SamplingParams

PROMPTS = [{"prompt_token_ids": [5 + n, 6, 7, n]} for n in range(4)]
PARAMS = [SamplingParams(max_tokens=200, seed=n, ignore_eos=True) for n in range(4)]


def start(folder: Path, **options: Any) -> LLM:
    return LLM(
        str(folder), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=64, max_num_seqs=8, **options
    )


@pytest.mark.system
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp", "pp"])
def test_tokens_are_those_of_one_rank_also_where_a_worker_is_killed(
    ranks: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tiny_models.save("llama", tmp_path)
    with start(tmp_path, in_process=True) as llm:
        expected = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    others = psutil.Process().children()  # such as the helper that renders templates for tests of this process
    with start(tmp_path, data_parallel_size=2, **ranks) as llm:
        assert [each.outputs[0].token_ids for each in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] == expected
        cores = [each for each in psutil.Process().children() if each not in others and len(each.children()) == 2]
        assert len(cores) == 2
        llm.enqueue(PROMPTS, PARAMS)
        wait_until(lambda: llm.get_stats().num_generated_tokens > 4 * 200 + 8, 20, "tokens of all")
        cores[0].children()[1].kill()
        outputs = llm.wait_for_completion(use_tqdm=False)
        assert [each.outputs[0].token_ids for each in outputs] == expected
        assert llm._client.router.migrations["died"] >= 1
