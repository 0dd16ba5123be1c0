"""Frameworks, as installed from PyPI, against a real server whose model gives scripted answers.

    python benchmarks/agents_clients.py [--work DIR] [--only NAME ...] [--out benchmarks/results/agents_clients.json]

Each framework is installed into its own virtual environment under DIR (kept if one is given), and runs the function
below with its name, unchanged. The model is an executor of the tests that repeats its prompt once; the chat template
makes that prompt from the last message. Exit status 1 when one fails. Needs PyPI.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "agents_clients.json"
TEMPLATE = (
    '{# <tool_call> "arguments" #}{% if messages[-1].role == "tool" %}It is {{ messages[-1].content }}.'
    "{% elif messages[-1].content is string %}{{ messages[-1].content }}"
    "{% else %}{% for part in messages[-1].content %}{{ part.text }}{% endfor %}{% endif %}"
)
CASE_S = 300.0


def call_of(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


WEATHER = call_of("get_weather", city="Zürich")
THOUGHT = "<think>hm</think>"
PERSON = '{"name": "Änn", "age": 3}'
SUNNY = "sunny in Zürich"


def check(found: Any, wanted: Any, what: str) -> None:
    if found != wanted:
        raise AssertionError(f"{what}: {found!r}, not {wanted!r}")


# Run in the environments of the frameworks:


def openai_client(url: str) -> None:
    from openai import OpenAI, pydantic_function_tool
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    class get_weather(BaseModel):
        city: str

    client, tools = OpenAI(base_url=f"{url}/v1", api_key="none"), [pydantic_function_tool(get_weather)]

    def asked(said: str) -> Any:
        return {"model": "null", "messages": [{"role": "user", "content": said}]}

    parsed = client.chat.completions.parse(**asked(PERSON), response_format=Person).choices[0].message.parsed
    check(parsed, Person(name="Änn", age=3), "parse")
    (call,) = client.chat.completions.parse(**asked(WEATHER), tools=tools).choices[0].message.tool_calls or []
    check(call.function.parsed_arguments, get_weather(city="Zürich"), "parse with tools")
    with client.chat.completions.stream(**asked(THOUGHT + WEATHER), tools=tools) as stream:
        pieces = [each.arguments_delta for each in stream if each.type == "tool_calls.function.arguments.delta"]
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls or []
    check(call.function.parsed_arguments, get_weather(city="Zürich"), "streamed")
    check(json.loads("".join(pieces)), {"city": "Zürich"}, "the arguments' events")
    check(len(pieces) > 1, True, "arguments come in pieces")

    function: Any = {"type": "function", "name": "get_weather", "parameters": get_weather.model_json_schema()}
    with client.responses.stream(model="null", input=THOUGHT + WEATHER, tools=[function]) as events:
        kinds = {each.type for each in events}
        first = events.get_final_response()
    wanted = {"response.reasoning_text.delta", "response.function_call_arguments.delta", "response.completed"}
    check(wanted - kinds, set(), "events of a response")
    (made,) = (each for each in first.output if each.type == "function_call")
    result: Any = {"type": "function_call_output", "call_id": made.call_id, "output": SUNNY}
    second = client.responses.create(model="null", previous_response_id=first.id, input=[result])
    check(second.output_text, f"It is {SUNNY}.", "previous_response_id")
    form: Any = client.responses.parse(model="null", input=PERSON, text_format=Person)
    check(form.output_parsed, Person(name="Änn", age=3), "a response parsed")


def anthropic(url: str) -> None:
    from anthropic import Anthropic

    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    asked: Any = {"model": "null", "max_tokens": 300, "tools": [{"name": "get_weather", "input_schema": schema}]}
    client = Anthropic(base_url=url, api_key="none")
    question: Any = {"role": "user", "content": THOUGHT + WEATHER}
    with client.messages.stream(**asked, messages=[question]) as stream:
        kinds = {each.type for each in stream}
        message = stream.get_final_message()
    check({"thinking", "input_json", "content_block_stop"} - kinds, set(), "events")
    thinking, call = message.content
    check((thinking.type, thinking.thinking), ("thinking", "hm"), "thinking")
    check((call.name, call.input, message.stop_reason), ("get_weather", {"city": "Zürich"}, "tool_use"), "a call")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": SUNNY}
    turns: Any = [question, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    (said,) = client.messages.create(**asked, messages=turns).content
    check(said.text, f"It is {SUNNY}.", "the result's answer")
    counted = client.messages.count_tokens(model="null", messages=[question])
    check(counted.input_tokens > 0, True, "count_tokens")


def openai_agents(url: str) -> None:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Of a city."""
        return f"sunny in {city}"

    async def run() -> None:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
            agent = agents.Agent(name="a", instructions="b", tools=[get_weather], model=kind("null", client))
            whole = await agents.Runner.run(agent, WEATHER)
            check(whole.final_output, f"It is {SUNNY}.", f"{kind.__name__}, whole")
            streamed = agents.Runner.run_streamed(agent, WEATHER)
            async for _ in streamed.stream_events():
                pass
            check(streamed.final_output, f"It is {SUNNY}.", f"{kind.__name__}, streamed")

    asyncio.run(run())


def langchain_openai(url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Person(BaseModel):
        """Somebody."""

        name: str
        age: int

    @tool
    def get_weather(city: str) -> str:
        """Of a city."""
        return f"sunny in {city}"

    for responses in (False, True):
        model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="null", use_responses_api=responses)
        bound = model.bind_tools([get_weather])
        answer = bound.invoke(WEATHER)
        made = [(each["name"], each["args"]) for each in answer.tool_calls]
        check(made, [("get_weather", {"city": "Zürich"})], f"bind_tools, responses={responses}")
        result = ToolMessage(get_weather.invoke(answer.tool_calls[0]["args"]), tool_call_id=answer.tool_calls[0]["id"])
        check(bound.invoke([HumanMessage(WEATHER), answer, result]).text, f"It is {SUNNY}.", "the result's answer")
        whole: Any = None
        for chunk in bound.stream(WEATHER):
            whole = chunk if whole is None else whole + chunk
        check([each["args"] for each in whole.tool_calls], [{"city": "Zürich"}], f"streamed, responses={responses}")
        for method, said in (("json_schema", PERSON), ("function_calling", call_of("Person", name="Änn", age=3))):
            found = model.with_structured_output(Person, method=method).invoke(said)
            check(found, Person(name="Änn", age=3), f"with_structured_output, {method}, responses={responses}")


def langchain_ollama(url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_ollama import ChatOllama
    from pydantic import BaseModel

    class Person(BaseModel):
        """Somebody."""

        name: str
        age: int

    @tool
    def get_weather(city: str) -> str:
        """Of a city."""
        return f"sunny in {city}"

    model = ChatOllama(base_url=url, model="null", num_predict=200, validate_model_on_init=True)
    bound = model.bind_tools([get_weather])
    answer = bound.invoke(WEATHER)
    check([(each["name"], each["args"]) for each in answer.tool_calls], [("get_weather", {"city": "Zürich"})], "calls")
    result = ToolMessage(get_weather.invoke(answer.tool_calls[0]["args"]), tool_call_id=answer.tool_calls[0]["id"])
    check(bound.invoke([HumanMessage(WEATHER), answer, result]).text, f"It is {SUNNY}.", "the result's answer")
    check("".join(each.text for each in model.stream("hello")), "hello", "streamed")
    found = model.with_structured_output(Person, method="json_schema").invoke(PERSON)
    check(found, Person(name="Änn", age=3), "with_structured_output")


def llama_index(url: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    def get_weather(city: str) -> str:
        """Of a city."""
        return f"sunny in {city}"

    model = OpenAILike(
        model="null", api_base=f"{url}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True
    )
    check(model.chat([ChatMessage(content="hello")]).message.content, "hello", "chat")
    check("".join(each.delta or "" for each in model.stream_chat([ChatMessage(content="hello")])), "hello", "streamed")
    check(str(model.predict_and_call([FunctionTool.from_defaults(get_weather)], WEATHER)), SUNNY, "predict_and_call")
    found = model.as_structured_llm(Person).complete(call_of("Person", name="Änn", age=3)).raw
    check(found, Person(name="Änn", age=3), "as_structured_llm")


def litellm(url: str) -> None:
    import litellm

    function = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    messages = [{"role": "user", "content": WEATHER}]
    for provider, base in (("openai", f"{url}/v1"), ("hosted_vllm", f"{url}/v1"), ("anthropic", url)):
        asked: Any = {
            "model": f"{provider}/null",
            "api_base": base,
            "api_key": "none",
            "messages": messages,
            "tools": [{"type": "function", "function": function}],
            "max_tokens": 300,
        }
        made = litellm.completion(**asked).choices[0].message.tool_calls
        calls = [(each.function.name, json.loads(each.function.arguments)) for each in made]
        check(calls, [("get_weather", {"city": "Zürich"})], f"{provider}, whole")
        chunks = list(litellm.completion(**asked, stream=True))
        joined = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message.tool_calls
        check([json.loads(each.function.arguments) for each in joined], [{"city": "Zürich"}], f"{provider}, streamed")
    answer = litellm.responses(model="openai/null", api_base=f"{url}/v1", api_key="none", input="hello")
    check(answer.output[0].content[0].text, "hello", "responses")


def instructor(url: str) -> None:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    modes = (
        (instructor.Mode.TOOLS, call_of("Person", name="Änn", age=3)),
        (instructor.Mode.JSON_SCHEMA, PERSON),
    )
    for mode, said in modes:
        asked: Any = {"model": "null", "response_model": Person, "messages": [{"role": "user", "content": said}]}
        found = instructor.from_openai(client, mode=mode).chat.completions.create(**asked)
        check(found.model_dump(), {"name": "Änn", "age": 3}, str(mode))


Cases = dict[str, tuple[Callable[[str], None], tuple[str, ...]]]
"""By framework: the function that uses it, and the packages that the function needs."""

CASES: Cases = {
    "openai": (openai_client, ("openai",)),
    "anthropic": (anthropic, ("anthropic",)),
    "openai-agents": (openai_agents, ("openai-agents",)),
    "langchain-openai": (langchain_openai, ("langchain-openai",)),
    "langchain-ollama": (langchain_ollama, ("langchain-ollama",)),
    "llama-index": (llama_index, ("llama-index-llms-openai-like",)),
    "litellm": (litellm, ("litellm", "mcp")),
    "instructor": (instructor, ("instructor",)),
}

# Run in this environment:


def python_with(packages: tuple[str, ...], folder: Path) -> Path:
    """The Python interpreter of a new environment with the packages."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if subprocess.run([str(python), "-m", "pip", "show", "-q", *packages], capture_output=True, check=False).returncode:
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def run_case(script: str, name: str, packages: tuple[str, ...], url: str, work: Path) -> dict[str, Any]:
    python = python_with(packages, work / name)
    command = [str(python), script, "--case", name, "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CASE_S, check=False)
    listed = subprocess.run([str(python), "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
    wanted = {*packages, "openai"}
    versions = dict(line.split("==") for line in listed.splitlines() if line.partition("==")[0] in wanted)
    return {
        "passed": done.returncode == 0,
        "versions": versions,
        "said": done.stderr[-2000:] if done.returncode else "",
    }


def parse(description: str | None, cases: Cases, results: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where environments are kept; default: nowhere")
    parser.add_argument("--only", nargs="+", choices=list(cases), default=list(cases))
    parser.add_argument("--out", type=Path, default=results)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    return parser.parse_args()


def run(script: str, arguments: argparse.Namespace, cases: Cases, serve: Sequence[str]) -> None:
    """Runs the cases against a server or, as a child, one case. serve: additional arguments of the server's command."""
    if arguments.case is not None:
        try:
            cases[arguments.case][0](arguments.url)
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        return
    from http_overhead import free_port, program, wait_ready
    from report import write_report

    with tempfile.TemporaryDirectory(prefix="headrace-clients-") as folder:
        work = (arguments.work or Path(folder)).resolve()
        url = f"http://127.0.0.1:{(port := free_port())}"
        command = [sys.executable, "-m", "headrace", "serve", *serve, "--port", str(port)]
        log, environment = Path(folder) / "log", {"PYTHONPATH": str(ROOT / "tests" / "support")}
        with program(command, log, environment, Path(folder)) as process:
            wait_ready(process, url, log)
            results = {}
            for name in arguments.only:
                results[name] = run_case(script, name, cases[name][1], url, work)
                print(f"{name}: {'passed' if results[name]['passed'] else results[name]['said']}", flush=True)
    write_report(arguments.out, Path(script).stem, results)
    sys.exit(0 if all(each["passed"] for each in results.values()) else 1)


ECHO = (
    *("null", "--chat-template", TEMPLATE, "--max-model-len", "4096", "--hf-overrides", '{"vocab_size": 400}'),
    *("--distributed-executor-backend", "null_with_tokenizer:EchoExecutor", "--reasoning-parser", "qwen3"),
)

if __name__ == "__main__":
    run(__file__, parse(__doc__, CASES, RESULTS), CASES, ECHO)
