"""Runs the whole GPU path on a simulated GPU: `python FILE FOLDER [PART OF A NAME ...]`.

FOLDER holds tiny checkpoints by name. Prints one line of JSON for each case: its name, its seconds and its failure.
`pretend_rules` has the cases that test the simulation's own checks.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from case_process import cases_of, run_cases

MODELS = ("llama_gqa_tied", "qwen3", "gemma2", "llama_dynamic", "opt_projected_post_norm", "llama_biases", "smollm3")
RECURRENT_MODELS = {"lfm2": 22, "mamba2": 8, "falcon_h1": 80, "qwen3_5": 60}
"""Those of `tiny_recurrent`, with the blocks of little more than two rows' states and one row's tokens."""
"""The models of `tiny_models` that need different work of the device."""
LING_LINEAR = "bailing_moe_v2_5"
PUBLISHED_MODELS = (LING_LINEAR, "arctic", "k2_horizon_dense")
"""Of `published_models`."""
OWN_OPS = ("step3", "iquest_loopcoder", "plamo2", "nemotron_h_puzzle")
"""Likewise."""
LAYER_KERNELS = (
    *("norm_kernel", "linear_kernel", "small_linear_kernel", "rotary_cache_kernel", "attend_kernel", "combine_kernel"),
    "activation_kernel",
)
GREEDY = [7, 8, 9, 10, 11, 12, 13]


def find_cases(folder: Path) -> dict[str, Callable[[], None]]:
    cases: dict[str, Callable[[], None]] = {}
    for module in (sys.modules[__name__], importlib.import_module("pretend_rules")):
        cases |= {name: partial(case, folder) for name, case in cases_of(module).items()}
    return cases


def main() -> None:
    from pretend_kernels import begin

    begin()
    run_cases(find_cases(Path(sys.argv[1])), sys.argv[2:])


# --- what the cases share ---------------------------------------------------------------------------------------


def requests() -> list[Any]:
    from pretend_engine import Request

    return [
        Request(GREEDY),
        Request([5], {"temperature": 0.9}, seed=4),
        Request([20, 21, 22], {"temperature": 0.9, "top_p": 0.8, "top_k": 20}, seed=5),
    ]


def capture_all(executor: Any) -> None:
    """Captures graphs of all sizes, for greedy steps and for the sampling of `requests`."""
    from headrace.executor.gpu.sampler import StepEnding

    graphs = executor.steps.graphs
    for ending in (StepEnding.TRUNCATE, StepEnding.LOGITS):
        graphs.find(1, ending)  # registers that the graph is missing
    while executor.idle():
        pass
    assert not graphs.why_eager, graphs.why_eager
    assert len(graphs) == 3 * len(graphs.sizes)


def check_steps(answers: Any) -> None:
    """Checks that submitting waits for nothing, that collecting waits only for the step's own event, and that decodes
    use graphs."""
    assert answers.num_replays >= 2, "too few steps go through graphs"
    assert not answers.submit_syncs, answers.submit_syncs
    others = [wait for wait in answers.collect_syncs if not wait.startswith("Event.synchronize at executor/gpu/")]
    assert not others, others


def compare(got: Any, wanted: Any) -> None:
    assert got.tokens == wanted.tokens, (got.tokens, wanted.tokens)
    assert len(got.logprobs) == len(wanted.logprobs)
    for (row, ids, values), (wanted_row, wanted_ids, wanted_values) in zip(
        sorted(got.logprobs), sorted(wanted.logprobs), strict=True
    ):
        assert (row, ids) == (wanted_row, wanted_ids)
        assert all(a == b or abs(a - b) < 1e-3 for a, b in zip(values, wanted_values, strict=True)), (
            values,
            wanted_values,
        )


def tokens_of(folder: Path, wanted_on: str = "cpu", asked: Any = None, **options: Any) -> Any:
    """Checks that graphs with two steps in flight give the same tokens as one step at a time on a CPU."""
    from pretend_engine import drive, executor_for

    asked = asked or requests()
    wanted = drive(executor_for(folder, wanted_on, **options), asked, 1)
    executor = executor_for(folder, **options)
    capture_all(executor)
    answers = drive(executor, asked, 2)
    check_steps(answers)
    compare(answers, wanted)
    return executor


# --- cases ------------------------------------------------------------------------------------------------------


def case_tokens_of_gemma2(folder: Path) -> None:
    tokens_of(folder / "gemma2")


def long_case_tokens_of_llama_with_dynamic_rotary_scaling(folder: Path) -> None:
    tokens_of(folder / "llama_dynamic")


def long_case_tokens_of_llama_with_grouped_queries(folder: Path) -> None:
    tokens_of(folder / "llama_gqa_tied")


def long_case_tokens_of_qwen3(folder: Path) -> None:
    tokens_of(folder / "qwen3")


def long_case_tokens_of_opt_with_norms_after(folder: Path) -> None:
    tokens_of(folder / "opt_projected_post_norm")


def case_tokens_of_a_model_whose_rows_have_states(folder: Path) -> None:
    """The cases of engines have the other models."""
    tokens_of(folder / "qwen3_5")


def long_case_tokens_of_all_models_whose_rows_have_states(folder: Path) -> None:
    for model in RECURRENT_MODELS:
        tokens_of(folder / model)


def long_case_tokens_of_lightning_attention_whose_heads_are_normed_and_rotated(folder: Path) -> None:
    tokens_of(folder / LING_LINEAR)


def long_case_tokens_of_norms_of_groups(folder: Path) -> None:
    tokens_of(folder / "k2_horizon_dense")


def long_case_tokens_of_experts_of_the_layers_input(folder: Path) -> None:
    tokens_of(folder / "arctic")


def long_case_tokens_of_models_with_ops_of_their_own(folder: Path) -> None:
    for model in OWN_OPS:
        tokens_of(folder / model)


def case_everything_that_follows_logits(folder: Path) -> None:
    from pretend_engine import Request

    rules = {"allowed_token_ids": tuple(range(0, 320, 2)), "logit_bias": {6: 2.0}, "bad_words": ((8,),)}
    tokens_of(
        folder / "llama",
        asked=[
            Request(GREEDY, {"logprobs": 3, "prompt_logprobs": 2}),
            Request([5], {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.4, **rules}, seed=4),
            Request([20, 21, 22], {"repetition_penalty": 1.3, "min_tokens": 4, "logprobs": 0}, seed=5),
            Request([9, 9, 4], {"temperature": 1.1, "min_p": 0.05, "top_k": 9, "prompt_logprobs": 0}, seed=6),
        ],
    )


def case_bad_words_wait_for_the_tokens_before(folder: Path) -> None:
    """Bad words of several tokens are the one documented exception to `check_steps`."""
    from pretend_engine import Request, drive, executor_for

    pairs = tuple((first, second) for first in range(320) for second in (first, 5, 77))
    asked = [Request(GREEDY), Request([5], {"bad_words": pairs})]
    answers = drive(executor_for(folder / "llama"), asked, 2)
    compare(answers, drive(executor_for(folder / "llama", "cpu"), asked, 1))


def long_case_bfloat16(folder: Path) -> None:
    tokens_of(folder / "llama_biases", "reference", dtype="bfloat16")


def case_fp8_weights_and_cache(folder: Path) -> None:
    tokens_of(folder / "llama", "reference", dtype="bfloat16", quantization="fp8", kv_cache_dtype="fp8")


def long_case_int8_weights_and_cache(folder: Path) -> None:
    options = {"quantization": "int8", "quantization_group_size": 32, "kv_cache_dtype": "int8"}
    tokens_of(folder / "llama", "reference", **options)


def long_case_int4_weights(folder: Path) -> None:
    tokens_of(folder / "llama", "reference", quantization="int4", quantization_group_size=32)


def long_case_batch_invariant(folder: Path) -> None:
    tokens_of(folder / "llama", "reference", batch_invariant=True)


def case_layers_in_the_hosts_memory(folder: Path) -> None:
    from headrace.executor.gpu.weights.offload import OffloadedLayer

    executor = tokens_of(folder / "smollm3", "reference", cpu_offload_gb=2.5e-4)
    layers = executor._residence.decoder._layers
    assert sum(isinstance(layer, OffloadedLayer) and layer._order is not None for layer in layers) == 3


def case_sleep_and_new_weights(folder: Path) -> None:
    from pretend_cuda import GPU
    from pretend_engine import drive, executor_for

    from headrace.ipc.control import PrepareWeights, Sleep, UseWeights, WakeUp

    executor = executor_for(folder / "llama", enable_sleep_mode=True)
    asked = requests()
    commands: tuple[list[Any], ...] = ([], [Sleep(level=1), WakeUp()], [Sleep(level=2), WakeUp()])
    wanted = drive(executor_for(folder / "llama", "cpu"), asked, 1)
    reload = [PrepareWeights(path=str(folder / "llama_other")), UseWeights(prepared=True)]
    for orders in (*commands, reload):
        for order in orders:
            executor.control(order)
        capture_all(executor)
        GPU.syncs.clear()
        answers = drive(executor, asked, 2)
        check_steps(answers)
        if orders is reload:
            wanted = drive(executor_for(folder / "llama_other", "cpu"), asked, 1)
        compare(answers, wanted)


def long_case_adapters(folder: Path) -> None:
    """Rows with one adapter, with two, with one from a position on and with none share batches, through graphs that
    were captured before an adapter was loaded, and through those of each number of adapters; adapters stay over sleep,
    and go on with new weights, in part computed of these."""
    from pretend_cuda import GPU
    from pretend_engine import Request, drive, executor_for

    from headrace.executor.gpu.sampler import StepEnding
    from headrace.ipc.adapters import RowAdapter
    from headrace.ipc.control import PrepareWeights, Sleep, UseWeights, WakeUp

    options = {"enable_lora": True, "max_loras": 3, "enable_sleep_mode": True}
    one, two = RowAdapter(0, 1.0), RowAdapter(2, 0.5)
    asked = [
        Request(GREEDY, adapters=(one,)),
        Request([20, 21, 22], {"temperature": 0.9, "top_p": 0.8, "top_k": 20}, seed=5),
        Request(GREEDY, adapters=(RowAdapter(0, 1.0, 5),)),
        Request([5], {"temperature": 0.9}, seed=4, adapters=(two, one)),
    ]
    plain = [Request(each.prompt, each.sampling, each.seed) for each in asked]
    on_cpu = executor_for(folder / "llama_short", "cpu", **options)
    executor = executor_for(folder / "llama_short", **options)

    def answers_of(rank: Any, requests: list[Request]) -> Any:
        return drive(rank, requests, 1 if rank is on_cpu else 2, new_tokens=4)

    adapters = ((1, "plain"), (0, "plain"), (2, "dora"), (1, ""))  # slot 1 is emptied again
    executor.steps.graphs.find(4, StepEnding.TRUNCATE, 2)  # registers that the graph is missing
    while executor.idle():
        pass
    for rank in (on_cpu, executor):
        for slot, name in adapters:
            if name:
                assert rank.load_adapter(slot, str(folder / f"adapter_{name}")).rank == 4
            else:
                rank.drop_adapter(slot)
    wanted = answers_of(on_cpu, asked)
    assert wanted.tokens != answers_of(on_cpu, plain).tokens, "the adapters change nothing"
    reload = [PrepareWeights(path=str(folder / "llama_short_other")), UseWeights(prepared=True)]
    refused = [PrepareWeights(path=str(folder / "llama_short_other")), UseWeights(prepared=False)]
    for orders in ([], [Sleep(level=1), WakeUp()], [Sleep(level=2), WakeUp()], refused, reload):
        for order in orders:
            executor.control(order)
            if orders is reload:
                on_cpu.control(order)
        while executor.idle():
            pass
        assert not executor.steps.graphs.why_eager, executor.steps.graphs.why_eager
        GPU.syncs.clear()
        if orders is reload:
            wanted = answers_of(on_cpu, asked)
        answers = answers_of(executor, asked)
        check_steps(answers)
        compare(answers, wanted)
    compare(answers_of(executor, plain), answers_of(on_cpu, plain))


def engines(
    folder: Path,
    prompts: list[list[int]],
    gpu_options: dict[str, Any],
    model: str = "llama",
    allowed: list[int] | None = None,
    **options: Any,
) -> Any:
    """Checks that a CPU engine and the simulated GPU's engine give the same tokens, of those allowed. Returns a
    description of the latter's worker afterwards."""
    from headrace import LLM, SamplingParams

    settings: dict[str, Any] = {
        "in_process": True, "device": "cpu", "skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 4,
        "max_model_len": 48, "block_size": 4, **options,
    }  # fmt: skip
    asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = [
        SamplingParams(
            temperature=0.9 * (index % 2), seed=index, max_tokens=20, ignore_eos=True, allowed_token_ids=allowed
        )
        for index in range(len(prompts))
    ]
    answers = []
    for backend, more in (("uni", {}), ("pretend_engine:PretendGpu", gpu_options)):
        with LLM(str(folder / model), distributed_executor_backend=backend, **settings, **more) as llm:
            outputs = llm.generate(asked, params, use_tqdm=False)
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
            stats = llm.get_stats()
            found = {**llm.describe_engine().workers[0], "num_preemptions": stats.num_preemptions}
            found["num_draft_tokens"], found["num_accepted"] = stats.num_draft_tokens, stats.num_accepted_tokens
            found["num_cached"] = sum(output.num_cached_tokens or 0 for output in outputs)
    assert answers[0] == answers[1]
    return found


def case_an_engine_whose_requests_give_way(folder: Path) -> None:
    """An engine that runs out of blocks and preempts, with graphs that are captured while requests run."""
    prompts = [[3 + index, *range(20, 29)] for index in range(4)]
    assert engines(folder, prompts, {}, num_gpu_blocks_override=20)["num_preemptions"] > 0


def case_an_engine_that_speculates(folder: Path) -> None:
    """Decodes by graphs alternate with steps that have drafts."""
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    prompts = [[3 + index, *[20, 21, 22] * 4] for index in range(4)]
    from headrace.core.schedule.drafters import step_costs

    step_costs.SHORTEST_S = math.inf  # what this machine's steps take decides about no draft
    found = engines(folder, prompts, {"speculative_config": config}, num_gpu_blocks_override=60)
    assert found["num_draft_tokens"] > 5
    assert found["graphs"] > 1


def long_case_an_engine_with_states_in_little_memory(folder: Path) -> None:
    run_in_little_memory(folder, ["lfm2"])


def long_case_every_engine_with_states_in_little_memory(folder: Path) -> None:
    run_in_little_memory(folder, RECURRENT_MODELS)


def run_in_little_memory(folder: Path, models: Iterable[str]) -> None:
    """Prompts in chunks, requests that give way, and those that start from states that others have left."""
    prompts = [[*range(20, 33), 3 + index, *range(40, 50)] for index in range(6)]
    options = {"max_num_batched_tokens": 16, "enable_prefix_caching": True}
    for model in models:
        found = engines(folder, prompts, {}, model, num_gpu_blocks_override=RECURRENT_MODELS[model], **options)
        # A state takes most of the others' memory, so that a request waits before it enters.
        assert found["num_preemptions"] > 0 or model != "lfm2"
        assert found["num_cached"] > 0, model
        assert found["graphs"] > 1, model


def long_case_every_engine_with_states_that_speculates(folder: Path) -> None:
    run_with_drafts(folder, RECURRENT_MODELS)


def run_with_drafts(folder: Path, models: Iterable[str]) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    prompts = [[3 + index, *[20, 21, 22] * 4] for index in range(4)]
    from headrace.core.schedule.drafters import step_costs

    step_costs.SHORTEST_S = math.inf  # what this machine's steps take decides about no draft
    for model in models:
        options = {"speculative_config": config}
        found = engines(folder, prompts, options, model, [20, 21, 22], num_gpu_blocks_override=160)
        assert 0 < found["num_accepted"] < found["num_draft_tokens"], model
        assert found["graphs"] > 1, model


def long_case_states_after_sleep(folder: Path) -> None:
    from pretend_engine import drive, executor_for

    from headrace.ipc.control import Sleep, WakeUp

    for model in RECURRENT_MODELS:
        executor, asked = executor_for(folder / model, enable_sleep_mode=True), requests()
        wanted = drive(executor_for(folder / model, "cpu"), asked, 1)
        for level in (1, 2):
            executor.control(Sleep(level=level))
            executor.control(WakeUp())
            capture_all(executor)
            answers = drive(executor, asked, 2)
            check_steps(answers)
            compare(answers, wanted)


def case_launches_of_a_captured_llama_step(folder: Path) -> None:
    """Each launch costs a graph about two microseconds, so layers launch only kernels, and few launches are around
    them."""
    import torch
    from pretend_cuda import GPU
    from pretend_engine import executor_for

    from headrace.executor.gpu.sampler import StepEnding

    def launches(name: str) -> Counter[str]:
        executor = executor_for(folder / name, dtype="bfloat16")
        backend, steps = executor._backend, executor.steps.steps
        with backend.here(), torch.inference_mode():
            backend.capturer().capture(lambda: steps.decode(4, StepEnding.ARGMAX))
        return Counter(launch.partition(" ")[0] for launch in GPU.launches)

    one, two = launches("llama_short"), launches("llama")
    layer = two - one
    assert set(layer) <= {*LAYER_KERNELS, "mm"}, layer
    assert layer.total() <= 10, layer
    assert one.total() - layer.total() <= 15, one - layer


def long_case_kernels_are_interpreted(folder: Path) -> None:
    """Interprets all kernels of a step as a device would be given them, for a device of few multiprocessors."""
    for model in ("llama_short", "lfm2_short"):
        interpreted(folder / model)


def interpreted(folder: Path) -> None:
    import torch
    from pretend_cuda import GPU
    from pretend_engine import Request, drive, executor_for

    from headrace.kernels.triton import configs

    asked = [Request(GREEDY[:5]), Request([5], {"temperature": 0.9, "top_p": 0.8}, seed=4)]
    wanted = drive(executor_for(folder, "cpu"), asked, 1, 3)
    properties: Any = torch.cuda.get_device_properties(0)
    properties.multi_processor_count, GPU.interpreting = 2, True
    configs._cuda_device.cache_clear()
    try:
        executor = executor_for(folder, cudagraph_capture_sizes=(2,), max_num_batched_tokens=8)
        capture_all(executor)
        answers = drive(executor, asked, 2, 3)
    finally:
        properties.multi_processor_count, GPU.interpreting = 132, False
        configs._cuda_device.cache_clear()
    check_steps(answers)
    compare(answers, wanted)


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    main()
