"""Two engines that answer as one, each with its own copy of the model. Usage: several_engines.py [MODEL]"""

import sys

from headrace import LLM, SamplingParams
from headrace.v1.metrics.reader import Counter

with LLM(*sys.argv[1:2], data_parallel_size=2) as llm:
    outputs = llm.generate([f"The number {n} is" for n in range(16)], SamplingParams(temperature=0, max_tokens=8))
    for output in outputs[:3]:
        print(repr(output.prompt), "->", repr(output.outputs[0].text))
    counters = [each for each in llm.get_metrics() if isinstance(each, Counter)]
    tokens = sum(each.value for each in counters if each.name == "vllm:generation_tokens")
    print("both together have generated", tokens, "tokens")
