"""trl: its view of vllm's version, and the calls of its generation; its trainers are refused, with the reason."""

from __future__ import annotations

import sys

MODEL, URL = sys.argv[1:]


def main() -> None:
    import pytest
    import vllm
    from trl.import_utils import is_vllm_available
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    assert is_vllm_available(), vllm.__version__
    with pytest.raises(ImportError, match="weights"):  # its trainers send weights to the engine: not supported
        import trl.generation.vllm_generation  # noqa: F401

    llm = LLM(MODEL, max_model_len=256, dtype="float32", enable_sleep_mode=False, logprobs_mode="processed_logprobs")
    params = SamplingParams(
        n=2,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        repetition_penalty=1.0,
        max_tokens=5,
        logprobs=0,
        structured_outputs=StructuredOutputsParams(regex="[a-z]+"),
    )
    outputs = llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling_params=params, use_tqdm=False)
    ids = [output.token_ids for answer in outputs for output in answer.outputs]
    logprobs = [[next(iter(each.values())).logprob for each in output.logprobs] for output in outputs[0].outputs]
    assert len(ids) == 2
    assert [len(each) for each in ids] == [len(each) for each in logprobs]


if __name__ == "__main__":
    main()
