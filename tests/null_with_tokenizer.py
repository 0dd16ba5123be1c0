"""The null executor with a small byte-level tokenizer and a chat template, for servers started as programs."""

from __future__ import annotations

from fake_tokenizers import bundle_of, byte_level_tokenizer

from headrace.core.options import Options
from headrace.executor.null import NullExecutor, NullModel
from headrace.ipc.control import WorkerAnswer, WorkerCommand

VOCAB_SIZE = 400
BACKEND = "null_with_tokenizer:TokenizingNullExecutor"


class TokenizingNullExecutor(NullExecutor):
    """Its tokens are the tokenizer's; what it imitates besides comes from hf_overrides, as for NullExecutor."""

    def __init__(self, options: Options, model: NullModel | None = None) -> None:
        super().__init__(options, model, bundle_of(byte_level_tokenizer(VOCAB_SIZE)))

    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]:
        """Agrees to everything, as there is nothing to do."""
        return (WorkerAnswer(),)
