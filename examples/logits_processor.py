"""A rule of your own for which tokens may come. Usage: logits_processor.py [MODEL]"""

import sys

import torch

from headrace import LLM, SamplingParams
from headrace.v1.sample.logits_processor import AdapterLogitsProcessor


class NoRepeats(AdapterLogitsProcessor):
    """extra_args={"no_repeats": n}: none of a request's last n tokens may come again."""

    def is_argmax_invariant(self) -> bool:
        return False  # it may forbid the most likely token, so greedy requests need it too

    def new_req_logits_processor(self, params: SamplingParams):
        window = (params.extra_args or {}).get("no_repeats")
        if window is None:
            return None  # the request goes without

        def forbid(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[output_ids[-window:]] = float("-inf")
            return logits

        return forbid


if __name__ == "__main__":  # the engine's process imports this file for the class
    with LLM(*sys.argv[1:2], logits_processors=[NoRepeats]) as llm:
        for extra in (None, {"no_repeats": 40}):
            params = SamplingParams(temperature=0, max_tokens=40, extra_args=extra)
            print(extra, "->", repr(llm.generate("One two one two one", params)[0].outputs[0].text))
