"""A program that starts an engine once and prints the times as JSON. It reads the options from stdin."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    began_s = time.time()
    options = json.load(sys.stdin)
    phases: dict[str, float] = {}
    mark_s = time.perf_counter()

    def done(phase: str) -> None:
        nonlocal mark_s
        now_s = time.perf_counter()
        phases[phase], mark_s = now_s - mark_s, now_s

    from headrace.frontend.api.llm import LLM
    from headrace.frontend.request.parameters.sampling_params import SamplingParams
    from headrace.ipc.failure import HeadraceError

    done("import headrace")
    given: dict[str, Any] = {}
    for name, value in options.items():
        given[name] = tuple(value) if isinstance(value, list) else value
    try:
        with LLM(given.pop("model") or None, **given) as llm:
            done("start the engine")
            llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True), use_tqdm=False)
            done("first token")
            engine = llm.engine.startup_s
    except HeadraceError as error:
        sys.exit(str(error))
    print(json.dumps({"python_s": began_s, "phases": phases, "engine": engine}))


if __name__ == "__main__":
    main()
