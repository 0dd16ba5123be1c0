"""Forms that a client makes large or hostile: what is done with them in the server's and the engine's own process takes
little time, as other requests wait for the interpreter meanwhile.

Times are processor seconds of this thread, where a machine's load does not show.
"""

from __future__ import annotations

import gc
import json
import queue
import resource
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from patience import has_ended, still_alive, wait_until
from processor_time import least_processor_s, processor_s
from test_grammar_backends import BACKENDS, VOCAB_SIZE, VOCABULARY, compiled, each_backend, takes, tokens_of
from thinned import every, pairs

from headrace import InvalidRequestError, StructuredOutputsParams
from headrace.core.engine.gates import GateFailed, GateOpened
from headrace.core.engine.sessions import Inbox
from headrace.core.options.structured_outputs import StructuredOutputs
from headrace.core.structured_output import backend, llguidance_backend, xgrammar_backend
from headrace.core.structured_output.backend import Backend, Guarded
from headrace.core.structured_output.backends import Backends
from headrace.core.structured_output.compiler import GrammarCompiler
from headrace.core.structured_output.follower import Follower
from headrace.core.structured_output.forms import prepared
from headrace.core.structured_output.held_memory import Held, HeldMemory
from headrace.core.structured_output.helper.trial import QUICK_BYTES, Trial, stack_bytes
from headrace.core.structured_output.llguidance_backend import MASKS_ON_ONE_THREAD
from headrace.frontend.http.apis.openai.requests import CompletionRequest
from headrace.frontend.request.parameters.structured_outputs import from_body
from headrace.ipc.codec import Tensor
from headrace.ipc.failure import QueueFullError
from headrace.ipc.messages import MOST_GRAMMAR_CHARACTERS, AddRequest, Generate, Sampling, StructuredOutput
from headrace.ipc.process.child import STOP_SIGNALS

LARGE = 8 << 20
"""About the largest body."""


@pytest.mark.parametrize(
    "form",
    every(
        2,
        [
            {"json": json.dumps({"enum": ["abcd"] * (LARGE // 8)})},
            {"json": {"enum": ["a" * 100] * (LARGE // 100)}},
            {"json": {"enum": [{}] * (LARGE // 4)}},
            {"json": {str(each): True for each in range(LARGE // 20)}},
            {"structural_tag": {"structures": [], "triggers": ["a" * LARGE]}},
            {"choice": ["ab"] * (LARGE // 5)},
            {"regex": "a" * LARGE},
        ],
    ),
    ids=["a text", "texts", "objects", "names", "a tag", "choices", "an expression"],
)
def test_a_form_that_is_too_large_is_refused_before_it_is_read(form: dict[str, Any]) -> None:
    def refused() -> None:
        with pytest.raises(InvalidRequestError, match=f"must have at most {MOST_GRAMMAR_CHARACTERS} characters"):
            StructuredOutputsParams(**form)

    most_s = max(0.02, 0.5 * processor_s(lambda: json.loads(json.dumps(form))))
    assert least_processor_s(refused, most_s) < most_s


def test_a_form_as_large_as_may_be_is_taken() -> None:
    schema = {"enum": ["a" * 1000] * 1000}
    assert len(StructuredOutputsParams(json=schema).to_wire().text) == len(json.dumps(schema))


@pytest.mark.parametrize(
    "text",
    [
        "\n" * 300_000 + 'root ::= "a"',
        " " * 300_000 + 'root ::= "a"',
        "\n \n" * 100_000 + 'root ::= "a"',
        "#\n" * 100_000 + 'root ::= "a"',
        'root ::= "a"' + "\n" * 300_000,
        "root" + "\n" * 300_000 + '::= "a"',
    ],
    ids=["empty lines", "spaces", "both", "comments", "empty lines behind", "empty lines within"],
)
def test_which_notation_a_grammar_has_is_seen_at_once(text: str) -> None:
    """By one expression, during which the interpreter does nothing else."""
    assert processor_s(lambda: compiled("xgrammar", "grammar", text)) < 0.5
    assert takes(compiled("xgrammar", "grammar", text), "a")


@pytest.mark.parametrize(
    "part",
    every(
        2,
        [
            '"' + '\\"' * 200_000,
            "/" + "\\/" * 200_000,
            '""' * 200_000,
            '\n"' * 200_000,
            "// /\n" * 100_000,
            "/ " * 200_000,
        ],
    ),
    ids=["an open text", "an open expression", "texts", "open texts", "comments", "expressions"],
)
def test_the_schemas_of_a_grammar_are_found_at_once(part: str) -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    text = f"start: %json {json.dumps(schema)}\n{part}"
    wanted = StructuredOutput(kind="grammar", text=text, disable_additional_properties=True)
    assert least_processor_s(lambda: prepared(wanted), 0.5) < 0.5
    said = prepared(wanted).text
    assert said.startswith(f"start: %json {json.dumps({**schema, 'additionalProperties': False})}\n")
    assert said.endswith(part)


@each_backend
def test_an_object_of_a_thousand_optional_properties_is_followed(name: str) -> None:
    properties = {f"p{each}": {"type": "integer"} for each in range(1000)}
    start = compiled(name, "json", json.dumps({"properties": properties, "additionalProperties": False}))
    assert takes(start, '{"p0":1,"p999":2}')
    assert not takes(start, '{"p1000":1}')


def test_forms_count_as_memory_that_a_client_takes_of_the_engine() -> None:
    def request(slot: int) -> AddRequest:
        form = StructuredOutput(kind="regex", text="a" * 1_000_000)
        prompt = Tensor.of("int32", [5])
        task = Generate(sampling=Sampling(max_tokens=1, structured_output=form))
        return AddRequest(slot=slot, request_id=str(slot), prompt_token_ids=prompt, task=task)

    inbox = Inbox(max_client_bytes=10_000_000)
    assert sum(inbox.offer(1, request(slot)) for slot in range(20)) == 9


# --- the process that tries grammars ----------------------------------------------------------------------------------

CRASHES: dict[str, Any] = {
    "the least integer": {"json": {"const": -(2**63)}},
    "the least integer in an object": {"json": {"type": "object", "properties": {"a": {"enum": [1, -(2**63)]}}}},
    "the least bound": {"json": {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}},
    "a long chain of references": {
        "json": {"$ref": "#/$defs/d0", "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(3000)}}
    },
}


@pytest.fixture
def trial() -> Iterator[Trial]:
    follower = Follower(VOCABULARY, "llguidance")
    yield Trial(follower.helper)
    follower.stop()


def process_of(trial: Trial) -> psutil.Process:
    assert trial.helper.pid is not None
    return psutil.Process(trial.helper.pid)


def forked_by(process: psutil.Process) -> list[psutil.Process]:
    alive = [each for each in process.children() if not has_ended(each)]
    return sorted(alive, key=lambda each: (each.create_time(), each.pid))  # numbers begin anew at times


AS_BODY: dict[str, Callable[[Any], dict[str, Any]]] = {
    "structured_outputs": lambda schema: {"structured_outputs": {"json": schema}},
    "response_format": lambda schema: {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    },
    "a structural tag": lambda schema: {
        "structural_tag": {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<a>"]}
    },
    "a grammar": lambda schema: {"guided_grammar": f"start: %json {json.dumps(schema)}"},
}


@pytest.mark.parametrize(("name", "route"), pairs(tuple(CRASHES), tuple(AS_BODY)))
def test_no_form_is_followed_before_its_trial(name: str, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the trial process refuses, the process that follows all grammars does not even begin to compile."""
    body = CompletionRequest(prompt="a", **AS_BODY[route](CRASHES[name]["json"]))
    params = from_body(body)
    assert params is not None
    backends = Backends(StructuredOutputs(), VOCABULARY)
    compiled = list[StructuredOutput]()
    monkeypatch.setattr(Follower, "compile", lambda self, backend, wanted, held: compiled.append(wanted))
    try:
        with pytest.raises(InvalidRequestError, match=r"ended with status -11|SamplingParams.structured_outputs"):
            backends.compile(params.to_wire())
    finally:
        backends.stop()
    assert not compiled


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (resource.RLIM_INFINITY, 1 << 20),
        (8 << 20, 1 << 20),
        (2 << 20, 1 << 20),
        (1 << 20, 1 << 19),
        (256 << 10, 128 << 10),
    ],
)
def test_a_trial_has_at_most_half_the_stack_of_a_thread_of_the_engine(
    limit: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a form could be accepted that recurses too deeply in the engine."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, resource.RLIM_INFINITY))
    assert stack_bytes() == expected


def test_after_a_crash_the_tokenizer_is_not_read_again(trial: Trial) -> None:
    fine = StructuredOutput(kind="regex", text="[ab]+")
    trial.check("llguidance", fine)
    process = process_of(trial)
    before = forked_by(process)
    crash = StructuredOutput(kind="json", text=json.dumps(CRASHES["a long chain of references"]["json"]))
    with pytest.raises(InvalidRequestError, match="ended with status -11"):
        trial.check("llguidance", crash)
    trial.check("llguidance", fine)
    assert process_of(trial) == process
    assert forked_by(process)[0] == before[0], "the lane of plain forms goes on"
    assert forked_by(process)[1] != before[1]


def test_a_signal_to_all_processes_does_not_end_the_trial_of_a_grammar(trial: Trial) -> None:
    """systemd's and `docker stop`'s reach every process, and the engine goes on with what it has."""
    for number in STOP_SIGNALS:
        trial.check("llguidance", StructuredOutput(kind="regex", text=f"[ab]+{number:d}"))
        process = process_of(trial)
        forked = forked_by(process)
        for each in (process, *forked):
            each.send_signal(number)
    trial.check("llguidance", StructuredOutput(kind="regex", text="[ab]+"))
    assert process_of(trial) == process, "another had to be started"
    assert forked_by(process) == forked


def test_a_trial_process_that_is_killed_from_outside_is_started_again(trial: Trial) -> None:
    def has_each_lane() -> bool:
        """A worker that is killed at the end of its work ends its helper, and the next work starts another."""
        trial.check("llguidance", StructuredOutput(kind="regex", text="[ab]+"))
        return len(forked_by(process_of(trial))) == 3

    trial.helper.start()
    process_of(trial).terminate()  # before it could leave that to its parent
    for nth in range(3):
        wait_until(has_each_lane, 30, "a process for each lane")
        killed = (process_of(trial), *forked_by(process_of(trial)))[nth]
        killed.kill()
        # On a busy machine it lives on for a moment, and would be counted as a process of its lane.
        assert not still_alive([killed], 30)
    trial.check("llguidance", StructuredOutput(kind="regex", text="[ab]+"))


def test_no_process_is_left_when_the_trial_stops(trial: Trial) -> None:
    trial.check("llguidance", StructuredOutput(kind="regex", text="[ab]+"))
    processes = [process_of(trial), *forked_by(process_of(trial))]
    assert len(processes) == 4
    processes[1].suspend()  # one that reads nothing ends too
    trial.helper.stop()
    assert not still_alive(processes, 30)


# --- the memory of forms ----------------------------------------------------------------------------------------------


def test_a_trial_tells_how_much_memory_a_form_takes(trial: Trial) -> None:
    small = StructuredOutput(kind="regex", text="ab")
    large = StructuredOutput(kind="choice", text=json.dumps([f"{n:05}" * 20 for n in range(2000)]))
    sizes = [trial.check("llguidance", form) for form in (small, large, large)]
    assert sizes[0] == QUICK_BYTES < sizes[1], "the large one is measured, which the other one is not worth"
    assert abs(sizes[2] - sizes[1]) < 1 << 20, "what an earlier one has freed is counted again"


class Form(Guarded):
    def __init__(self, held: Held | None) -> None:
        self.held = held

    def copy(self) -> Form:
        return Form(self.held)


def test_forms_that_would_fill_the_memory_wait_for_those_of_others() -> None:
    memory, news = HeldMemory(1000), queue.SimpleQueue[Any]()
    forms: Any = SimpleNamespace(compile=lambda wanted: Form(memory.hold(400)), start=lambda: None, stop=lambda: None)
    compiler = GrammarCompiler(forms, news.put)

    def asked(text: str) -> tuple[Any, Any]:
        """A request, and the news of its gate."""
        sampling = Sampling(max_tokens=1, structured_output=StructuredOutput(kind="regex", text=text))
        request: Any = SimpleNamespace(sampling=sampling, token_ids=np.zeros(0, np.int32), num_prompt_tokens=0)
        prompt = Tensor.of("int32", [5])
        message = AddRequest(slot=0, request_id="a", prompt_token_ids=prompt, task=Generate(sampling=sampling))
        gates = compiler.closed_gates(request, message)
        return request, news.get(timeout=60) if gates else None

    try:
        first, opened = asked("a")
        assert isinstance(opened, GateOpened)
        _, opened = asked("unused")
        assert isinstance(opened, GateOpened)
        del _
        second, opened = asked("b")
        assert isinstance(opened, GateOpened), "what was kept for later requests makes room"
        _, failed = asked("c")
        assert isinstance(failed, GateFailed)
        assert failed.failure.type == QueueFullError.__name__
        assert failed.failure.retry_after_s > 0
        first.matcher = None
        _, opened = asked("c")
        assert isinstance(opened, GateOpened), "it is tried again once there is room"
        assert second.matcher is not None
    finally:
        compiler.stop()


def test_one_form_alone_is_never_too_large() -> None:
    memory = HeldMemory(3 << 20)
    held = memory.hold(2 << 20)
    with pytest.raises(QueueFullError, match="take 3 MiB, as much as they may; try again"):
        memory.hold(2 << 20)
    del held
    assert memory.hold(5 << 20)


# --- grammars that are slow only after many tokens --------------------------------------------------------------------

AMBIGUOUS = 'root ::= e\ne ::= e e e | e e | "a" | "b"'
SLOW = "takes more than 0.02 s for one token"


@pytest.fixture
def less_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that a step is too slow soon. A collection of what other tests hold would be measured, too."""
    for module in (backend, llguidance_backend, xgrammar_backend):
        monkeypatch.setattr(module, "MOST_STEP_S", 0.02)
    gc.disable()
    yield
    gc.enable()


def follow(matcher: Any, library: Backend, num_tokens: int) -> int:
    """The number of tokens that it accepts, with a mask before each."""
    mask = np.zeros((1, -(-VOCAB_SIZE // 32)), np.int32)
    (token_id,) = tokens_of("a")
    for count in range(num_tokens):
        library.fill([(matcher, 0, [])], mask)
        if not matcher.accept(token_id):
            return count
    return num_tokens


@pytest.mark.usefixtures("less_time")
@each_backend
def test_a_grammar_that_grows_slow_ends_its_request(name: str) -> None:
    matcher = compiled(name, "grammar", AMBIGUOUS)
    assert follow(matcher, BACKENDS[name], 1000) < 1000
    assert SLOW in matcher.problem


@pytest.mark.usefixtures("less_time")
@pytest.mark.parametrize("name", every(2, ["xgrammar", "llguidance"]))
def test_a_slow_grammar_is_found_among_many(name: str) -> None:
    """Several masks are made at once on other threads, whose time is not known each."""
    slow, fast = compiled(name, "grammar", AMBIGUOUS), compiled(name, "regex", "a{5000}")
    others = [fast.copy() for _ in range(MASKS_ON_ONE_THREAD + 1)]
    places = [(each, nth, list[int]()) for nth, each in enumerate([*others, slow])]
    masks = np.zeros((len(places), -(-VOCAB_SIZE // 32)), np.int32)
    (token_id,) = tokens_of("a")
    for _ in range(1000):
        BACKENDS[name].fill(places, masks)
        for each in others:
            assert each.accept(token_id), each.problem
        if not slow.accept(token_id):
            break
    assert SLOW in slow.problem
    assert not any(each.problem for each in others)


class Failing:
    """A library's matcher of which one method raises."""

    def __init__(self, own: Any, method: str) -> None:
        self._own, self._method = own, method

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            raise RuntimeError("broken")
        return getattr(self._own, name)


@pytest.mark.parametrize("num_others", [1, MASKS_ON_ONE_THREAD + 1])
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("llguidance", each) for each in ("consume_token", "unsafe_compute_mask_ptr", "compute_ff_tokens")),
        ("llguidance", "validate_tokens"),
        *(("xgrammar", each) for each in ("accept_token", "fill_next_token_bitmask", "find_jump_forward_string")),
        ("xgrammar", "is_completed"),
    ],
)
def test_a_library_that_fails_for_one_matcher_ends_that_request_alone(
    name: str, method: str, num_others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [compiled(name, "regex", "a[bc]{3}") for _ in range(num_others)]
    broken = compiled(name, "regex", "a[bc]{3}")
    (token_id,) = tokens_of("a")
    for each in (broken, *others):
        each.mask = None
        assert each.accept(token_id)
    broken.matcher = Failing(broken.matcher, method)
    if name == "xgrammar":  # whose library takes what it is given for a matcher
        monkeypatch.setattr(BACKENDS[name], "_batch", Failing(None, "batch_fill_next_token_bitmask"))
    places = [(each, nth, list[int]()) for nth, each in enumerate([*others, broken])]
    masks = np.zeros((len(places), -(-VOCAB_SIZE // 32)), np.int32)
    BACKENDS[name].fill(places, masks)
    assert not broken.forced_tokens()
    assert not broken.is_complete
    assert broken.num_valid(tokens_of("d")) == 0
    (token_id,) = tokens_of("b")
    assert all(each.accept(token_id) for each in others)
    assert not broken.accept(token_id)
    assert broken.problem == "the library that follows the grammar failed: RuntimeError('broken')"
    assert not any(each.problem for each in others)
    assert all(np.array_equal(mask, masks[0]) for mask in masks[:num_others])
    assert masks[0].any()


@each_backend
def test_masks_made_one_by_one_are_those_made_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matchers = [compiled(name, "regex", pattern) for pattern in ("[ab]{3}", "abc", "(ab)*", *["a+"] * 9)]
    drafts = [tokens_of("ab"), matchers[1].forced_tokens(), tokens_of("a"), *[list[int]()] * 9]
    at, places = 0, list[tuple[Any, int, list[int]]]()
    for matcher, each in zip(matchers, drafts, strict=True):
        matcher.mask = None
        places.append((matcher, at, each))
        at += len(each) + 1
    together, alone = (np.zeros((at, -(-VOCAB_SIZE // 32)), np.int32) for _ in range(2))
    BACKENDS[name].fill(places, together)
    monkeypatch.setattr(BACKENDS[name], "_is_slow", True)
    BACKENDS[name].fill(places, alone)
    assert np.array_equal(together, alone)
