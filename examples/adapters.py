"""A model with and without a LoRA adapter, in one batch. Usage: adapters.py MODEL ADAPTER"""

import sys

from headrace import LLM, LoRARequest, SamplingParams

model, path = sys.argv[1:3]
with LLM(model, enable_lora=True) as llm:
    adapter = LoRARequest("mine", 1, path)
    prompts, params = ["The sky is", "The sky is"], SamplingParams(temperature=0, max_tokens=12)
    for output in llm.generate(prompts, params, lora_request=[None, adapter]):
        name = "the model" if output.lora_request is None else output.lora_request.lora_name
        print(f"{name}: {output.outputs[0].text!r}")
