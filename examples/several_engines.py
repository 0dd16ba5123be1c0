"""Two engines that answer as one, each with its own copy of the model. Usage: several_engines.py [MODEL]"""

import sys

from headrace import LLM, SamplingParams

with LLM(*sys.argv[1:2], data_parallel_size=2) as llm:
    outputs = llm.generate([f"The number {n} is" for n in range(16)], SamplingParams(temperature=0, max_tokens=8))
    for output in outputs[:3]:
        print(repr(output.prompt), "->", repr(output.outputs[0].text))
    tokens = sum(m.value for m in llm.get_metrics() if m.name == "vllm:generation_tokens")
    print("both together have generated", tokens, "tokens")
