"""A conversation of two turns. Usage: chat.py [MODEL]"""

import sys

from headrace import LLM, SamplingParams

messages = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "What is a headrace?"},
]

with LLM(*sys.argv[1:2]) as llm:
    for question in ("Why does it need a screen?", None):
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=60))
        reply = output.outputs[0].text
        print("assistant:", reply)
        print(f"  ({output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were in the cache)")
        if question is not None:
            print("user:", question)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": question}]
