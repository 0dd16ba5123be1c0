"""A tool that the model must call, and its result given back. Usage: tools.py [URL MODEL] of a running server, such as
`headrace serve --port 8000`; by default http://127.0.0.1:8000/v1 and the first model that it has."""

import json
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="none")
model = sys.argv[2] if len(sys.argv) > 2 else client.models.list().data[0].id
messages = [{"role": "user", "content": "What is the weather in Oslo?"}]

forced = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
answer = client.chat.completions.create(model=model, messages=messages, tools=[TOOL], **forced)
call = answer.choices[0].message.tool_calls[0]
city = json.loads(call.function.arguments)["city"]
print(f"the model calls {call.function.name}({city!r})")

messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "12 degrees and rain"}]
answer = client.chat.completions.create(model=model, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=60)
print("answer:", answer.choices[0].message.content)
