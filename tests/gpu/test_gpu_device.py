"""On a GPU: kernels against their references, graphs against eager steps, answers against transformers.

Skipped, with the reason, where there is no GPU. With TRITON_INTERPRET=1 the kernels' part runs on a CPU, interpreted.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from plan_maker import PlanMaker
from token_bits import pack_bits

from headrace import LLM, SamplingParams
from headrace.core.options.engine_options import Options
from headrace.core.options.memory import fit_cache
from headrace.core.options.resolve import resolve
from headrace.executor.gpu.hardware.device import choose_device
from headrace.executor.gpu.rank import GpuRank
from headrace.ipc.failure import HeadraceError, OptionError
from headrace.kernels import ops
from headrace.kernels.reference.attention import AttentionParams, PagedBatch
from headrace.kernels.reference.sampling import DeviceDraws, LogitChanges, Penalties


def why_no_gpu() -> str:
    try:
        choose_device("cuda")
    except OptionError as error:
        return str(error)
    return ""


WHY_NO_GPU = why_no_gpu()
INTERPRETED = bool(WHY_NO_GPU) and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if not WHY_NO_GPU else "cpu")
needs_gpu = pytest.mark.skipif(bool(WHY_NO_GPU), reason=WHY_NO_GPU)
needs_kernels = pytest.mark.skipif(bool(WHY_NO_GPU) and not INTERPRETED, reason=WHY_NO_GPU)
DTYPES = (torch.float32,) if INTERPRETED else (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of the largest magnitude: float32 sums in another order; bf16 rounds to 8 bits, and each side may round twice."""


def both(op: str, dtype: torch.dtype, **facts: Any) -> tuple[Any, Any]:
    """The GPU's version, which there must be, and the reference."""
    choice = ops()[op].choose(device=DEVICE, dtype=dtype, **facts)
    assert choice.name != "reference", choice.refused
    return choice.function, ops()[op].reference


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    bound = TOLERANCE.get(expected.dtype, 0.0) * float(expected.float().abs().max().clamp(min=1))
    assert float((found.float() - expected.float()).abs().max()) <= bound


# --- kernels ----------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "cap"), [(None, None), (37, None), (None, 5.0)])
def test_attention_over_a_mixed_batch(dtype: torch.dtype, window: int | None, cap: float | None) -> None:
    heads, kv_heads, size, block = (4, 2, 32, 8) if INTERPRETED else (32, 8, 128, 16)
    counts, contexts = ([1, 9, 1], [50, 30, 1]) if INTERPRETED else ([1, 513, 1, 64, 1], [5000, 900, 1, 64, 333])
    longest = -(-max(contexts) // block)
    generator = torch.Generator(DEVICE).manual_seed(1)
    tables = torch.randperm(len(counts) * longest, generator=generator, device=DEVICE).view(len(counts), longest) + 1
    shape = (int(tables.max()) + 1, kv_heads, block, size)
    keys, values = (torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for _ in range(2))
    query = torch.randn(sum(counts), heads, size, generator=generator, device=DEVICE).to(dtype)
    starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    slots = torch.zeros(sum(counts), dtype=torch.int64, device=DEVICE)
    params = AttentionParams(size**-0.5, window, cap)
    version, reference = both("paged_attention", dtype, head_dim=size, num_heads=heads, num_kv_heads=kv_heads)
    outputs = [
        function(query, keys, values, PagedBatch(starts, lens, tables.int(), slots, block), params)
        for function in (version, reference)
    ]
    close(*outputs)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_seqs", "kv_heads", "own"), [(1, 1, 9000), (4, 8, 2000), (8, 8, 300), (200, 8, 40)])
def test_decodes_that_are_divided(dtype: torch.dtype, num_seqs: int, kv_heads: int, own: int) -> None:
    """From one sequence in many parts to many in few; the first 1000 or so tokens are the same blocks."""
    block, size, alike = 16, 128, 1000
    if INTERPRETED:
        num_seqs, kv_heads, size, alike, own = min(num_seqs, 5), min(kv_heads, 2), 16, 70, min(own, 90)
    generator = torch.Generator(DEVICE).manual_seed(3)
    lens = alike + torch.randint(1, own, (num_seqs,), generator=generator, device=DEVICE)
    longest, shared_blocks = -(-int(lens.max()) // block), alike // block
    tables = torch.randperm(num_seqs * longest, generator=generator, device=DEVICE).view(num_seqs, longest) + 1
    tables[:, :shared_blocks] = tables[:1, :shared_blocks].clone()
    shape = (num_seqs * longest + 1, kv_heads, block, size)
    keys, values = (torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for _ in range(2))
    query = torch.randn(num_seqs, 4 * kv_heads, size, generator=generator, device=DEVICE).to(dtype)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE)
    slots = torch.zeros(num_seqs, dtype=torch.int64, device=DEVICE)
    batch = PagedBatch(starts, lens.int(), tables.int(), slots, block, max_query_len=1)
    heads = {"head_dim": size, "num_heads": 4 * kv_heads, "num_kv_heads": kv_heads}
    plain, reference = both("paged_attention", dtype, **heads)
    expected = reference(query, keys, values, batch, AttentionParams(size**-0.5))
    close(plain(query, keys, values, batch, AttentionParams(size**-0.5)), expected)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [96, 4096])
def test_norms_and_activations(dtype: torch.dtype, size: int) -> None:
    x, residual = (torch.randn(7, size, device=DEVICE).to(dtype) for _ in range(2))
    weight, bias = torch.rand(size, device=DEVICE), torch.rand(size, device=DEVICE)
    for op, weights in (("rms_norm", (weight,)), ("layer_norm", (weight, bias))):
        version, reference = both(op, dtype, size=size)
        for found, expected in zip(
            version(x, residual, *weights, 1e-5), reference(x, residual, *weights, 1e-5), strict=True
        ):
            close(found, expected)
    version, reference = both("activate_and_multiply", dtype, kind="silu")
    close(version(x, "silu"), reference(x, "silu"))


@needs_kernels
def test_chosen_tokens_are_the_references() -> None:
    rows, vocab_size = (6, 1000) if INTERPRETED else (64, 128256)
    generator = torch.Generator(DEVICE).manual_seed(2)
    logits = torch.randn(rows, vocab_size, generator=generator, device=DEVICE) * 3
    kind = torch.arange(rows, device=DEVICE) % 4
    draws = DeviceDraws(
        temperature=torch.where(kind == 0, 0.0, 0.8),
        top_k=torch.where(kind == 1, 20, 0).int(),
        top_p=torch.where(kind == 2, 0.9, 1.0).double(),
        min_p=torch.where(kind == 3, 0.05, 0.0).double(),
        seed=torch.arange(rows, device=DEVICE) * 77,
        position=torch.arange(rows, device=DEVICE),
    )
    version, reference = both("choose_tokens", torch.float32, vocab_size=vocab_size)
    found, expected = version(logits, draws), reference(logits, draws)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.best.tolist() == expected.best.tolist()


@needs_gpu
def test_a_thousand_choices_of_the_same_logits_are_the_same() -> None:
    """Programs meet in any order: what one reads before another has written it would differ sooner or later."""
    rows, vocab_size = 96, 128256
    generator = torch.Generator(DEVICE).manual_seed(4)
    logits = torch.randn(rows, vocab_size, generator=generator, device=DEVICE) * 3
    numbers = torch.arange(rows, device=DEVICE)
    draws = DeviceDraws(
        temperature=torch.full((rows,), 0.8, device=DEVICE),
        top_k=torch.where(numbers % 3 == 0, 40, 0).int(),
        top_p=torch.where(numbers % 3 == 1, 0.9, 1.0).double(),
        min_p=torch.where(numbers % 3 == 2, 0.02, 0.0).double(),
        seed=numbers * 77,
        position=numbers,
    )
    version, _ = both("choose_tokens", torch.float32, vocab_size=vocab_size)
    first = version(logits, draws).token_ids
    others = torch.stack([version(logits, draws).token_ids for _ in range(1000)])
    assert int((others != first).sum()) == 0


@needs_kernels
def test_changed_and_reported_logits_are_the_references() -> None:
    """What changes a choice to the bit: no product and sum are fused."""
    rows, vocab_size = (5, 1000) if INTERPRETED else (64, 128256)
    generator = torch.Generator(DEVICE).manual_seed(3)
    logits = torch.randn(rows, vocab_size, generator=generator, device=DEVICE) * 3
    counts = torch.randint(0, 4, (rows + 1, vocab_size), generator=generator, device=DEVICE, dtype=torch.int32)
    numbers = torch.rand(3, rows + 1, generator=generator, device=DEVICE) + 0.5
    penalties = Penalties(pack_bits(counts == 1), pack_bits(counts > 1), counts, *numbers)
    order = torch.randperm(rows, generator=generator, device=DEVICE)
    version, reference = both("adjust_logits", torch.float32)
    for changes in (LogitChanges(order, pack_bits(counts > 0)), LogitChanges(order, pack_bits(counts > 0), penalties)):
        assert version(logits.clone(), changes).equal(reference(logits.clone(), changes))
    version, reference = both("token_logprobs", torch.float32)
    for num_top in (0, 5, 20, 50):
        found, expected = version(logits, order, num_top), reference(logits, order, num_top)
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.ranks.tolist() == expected.ranks.tolist()
        close(found.logprobs, expected.logprobs)


# --- the executor -----------------------------------------------------------------------------------------------


def generate(model: Path, prompts: list[list[int]], num_tokens: int, **options: Any) -> tuple[list[list[int]], GpuRank]:
    """Greedy, prompts one after another, two steps in flight; graphs are made before unless enforce_eager."""
    settings = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": 256, "gpu_memory_utilization": 0.3, **options}
    asked = Options(model=str(model), skip_tokenizer_init=True, device="cuda", **settings)
    executor = GpuRank(asked, torch.device("cuda", 0))
    plan = resolve(asked, executor.describe(lambda phase: None))
    facts = fit_cache(plan, executor.load(plan, lambda phase: None))
    executor.allocate(facts.num_blocks, facts.max_model_len)
    while executor.idle():
        pass
    maker, pending = PlanMaker.of(plan, facts.num_blocks), list[tuple[list[int], list[int]]]()

    def read() -> None:
        rows, columns = pending.pop(0)
        result = executor.collect()
        for row, column, token in zip(rows, columns, result.token_ids.tolist(), strict=True):
            maker.tokens[row][column] = token

    for step in range(num_tokens + len(prompts)):
        if step < len(prompts):
            maker.enter(step, list(prompts[step]), temperature=0.0, like=0 if step else None)
        for row, tokens in maker.tokens.items():
            if len(tokens) < len(prompts[row]) + num_tokens:
                maker.compute(row)
        next_plan = maker.plan()
        if not len(next_plan.rows):
            break
        executor.submit(next_plan)
        rows = next_plan.rows[next_plan.sampled].tolist()
        pending.append((rows, [len(maker.tokens[row]) for row in rows]))
        for row in rows:
            maker.tokens[row].append(-1)
        if len(pending) == 2:
            read()
    while pending:
        read()
    return [maker.tokens[row] for row in range(len(prompts))], executor


PROMPTS = [[7, 8, 9, 10, 11, 12, 13], [5], list(range(20, 90)), [40, 41, 42, 43, 44]]


@needs_gpu
@pytest.mark.parametrize("name", ["llama_gqa_tied", "qwen3", "gemma2", "llama_dynamic", "mistral_window"])
def test_fp32_answers_are_transformers_and_graphs_change_nothing(name: str, tmp_path: Path) -> None:
    model = tiny_models.save(name, tmp_path)
    found, executor = generate(model, PROMPTS, 40)
    assert executor.steps.graphs.why_eager == ""
    assert len(executor.steps.graphs) >= 4
    executor.stop()
    eager, executor = generate(model, PROMPTS, 40, enforce_eager=True)
    executor.stop()
    assert found == eager
    reference = tiny_models.build(name).to("cuda")
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        expected = reference.generate(
            torch.tensor([prompt], device="cuda"), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert tokens == expected[0].tolist()


@needs_gpu
@pytest.mark.parametrize("name", ["llama_gqa_tied", "qwen3"])
def test_bf16_answers_are_transformers_wherever_its_margin_exceeds_rounding(name: str, tmp_path: Path) -> None:
    """Judged token by token on our own sequence: transformers, in bf16 on the same GPU, gives the logits at each
    position; where its best and second differ by more than the largest difference between its bf16 and fp32 logits at
    that position, which is what rounding has been seen to accumulate to, ours must be its best."""
    model = tiny_models.save(name, tmp_path)
    found, executor = generate(model, PROMPTS, 40, dtype="bfloat16")
    executor.stop()
    exact = tiny_models.build(name).to("cuda")
    rounded = tiny_models.build(name).to("cuda", torch.bfloat16)
    judged = 0
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([tokens[:-1]], device="cuda")
        with torch.inference_mode():
            bf16, fp32 = rounded(ids).logits[0].float(), exact(ids).logits[0]
        rounding = (bf16 - fp32).abs().amax(1)
        best = bf16.topk(2).values
        clear = best[:, 0] - best[:, 1] > 2 * rounding
        for position in range(len(prompt) - 1, len(tokens) - 1):
            if clear[position]:
                judged += 1
                assert tokens[position + 1] == int(bf16[position].argmax()), f"position {position}"
    assert judged > 20, "the margins must leave something to judge"


@needs_gpu
def test_offloaded_layers_change_nothing_through_graphs_and_eagerly(tmp_path: Path) -> None:
    model = tiny_models.save("llama", tmp_path, num_hidden_layers=5)
    found = []
    for options in ({}, {"cpu_offload_gb": 1.0}, {"cpu_offload_gb": 1.0, "enforce_eager": True}):
        tokens, executor = generate(model, PROMPTS, 40, **options)
        assert executor.steps.graphs.why_eager in ("", "enforce_eager is set")
        executor.stop()
        found.append(tokens)
    assert found[0] == found[1] == found[2]


@needs_gpu
@pytest.mark.parametrize("kind", [{"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}])
def test_quantised_weights_and_caches_answer_through_graphs_as_eagerly(kind: dict[str, str], tmp_path: Path) -> None:
    model = tiny_models.save("llama", tmp_path)
    found, executor = generate(model, PROMPTS, 40, **kind)
    executor.stop()
    eager, executor = generate(model, PROMPTS, 40, enforce_eager=True, **kind)
    executor.stop()
    assert found == eager


@needs_gpu
@pytest.mark.parametrize("level", [1, 2])
def test_a_gpu_that_slept_gave_its_memory_back_and_answers_as_before(level: int, tmp_path: Path) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    model = tiny_models.save("llama", tmp_path, **shape)
    prompts, greedy = [{"prompt_token_ids": each} for each in PROMPTS], SamplingParams(temperature=0.0, max_tokens=20)
    with LLM(
        str(model), in_process=True, device="cuda", dtype="float32", max_model_len=256, enable_sleep_mode=True,
        skip_tokenizer_init=True, gpu_memory_utilization=0.3,
    ) as llm:  # fmt: skip

        def answer() -> list[list[int]]:
            return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, greedy, use_tqdm=False)]

        before, held = answer(), torch.cuda.memory_allocated()
        report = llm.describe_engine()
        llm.sleep(level=level)
        asleep_bytes = report.workers[0]["weight_bytes"] + report.facts["kv_cache_bytes"]
        assert held - torch.cuda.memory_allocated() > 0.9 * asleep_bytes
        llm.wake_up()
        assert answer() == before
        llm.reload_weights()
        assert answer() == before
        assert answer() == before, "through new graphs too"


@needs_gpu
def test_a_model_that_does_not_fit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    model = tiny_models.save("llama", tmp_path)
    _, total_bytes = torch.cuda.mem_get_info()
    size = 1 << 15
    huge = {"hidden_size": size, "intermediate_size": size, "num_hidden_layers": 2 * total_bytes // (size * size * 20)}
    options = Options(
        model=str(model),
        device="cuda",
        load_format="dummy",
        hf_overrides=huge,
        skip_tokenizer_init=True,
        max_model_len=64,
    )
    executor = GpuRank(options, torch.device("cuda", 0))
    with pytest.raises(OptionError, match=r"billion weights of .* needs .* GiB, and .* GiB of the .* GiB of cuda:0"):
        executor.load(resolve(options, executor.describe(lambda phase: None)), lambda phase: None)


@needs_gpu
def test_an_index_that_does_not_exist_is_named() -> None:
    with pytest.raises(OptionError, match="device=cuda:77 does not exist: "):
        choose_device("cuda:77")


# --- several GPUs -----------------------------------------------------------------------------------------------

NUM_GPUS = 0 if WHY_NO_GPU else torch.cuda.device_count()
WORLDS = [
    ({"tensor_parallel_size": 2}, "symmetric memory"),
    ({"tensor_parallel_size": 2, "disable_custom_all_reduce": True}, "process group"),
    ({"tensor_parallel_size": 2, "enforce_eager": True}, "symmetric memory"),
    ({"pipeline_parallel_size": 2}, "process group"),
    ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, ""),
]


@needs_gpu
@pytest.mark.parametrize(("options", "sums"), WORLDS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_ranks_on_gpus_of_their_own_answer_like_one(
    name: str, options: dict[str, Any], sums: str, tmp_path: Path
) -> None:
    ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    if ranks > NUM_GPUS:
        pytest.skip(f"{ranks} GPUs are needed, and there are {NUM_GPUS}")
    model = tiny_models.save(name, tmp_path)
    settings = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": 256, "skip_tokenizer_init": True}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    answers = []
    for world in ({"gpu_memory_utilization": 0.2}, options):
        with LLM(str(model), device="cuda", **settings, **world) as llm:
            outputs = [llm.generate([list(p) for p in PROMPTS], params, use_tqdm=False) for _ in range(2)]
            answers += [[list(output.outputs[0].token_ids) for output in each] for each in outputs]
            workers = llm.describe_engine().workers
    assert answers[1:] == answers[:1] * 3
    assert len(workers) == ranks
    for facts in workers:
        assert facts["why_eager"] == ("enforce_eager is set" if "enforce_eager" in options else "")
        assert facts["sums"].startswith(sums), "which way sums go depends on access between the GPUs, and on its size"


@needs_gpu
def test_more_ranks_than_gpus_are_refused_with_the_numbers(tmp_path: Path) -> None:
    model = tiny_models.save("llama", tmp_path)
    with pytest.raises(HeadraceError, match=rf"{NUM_GPUS + 1} ranks on this host .* need a GPU each"):
        LLM(str(model), device="cuda", tensor_parallel_size=NUM_GPUS + 1, skip_tokenizer_init=True)
