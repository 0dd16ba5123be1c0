"""Chat with a model in the terminal.

Ctrl-C stops an answer, Ctrl-D ends; /help lists more commands. If the input is a pipe or file, each line is a message,
and only the answers are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from typing import TYPE_CHECKING

from headrace.frontend.cli.engine_arguments import (
    add_engine_arguments,
    add_server_arguments,
    check_sampling,
    check_text,
    open_engine_or_server,
    sampling_params,
)
from headrace.ipc.failure import EngineDeadError, HeadraceError

if TYPE_CHECKING:
    from headrace.frontend.api.llm import LLM
    from headrace.frontend.cli.conversation import Conversation
    from headrace.frontend.cli.remote import RemoteLLM
    from headrace.frontend.request.parameters.sampling_params import SamplingParams

PROMPT = "> "
_HELP = """\
/system TEXT       set the system message; without TEXT, show it
/params            show how tokens are sampled; /params NAME VALUE sets one, VALUE `default` sets it back
/undo              take back your last message and its answer
/reset             forget the conversation, but not the system message
/save FILE         write the conversation as JSON
/help              show this
/quit              end, as Ctrl-D does
Ctrl-C             stop the answer; what there is of it stays in the conversation
A message that begins with / is written with two: //etc/hosts"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="The system message")
    add_server_arguments(parser)
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from headrace.frontend.cli.conversation import Conversation

    check_sampling(arguments)
    check_text("--system", arguments.system)
    interactive = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # invalid UTF-8 is then an error of its line alone
    with open_engine_or_server(arguments) as llm:
        params = sampling_params(arguments, llm.get_default_sampling_params())
        conversation = Conversation(llm.get_tokenizer(), llm.engine.max_model_len, system=arguments.system)
        chat = Chat(llm, conversation, params)
        return _converse(chat) if interactive else _answer_lines(chat)


class Chat:
    """A conversation with an engine, line by line."""

    def __init__(self, llm: LLM | RemoteLLM, conversation: Conversation, params: SamplingParams) -> None:
        self._llm, self.conversation = llm, conversation
        self._defaults, self._params = params, params.clone()
        self._saved: set[str] = set()

    def take(self, line: str) -> bool:
        """Handles one line of input: a message to answer, or a command. Returns False if it asks to end.

        Raises HeadraceError. On Ctrl-C raises KeyboardInterrupt, after adding the partial answer to the conversation.
        """
        text = line.strip()
        if not text:
            return True
        try:
            text.encode()
        except UnicodeEncodeError:
            raise HeadraceError("this line is not valid UTF-8; the message was not sent") from None
        if not text.startswith("/") or text.startswith("//"):
            self._answer(text.removeprefix("/") if text.startswith("//") else text)
            return True
        name, _, rest = text[1:].partition(" ")
        return self._obey(name, rest.strip())

    def _obey(self, name: str, rest: str) -> bool:
        if name in ("quit", "exit"):
            return False
        if name == "help":
            print(_HELP)
        elif name == "reset":
            self.conversation.reset()
        elif name == "undo":
            if not self.conversation.undo():
                raise HeadraceError("there is nothing to undo")
        elif name == "system":
            if rest:
                self.conversation.system = rest
            else:
                print(self.conversation.system or "(none)")
        elif name == "params":
            self._set_params(rest)
        elif name == "save":
            self._save(rest)
        else:
            raise HeadraceError(f"there is no command /{name}; /help lists them (a message can begin with //)")
        return True

    def _answer(self, text: str) -> None:
        conversation = self.conversation
        token_ids, num_dropped = conversation.ask(text, self._params.max_tokens)
        if num_dropped:
            turns = f"{num_dropped} oldest turns were" if num_dropped > 1 else "oldest turn was"
            note(f"the {turns} dropped to stay within max_model_len, {self._llm.engine.max_model_len} tokens")
        answer, reason = "", None
        try:
            with self._llm.stream({"prompt_token_ids": token_ids}, self._params) as stream:
                for output in stream:
                    answer += output.outputs[0].text
                    reason = output.outputs[0].finish_reason
                    print(output.outputs[0].text, end="", flush=True)
        finally:
            conversation.answered(answer)
            if answer:
                print(flush=True)
        if not answer:
            note("the model answered nothing; the message is taken back")
        elif reason == "length":
            note("the answer was cut: it reached max_tokens or max_model_len")

    def _set_params(self, text: str) -> None:
        from headrace.frontend.cli.conversation import SETTABLE, with_param

        if not text:
            for name in SETTABLE:
                print(f"{name} = {getattr(self._params, name)!r}")
            return
        name = re.split(r"[\s=]", text, maxsplit=1)[0]
        value = text.removeprefix(name).strip().removeprefix("=").strip()
        self._params = with_param(self._params, name, value, self._defaults)

    def _save(self, file: str) -> None:
        if not file:
            raise HeadraceError("/save needs the name of a file")
        try:
            with open(file, "w" if file in self._saved else "x", encoding="utf-8") as out:
                out.write(self.conversation.to_json(self._llm.engine.model))
        except FileExistsError:
            raise HeadraceError(f"{file} exists; give another name") from None
        except OSError as error:
            raise HeadraceError(f"cannot write {file}: {(error.strerror or str(error)).lower()}") from None
        self._saved.add(file)


def note(text: str) -> None:
    """Prints to stderr, so that piped output holds only answers."""
    sys.stdout.flush()
    print(f"[{text}]", file=sys.stderr, flush=True)


def _converse(chat: Chat) -> int:
    """Reads from a terminal. Errors are printed and do not end the chat, except that of a dead engine."""
    with contextlib.suppress(ImportError):
        import readline

        readline.set_auto_history(True)
    note("/help lists the commands, Ctrl-D ends")
    while True:
        try:
            if not chat.take(input(PROMPT)):
                return 0
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
        except EngineDeadError:
            raise
        except HeadraceError as error:
            note(str(error))


def _answer_lines(chat: Chat) -> int:
    """Reads from a pipe or file. A line that fails does not stop the others; the exit status is then 1."""
    status = 0
    for line in sys.stdin:
        try:
            if not chat.take(line):
                break
        except EngineDeadError:
            raise
        except HeadraceError as error:
            note(str(error))
            status = 1
    return status
