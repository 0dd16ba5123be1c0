"""Forms that a client makes large or hostile: what is done with them in the server's and the engine's own process takes
little time, as other requests wait for the interpreter meanwhile.

Times are processor seconds of this thread, where a machine's load does not show.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from test_grammar_backends import VOCABULARY, compiled, takes

from headrace import InvalidRequestError, StructuredOutputsParams
from headrace.core.engine.sessions import Inbox
from headrace.core.structured_output.json_schema import closed
from headrace.core.structured_output.trial import Trial, TrialMessage
from headrace.ipc.codec import Tensor
from headrace.ipc.messages import MOST_GRAMMAR_CHARACTERS, AddRequest, Generate, Sampling, StructuredOutput
from headrace.ipc.process.child import STOP_SIGNALS
from headrace.ipc.transport.channel import Channel

LARGE = 8 << 20
"""About the largest body."""


def seconds(work: Callable[[], object]) -> float:
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s


@pytest.mark.parametrize(
    "form",
    [
        {"json": json.dumps({"enum": ["abcd"] * (LARGE // 8)})},
        {"json": {"enum": ["a" * 100] * (LARGE // 100)}},
        {"json": {"enum": [{}] * (LARGE // 4)}},
        {"json": {str(each): True for each in range(LARGE // 20)}},
        {"structural_tag": {"structures": [], "triggers": ["a" * LARGE]}},
        {"choice": ["ab"] * (LARGE // 5)},
        {"regex": "a" * LARGE},
    ],
    ids=["a text", "texts", "objects", "names", "a tag", "choices", "an expression"],
)
def test_a_form_that_is_too_large_is_refused_before_it_is_read(form: dict[str, Any]) -> None:
    def refused() -> None:
        with pytest.raises(InvalidRequestError, match=f"must have at most {MOST_GRAMMAR_CHARACTERS} characters"):
            StructuredOutputsParams(**form)

    whole_s = seconds(lambda: json.loads(json.dumps(form)))
    assert seconds(refused) < max(0.02, 0.5 * whole_s)


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
    taken_s = seconds(lambda: compiled("xgrammar", "grammar", text))
    assert taken_s < 0.5, f"{taken_s:.2f} s"
    assert takes(compiled("xgrammar", "grammar", text), "a")


@pytest.mark.parametrize(
    "part",
    ['"' + '\\"' * 200_000, "/" + "\\/" * 200_000, '""' * 200_000, '\n"' * 200_000, "// /\n" * 100_000, "/ " * 200_000],
    ids=["an open text", "an open expression", "texts", "open texts", "comments", "expressions"],
)
def test_the_schemas_of_a_grammar_are_found_at_once(part: str) -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    text = f"start: %json {json.dumps(schema)}\n{part}"
    wanted = StructuredOutput(kind="grammar", text=text, disable_additional_properties=True)
    assert seconds(lambda: closed(wanted)) < 0.5
    said = closed(wanted).text
    assert said.startswith(f"start: %json {json.dumps({**schema, 'additionalProperties': False})}\n")
    assert said.endswith(part)


def test_forms_count_as_memory_that_a_client_takes_of_the_engine() -> None:
    def request(slot: int) -> AddRequest:
        form = StructuredOutput(kind="regex", text="a" * 1_000_000)
        prompt = Tensor.of("int32", [5])
        task = Generate(sampling=Sampling(max_tokens=1, structured_output=form))
        return AddRequest(slot=slot, request_id=str(slot), prompt_token_ids=prompt, task=task)

    inbox = Inbox(max_client_bytes=10_000_000)
    assert sum(inbox.offer(1, request(slot)) for slot in range(20)) == 9


def test_a_signal_to_all_processes_does_not_end_the_trial_of_a_grammar() -> None:
    """systemd's and `docker stop`'s reach every process, and the engine goes on with what it has."""
    trial = Trial(VOCABULARY)
    others = set(psutil.Process().children())
    try:
        for number in STOP_SIGNALS:
            trial.check("llguidance", StructuredOutput(kind="regex", text=f"[ab]+{number:d}"))
            (process,) = set(psutil.Process().children()) - others
            process.send_signal(number)
        trial.check("llguidance", StructuredOutput(kind="regex", text="[ab]+"))
        assert process.is_running(), "another had to be started"
    finally:
        trial.stop()
    trial = Trial(VOCABULARY)
    try:
        trial.start()
        (process,) = set(psutil.Process().children()) - others
        process.terminate()  # before it could leave that to its parent
        trial.check("llguidance", StructuredOutput(kind="regex", text="[ab]+"))
    finally:
        trial.stop()


def test_a_trial_that_crashed_is_told_from_one_that_hangs_though_it_is_long_in_dying() -> None:
    """On a busy machine: its channel is closed at once, its memory is given back later."""
    trial = Trial(VOCABULARY)
    channel, theirs = Channel.pair(TrialMessage)
    with theirs:
        # Closes its end, as one that crashes, and is gone a second later.
        crash = "import os, signal, sys, time; os.close(int(sys.argv[1])); time.sleep(1); signal.raise_signal(11)"
        trial._process = subprocess.Popen(
            [sys.executable, "-c", crash, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
    trial._channel = channel
    try:
        with pytest.raises(InvalidRequestError, match="ended with status -11"):
            trial.check("llguidance", StructuredOutput(kind="regex", text="[ab]+"))
    finally:
        trial.stop()
