"""The in-process executor over tiny checkpoints, and what it finds out about memory and cores."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models
import torch
from plan_maker import PlanMaker

from headrace import LLM, SamplingParams
from headrace.core.options.engine_options import Options
from headrace.core.options.plan import MemoryReading, Plan
from headrace.core.options.resolve import resolve
from headrace.executor.cpu.rank import CpuRank, check_weights_fit, use_all_cores
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.sizes import activation_bytes, prompt_logprobs_cost, weight_elements
from headrace.ipc.failure import ModelError
from headrace.ipc.process.host import HostMemory, host_memory, usable_cores

PROMPT = [7, 8, 9, 10, 11, 12, 13]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("llama"))


def started(checkpoint: Path) -> tuple[CpuRank, Plan, MemoryReading, list[str]]:
    options = Options(model=str(checkpoint), dtype="float32", block_size=4, max_num_seqs=4, skip_tokenizer_init=True)
    executor, phases = CpuRank(options), list[str]()
    plan = resolve(options, executor.describe(phases.append))
    return executor, plan, executor.load(plan, phases.append), phases


def test_a_program_gathers_no_keys_for_which_memory_is_kept(checkpoint: Path) -> None:
    executor, plan, reading, _ = started(checkpoint)
    model = executor.found.spec
    assert reading.activation_bytes == activation_bytes(model, plan, 4, gathers=False)
    assert reading.activation_bytes < activation_bytes(model, plan, 4)


def test_from_a_folder_to_the_same_greedy_tokens_as_transformers(checkpoint: Path) -> None:
    executor, plan, reading, phases = started(checkpoint)
    assert (plan.model.architecture, plan.model.vocab_size) == ("LlamaForCausalLM", tiny_models.VOCAB_SIZE)
    assert plan.model.eos_token_ids == (tiny_models.EOS,)
    assert executor.tokenizer() is None
    assert phases == ["find model", "compile kernels", "load weights"]
    assert 0 < reading.available_bytes < reading.total_bytes
    assert reading.activation_bytes > 0

    executor.allocate(num_blocks=64, max_model_len=64)
    maker = PlanMaker(block_size=4)
    maker.enter(0, PROMPT, temperature=0.0)
    maker.enter(1, PROMPT[:3], seed=5)
    for step in range(12):
        maker.compute(0, 4 if step == 0 else None)
        maker.compute(1)
        executor.submit(maker.plan())
        result = executor.collect()
        assert result.step == step
        maker.sampled(result.rows, result.token_ids)
    reference = tiny_models.build("llama")
    expected = reference.generate(
        torch.tensor([PROMPT]), max_new_tokens=11, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert maker.tokens[0] == expected[0].tolist()
    executor.stop()
    executor.stop()


def test_repeated_steps_give_the_tokens_of_steps_made_anew(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, _, _, _ = started(checkpoint)
    executor.allocate(num_blocks=64, max_model_len=64)
    answers, num_repeats = [], [0, 0]
    assert executor._model is not None
    repeat = executor._model.repeat  # type: ignore[union-attr]
    for may_repeat in (True, False):
        executor._runner._may_repeat = may_repeat  # type: ignore[union-attr]
        executor._runner.use(executor._model)  # type: ignore[union-attr]

        def counted(*args, may_repeat=may_repeat):
            num_repeats[may_repeat] += 1
            return repeat(*args)

        monkeypatch.setattr(executor._model, "repeat", counted)
        maker = PlanMaker(block_size=4)
        maker.enter(0, PROMPT, temperature=0.0)
        maker.enter(1, PROMPT, seed=5)
        maker.enter(2, PROMPT, seed=5, top_k=9, top_p=0.8)
        for step in range(20):
            for row in maker.tokens:
                maker.compute(row)
            executor.submit(maker.plan())
            result = executor.collect()
            assert (result.step, result.rows.tolist()) == (step, list(maker.tokens))
            maker.sampled(result.rows, result.token_ids)
        answers.append([maker.tokens[row] for row in sorted(maker.tokens)])
        for row in list(maker.tokens):
            maker.release(row)
        executor.submit(maker.plan())
        executor.collect()
    assert num_repeats == [0, 18]  # but for the prompts' step and the first after it
    assert answers[0] == answers[1]
    executor.stop()


def test_stop_is_safe_before_anything_started() -> None:
    CpuRank(Options()).stop()


def test_importing_it_loads_no_transformers() -> None:
    code = "import sys, headrace.executor.cpu.rank; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# --- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "opt", "opt_projected_post_norm"])
def test_weights_are_estimated_from_the_config_to_a_few_percent(name: str) -> None:
    model = tiny_models.build(name, hidden_size=128)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    actual = sum(parameter.numel() for parameter in model.parameters())
    assert 0.96 * actual < weight_elements(spec_from_config(config)) <= actual


@pytest.mark.parametrize(("name", "chosen_share"), [("llama", 1.0), ("mixtral", 2 / 5)])
def test_a_reported_prompt_token_costs_the_vocabularys_product_beside_those_of_the_layers(
    name: str, chosen_share: float
) -> None:
    model = tiny_models.build(name)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    head = model.lm_head.weight.numel()
    layers = {key: each.numel() for key, each in model.named_parameters() if ".layers." in key}
    of_token = sum(count * (chosen_share if ".experts" in key else 1.0) for key, count in layers.items())
    assert prompt_logprobs_cost(spec_from_config(config)) == pytest.approx(2 * head / of_token)


def test_weights_that_do_not_fit_are_refused_with_the_numbers(checkpoint: Path) -> None:
    _, plan, _, _ = started(checkpoint)
    spec = spec_from_config({**_config(checkpoint), "num_hidden_layers": 4_000})
    with pytest.raises(
        ModelError, match=r"0\.\d\d billion of 4 bytes \(float32\) need 0\.\d\d GiB, and 0\.25 GiB of 8"
    ):
        check_weights_fit(spec, plan, HostMemory(8 << 30, 1 << 28))
    check_weights_fit(spec, plan, HostMemory(8 << 30, 4 << 30))


def test_weights_that_are_kept_twice_are_counted_twice(tmp_path: Path) -> None:
    """Latent attention's up-projection, which is most of these."""
    whole_rows = {"kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    folder = tiny_models.save("deepseek_v2_moe", tmp_path, **whole_rows)
    executor, plan, _, _ = started(folder)
    kept, spec = executor.weight_bytes, spec_from_config(_config(folder))
    assert kept > 1.3 * 4 * weight_elements(spec)
    check_weights_fit(spec, plan, HostMemory(8 << 30, kept))
    with pytest.raises(ModelError, match="do not fit"):
        check_weights_fit(spec, plan, HostMemory(8 << 30, int(0.97 * kept)))


def _config(checkpoint: Path) -> dict[str, Any]:
    import json

    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    return config


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_memory_is_limited_by_the_tightest_control_group_of_version_2(tmp_path: Path) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("0::/slice/task\n")
    stat = "anon 5\ninactive_file 100000\n"
    write(root / "slice" / "task", memory__max="max\n", memory__current="300000\n", memory__stat=stat)
    write(root / "slice", memory__max="1000000\n", memory__current="700000\n", memory__stat=stat)
    assert host_memory(proc, root) == HostMemory(total_bytes=1_000_000, available_bytes=400_000)


def test_memory_is_limited_by_a_control_group_of_version_1(tmp_path: Path) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("12:cpu,cpuacct:/task\n4:memory:/task\n1:name=systemd:/\n0::/elsewhere\n")
    write(root / "memory" / "task", **{"memory.limit_in_bytes": "500000", "memory.usage_in_bytes": "600000"})
    assert host_memory(proc, root) == HostMemory(total_bytes=500_000, available_bytes=0)


def test_without_a_limit_memory_is_the_machines(tmp_path: Path) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("4:memory:/task\n")
    write(root / "memory" / "task", **{"memory.limit_in_bytes": str(1 << 62), "memory.usage_in_bytes": "1"})
    missing = host_memory(tmp_path / "none", root)
    assert host_memory(proc, root).total_bytes == missing.total_bytes > 1 << 28


@pytest.fixture(params=["addresses", "data"])
def few_bytes(request: pytest.FixtureRequest) -> Iterator[int]:
    """Limits this process's address space (`ulimit -v`) or its data (`ulimit -d`) to so many bytes, 3 GiB more than it
    has."""
    own = psutil.Process().memory_info()
    kind, used = {"addresses": (resource.RLIMIT_AS, own.vms), "data": (resource.RLIMIT_DATA, own.data)}[request.param]
    before = resource.getrlimit(kind)
    limit = used + (3 << 30)
    resource.setrlimit(kind, (limit, before[1]))
    yield limit
    resource.setrlimit(kind, before)


def test_a_limit_of_addresses_or_data_gives_a_smaller_cache(tmp_path: Path, few_bytes: int) -> None:
    found = host_memory()
    assert found.total_bytes <= few_bytes
    assert found.available_bytes <= 3 << 30
    long = {"max_position_embeddings": 1 << 20, "hidden_size": 512, "num_key_value_heads": 4}
    model = tiny_models.save("llama", tmp_path, **long)
    options = {"in_process": True, "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 8}
    with LLM(str(model), **options) as llm:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        assert len(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids) == 2


# --- cores ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("quota", "expected"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None)])
def test_cores_are_limited_by_the_quota(tmp_path: Path, quota: str, expected: int | None) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("0::/task\n")
    write(root / "task", cpu__max=quota + "\n")
    unlimited = usable_cores(tmp_path / "none", root)
    assert usable_cores(proc, root) == (expected or unlimited)


def test_threads_are_the_usable_cores_unless_omp_num_threads_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(usable_cores() + 1)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        use_all_cores()
        assert torch.get_num_threads() == usable_cores() + 1
        monkeypatch.delenv("OMP_NUM_THREADS")
        use_all_cores()
        assert torch.get_num_threads() == usable_cores()
    finally:
        torch.set_num_threads(before)
