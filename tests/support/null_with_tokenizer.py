"""Null executors with a small byte-level tokenizer and a chat template, for servers started as programs."""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections.abc import Mapping

import numpy as np
from fake_tokenizers import bundle_of, byte_level_tokenizer
from tokenizers import AddedToken, Regex, pre_tokenizers

from headrace.core.options.engine_options import Options
from headrace.core.options.plan import ModelDescription
from headrace.core.structured_output.follower import FollowedMatcher
from headrace.executor.rank import Report
from headrace.executor.testing.null import FIRST_ORDINARY_TOKEN, NullExecutor, NullModel, _Rows
from headrace.ipc.control import CallExtension, WorkerAnswer, WorkerCommand
from headrace.ipc.failure import HeadraceError, ModelError
from headrace.ipc.step import NewRow

VOCAB_SIZE = 400
MARKERS = ("<tool_call>", "</tool_call>")
"""Added tokens that are text, as Qwen's are."""
BACKEND = "null_with_tokenizer:TokenizingNullExecutor"
PARROT = "null_with_tokenizer:ParrotExecutor"
LATE = "null_with_tokenizer:LateExecutor"
DEADLY_FORM = "null_with_tokenizer:DeadlyFormExecutor"
DEADLY_TOKENS = 30
HANGING = "null_with_tokenizer:HangingExecutor"
MISSABLE = "null_with_tokenizer:MissableExecutor"


class TokenizingNullExecutor(NullExecutor):
    """A null executor with a tokenizer; hf_overrides set the fields of its NullModel, as for NullExecutor."""

    def __init__(self, options: Options, model: NullModel | None = None) -> None:
        tokenizer = byte_level_tokenizer(VOCAB_SIZE - len(MARKERS))
        tokenizer.add_tokens([AddedToken(each, special=False) for each in MARKERS])
        super().__init__(options, model, bundle_of(tokenizer))

    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]:
        """Confirms every command without doing anything, except calls of a worker extension, which it refuses."""
        if isinstance(command, CallExtension):
            raise HeadraceError(f"there is no worker extension with a method {command.method}")
        return (WorkerAnswer(),)


class HangingExecutor(TokenizingNullExecutor):
    """Its tokenizer works for minutes on texts such as ("a" * 19 + "b") * 5000."""

    def __init__(self, options: Options, model: NullModel | None = None) -> None:
        super().__init__(options, model)
        library = byte_level_tokenizer(VOCAB_SIZE)
        split = pre_tokenizers.Split(Regex("(a+)+[cd]"), "isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
        self._bundle = bundle_of(library)


class MissableExecutor(TokenizingNullExecutor):
    """Starts only while the folder exists that HEADRACE_TEST_MODEL_FOLDER names."""

    def describe(self, report: Report) -> ModelDescription:
        if not os.path.isdir(os.environ["HEADRACE_TEST_MODEL_FOLDER"]):
            raise ModelError("the model's folder is away")
        return super().describe(report)


class LateExecutor(TokenizingNullExecutor):
    """Starts once the folder exists that HEADRACE_TEST_MODEL_FOLDER and its rank name."""

    def describe(self, report: Report) -> ModelDescription:
        while not os.path.isdir(f"{os.environ['HEADRACE_TEST_MODEL_FOLDER']}{self._options.data_parallel_rank}"):
            time.sleep(0.02)
        return super().describe(report)


class DeadlyFormExecutor(TokenizingNullExecutor):
    """Kills its process, as a fault in the native code of a step would, at the token DEADLY_TOKENS of an answer with a
    form."""

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        super().allocate(num_blocks, max_model_len)
        accept = FollowedMatcher.accept

        def deadly(matcher: FollowedMatcher, token_id: int) -> bool:
            counts[matcher] = counts.get(matcher, 0) + 1
            if counts[matcher] >= DEADLY_TOKENS:
                os.kill(os.getpid(), signal.SIGSEGV)
            return accept(matcher, token_id)

        counts: weakref.WeakKeyDictionary[FollowedMatcher, int] = weakref.WeakKeyDictionary()
        FollowedMatcher.accept = deadly  # type: ignore[method-assign, assignment]


class ParrotExecutor(TokenizingNullExecutor):
    """Repeats its prompt for ever, so that a test chooses the generated text, byte by byte."""

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        super().allocate(num_blocks, max_model_len)
        assert self._plan is not None
        self._rows = _ParrotRows(self._plan.max_num_seqs, self.model, self.identities)


class EchoExecutor(TokenizingNullExecutor):
    """Generates its prompt once and ends."""

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        super().allocate(num_blocks, max_model_len)
        assert self._plan is not None
        self._rows = _EchoRows(self._plan.max_num_seqs, self.model, self.identities)


class _ParrotRows(_Rows):
    def __init__(self, num_rows: int, model: NullModel, identities: Mapping[int, str]) -> None:
        super().__init__(num_rows, model, identities)
        self._heard: dict[int, np.ndarray] = {}

    def _enter(self, new: NewRow) -> None:
        super()._enter(new)
        prompt = np.asarray(new.token_ids[: new.num_prompt_tokens], np.int32)
        self._heard[new.row] = prompt[prompt >= FIRST_ORDINARY_TOKEN]

    def _draw(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        said = positions - self._num_prompt_tokens[rows]
        return np.array(
            [self._heard[row][count % len(self._heard[row])] for row, count in zip(rows.tolist(), said, strict=True)],
            np.int32,
        )


class _EchoRows(_ParrotRows):
    def _draw(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        lengths = np.array([len(self._heard[row]) for row in rows.tolist()])
        ended = positions - self._num_prompt_tokens[rows] >= lengths
        return np.where(ended, self._model.eos_token_id, super()._draw(rows, positions))
