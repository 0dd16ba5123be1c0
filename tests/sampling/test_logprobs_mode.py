"""logprobs_mode: what is reported, against the definition in float64."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import tiny_models
import torch
from test_sampler import EOS, Case, random_logits

from headrace import LLM, SamplingParams
from headrace.core.options.model_options import LogprobsMode
from headrace.executor.sampling.sampler import sample
from headrace.executor.step.batch import BatchState
from headrace.ipc.messages import Sampling

VOCABULARY = 200
CASES = [
    Case([1, 2, 3, 2], 2, 5, Sampling(max_tokens=9, logprobs=4, temperature=0.0, repetition_penalty=1.5)),
    Case([1, 2], 1, 6, Sampling(max_tokens=9, logprobs=12, temperature=0.7, top_k=5)),
    Case([1, 2], 1, 7, Sampling(max_tokens=9, logprobs=0, temperature=1.6, top_p=0.5, logprob_token_ids=(3, 77))),
    Case([4], 1, 8, Sampling(max_tokens=9, logprobs=3, temperature=1.0, logit_bias={9: 3.0}, typical_p=0.4)),
]


def reference(logits: torch.Tensor, case: Case, mode: str) -> list[float]:
    """Of every token, in float64; truncation by a sort."""
    values, s = logits.double().tolist(), case.sampling
    if mode.startswith("processed"):
        for token, bias in s.logit_bias.items():
            values[token] += bias
        for token in set(case.tokens):
            values[token] *= 1 / s.repetition_penalty if values[token] > 0 else s.repetition_penalty
        if s.temperature > 0:
            values = [value / s.temperature for value in values]
            order = sorted(range(len(values)), key=lambda t: (-values[t], t))[: s.top_k or None]
            weights = {token: math.exp(values[token]) for token in order}
            total, mass = math.fsum(weights.values()), 0.0
            kept: list[int] = []
            if s.typical_p < 1:
                share = {token: weight / total for token, weight in weights.items()}
                entropy = -math.fsum(p * math.log(p) for p in share.values())
                order, weights = sorted(share, key=lambda t: (abs(-math.log(share[t]) - entropy), t)), share
                total = 1.0
            for token in order:
                if mass >= min(s.top_p, s.typical_p) * total:
                    break
                kept, mass = [*kept, token], mass + weights[token]
            values = [value if token in set(kept) else -math.inf for token, value in enumerate(values)]
    if mode.endswith("logprobs"):
        whole = math.log(math.fsum(math.exp(value) for value in values))
        values = [value - whole for value in values]
    return values


@pytest.mark.parametrize("mode", get_args(LogprobsMode))
def test_what_is_reported_is_what_the_mode_says(mode: LogprobsMode) -> None:
    batch = BatchState(len(CASES), 64, 16, (EOS,))
    batch.sampling.logprobs_mode = mode
    for row, case in enumerate(CASES):
        batch.tokens[row, : len(case.tokens)] = case.tokens
        batch.num_tokens[row], batch.num_prompt_tokens[row] = len(case.tokens), case.num_prompt_tokens
        batch.sampling.put(row, case.sampling, case.seed)
    logits = random_logits(len(CASES), VOCABULARY, seed=3)
    found = sample(logits.clone(), batch, np.arange(len(CASES), dtype=np.int32))
    assert found.logprobs is not None
    ids, values = found.logprobs.token_ids.numpy(), found.logprobs.logprobs.numpy()
    for row, case in enumerate(CASES):
        expected = reference(logits[row], case, mode)
        assert ids[row, 0] == found.token_ids[row]
        used = ids[row] >= 0
        assert values[row, used].tolist() == pytest.approx([expected[t] for t in ids[row, used]], abs=1e-4)
        if case.sampling.logprob_token_ids:
            assert ids[row, 1:3].tolist() == [3, 77]
        else:
            likeliest = sorted(range(VOCABULARY), key=lambda t: (-np.float32(expected[t]), t))
            count = case.sampling.logprobs or 0
            finite = sum(each > -math.inf for each in expected)
            assert ids[row, 1 : 1 + min(count, finite)].tolist() == likeliest[: min(count, finite)]


def test_an_engine_reports_by_its_mode_and_chooses_the_same_tokens(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = str(tiny_models.save("llama", tmp_path_factory.mktemp("mode") / "model"))
    options = {"dtype": "float32", "max_model_len": 64, "in_process": True, "skip_tokenizer_init": True}
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=3, top_k=3, logprobs=5, ignore_eos=True)
    with LLM(folder, **options) as raw, LLM(folder, **options, logprobs_mode="processed_logprobs") as processed:
        (usual,), (told,) = (llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs for llm in (raw, processed))
    assert told.token_ids == usual.token_ids
    for position in told.logprobs:
        kept = [each.logprob for each in position.values() if each.logprob > -math.inf]
        assert len(kept) == 3
        assert math.fsum(math.exp(each) for each in kept) == pytest.approx(1, abs=1e-5)
