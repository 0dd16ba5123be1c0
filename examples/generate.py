"""Several prompts at once. Usage: generate.py [MODEL]"""

import sys

from headrace import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=32, logprobs=1)

with LLM(*sys.argv[1:2]) as llm:
    for output in llm.generate(["The sky is", "Water runs", "A headrace is"], params):
        answer = output.outputs[0]
        print(f"{output.prompt!r} -> {answer.text!r}")
        print(f"  {len(output.prompt_token_ids)} + {len(answer.token_ids)} tokens, ended by {answer.finish_reason}")
        print(f"  mean log-probability {(answer.cumulative_logprob or 0.0) / len(answer.token_ids):.2f}")
