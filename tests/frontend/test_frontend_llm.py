"""The synchronous face, on a core in memory and on one behind a real socket."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_core import MAX_MODEL_LEN, Faults, MemoryCore, expected_text, memory_core
from fake_llm import core, llm

from headrace import (
    LLM,
    EngineDeadError,
    HeadraceError,
    InvalidRequestError,
    OptionError,
    QueueFullError,
    RequestFailedError,
    SamplingParams,
)
from headrace.ipc.messages import Abort, AddRequest, GetStats, Goodbye

__all__ = ["core", "llm"]  # fixtures
pytestmark = pytest.mark.usefixtures("private_cache")


def requests_of(core: MemoryCore) -> list[AddRequest]:
    return [message for message in core.core.received if isinstance(message, AddRequest)]


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["Hello", "the quick brown", "世界"]
    lengths = [9, 3, 6]
    outputs = llm.generate(prompts, [SamplingParams(max_tokens=each) for each in lengths], use_tqdm=False)
    for prompt, length, output in zip(prompts, lengths, outputs, strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids == llm.get_tokenizer().encode(prompt)
        assert output.outputs[0].text == expected_text(llm, output.prompt_token_ids, length)
        assert (output.finished, output.outputs[0].finish_reason) == (True, "length")


@pytest.mark.parametrize(
    "prompts",
    [
        "Hello",
        {"prompt": "Hello"},
        [42, 71, 78, 78, 81],
        {"prompt_token_ids": [42, 71, 78, 78, 81]},
        {"prompt_token_ids": [42, 71, 78, 78, 81], "prompt": "Hello"},
        ["Hello"],
        [{"prompt": "Hello"}],
        [[42, 71, 78, 78, 81]],
        [{"prompt_token_ids": (42, 71, 78, 78, 81), "cache_salt": None}],
    ],
)
def test_every_form_of_a_prompt_is_the_same_request(llm: LLM, prompts: Any) -> None:
    (output,) = llm.generate(prompts, use_tqdm=False)
    assert output.outputs[0].text == expected_text(llm, [42, 71, 78, 78, 81], 8)
    assert output.prompt_token_ids == [42, 71, 78, 78, 81]


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_the_models_defaults_count_when_none_are_given(llm: LLM, core: MemoryCore) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, max_tokens=8)
    llm.generate("Hello", use_tqdm=False)
    assert (requests_of(core)[0].task.sampling.temperature, requests_of(core)[0].task.sampling.max_tokens) == (0.5, 8)
    llm.generate("Hello", SamplingParams(), use_tqdm=False)
    assert (requests_of(core)[1].task.sampling.temperature, requests_of(core)[1].task.sampling.max_tokens) == (1.0, 16)


def test_no_limit_means_the_models_length(llm: LLM) -> None:
    (output,) = llm.generate("Hello", SamplingParams(max_tokens=None), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == MAX_MODEL_LEN - 5


def test_priority_and_cache_salt_reach_the_core(llm: LLM, core: MemoryCore) -> None:
    llm.generate([{"prompt": "a", "cache_salt": "mine"}, "b"], priority=[3, -1], use_tqdm=False)
    assert [(each.priority, each.cache_salt) for each in requests_of(core)] == [(3, "mine"), (-1, "")]
    messages = [{"role": "user", "content": "a"}]
    llm.chat([messages, messages], priority=[4, -2], use_tqdm=False)
    llm.chat(messages, priority=7, use_tqdm=False)
    llm.enqueue_chat([messages], priority=[5])
    llm.wait_for_completion(use_tqdm=False)
    assert [each.priority for each in requests_of(core)[2:]] == [4, -2, 7, 5]


def test_n_outputs_have_seeds_of_their_own(llm: LLM) -> None:
    (output,) = llm.generate("Hello", SamplingParams(n=3, seed=5, max_tokens=7), use_tqdm=False)
    assert [each.index for each in output.outputs] == [0, 1, 2]
    for each in output.outputs:
        assert each.text == expected_text(llm, output.prompt_token_ids, 7, seed=5 + each.index)


def test_logprobs_have_vllms_form(llm: LLM, core: MemoryCore) -> None:
    (output,) = llm.generate("Hi", SamplingParams(max_tokens=3, n=2, logprobs=2, prompt_logprobs=0), use_tqdm=False)
    assert [each.task.sampling.prompt_logprobs for each in requests_of(core)] == [0, None]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [list(each or {}) for each in output.prompt_logprobs[1:]] == [[each] for each in output.prompt_token_ids[1:]]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert completion.cumulative_logprob == pytest.approx(-0.5 * 3)
    for token_id, row in zip(completion.token_ids, completion.logprobs, strict=True):
        assert list(row) == list(dict.fromkeys([token_id, 10, 11]))
        assert (row[token_id].logprob, row[token_id].rank) == (-0.5, 2)
        assert row[token_id].decoded_token == llm.get_tokenizer().decode([token_id])
        if token_id != 10:
            assert (row[10].logprob, row[10].rank) == (-0.25, 1)


@pytest.mark.parametrize(
    ("prompts", "params", "said"),
    [
        ("", {}, "the decoder prompt cannot be empty"),
        ([["Hello"]], {}, r"prompt_token_ids\[0\] is 'Hello', which is no token id"),
        ({"prompt_token_ids": [2, int]}, {}, r"prompt_token_ids\[1\] is <class 'int'>, which is no token id"),
        ({"prompt_token_ids": [2, np.array([3])]}, {}, r"prompt_token_ids\[1\] is array\(\[3\]\), which is no"),
        ([[]], {}, "the decoder prompt cannot be empty"),
        ([1, -2, 3], {}, r"prompt_token_ids\[1\] is -2, which is out of vocabulary: the model's token ids are 0 to"),
        ([1, 5000, 9999], {}, r"prompt_token_ids\[1\] is 5000, which is out of vocabulary: the model's token ids"),
        ([[1, 2], [1, 2**80]], {}, r"prompt_token_ids\[1\] is 1208925819614629174706176"),
        ([[1, True]], {}, r"prompt_token_ids\[1\] is True"),
        ([[1, 2.5]], {}, r"prompt_token_ids\[1\] is 2.5"),
        ([[1], [3] * 300], {}, r"prompts\[1\]: .*prompt \(length 300\) .* maximum model length of 256"),
        ([[3] * 256], {}, "maximum context length is 256 tokens"),
        ([[3] * 256], {}, "Please reduce the length of the prompt to 255 tokens"),
        (
            [[3] * 256],
            {},
            r"longer than the maximum model length of 256\. Make sure that `max_model_len` is no",
        ),
        (5, {}, "a prompt is a string"),
        ([None], {}, "a prompt is a string"),
        ({"text": "x"}, {}, "a field 'text'"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, {}, "'multi_modal_data', which is not supported"),
        ({}, {}, "neither 'prompt' nor 'prompt_token_ids'"),
        ({"prompt": 7}, {}, "'prompt' must be a string"),
        ({"prompt_token_ids": "abc"}, {}, "must be a list of integers"),
        ({"prompt": "x", "cache_salt": 1}, {}, "'cache_salt' must be a string"),
        ("\ud800", {}, "not valid Unicode"),
        ("x", {"logprobs": 6}, "logprobs = 6: the engine gives at most 5"),
        ("x", {"prompt_logprobs": -1}, "prompt_logprobs = -1, the whole vocabulary of 317: the engine gives at most 5"),
        ("x", {"stop_token_ids": [5000]}, "stop_token_ids contains 5000"),
    ],
)
def test_a_bad_request_is_refused_before_anything_is_sent(
    llm: LLM, core: MemoryCore, prompts: Any, params: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
    assert requests_of(core) == []
    assert llm.generate("still fine", use_tqdm=False)[0].finished


def test_numbers_of_params_and_priorities_must_match(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="2 prompts and 1 sampling_params"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(InvalidRequestError, match="one for each of the 2 prompts"):
        llm.generate(["a", "b"], priority=[1])
    with pytest.raises(InvalidRequestError, match="must be a SamplingParams"):
        llm.generate("a", {"temperature": 0})  # type: ignore[arg-type]


def test_params_changed_to_something_bad_are_refused(llm: LLM) -> None:
    params = SamplingParams()
    params.top_p = 7
    with pytest.raises(InvalidRequestError, match="top_p"):
        llm.generate("a", params)


def test_chat_is_the_template_and_generate(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi 😀"}]
    (answer,) = llm.chat(messages, use_tqdm=False)
    assert answer.prompt == "<|im_start|>user\nhi 😀<|im_end|>\n<|im_start|>assistant\n"
    ids = llm.get_tokenizer().encode(answer.prompt, add_special_tokens=False)
    assert answer.outputs == llm.generate({"prompt_token_ids": ids}, use_tqdm=False)[0].outputs


def test_chat_takes_several_conversations_and_the_templates_arguments(llm: LLM) -> None:
    half = [{"role": "assistant", "content": "I am"}]
    outputs = llm.chat([half, half], continue_final_message=True, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["<|im_start|>assistant\nI am"] * 2
    (output,) = llm.chat(
        half, chat_template="{{ mood }}!{{ add_generation_prompt }}", chat_template_kwargs={"mood": "ü"}, use_tqdm=False
    )
    assert output.prompt == "ü!True"
    with pytest.raises(InvalidRequestError, match="no argument 'template'"):
        llm.chat(half, template="x")
    with pytest.raises(InvalidRequestError, match="must be a list of dicts"):
        llm.chat("hi")  # type: ignore[arg-type]


def test_chat_moves_an_instruction_that_the_template_would_leave_out(llm: LLM) -> None:
    template = "{% for m in messages %}{% if m.role in ['system', 'user'] %}<{{ m.content }}>{% endif %}{% endfor %}"
    messages = [{"role": "user", "content": "hi"}, {"role": "developer", "content": "be brief"}]
    (output,) = llm.chat(messages, chat_template=template, use_tqdm=False)
    assert output.prompt == "<hi><be brief>"
    asked = {"chat_template": template, "tokenize": False}
    assert llm.get_tokenizer().apply_chat_template(messages, **asked) == "<hi>", "as transformers has it"


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("message", "options", "said"),
    [
        ({"role": 3, "content": "x"}, {}, r"messages\[0\]\.role must be a text, not 3"),
        ({"role": "user", "content": 3}, {}, r"messages\[0\]\.content must be a text or a list of parts, not 3"),
        ({}, {"tools": 3}, "tools must be a list of dicts, not int"),
        ({}, {"tools": TOOL}, "tools must be a list of dicts, not dict"),
        ({}, {"tools": [3]}, r"tools\[0\] must be a dict"),
        ({}, {"tools": [{"type": "function"}]}, r"tools\[0\] must be {type: function, function: {name: ...}}"),
        ({}, {"tools": [TOOL, {"function": {}}]}, r"tools\[1\].function needs a name"),
        ({}, {"tools": [TOOL, TOOL]}, "two tools are called 'f'"),
        ({}, {"tools": [{"function": {"name": "f", "parameters": "x"}}]}, "parameters must be a JSON schema"),
        ({}, {"tools": [{"function": {"name": "f", "inputSchema": {}}}]}, "inputSchema is another API's name: give"),
        ({}, {"tools": [{"function": {"name": "f", "parametersJsonSchema": {}}}]}, "give .* schema as parameters"),
        ({}, {"documents": "x"}, "documents must be a list of dicts, not str"),
        ({}, {"chat_template": 3}, "chat_template must be a text, not int"),
        ({}, {"chat_template_kwargs": [1]}, r"chat_template_kwargs must be a dict of values by their names, not \[1\]"),
        ({}, {"chat_template_kwargs": {1: 2}}, "chat_template_kwargs must be a dict of values by their names"),
        ({}, {"tool_call_parser": 3}, "tool_call_parser must be the name of a format, not 3"),
    ],
)
def test_chat_refuses_what_is_malformed_in_the_servers_words(llm: LLM, message: Any, options: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        llm.chat([{"role": "user", "content": "x", **message}], use_tqdm=False, **options)


def test_chat_hands_tools_of_other_shapes_to_the_template(llm: LLM) -> None:
    tools = [{"name": "f", "input_schema": {}}]
    (output,) = llm.chat([{"role": "user", "content": "x"}], chat_template="{{ tools[0].name }}", tools=tools)
    assert output.prompt == "f"


PARTS = [{"type": "text", "text": "Say"}, {"type": "text", "text": "hi"}]


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{{ messages[0]['content'] }}", "Say\nhi"),
        ("{% for p in messages[0].content %}<{{ p.type }}:{{ p.text }}>{% endfor %}", "<text:Say><text:hi>"),
    ],
)
def test_chat_takes_text_in_parts(llm: LLM, template: str, prompt: str) -> None:
    template = template.replace("messages[0]", "m").join(["{% for m in messages %}", "{% endfor %}"])
    (output,) = llm.chat([{"role": "user", "content": PARTS}], chat_template=template, use_tqdm=False)
    assert output.prompt == prompt


@pytest.mark.parametrize(
    ("given", "content", "prompt"),
    [
        ("string", PARTS, "Say\nhi"),
        ("openai", PARTS, "<Say><hi>"),
        ("openai", "hi", "<hi>"),
        ("openai", "", ""),
        ("auto", "hi", "hi"),
    ],
)
def test_a_template_gets_contents_in_the_form_that_was_asked_for(
    llm: LLM, given: str, content: Any, prompt: str
) -> None:
    """The template takes parts, so that auto would give them to it."""
    parts = "{% for p in m.content %}<{{ p.text }}>{% endfor %}"
    one = "{% if m.content is string %}{{ m.content }}{% else %}" + parts + "{% endif %}"
    template = "{% for m in messages %}" + one + "{% endfor %}."
    messages = [{"role": "user", "content": content}]
    (output,) = llm.chat(messages, chat_template=template, chat_template_content_format=given, use_tqdm=False)
    assert output.prompt == f"{prompt}."
    with pytest.raises(InvalidRequestError, match="chat_template_content_format must be auto, string or openai"):
        llm.chat(messages, chat_template_content_format="text")


def test_chat_refuses_other_parts_by_name(llm: LLM) -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(InvalidRequestError, match="'image_url': multimodal input is not supported"):
        llm.chat([{"role": "user", "content": [*PARTS, image]}])
    with pytest.raises(InvalidRequestError, match=r"content\[0\] must be"):
        llm.chat([{"role": "user", "content": [{"type": "text"}]}])


def test_lora_request_is_none_or_a_lora_request(llm: LLM) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    assert llm.generate("Hello", use_tqdm=False, lora_request=None)[0].finished
    assert llm.chat(hello, use_tqdm=False, lora_request=None)[0].finished
    with pytest.raises(InvalidRequestError, match="lora_request must be a LoRARequest"):
        llm.generate("Hello", lora_request=object())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="lora_request must be a LoRARequest"):
        llm.chat(hello, lora_request=object())  # type: ignore[arg-type]


def test_an_empty_model_name_is_refused() -> None:
    for in_process in (True, False):
        with pytest.raises(OptionError, match="model is empty: name one, or leave it out"):
            LLM("", in_process=in_process)


def test_a_list_of_prompts_to_stream_is_told_to_be_one(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="takes one prompt, not a list of 2"):
        llm.stream(["a", "b"])


def test_stream_gives_each_piece_once(llm: LLM) -> None:
    pieces = list(llm.stream("Hello", SamplingParams(max_tokens=20)))
    assert "".join(piece.outputs[0].text for piece in pieces) == expected_text(llm, [42, 71, 78, 78, 81], 20)
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert sum(len(piece.outputs[0].token_ids) for piece in pieces) == 20


def test_stream_refuses_a_bad_request_at_once(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.stream("")


def wait_until_idle(llm: LLM) -> None:
    deadline = threading.Event()
    for _ in range(500):
        if llm.get_stats().num_running == 0:
            return
        deadline.wait(0.01)
    pytest.fail("the core still runs the request 5 s later")


@pytest.mark.parametrize("how", ["close", "with", "forget"])
def test_leaving_a_stream_aborts_the_request(llm: LLM, core: MemoryCore, how: str) -> None:
    core.pause()
    stream = llm.stream("Hello", SamplingParams(max_tokens=250))
    assert llm.get_stats().num_running == 1
    if how == "close":
        stream.close()
        assert list(stream) == []
    elif how == "with":
        with stream:
            pass
    del stream
    gc.collect()
    wait_until_idle(llm)
    assert any(isinstance(message, Abort) for message in core.core.received)


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_ctrl_c_aborts_what_runs_and_raises(llm: LLM, core: MemoryCore, call: str) -> None:
    core.pause()
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def interrupt_once_it_runs() -> None:
        while llm.get_stats().num_running < 1:
            pass
        signal.pthread_kill(main_thread, signal.SIGINT)

    thread = threading.Thread(target=interrupt_once_it_runs)
    thread.start()
    params = SamplingParams(max_tokens=250)
    with pytest.raises(KeyboardInterrupt):
        _ = (
            llm.generate(["Hello", "a"], params, use_tqdm=False)
            if call == "generate"
            else next(llm.stream("a", params))
        )
    thread.join()
    wait_until_idle(llm)
    core.resume()
    assert llm.generate("and on", use_tqdm=False)[0].finished


def test_one_request_that_fails_ends_its_call_and_nothing_else() -> None:
    faults = Faults(failing_prompts=(9,))
    with memory_core(faults=faults, max_model_len=1_000_000) as core, LLM.attach(core.transport) as llm:
        with pytest.raises(RequestFailedError, match=r"^prompts\[1\]: the model gave NaN") as caught:
            llm.generate([[5], [9], [6]], SamplingParams(max_tokens=None), use_tqdm=False)
        assert caught.value.failure is not None
        assert caught.value.failure.phase == "step"
        wait_until_idle(llm)
        aborted = [message.slots for message in core.core.received if isinstance(message, Abort)]
        assert aborted == [(0,), (2,)], "the others should have been aborted, not waited for"
        assert llm.generate([5], use_tqdm=False)[0].finished


def test_a_full_queue_says_when_to_come_back() -> None:
    with memory_core(faults=Faults(retry_after_s=2.5)) as core, LLM.attach(core.transport) as llm:
        with pytest.raises(QueueFullError, match="the queue is full") as caught:
            llm.generate("Hello", use_tqdm=False)
        assert caught.value.failure is not None
        assert caught.value.failure.retry_after_s == 2.5


@pytest.mark.parametrize("fault", ["die_after_steps", "fail_after_steps"])
@pytest.mark.parametrize("call", ["generate", "stream", "stats"])
def test_a_core_that_dies_ends_every_wait_with_the_cause(fault: str, call: str) -> None:
    with (
        memory_core(faults=Faults(ignore_stats=True, **{fault: 3})) as core,
        LLM.attach(core.transport) as llm,
    ):
        core.pause()
        waited_for = GetStats if call == "stats" else AddRequest

        def die_once_somebody_waits() -> None:
            while not any(isinstance(message, waited_for) for message in core.core.received):
                pass
            core.resume()

        killer = threading.Thread(target=die_once_somebody_waits)
        killer.start()
        params = SamplingParams(max_tokens=100)
        calls: dict[str, Callable[[], object]] = {
            "generate": lambda: llm.generate("Hello", params, use_tqdm=False),
            "stream": lambda: list(llm.stream("Hello", params)),
            "stats": lambda: [llm.stream("Hello", params), llm.get_stats()],
        }
        with pytest.raises(EngineDeadError, match="ran out of memory"):
            calls[call]()
        killer.join()
        with pytest.raises(EngineDeadError, match="ran out of memory"):
            llm.generate("again", use_tqdm=False)


@pytest.mark.parametrize("name", ["close", "shutdown"])
def test_a_closed_llm_says_so(core: MemoryCore, name: str) -> None:
    llm = LLM.attach(core.transport)
    getattr(llm, name)()
    getattr(llm, name)()
    core.stop()
    assert isinstance(core.core.received[-1], Goodbye)
    with pytest.raises(HeadraceError, match="closed"):
        llm.generate("Hello")


def test_an_llm_that_is_forgotten_leaves_and_ends_its_thread(core: MemoryCore) -> None:
    llm = LLM.attach(core.transport)
    thread = llm._background._thread
    llm.generate("Hello", use_tqdm=False)
    watched = weakref.ref(llm)
    del llm
    gc.collect()
    assert watched() is None
    assert not thread.is_alive()
    core.stop()
    assert isinstance(core.core.received[-1], Goodbye)


def test_it_works_where_a_loop_runs_already_as_in_a_notebook(llm: LLM) -> None:
    async def cell() -> str:
        return llm.generate("Hello", use_tqdm=False)[0].outputs[0].text

    assert asyncio.run(cell()) == expected_text(llm, [42, 71, 78, 78, 81], 8)


def test_a_batch_larger_than_the_window_completes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.frontend.api.batch.MAX_IN_FLIGHT", 4)
    outputs = llm.generate([[10 + index % 50] for index in range(100)], SamplingParams(max_tokens=2), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[10 + index % 50] for index in range(100)]


def test_the_progress_bar_counts_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"])
    said = capsys.readouterr()
    assert "2/2" in said.err
    assert said.out == ""


def test_an_llm_that_is_collected_on_its_own_clients_thread_still_ends():
    with memory_core() as core:
        holder = [LLM.attach(core.transport)]
        background, finalizer = holder[0]._background, holder[0]._close
        background.call_soon(holder.clear)  # the last reference goes there
        background._thread.join(10)
        assert not background._thread.is_alive()
        assert not finalizer.alive
