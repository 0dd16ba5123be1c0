"""An answer that fits a JSON schema, whatever the model would rather say. Usage: structured.py [MODEL]"""

import json
import sys

from headrace import LLM, SamplingParams, StructuredOutputsParams

schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "languages": {"type": "array", "items": {"enum": ["English", "French", "Hindi"]}, "maxItems": 2},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}
params = SamplingParams(max_tokens=200, seed=1, structured_outputs=StructuredOutputsParams(json=schema))

with LLM(*sys.argv[1:2]) as llm:
    (output,) = llm.chat([{"role": "user", "content": "Invent a person."}], params)
    person = json.loads(output.outputs[0].text)
    print(person["name"], "is", person["age"], "and speaks", " and ".join(person["languages"]) or "nothing")
