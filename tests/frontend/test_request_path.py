"""The way of one request from `LLM.generate` to the forward pass, followed by a tracer; `pytest -s` prints it.

The calls are the functions on the stack where the request is handed on, in each thread, down to the model's step. The
threads' own loops, which run without any request too, are not counted.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import tiny_models

from headrace import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
FOLDERS = tuple(f"{ROOT}/{name}/" for name in ("headrace", "core", "executor", "frontend", "ipc", "kernels"))
LOOPS = {"BackgroundLoop._run", "EngineThread._run", "EngineCore.run", "Loop.run"}
HANDED_ON = (
    "BackgroundLoop.run",  # to the client's thread
    "Sessions.receive",  # to the core's thread
    "Scheduler.add",  # to the scheduler
    "Scheduler.schedule",  # into a step
    "CpuRank.submit",  # to the rank
    "CpuDecoder.step",  # the forward pass
)


class Tracer:
    """Notes the stack of ours at the first call of each function, in every thread started after `install`."""

    def __init__(self) -> None:
        self.is_on = False
        self.stacks: dict[str, tuple[str, ...]] = {}
        self.folders: dict[str, str] = {}
        """Of each function."""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.is_on or event != "call" or not frame.f_code.co_filename.startswith(FOLDERS):
            return
        if frame.f_code.co_qualname in self.stacks:
            return
        self.folders[frame.f_code.co_qualname] = Path(frame.f_code.co_filename).relative_to(ROOT).parts[0]
        stack, each = [], frame
        while each is not None:
            if each.f_code.co_filename.startswith(FOLDERS):
                stack.append(each.f_code.co_qualname)
            each = each.f_back  # type: ignore[assignment]
        self.stacks[frame.f_code.co_qualname] = tuple(reversed(stack))


def test_a_request_reaches_the_forward_pass_through_the_functions_that_hand_it_on(tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path)
    tracer = Tracer()
    threading.setprofile(tracer)
    try:
        with LLM(
            str(tmp_path), in_process=True, dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=64,
            max_model_len=64, use_tqdm_on_load=False,
        ) as llm:  # fmt: skip
            params = SamplingParams(max_tokens=2)
            sys.setprofile(tracer)
            tracer.is_on = True
            llm.generate([[5, 6, 7]], params, use_tqdm=False)
            tracer.is_on = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    missing = [name for name in HANDED_ON if name not in tracer.stacks]
    assert not missing, f"the path no longer leads through {missing}: name here what took their place"
    path = list(dict.fromkeys(each for name in HANDED_ON for each in tracer.stacks[name] if each not in LOOPS))
    assert path[0] == "LLM.generate"
    touched = list(tracer.stacks)[: list(tracer.stacks).index(HANDED_ON[-1]) + 1]
    nested = sum("<" in name for name in touched)
    by_folder = Counter(tracer.folders[name] for name in touched)
    print(
        f"{len(touched)} functions until the forward pass, of which {nested} are lambdas, comprehensions and closures: "
        f"{', '.join(f'{count} in {folder}' for folder, count in by_folder.most_common())}; "
        f"{len(path)} calls: {' > '.join(path)}"
    )
