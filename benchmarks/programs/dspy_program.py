"""dspy: a signature answered through litellm's hosted_vllm and openai providers."""

from __future__ import annotations

import sys

import dspy

_, URL = sys.argv[1:]


def main() -> None:
    for provider in ("hosted_vllm", "openai"):
        model = dspy.LM(f"{provider}/tiny", api_base=f"{URL}/v1", api_key="none", max_tokens=60, cache=False)
        (answer,) = model("Say hello.")
        assert isinstance(answer if isinstance(answer, str) else answer["text"], str)
        dspy.configure(lm=model, adapter=dspy.JSONAdapter())
        try:
            found = dspy.Predict("question -> answer: bool")(question="Is it raining?")
            assert isinstance(found.answer, bool)
        except dspy.utils.exceptions.AdapterParseError as error:  # a model of random weights may run out of tokens
            print("the answer did not end:", str(error)[:80])


if __name__ == "__main__":
    main()
