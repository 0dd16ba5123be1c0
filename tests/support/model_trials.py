"""Opens models of strangers, each in a fork with limits of memory and processor time, and reports how it ended.

stdin: lines, each a JSON list of [path, options]; with the options null the files are read and nothing is computed.
stdout: for each line one with a JSON list, one string each: `answered`, `refused: MESSAGE` of an error of Headrace's,
`raised: ...` of any other, or `killed by signal N`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from typing import Any

MEMORY_BYTES = 1 << 30
"""What a model may take beside what the libraries have taken."""
PROCESSOR_S = 30
HANGS_S = 60
"""By the clock: for what waits and computes nothing."""
SMALL: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 32, "max_num_seqs": 1, "kv_cache_memory_bytes": 1 << 20, "seed": 0,
    "skip_tokenizer_init": True,
}  # fmt: skip


def read(path: str) -> None:
    from headrace.core.options.engine_options import Options
    from headrace.executor.checkpoints.checkpoint import open_checkpoint
    from headrace.executor.checkpoints.tokenizers.tokenizer import end_of_tokenizer, load_bundle

    options = Options(model=path)
    checkpoint = open_checkpoint(options)
    weights = checkpoint.weights()
    for name in sorted(weights.names()):
        weights.get(name)
    end_of_tokenizer(checkpoint, options)
    load_bundle(checkpoint, options)


def try_model(path: str, options: dict[str, Any] | None) -> str:
    from headrace import LLM, HeadraceError, SamplingParams

    try:
        if options is None:
            read(path)
            return "answered"
        with LLM(path, in_process=True, **{**SMALL, **options}) as llm:
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True), use_tqdm=False)
    except HeadraceError as error:
        return f"refused: {error}"
    except BaseException:
        return f"raised: {traceback.format_exc()[-1500:]}"
    return "answered"


def in_a_fork(path: str, options: dict[str, Any] | None) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_S,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(HANGS_S)
        os.write(writer, try_model(path, options)[:60000].encode(errors="backslashreplace"))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        said = file.read().decode()
    _, status = os.waitpid(child, 0)
    return said or f"killed by signal {os.WTERMSIG(status)}"


def main() -> None:
    # What a model needs is imported once, without a thread, which a fork would not have.
    import headrace.core.engine.engine
    import headrace.executor.checkpoints.sources.gguf.file
    import headrace.executor.checkpoints.sources.gguf.tokenizer
    import headrace.executor.checkpoints.tokenizers.converted_tokenizers
    import headrace.executor.checkpoints.tokenizers.tokenizer
    import headrace.executor.cpu.rank
    import headrace.executor.placement.in_process  # noqa: F401
    from headrace.executor.models import families

    families.families()
    for line in sys.stdin:
        print(json.dumps([in_a_fork(path, options) for path, options in json.loads(line)]), flush=True)


if __name__ == "__main__":
    main()
