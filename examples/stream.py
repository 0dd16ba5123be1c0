"""Text as it is generated, two streams side by side; one is stopped early. Usage: stream.py [MODEL]"""

import asyncio
import sys

from headrace import AsyncLLM, RequestOutputKind, SamplingParams


async def follow(llm: AsyncLLM, name: str, prompt: str, most_pieces: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, output_kind=RequestOutputKind.DELTA)
    num_pieces = 0
    async for output in llm.generate(prompt, params, request_id=name):
        print(f"{name}: {output.outputs[0].text!r}")
        num_pieces += 1
        if num_pieces == most_pieces:
            print(f"{name}: stopped")
            break  # leaving the loop ends the request in the engine


async def main() -> None:
    async with AsyncLLM(*sys.argv[1:2]) as llm:
        await asyncio.gather(
            follow(llm, "whole", "Once upon a time", most_pieces=1000),
            follow(llm, "short", "The recipe begins with", most_pieces=5),
        )


asyncio.run(main())
