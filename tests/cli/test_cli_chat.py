"""`headrace chat`: a conversation that is kept, cut and steered; on a terminal and from a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_core import FakeCore, MemoryCore, memory_core, zmq_core
from fake_tokenizers import bundle_of, byte_level_tokenizer
from terminal import on_terminal
from thinned import every

from headrace import LLM, SamplingParams
from headrace.frontend.cli.commands.chat import Chat
from headrace.frontend.cli.conversation import Conversation, with_param
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.failure import HeadraceError, InvalidRequestError
from headrace.ipc.messages import AddRequest, TokenizerBundle

TOKENIZER = Tokenizer(bundle_of(byte_level_tokenizer()))


class Session:
    def __init__(self, core: MemoryCore, llm: LLM, chat: Chat) -> None:
        self.core, self.llm, self.chat = core, llm, chat

    def prompts(self) -> list[str]:
        """What the engine was asked, as text."""
        received = [each for each in self.core.core.received if isinstance(each, AddRequest)]
        return [self.llm.get_tokenizer().decode(each.prompt_token_ids.tolist()) for each in received]

    def answers(self) -> list[str]:
        return [each["content"] for each in self.chat.conversation.messages() if each["role"] == "assistant"]


@pytest.fixture
def session() -> Iterator[Session]:
    with memory_core() as core, LLM.attach(core.transport) as llm:
        conversation = Conversation(llm.get_tokenizer(), llm.engine.max_model_len)
        yield Session(core, llm, Chat(llm, conversation, SamplingParams(max_tokens=5)))


def rendered(*messages: tuple[str, str]) -> str:
    chat = [{"role": role, "content": content} for role, content in messages]
    text: str = TOKENIZER.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return text


def test_each_message_is_asked_with_what_was_said_before(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    assert session.chat.take("one\n")
    assert session.chat.take("  ")
    assert session.chat.take("//two")
    first, second = session.answers()
    assert capsys.readouterr().out == f"{first}\n{second}\n"
    assert session.prompts() == [
        rendered(("user", "one")),
        rendered(("user", "one"), ("assistant", first), ("user", "/two")),
    ]


def test_undo_reset_and_system_change_what_is_asked_next(session: Session) -> None:
    session.chat.take("one")
    session.chat.take("/system Be brief.")
    session.chat.take("two")
    session.chat.take("/undo")
    first = session.answers()[0]
    session.chat.take("three")
    assert session.prompts()[-1] == rendered(
        ("system", "Be brief."), ("user", "one"), ("assistant", first), ("user", "three")
    )
    session.chat.take("/reset")
    session.chat.take("four")
    assert session.prompts()[-1] == rendered(("system", "Be brief."), ("user", "four"))
    session.chat.take("/undo")
    with pytest.raises(HeadraceError, match="nothing to undo"):
        session.chat.take("/undo")


def test_params_are_shown_set_and_set_back(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    session.chat.take("/params max_tokens=3")
    session.chat.take("/params temperature 0.25")
    session.chat.take("hello")
    sampling = [each.task.sampling for each in session.core.core.received if isinstance(each, AddRequest)]
    assert (sampling[0].max_tokens, sampling[0].temperature) == (3, 0.25)
    assert "cut: it reached max_tokens" in capsys.readouterr().err
    session.chat.take("/params max_tokens default")
    session.chat.take("/params")
    shown = capsys.readouterr().out
    assert "max_tokens = 5\n" in shown
    assert "temperature = 0.25\n" in shown


@pytest.mark.parametrize(
    ("line", "words"),
    every(
        2,
        [
            ("/params temprature 1", "unknown parameter 'temprature'; did you mean 'temperature'?"),
            ("/params temperature -1", "temperature = -1: must be at least 0"),
            ("/params temperature hot", "temperature = 'hot': must be a number"),
            ("/params n 2", "unknown parameter 'n'"),
            ("/params seed", "seed is None"),
            ("/hlep", "there is no command /hlep; /help lists them"),
            ("/save", "needs the name of a file"),
            ("/save /nowhere/at/all", "cannot write /nowhere/at/all: no such file or directory"),
            ("broken \udcff", "not valid UTF-8"),
        ],
    ),
)
def test_a_bad_line_is_told_in_a_sentence_and_changes_nothing(session: Session, line: str, words: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        session.chat.take(line)
    assert words in str(caught.value)
    assert session.prompts() == []
    session.chat.take("goes on")
    assert len(session.answers()) == 1


@pytest.mark.parametrize(("text", "value"), [("a = b", "a = b"), ('["x", "y"]', ["x", "y"]), ("None", None)])
def test_values_are_json_or_text(text: str, value: object) -> None:
    defaults = SamplingParams()
    assert with_param(defaults, "stop", text, defaults).stop == value
    assert defaults.stop == []


def test_saving_writes_messages_and_never_over_another_file(session: Session, tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.json", tmp_path / "other.json"
    other.write_text("precious")
    session.chat.take("/system Hi.")
    session.chat.take(f"/save {mine}")
    session.chat.take("wörld")
    session.chat.take(f"/save {mine}")
    assert json.loads(mine.read_text()) == {
        "model": "fake",
        "messages": [
            {"role": "system", "content": "Hi."},
            {"role": "user", "content": "wörld"},
            {"role": "assistant", "content": session.answers()[0]},
        ],
    }
    with pytest.raises(HeadraceError, match="exists"):
        session.chat.take(f"/save {other}")
    assert other.read_text() == "precious"


def test_the_oldest_turns_are_dropped_when_the_model_s_length_is_reached(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.chat.take("/system S")
    for number in range(6):
        session.chat.take(f"{number} " + "x" * 40)
    assert "oldest turn was dropped to stay within max_model_len, 256 tokens" in capsys.readouterr().err
    last = session.prompts()[-1]
    assert last.startswith(rendered(("system", "S")).removesuffix("<|im_start|>assistant\n"))
    assert "0 xxx" not in last
    assert "4 xxx" in last
    assert "5 xxx" in last
    with pytest.raises(InvalidRequestError, match="max_model_len is 256: shorten it"):
        session.chat.take("x" * 400)
    before = len(session.chat.conversation.turns)
    session.chat.take("short")
    assert len(session.chat.conversation.turns) >= before


def test_room_is_kept_for_the_answer() -> None:
    lengths = {}
    for max_tokens, room in ((1, 1), (None, 40), (60, 60), (1000, 80)):
        conversation = Conversation(TOKENIZER, 160)
        for _ in range(5):
            token_ids, num_dropped = conversation.ask("x", max_tokens)
            conversation.answered("y" * 20)
        assert num_dropped == 1
        assert len(token_ids) + room <= 160
        lengths[room] = len(token_ids)
    assert lengths[1] > lengths[40] > lengths[80]


def test_a_model_without_a_chat_template_is_refused_at_once() -> None:
    bare = TokenizerBundle(tokenizer_json=bundle_of(byte_level_tokenizer()).tokenizer_json)
    with pytest.raises(InvalidRequestError, match="chat template"):
        Conversation(Tokenizer(bare), 100)


def test_an_answer_of_nothing_takes_the_message_back(capsys: pytest.CaptureFixture[str]) -> None:
    core = FakeCore(next_token=lambda prompt, seed, position: 2)
    with memory_core(core.bundle, core.next_token) as engine, LLM.attach(engine.transport) as llm:
        chat = Chat(llm, Conversation(llm.get_tokenizer(), 256), SamplingParams(max_tokens=5))
        chat.take("hello")
        assert chat.conversation.messages() == []
    assert "answered nothing" in capsys.readouterr().err


def test_lines_of_a_pipe_are_answered_without_prompts(runtime_directory: Path) -> None:
    with zmq_core() as core:
        result = subprocess.run(
            [
                *(sys.executable, "-m", "headrace", "chat"),
                "--engine",
                core.address,
                "--max-tokens",
                "4",
            ],
            input=b"hello\n\xff\n/nonsense\nagain\n/quit\nnever\n",
            capture_output=True,
            timeout=60,
            check=False,
        )
        asked = [each for each in core.core.received if isinstance(each, AddRequest)]
    text = result.stdout.decode()
    assert text.count("\n") == len(asked) == 2
    assert "> " not in text
    assert result.stderr.decode().splitlines()[1:3] == [
        "[this line is not valid UTF-8; the message was not sent]",
        "[there is no command /nonsense; /help lists them (a message can begin with //)]",
    ]
    assert result.returncode == 1  # two lines could not be taken


def test_ctrl_c_stops_the_answer_and_ctrl_d_ends(runtime_directory: Path) -> None:
    with (
        zmq_core(max_model_len=100_000) as core,
        on_terminal("chat", "--engine", core.address, "--system", "S") as terminal,
    ):
        terminal.wait_for("> ")
        terminal.keys("hello\r")
        terminal.wait_for("hello\r\n")
        terminal.wait_for("e")  # an answer that would go on for minutes
        terminal.keys("\x03")
        terminal.wait_for("\n> ")
        terminal.keys("half a line")
        terminal.wait_for("half a line")
        terminal.press_until("\x03", "\n> ")
        terminal.keys("/nonsense\r")
        terminal.wait_for("there is no command /nonsense")
        terminal.wait_for("> ")
        terminal.keys("/params max_tokens 3\r")
        terminal.wait_for("> ")
        terminal.keys("again\r")
        terminal.wait_for("cut")
        terminal.wait_for("\n> ")
        terminal.keys("\x04")
        assert terminal.ends() == 0, terminal.shown
        assert "Traceback" not in terminal.shown
        first, second = (each for each in core.core.received if isinstance(each, AddRequest))
        texts = [TOKENIZER.decode(each.prompt_token_ids.tolist()) for each in (first, second)]
    assert texts[0] == rendered(("system", "S"), ("user", "hello"))
    assert texts[1].startswith(texts[0])
    assert texts[1].endswith(rendered(("user", "again")))
    assert len(texts[1]) > len(texts[0]) + len(rendered(("user", "again")))  # the stopped answer is between them


@pytest.mark.system
@pytest.mark.demo_model
def test_the_demo_model_answers(demo_model_path: Path) -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-m", "headrace", "chat", "--max-model-len", "256"),
            *("--max-tokens", "24", "--temperature", "0"),
        ],
        input="What is the capital of France?\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout


def test_a_key_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "headrace", "complete", "hi", "--engine", "tcp://127.0.0.1:9"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "HEADRACE_KEYS": str(tmp_path / "none")},
    )
    assert result.returncode != 0
    assert result.stderr == f"headrace: the key file {tmp_path / 'none'} cannot be read: no such file or directory\n"
