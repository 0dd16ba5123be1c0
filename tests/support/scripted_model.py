"""A model that follows a script, on Qwen's tokenizer, so that agents' tool loops can be run without weights.

The prompt says which script: its last `TASK name IN folder`. Each answer of the model so far is a step of the script
that was taken; after the last one, and in prompts without a task (of titles, say), it says "Done.". Asked for a summary
of the conversation, it says that the task is now the one with "-after" behind its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from null_with_tokenizer import _ParrotRows
from tokenizers import Tokenizer

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.tokenizers.tokenizer import _fast
from headrace.executor.testing.null import NullExecutor, NullModel
from headrace.ipc.messages import TokenizerBundle
from headrace.ipc.step import NewRow

_TASK = re.compile(r"TASK ([\w-]+) IN ([\w/.-]+)")
DONE = "Done."
_TURN, _SAID = "<|im_start|>assistant", "<|im_start|>user"


def answer(scripts: dict[str, list[str]], prompt: str) -> str:
    """The model's answer to a prompt in Qwen's template."""
    tasks = list(_TASK.finditer(prompt))
    if not tasks:
        return DONE
    name, folder = tasks[-1].groups()
    last_said = prompt.rpartition(_SAID)[2]
    if (after := f"{name}-after") in scripts and "summary" in last_said and "<tool_response>" not in last_said:
        return f"<summary>TASK {after} IN {folder} </summary>"
    steps, begin = scripts.get(name, []), prompt.index(tasks[-1].group())
    taken = prompt.count(_TURN, begin) - 1  # the last one is the turn to write
    step = steps[taken] if taken < len(steps) else DONE
    if "<tool_call>" in step and "<tools>" not in prompt:
        return DONE
    return step.replace("FOLDER", folder)


class ScriptedExecutor(NullExecutor):
    """The model's folder has tokenizer.json, tokenizer_config.json and scripts.json: {name: [answer, ...]}."""

    def __init__(self, options: Options, model: NullModel | None = None) -> None:
        folder = Path(str(options.model))
        self._scripts: dict[str, list[str]] = json.loads((folder / "scripts.json").read_text())
        bundle: TokenizerBundle = _fast(folder)
        super().__init__(options, model, bundle)

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        super().allocate(num_blocks, max_model_len)
        assert self._plan is not None
        assert self._bundle is not None
        tokenizer = Tokenizer.from_str(self._bundle.tokenizer_json.decode())
        self._rows = _ScriptedRows(self._plan.max_num_seqs, self.model, self.identities, tokenizer, self._scripts)


class _ScriptedRows(_ParrotRows):
    def __init__(
        self,
        num_rows: int,
        model: NullModel,
        identities: Mapping[int, str],
        tokenizer: Tokenizer,
        scripts: dict[str, list[str]],
    ) -> None:
        super().__init__(num_rows, model, identities)
        self._tokenizer, self._scripts = tokenizer, scripts

    def _enter(self, new: NewRow) -> None:
        super()._enter(new)
        prompt = self._tokenizer.decode(new.token_ids[: new.num_prompt_tokens], skip_special_tokens=False)
        said = self._tokenizer.encode(answer(self._scripts, prompt), add_special_tokens=False).ids
        self._heard[new.row] = np.array([*said, self._model.eos_token_id], np.int32)
