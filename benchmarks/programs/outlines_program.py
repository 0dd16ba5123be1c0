"""outlines: structured answers of an LLM in the process, and of a server under its `vllm` and `openai` models."""

from __future__ import annotations

import json
import re
import sys
from typing import Literal

MODEL, URL = sys.argv[1:]


def offline() -> None:
    import outlines
    from pydantic import BaseModel
    from vllm import LLM, SamplingParams

    class Cat(BaseModel):
        name: str
        lives: int

    model = outlines.from_vllm_offline(LLM(MODEL, max_model_len=256, dtype="float32"))
    params = SamplingParams(max_tokens=100, temperature=0.5, seed=3)
    assert model("Yes or no?", Literal["yes", "no"], sampling_params=params) in ("yes", "no")
    found = model("A cat:", Cat, sampling_params=SamplingParams(max_tokens=200, seed=1, bad_words=[]))
    assert found.startswith("{"), found
    several = model.batch(["A number:", "Another:"], outlines.regex("[0-9]{3}"), sampling_params=params)
    assert all(re.fullmatch("[0-9]{3}", each) for answer in several for each in [answer] if isinstance(each, str)), (
        several
    )
    assert isinstance(model("Hello", sampling_params=params), str)


def served() -> None:
    import openai
    import outlines

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    model = outlines.from_vllm(client, "tiny")
    assert model("Yes or no?", Literal["yes", "no"], max_tokens=20) in ("yes", "no")
    assert re.fullmatch("[0-9]{3}", model("A number:", outlines.regex("[0-9]{3}"), max_tokens=20))
    assert "".join(model.stream("Yes or no?", Literal["yes", "no"], max_tokens=20)) in ("yes", "no")
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    plain = outlines.from_openai(client, "tiny")
    assert json.loads(plain("An object:", outlines.json_schema(json.dumps(schema)), max_tokens=60))["a"] in ("x", "y")


if __name__ == "__main__":
    offline()
    served()
