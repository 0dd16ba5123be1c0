"""From options and a model to a plan, and from a plan and the memory to blocks: every number and its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.options.engine_options import Options
from headrace.core.options.memory import CPU_CACHE_BYTES, block_bytes, fit_cache, ledger
from headrace.core.options.parsing import parse_options
from headrace.core.options.plan import Facts, MemoryReading, ModelDescription, Plan
from headrace.core.options.resolve import check_stored_format, resolve
from headrace.ipc.failure import OptionError

GIB = 1 << 30


def description(**changes: Any) -> ModelDescription:
    values: dict[str, Any] = {
        "name": "tiny",
        "architecture": "LlamaForCausalLM",
        "checkpoint_dtype": "bfloat16",
        "max_model_len": 8192,
        "vocab_size": 1000,
        "num_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 256,
        "kv_elements_per_token": 4 * 2 * 64,
        "kv_rows_per_token": 4 * 2,
        "eos_token_ids": (2,),
        "generation_defaults": {"temperature": 0.7, "top_p": 0.9},
    }
    return ModelDescription(**{**values, **changes})


def plan(model: ModelDescription | None = None, **options: Any) -> Plan:
    return resolve(parse_options(**options), model or description())


def reading(available_bytes: int = 8 * GIB, **changes: Any) -> MemoryReading:
    values: dict[str, Any] = {
        "total_bytes": 16 * GIB,
        "available_bytes": available_bytes,
        "weights_bytes": GIB,
        "activation_bytes": GIB // 8,
    }
    return MemoryReading(**{**values, **changes})


def reason(of: Plan, name: str) -> str:
    return next(decision.reason for decision in of.decisions if decision.name == name)


# --- resolve --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "checkpoint", "decided"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float16", "float16"),
        ("auto", "float32", "bfloat16"),
        ("auto", "Q4_1", "bfloat16"),
        ("half", "bfloat16", "float16"),
        ("float", "bfloat16", "float32"),
        ("float32", "float16", "float32"),
    ],
)
def test_dtype(asked: str, checkpoint: str, decided: str) -> None:
    made = plan(description(checkpoint_dtype=checkpoint), dtype=asked)
    assert made.dtype == decided
    assert reason(made, "dtype")


@pytest.mark.parametrize(
    ("stored", "asked", "decided"),
    [
        ({"stored_as": "gptq"}, {}, "float16"),
        ({"checkpoint_dtype": "Q4_1"}, {}, "float16"),
        ({"stored_as": "compressed-tensors", "rounds_inputs": True}, {}, "bfloat16"),
        ({"stored_as": "gptq"}, {"kv_cache_dtype": "bfloat16"}, "bfloat16"),
        ({"stored_as": "gptq"}, {"dtype": "float16"}, "float16"),
        ({"stored_as": "gptq"}, {"dtype": "float32"}, "float32"),
        ({"stored_as": "compressed-tensors", "rounds_inputs": True}, {"dtype": "float32"}, "float32"),
    ],
)
def test_the_cache_of_packed_weights_is_as_fine_as_their_activations_or_finer_unless_those_become_int8(
    stored: dict[str, Any], asked: dict[str, Any], decided: str
) -> None:
    assert plan(description(**stored), **asked).kv_cache_dtype == decided


@pytest.mark.parametrize(
    ("model", "options", "groups"),
    [
        ({"whole_prompts": True}, {"quantization": "int8"}, (64, 32)),
        ({"whole_prompts": True}, {"quantization": "int8", "quantization_group_size": 32}, (32,)),
        ({"whole_prompts": True}, {"quantization": "int4"}, (32,)),
        ({}, {"quantization": "int8"}, (32,)),
        ({}, {"quantization": "int4", "quantization_group_size": 128}, (128,)),
        ({}, {}, ()),
    ],
)
def test_the_groups_of_quantised_weights(
    model: dict[str, Any], options: dict[str, Any], groups: tuple[int, ...]
) -> None:
    assert plan(description(**model), **options).weight_groups == groups


def test_max_model_len_is_the_models_unless_asked_for_less() -> None:
    assert (plan().max_model_len, plan().max_model_len_is_fixed) == (8192, False)
    asked = plan(max_model_len=100)
    assert (asked.max_model_len, asked.max_model_len_is_fixed) == (100, True)
    assert plan(max_model_len=8192).max_model_len == 8192
    with pytest.raises(OptionError, match=r"max_model_len=8193 is more than the 8192 tokens.*hf_overrides"):
        plan(max_model_len=8193)


@pytest.mark.parametrize(
    ("options", "tokens", "seqs"),
    [
        ({}, 2048, 256),
        ({"max_num_batched_tokens": 64}, 64, 64),
        ({"max_num_seqs": 4000}, 4000, 4000),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 64}, 64, 64),
        ({"enable_chunked_prefill": False}, 8192, 256),
        ({"enable_chunked_prefill": False, "max_model_len": 512}, 2048, 256),
        ({"enable_chunked_prefill": False, "max_model_len": 512, "max_num_batched_tokens": 512}, 512, 256),
    ],
)
def test_the_budget_of_a_step(options: dict[str, Any], tokens: int, seqs: int) -> None:
    made = plan(**options)
    assert (made.max_num_batched_tokens, made.max_num_seqs) == (tokens, seqs)


def test_a_large_gpu_gets_larger_steps_unless_others_are_asked_for() -> None:
    large, small = description(device_bytes=140 * GIB), description(device_bytes=24 * GIB)
    made = plan(large)
    assert (made.max_num_batched_tokens, made.max_num_seqs) == (8192, 1024)
    assert "the default of a GPU of 140 GiB" in {decision.reason for decision in made.decisions}
    made = plan(small)
    assert (made.max_num_batched_tokens, made.max_num_seqs) == (2048, 256)
    made = plan(large, max_num_seqs=64)
    assert (made.max_num_batched_tokens, made.max_num_seqs) == (8192, 64)
    made = plan(large, max_num_batched_tokens=512)
    assert (made.max_num_batched_tokens, made.max_num_seqs) == (512, 512)


def test_a_budget_that_cannot_work_is_refused_with_the_numbers() -> None:
    with pytest.raises(OptionError, match=r"max_num_batched_tokens=64 is less than max_num_seqs=65"):
        plan(max_num_batched_tokens=64, max_num_seqs=65)
    with pytest.raises(OptionError, match=r"max_num_batched_tokens=512 must be at least max_model_len, 8192"):
        plan(max_num_batched_tokens=512, enable_chunked_prefill=False)


def test_the_seed_is_drawn_only_when_none_is_asked_for() -> None:
    assert plan(seed=7).seed == 7
    assert resolve(parse_options(seed=None), description(), draw_seed=lambda: 42).seed == 42
    assert len({plan(seed=None).seed for _ in range(4)}) == 4


def test_names_and_log_probability_limits() -> None:
    assert plan().served_model_names == ("tiny",)
    assert plan(served_model_name=["a", "b"]).served_model_names == ("a", "b")
    assert plan(max_logprobs=5).max_logprobs == 5
    assert plan(max_logprobs=-1).max_logprobs == 1000
    assert plan(max_logprobs=5000).max_logprobs == 1000


def test_sampling_defaults() -> None:
    assert plan().model.generation_defaults == {"temperature": 0.7, "top_p": 0.9}
    assert plan(generation_config="vllm").model.generation_defaults == {}
    override = plan(override_generation_config={"temperature": 0.1})
    assert override.model.generation_defaults == {"temperature": 0.1, "top_p": 0.9}
    with pytest.raises(OptionError, match="cannot set temprature; it can set max_tokens, min_tokens, temperature"):
        plan(override_generation_config={"temprature": 0.1})


# vLLM's tests/test_config.py::test_get_diff_sampling_param and the help of its --generation-config
def test_max_new_tokens_is_the_default_of_max_tokens_and_bounds_what_a_server_gives() -> None:
    given = plan(override_generation_config={"max_new_tokens": 5})
    assert given.model.generation_defaults == {"temperature": 0.7, "top_p": 0.9, "max_tokens": 5}
    assert given.most_new_tokens == 5
    both = plan(override_generation_config={"max_new_tokens": 5, "max_tokens": 3})
    assert (both.model.generation_defaults["max_tokens"], both.most_new_tokens) == (3, 5)
    model = description(generation_defaults={"max_tokens": 9})
    for source, most in (("auto", None), ("vllm", None), ("/a/folder", 9)):
        assert plan(model, generation_config=source).most_new_tokens == most, source
    with pytest.raises(OptionError, match=r"sets max_new_tokens=0: it must be a whole number, at least 1"):
        plan(override_generation_config={"max_new_tokens": 0})


def test_tokens_that_end_answers_are_set_by_the_generation_config_that_overrides() -> None:
    own = plan().model.eos_token_ids
    stops = plan(override_generation_config={"stop_token_ids": [9, 7, 9], "min_p": 0.2})
    assert stops.model.generation_defaults == {"temperature": 0.7, "top_p": 0.9, "min_p": 0.2, "stop_token_ids": [9, 7]}
    assert stops.model.eos_token_ids == own
    for ends_with, ids in ((5, (5,)), ([5, 6], (5, 6)), ([], ())):
        ends = plan(override_generation_config={"eos_token_id": ends_with})
        assert ends.model.eos_token_ids == ids
        assert ends.model.generation_defaults == {"temperature": 0.7, "top_p": 0.9}
        assert [each.reason for each in ends.decisions if each.name == "eos_token_id"] == ["override_generation_config"]
    for name in ("stop_token_ids", "eos_token_id"):
        for wrong in ("</s>", [1.0], [True], None, [-1]):
            with pytest.raises(OptionError, match=rf"sets {name}=.*: it must be a token id or a list of them$"):
                plan(override_generation_config={name: wrong})
        with pytest.raises(OptionError, match=rf"sets {name}=\[1000\]: .*, each below 1000, the model's vocabulary"):
            plan(override_generation_config={name: [1000]})


def test_the_plan_has_one_reason_for_each_decision() -> None:
    decisions = {decision.name: (decision.value, decision.reason) for decision in plan(max_num_seqs=3).decisions}
    assert len(decisions) == len(plan(max_num_seqs=3).decisions)
    assert decisions["max_num_seqs"] == ("3", "asked for")
    assert decisions["structured_outputs_config"][0] == "llguidance"
    assert "backend auto takes it" in decisions["structured_outputs_config"][1]
    assert all(reason for _, reason in decisions.values())


# --- memory ---------------------------------------------------------------------------------------------------------


def test_blocks_override_beats_bytes_beats_the_share() -> None:
    small: dict[str, Any] = {"max_model_len": 32}
    size = block_bytes(plan())
    assert size == 16 * 512 * 2
    both = plan(num_gpu_blocks_override=7, kv_cache_memory_bytes=size * 100, **small)
    assert fit_cache(both, reading()).num_blocks == 7
    assert fit_cache(plan(kv_cache_memory_bytes=size * 100 + 5, **small), reading()).num_blocks == 100
    free = 1000 * size
    whole = reading(free, total_bytes=1400 * size, weights_bytes=200 * size, activation_bytes=100 * size)
    shared = fit_cache(plan(gpu_memory_utilization=0.5, **small), whole)
    assert (shared.num_blocks, shared.kv_cache_bytes) == (400, 400 * size)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_share_is_of_all_memory_whatever_others_have_taken(device: str) -> None:
    size = block_bytes(plan())
    facts = fit_cache(
        plan(gpu_memory_utilization=0.5),
        reading(
            900 * size, total_bytes=2000 * size, weights_bytes=200 * size, activation_bytes=100 * size, device=device
        ),
    )
    assert facts.num_blocks == 1000 - 200 - 100


@pytest.mark.parametrize(("device", "num_blocks"), [("cuda", 700), ("cpu", 233)])
def test_engines_of_one_machine_divide_its_memory_but_have_a_gpu_each(device: str, num_blocks: int) -> None:
    size = block_bytes(plan())
    whole = reading(
        900 * size, total_bytes=2000 * size, weights_bytes=200 * size, activation_bytes=100 * size, device=device
    )
    of_five = {"gpu_memory_utilization": 0.5, "data_parallel_size": 5}
    assert fit_cache(plan(data_parallel_size_local=3, **of_five), whole).num_blocks == num_blocks
    assert fit_cache(plan(data_parallel_size_local=1, **of_five), whole).num_blocks == 700


def test_no_room_shows_where_the_memory_goes_and_what_to_change() -> None:
    with pytest.raises(OptionError) as by_share:
        fit_cache(plan(gpu_memory_utilization=0.05), reading())
    for part in ("0.05 of 16.0 GiB is 819.2 MiB", "weights take 1.0 GiB", "a step needs 128.0 MiB", "room for 0"):
        assert part in str(by_share.value)
    assert "raise gpu_memory_utilization" in str(by_share.value)
    with pytest.raises(OptionError) as by_others:
        fit_cache(plan(), reading(100 << 20))
    assert "100.0 MiB are free of 16.0 GiB, and a step needs 128.0 MiB" in str(by_others.value)
    assert "free memory" in str(by_others.value)


def test_no_more_blocks_than_requests_could_use_nor_than_a_modest_share_of_a_cpu() -> None:
    few = plan(max_num_seqs=2, max_model_len=32)
    assert fit_cache(few, reading()).num_blocks == 2 * 2 + 1
    many = fit_cache(plan(max_num_seqs=1024), reading(100 * GIB, total_bytes=128 * GIB))
    assert CPU_CACHE_BYTES - block_bytes(plan()) < many.kv_cache_bytes <= CPU_CACHE_BYTES
    long = description(kv_elements_per_token=1 << 20)  # one request of 8192 tokens takes 16 GiB
    facts = fit_cache(plan(long), reading(100 * GIB, total_bytes=128 * GIB))
    assert (facts.max_model_len, facts.warnings) == (8192, ())


def test_a_length_that_does_not_fit_is_shortened_with_one_warning_or_refused_when_asked_for() -> None:
    size = block_bytes(plan())
    facts = fit_cache(plan(num_gpu_blocks_override=11), reading())
    assert (facts.num_blocks, facts.max_model_len) == (11, 160)
    assert len(facts.warnings) == 1
    for part in ("shortened to 160", "8192", f"{513 * size:,}", f"{11 * size:,}", "num_gpu_blocks_override"):
        assert part in facts.warnings[0]
    with pytest.raises(OptionError) as caught:
        fit_cache(plan(max_model_len=161), reading(11 * size, activation_bytes=0))
    for part in ("max_model_len=161", f"{12 * size:,}", f"{11 * size:,}", "to 160", "are free of"):
        assert part in str(caught.value)
    assert fit_cache(plan(max_model_len=160), reading(11 * size, activation_bytes=0)).max_model_len == 160


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(OptionError, match=r"kv_cache_memory_bytes asks for .* at most"):
        fit_cache(plan(kv_cache_memory_bytes="16GiB"), reading())
    with pytest.raises(OptionError, match="no room for a KV cache"):
        fit_cache(plan(), reading(0))
    with pytest.raises(OptionError, match=r"kv_cache_memory_bytes gives it 7, .*raise kv_cache_memory_bytes"):
        fit_cache(plan(kv_cache_memory_bytes=7), reading())


@given(
    available_bytes=st.integers(0, 64 * GIB),
    activation_bytes=st.integers(0, 4 * GIB),
    share=st.floats(0.01, 1.0),
    block_size=st.integers(1, 256),
    max_model_len=st.none() | st.integers(1, 8192),
    max_num_seqs=st.integers(1, 2048),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_what_is_fitted_fits(
    available_bytes: int,
    activation_bytes: int,
    share: float,
    block_size: int,
    max_model_len: int | None,
    max_num_seqs: int,
    dtype: str,
    device: str,
) -> None:
    made = plan(
        gpu_memory_utilization=share,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        dtype=dtype,
    )
    memory = reading(available_bytes, activation_bytes=activation_bytes, device=device, total_bytes=65 * GIB)
    try:
        facts = fit_cache(made, memory)
    except OptionError:
        return
    assert facts.kv_cache_bytes == facts.num_blocks * block_bytes(made)
    assert facts.kv_cache_bytes + activation_bytes <= available_bytes
    holds = (facts.num_blocks - 1) * block_size
    assert 1 <= facts.max_model_len <= min(holds, made.max_model_len)
    assert (facts.max_model_len < made.max_model_len) == bool(facts.warnings)
    assert not (facts.warnings and made.max_model_len_is_fixed)
    assert facts.num_blocks <= 1 + max_num_seqs * -(-made.max_model_len // block_size)


def test_the_ledger_adds_up() -> None:
    made = plan(num_gpu_blocks_override=65, max_model_len=512)
    text = ledger(fit_cache(made, reading()), made)
    rows = {line[:12].strip(): line[12:] for line in text.splitlines()}
    assert list(rows) == ["weights", "activations", "KV cache", "total"]
    assert "1.0 GiB" in rows["weights"]
    assert "65 blocks of 16 tokens in bfloat16: 1024 tokens, 2.0 requests of 512" in rows["KV cache"]
    assert "16.0 GiB on the cpu" in rows["total"]
    facts = Facts(num_blocks=2, max_model_len=16, memory=reading(weights_bytes=1), kv_cache_bytes=2)
    assert "3 B" in ledger(Facts(**{**_fields(facts), "memory": reading(weights_bytes=1, activation_bytes=0)}), made)


def _fields(facts: Facts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in facts.__struct_fields__}


def test_prefix_caching_is_off_where_keys_depend_on_more_than_the_prefix() -> None:
    assert plan().enable_prefix_caching
    decided = plan(description(why_no_prefix_caching="keys depend on the prompt's length"))
    assert not decided.enable_prefix_caching
    assert any(d.name == "enable_prefix_caching" and "prompt's length" in d.reason for d in decided.decisions)


@pytest.mark.parametrize(
    ("model", "files", "said"),
    [
        ("", {}, "the demo model is a GGUF file; leave it out"),
        ("model.GGUF", {}, r"model\.GGUF is a GGUF file"),
        ("", {"config.json": "{}"}, "has no quantization_config; leave it out, or quantise float weights"),
        ("", {"config.json": '{"quantization_config": {}}'}, ""),
        ("", {"config.json": "{}", "hf_quant_config.json": "{}"}, ""),
        ("", {"config.json": "not json"}, ""),
        ("someone/a-model", {}, ""),
    ],
)
def test_a_format_that_a_checkpoint_is_not_stored_in_is_refused_before_anything_is_imported(
    model: str, files: dict[str, str], said: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    options = Options(model=str(tmp_path) if files else model, quantization="awq")
    if not said:
        check_stored_format(options)
        return
    with pytest.raises(OptionError, match=f"quantization=awq asks for a checkpoint that is stored so, and .*{said}"):
        check_stored_format(options)
    for other in (None, "gguf", "int4"):
        check_stored_format(msgspec.structs.replace(options, quantization=other))


@pytest.mark.parametrize("model", ["", "someone/a-model"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("AWQ", r"quantization=AWQ is unknown; did you mean awq\? known: gguf, int8, .*, gptq, .*, torchao"),
        ("compresed-tensors", r"did you mean compressed_tensors\?"),
        ("zzz", "quantization=zzz is unknown; known: gguf, int8"),
        ("squeezellm", "quantization=squeezellm is not supported: vLLM took it out in 0.8"),
    ],
)
def test_a_quantization_that_nobody_knows_is_refused_before_anything_is_fetched(
    name: str, said: str, model: str
) -> None:
    with pytest.raises(OptionError, match=said):
        check_stored_format(Options(model=model, quantization=name))
