"""What an adapter (LoRA) costs here and in vLLM, peft and llama.cpp, alternately in one run.

    python benchmarks/adapters_peers.py [--peers DIR] [--shape 135m] [--only headrace peft] [--rounds 3] [--share 0.25]
                                        [--out FILE.json]

DIR has a virtual environment for each peer, `vllm`, `hf` (transformers and peft) and `llamacpp` (llama-cpp-python);
those that are not there are left out, and peft runs in this environment where it has it. All read the same model of
random weights in bfloat16, llama.cpp as GGUF, and the same adapters of rank 16 on all linear layers. `prefill_1024`
is a prompt of 1,024 tokens, `decode_8` 64 tokens of 8 prompts of 16, each without an adapter, with one, and with 8
distinct ones, where the engine can. `--share` shortens the long prompt and the answers; peft takes a minute for a
round of them. Figures are medians of seconds over the rounds. Nothing else may run on the machine. `--engine NAME
FOLDER` runs one of them alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import vllm_peer

HERE = Path(__file__).parent
VENVS = {"vllm": "vllm", "peft": "hf", "llama.cpp": "llamacpp"}
CASES = {"prefill_1024": (1, 1024, 1), "decode_8": (8, 16, 64)}
"""Prompts, tokens of each, and tokens of each answer."""
LEAST_TOKENS, WARM_TOKENS = 16, 2
"""Of a shortened prompt or answer, and of each answer of the first round, which is not counted."""
RANK, NUM_ADAPTERS = 16, 8
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
Run = Callable[[list[list[int]], int, Sequence[int | None]], None]
"""(prompts, tokens of each answer, the number of each prompt's adapter)"""


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(100, 40_000) for _ in range(tokens)] for _ in range(count)]


def engine_of(package: str) -> Callable[[Path], Run]:
    """Headrace's LLM and vLLM's have the same methods."""

    def open_engine(folder: Path) -> Run:
        import importlib

        module = importlib.import_module(package)
        request = importlib.import_module("vllm.lora.request" if package == "vllm" else package).LoRARequest
        llm = module.LLM(
            str(folder / "model"),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=2048,
            enable_prefix_caching=False,
            enable_lora=True,
            max_loras=NUM_ADAPTERS,
            max_lora_rank=RANK,
        )
        loras = [request(f"a{n}", n + 1, str(folder / f"adapter {n}")) for n in range(NUM_ADAPTERS)]

        def run(asked: list[list[int]], tokens: int, adapters: Sequence[int | None]) -> None:
            params = module.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            given = [{"prompt_token_ids": each} for each in asked]
            chosen = [None if each is None else loras[each] for each in adapters]
            llm.generate(given, params, use_tqdm=False, lora_request=chosen)

        return run

    return open_engine


def open_peft(folder: Path) -> Run:
    import peft
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    adapted: Any = peft.PeftModel.from_pretrained(model, str(folder / "adapter 0"), "a0")
    for number in range(1, NUM_ADAPTERS):
        adapted.load_adapter(str(folder / f"adapter {number}"), f"a{number}")
    adapted.eval()

    @torch.inference_mode()
    def run(asked: list[list[int]], tokens: int, adapters: Sequence[int | None]) -> None:
        names = ["__base__" if each is None else f"a{each}" for each in adapters]
        sizes = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        if set(names) == {"__base__"}:
            with adapted.disable_adapter():
                adapted.generate(input_ids=torch.tensor(asked), **sizes)
        elif len(set(names)) == 1:
            adapted.set_adapter(names[0])
            adapted.generate(input_ids=torch.tensor(asked), **sizes)
        else:
            adapted.generate(input_ids=torch.tensor(asked), adapter_names=names, **sizes)

    return run


def open_llama_cpp(folder: Path) -> Run:
    """One sequence at a time in one batch of all: requests with different adapters are not computed together."""
    import ctypes

    import llama_cpp
    import numpy as np

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        str(folder / "model.gguf").encode(), llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_seq_max, params.kv_unified = 4096, 2048, NUM_ADAPTERS, True
    params.n_threads = params.n_threads_batch = os.cpu_count() or 1
    context = llama_cpp.llama_init_from_model(model, params)
    assert context, "the model was not read"
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    lora = llama_cpp.llama_adapter_lora_init(model, str(folder / "adapter.gguf").encode())
    assert lora, "the adapter was not read"

    def decode(tokens: list[list[int]], position: int) -> None:
        batch = llama_cpp.llama_batch_init(sum(map(len, tokens)), 0, len(tokens))
        for sequence, each in enumerate(tokens):
            for at, token in enumerate(each):
                index = batch.n_tokens
                batch.token[index], batch.pos[index] = token, position + at
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
                batch.logits[index] = at == len(each) - 1
                batch.n_tokens += 1
        assert llama_cpp.llama_decode(context, batch) == 0, "a batch was refused"
        llama_cpp.llama_batch_free(batch)

    def run(asked: list[list[int]], tokens: int, adapters: Sequence[int | None]) -> None:
        if len(set(adapters)) > 1:
            raise NotImplementedError("distinct adapters are not computed in one batch")
        count = int(adapters[0] is not None)
        given = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(lora)
        assert llama_cpp.llama_set_adapters_lora(context, given, count, (ctypes.c_float * 1)(1.0)) == 0
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        decode(asked, 0)
        for step in range(tokens - 1):
            found = [llama_cpp.llama_get_logits_ith(context, -1 - row) for row in range(len(asked))][::-1]
            chosen = [int(np.ctypeslib.as_array(each, (vocabulary,)).argmax()) for each in found]
            decode([[token] for token in chosen], len(asked[0]) + step)

    return run


ENGINES = {
    "headrace": engine_of("headrace"),
    "vllm": engine_of("vllm"),
    "peft": open_peft,
    "llama.cpp": open_llama_cpp,
}


def shortened(tokens: int, share: float) -> int:
    return tokens if tokens <= LEAST_TOKENS else max(LEAST_TOKENS, round(tokens * share))


def measured(run: Run, rounds: int, share: float) -> dict[str, Any]:
    """Seconds by case and kind, kinds alternating; an error in the place of what an engine cannot do."""
    found: dict[str, Any] = {}
    for case, (count, *sizes) in CASES.items():
        size, tokens = (shortened(each, share) for each in sizes)
        kinds: dict[str, list[int | None]] = {"base": [None] * count, "1 adapter": [0] * count}
        if count > 1:
            kinds["8 adapters"] = list(range(count))
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for seed in range(rounds + 1):  # the first is not counted
            for kind, adapters in list(kinds.items()):
                began = time.perf_counter()
                try:
                    run(prompts(count, size, seed), tokens if seed else min(tokens, WARM_TOKENS), adapters)
                except NotImplementedError as error:
                    found[f"{case}, {kind}"] = str(error)
                    del kinds[kind]
                    continue
                if seed:
                    seconds[kind].append(time.perf_counter() - began)
        found |= {f"{case}, {kind}": seconds[kind] for kind in kinds}
    return found


def write_all(shape: str, folder: Path) -> None:
    """The model and its adapters, as safetensors and as GGUF."""
    sys.path += [str(HERE), str(HERE.parent / "tests" / "support")]
    import torch
    import transformers
    from adapters import SHAPES, VOCAB_SIZE, write_adapter
    from gguf.constants import GGMLQuantizationType
    from safetensors.torch import load_file
    from tiny_gguf import save_adapter, save_gguf

    sizes: dict[str, Any] = SHAPES.get(shape, TINY)
    config = transformers.LlamaConfig(vocab_size=VOCAB_SIZE, tie_word_embeddings=True, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    vocab = {"tokenizer.ggml.model": "no_vocab", "llama.vocab_size": VOCAB_SIZE}
    save_gguf(model, folder / "model.gguf", GGMLQuantizationType.BF16, vocab)
    for number in range(NUM_ADAPTERS):
        write_adapter(folder / f"adapter {number}", sizes, RANK, number)
    tensors = load_file(folder / "adapter 0" / "adapter_model.safetensors")
    factors = {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): (a, tensors[name.replace("_A.", "_B.")])
        for name, a in tensors.items()
        if ".lora_A." in name
    }
    save_adapter(
        "LlamaForCausalLM", config.to_dict(), factors, folder / "adapter.gguf", 2 * RANK, GGMLQuantizationType.BF16
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--shape", default="135m", choices=("135m", "1.7b", "tiny"), help="tiny: to try the script")
    parser.add_argument("--only", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of the tokens of long prompts and answers")
    parser.add_argument("--engine", nargs=2, metavar=("NAME", "FOLDER"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.engine:
        name, where = arguments.engine
        print(json.dumps(measured(ENGINES[name](Path(where)), arguments.rounds, arguments.share)))
        return
    pythons = {"headrace": Path(sys.executable)}
    if importlib.util.find_spec("peft"):
        pythons["peft"] = Path(sys.executable)
    if arguments.peers is not None:
        found = {name: arguments.peers.absolute() / venv / "bin/python" for name, venv in VENVS.items()}
        pythons |= {name: python for name, python in found.items() if python.exists()}
    with tempfile.TemporaryDirectory() as at:
        write_all(arguments.shape, Path(at))
        results: dict[str, Any] = {}
        for name in (each for each in arguments.only if each in pythons):
            script = str(Path(__file__).absolute())
            command = [str(pythons[name]), script, "--engine", name, at]
            command += ["--rounds", str(arguments.rounds), "--share", str(arguments.share)]
            environment = dict(os.environ)
            if name == "vllm":
                environment |= vllm_peer.settings(pythons[name].parents[1])
            # Elsewhere, as processes of vLLM's take their modules from where they start, and `kernels` is ours here.
            ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=at, env=environment)
            lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]  # vLLM logs there, too
            results[name] = json.loads(lines[-1]) if not ended.returncode else "failed"
            print(name, shown(results[name]), flush=True)
    if arguments.out:
        from report import write_report

        about = {"shape": arguments.shape, "share": arguments.share, "engines": results}
        write_report(arguments.out, "adapters_peers", about)


def shown(result: Any) -> Any:
    if not isinstance(result, dict):
        return result
    return {case: each if isinstance(each, str) else round(statistics.median(each), 3) for case, each in result.items()}


if __name__ == "__main__":
    main()
