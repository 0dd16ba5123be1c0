"""Options: one declaration serves Python keywords, the command line, the config file and the docs."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.options.document import DOCS_PAGE, options_page
from headrace.core.options.engine_options import Options
from headrace.core.options.option import Option, Secret
from headrace.core.options.parsing import (
    OptionParser,
    add_options,
    options_from_arguments,
    parse_options,
    struct_from_arguments,
)
from headrace.core.options.values import option_specs, parse_size
from headrace.core.options.vllm_environment import take_vllm_variables
from headrace.core.options.vllm_options import renamed_options, successor, unsupported_options
from headrace.frontend.http.options import ServeOptions
from headrace.ipc.failure import OptionError

ROOT = Path(__file__).parents[2]


def from_command_line(*arguments: str) -> Options:
    parser = OptionParser(prog="engine-core")
    add_options(parser, positional_model=True)
    return options_from_arguments(parser.parse_args(arguments))


def test_no_options_are_the_declared_defaults() -> None:
    assert parse_options() == Options() == from_command_line()


def test_every_option_has_a_type_a_group_and_help() -> None:
    for spec in option_specs().values():
        assert spec.option.group
        assert spec.option.help
        if spec.kind in ("int", "float") and spec.default is not None:
            assert spec.option.minimum is None or spec.default >= spec.option.minimum


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("model", Path("/models/llama"), "/models/llama"),
        ("dtype", types.SimpleNamespace(__name__="float16"), "float16"),
        ("max_model_len", "auto", None),
        ("load_format", "hf", "auto"),
        ("load_format", "npcache", "pt"),
        ("model_impl", "vllm", "headrace"),
        ("max_model_len", -1, None),
        ("max_model_len", "8k", 8000),
        ("max_model_len", "8K", 8192),
        ("max_model_len", 4096.0, 4096),
        ("kv_cache_memory_bytes", "4GiB", 4 << 30),
        ("kv_cache_memory_bytes", "512M", 512 << 20),
        ("kv_cache_memory_bytes", "1.5G", 3 << 29),
        ("gpu_memory_utilization", "0.5", 0.5),
        ("enable_prefix_caching", "false", False),
        ("enable_prefix_caching", None, True),
        ("seed", None, None),
        ("seed", "none", None),
        ("seed", -5, -5),
        ("served_model_name", "one", ("one",)),
        ("device", "cuda:12", "cuda:12"),
        ("cudagraph_capture_sizes", ["1,2", "4"], (1, 2, 4)),
        ("served_model_name", ["one", "two"], ("one", "two")),
        ("hf_overrides", '{"rope_theta": 1e4}', {"rope_theta": 1e4}),
        ("hf_overrides", '{"time_step_limit": [0.0, Infinity]}', {"time_step_limit": [0.0, float("inf")]}),
        ("hf_overrides", {"time_step_limit": (0.0, float("inf"))}, {"time_step_limit": [0.0, float("inf")]}),
        ("hf_overrides", {"id2label": {0: "a"}}, {"id2label": {"0": "a"}}),
    ],
)
def test_values_as_users_write_them(name: str, value: object, expected: object) -> None:
    assert getattr(parse_options(**{name: value}), name) == expected


def test_a_torch_dtype_is_taken_by_name() -> None:
    torch = pytest.importorskip("torch")
    assert parse_options(dtype=torch.bfloat16).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"block_size": 512}, ["block_size=512", "1 to 256 tokens"]),
        ({"max_num_seqs": 0}, ["max_num_seqs=0", "at least 1 request"]),
        ({"gpu_memory_utilization": float("nan")}, ["gpu_memory_utilization=nan", "0.01 to 1"]),
        ({"block_size": True}, ["block_size=True", "whole number"]),
        ({"max_num_seqs": 1.5}, ["max_num_seqs=1.5", "whole number"]),
        ({"max_model_len": "8.5K5"}, ["max_model_len=8.5K5", "4096, 8k"]),
        ({"max_model_len": "1.0001k"}, ["1000.1 is not a whole number"]),
        ({"dtype": "bf16"}, ["dtype=bf16", "auto, half", "bfloat16?"]),
        ({"model": 3}, ["model=3", "text, not int"]),
        ({"hf_overrides": lambda config: config}, ["hf_overrides", "a function cannot travel"]),
        ({"hf_overrides": {"x": object()}}, ["hf_overrides", "plain data"]),
        ({"override_generation_config": {"temperature": float("nan")}}, ["temperature=nan", "a number"]),
        ({"hf_overrides": "[1]"}, ["hf_overrides=[1]", "an object"]),
        ({"hf_overrides": "{"}, ["hf_overrides={", "JSON object"]),
        ({"served_model_name": [1]}, ["served_model_name", "list of names"]),
        ({"trust_remote_code": "maybe"}, ["trust_remote_code=maybe", "true or false"]),
        ({"max_modle_len": 4}, ["unknown option max_modle_len", "did you mean max_model_len?"]),
        ({"zzzz": 4}, ["unknown option zzzz"]),
        ({"load_format": "SafeTensor"}, ["load_format=SafeTensor: it must be one of", "did you mean safetensors?"]),
        ({"device": "gpu"}, ["device=gpu: it must be auto, cpu, cuda or cuda:INDEX; did you mean 'cuda'?"]),
        ({"device": "CUDA:1"}, ["did you mean 'cuda:1'?"]),
        ({"device": "cuda:x"}, ["device=cuda:x: it must be auto, cpu, cuda or cuda:INDEX"]),
        ({"device": "cuda:-1"}, ["device=cuda:-1: it must be auto"]),
        ({"device": "cuda:0,1"}, ["device=cuda:0,1: it must be auto"]),
        ({"cudagraph_capture_sizes": ["1,2,x"]}, ["sizes=1,2,x: 'x' is not a whole number; write them like 1,2,4"]),
        ({"cudagraph_capture_sizes": ["1", ""]}, ["sizes=1 : '' is not a whole number"]),
        ({"cudagraph_capture_sizes": "0,2"}, ["sizes=0,2: out of range; it must be at least 1 request"]),
        ({"max-model-len": 1, "max_model_len": 2}, ["given twice"]),
    ],
)
def test_a_bad_value_is_named_with_what_would_be_right(values: dict[str, object], words: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        parse_options(**values)
    for word in words:
        assert word in str(caught.value)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(OptionError, match="3 problems") as caught:
        parse_options(max_num_seqs=0, dtype="int8", modle="x")
    for name in ("max_num_seqs", "dtype", "modle"):
        assert name in str(caught.value)


@given(st.integers(-(2**70), 2**70))
def test_sizes_read_back_whole_numbers(number: int) -> None:
    assert parse_size(str(number)) == number
    assert parse_size(f"{number}k") == number * 1000
    assert parse_size(f"{number} MiB") == number << 20


@given(st.text(max_size=12))
def test_any_text_is_a_number_in_range_or_a_clear_error(text: str) -> None:
    try:
        value = parse_options(max_num_batched_tokens=text).max_num_batched_tokens
    except OptionError:
        return
    assert value is None or value >= 1


def test_options_survive_the_channel_to_a_child() -> None:
    options = parse_options(served_model_name=["a", "b"], hf_overrides={"x": {"y": 1}}, seed=None, max_model_len=64)
    assert parse_options(**msgspec.to_builtins(options)) == options


# --- vLLM's other options ------------------------------------------------------------------------------------


def test_vllms_other_options_pass_silently_at_values_that_ask_for_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, option in unsupported_options().items():
            for value in (None, *option.passes):
                assert parse_options(**{name: value}) == Options(), name
    with pytest.raises(OptionError, match="decode_context_parallel_size=2 is refused: not supported yet"):
        parse_options(decode_context_parallel_size=2)
    with pytest.raises(OptionError, match=r"enable_prompt_adapter=True is refused.*merge"):
        parse_options(enable_prompt_adapter=True)
    assert parse_options(mamba_cache_mode="align") == Options()
    with pytest.raises(OptionError, match=r"mamba_cache_mode=all is refused: .* kept at ends of blocks"):
        parse_options(mamba_cache_mode="all")
    with pytest.warns(FutureWarning, match=r"swap_space=16 has no effect: preempted requests are recomputed"):
        assert parse_options(swap_space=16) == parse_options()


def test_vllms_other_options_are_refused_with_a_reason_or_pass_with_one() -> None:
    for name, option in unsupported_options().items():
        given = {name: "something else"}
        if option.is_harmless:
            with pytest.warns(FutureWarning) as warned:
                assert parse_options(**given) == parse_options()
            assert [str(each.message) for each in warned] == [f"{name}=something else has no effect: {option.reason}"]
            continue
        with pytest.raises(OptionError) as caught:
            parse_options(**given)
        assert str(caught.value) == f"{name}=something else is refused: {option.reason}"


def test_neutral_values_are_recognised_as_text() -> None:
    assert from_command_line("--data-parallel-size", "1", "--compilation-config", "{}", "--no-enforce-eager")
    with pytest.raises(OptionError, match="--data-parallel-start-rank=True"):
        from_command_line("-dpr", "True")
    options = from_command_line("-tp", "2", "-pp", "3", "-dp", "4", "-dpn", "1")
    assert (options.tensor_parallel_size, options.pipeline_parallel_size) == (2, 3)
    assert (options.data_parallel_size, options.data_parallel_rank) == (4, 1)
    options = from_command_line("-ep", "-sc", '{"method": "ngram", "num_speculative_tokens": 2}')
    assert options.enable_expert_parallel
    assert options.speculative_config["num_speculative_tokens"] == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-dpr", "1"], "--data-parallel-start-rank=1 is refused"),
        (["-dcp", "2"], "--decode-context-parallel-size=2 is refused"),
        (["--headless"], "--headless=True is refused: not supported here: it is of `headrace serve`"),
        (["--enable-prompt-adapter", "True"], "--enable-prompt-adapter=True is refused: retired"),
        (["--max-log-len", "80"], "--max-log-len=80 is refused: not supported: a logged request shows no prompt"),
        (["--kv-offloading-size", "4"], "kv_cache_dtype fp8 or int8"),
        (["--logits-processor-pattern", "m.*"], "logits_processors are the engine's"),
    ],
)
def test_vllms_flags_are_answered_by_name_with_what_works(arguments: list[str], sentence: str) -> None:
    with pytest.raises(OptionError) as caught:
        from_command_line(*arguments)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("runai_streamer_sharded", "its library is not used: use sharded_state"),
        ("modelexpress", "weights of other servers are not fetched: use safetensors"),
    ],
)
def test_vllms_other_ways_of_loading_are_answered_with_what_to_use(value: str, sentence: str) -> None:
    with pytest.raises(OptionError, match=f"--load-format.*{value}.*{re.escape(sentence)}"):
        from_command_line("--load-format", value)


def test_letters_that_nothing_is_near_to_are_refused_without_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    parser = OptionParser(prog="engine-core")
    add_options(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["-xy", "2"])
    assert "unknown option -xy\n" in capsys.readouterr().err


def test_hf_of_vllm_is_our_own_choice_of_files() -> None:
    assert from_command_line("--load-format", "hf").load_format == "auto"


@pytest.mark.parametrize(
    "arguments",
    [
        ["-O2"],
        ["-dp", "1", "-dcp=1", "-pcp", "1"],
        ["--optimization-level", "2", "--all2all-backend", "allgather_reducescatter"],
        ["--no-tokens-only", "--no-enable-lora", "--enable-lora=false", "--enable-lora", "False"],
        ["--limit-mm-per-prompt", '{"image":0,"video":0}'],
        ["--uvicorn-log-level", "warning"],  # passes with a note
        ["--no-worker-use-ray"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_vllms_own_defaults_pass_on_the_command_line(arguments: list[str]) -> None:
    assert from_command_line(*arguments) == Options()


def test_vllms_short_flags_reach_our_options() -> None:
    options = from_command_line("-tp", "2", "-pp=3", "-n", "6", "-r", "1", "-q", "int8")
    assert (options.tensor_parallel_size, options.pipeline_parallel_size, options.quantization) == (2, 3, "int8")
    assert (options.nnodes, options.node_rank) == (6, 1)


def test_worker_use_ray_is_the_ray_executor() -> None:
    with pytest.warns(FutureWarning, match="worker_use_ray is retired; use distributed_executor_backend=ray"):
        assert parse_options(worker_use_ray=True).distributed_executor_backend == "ray"
    assert from_command_line("--worker-use-ray").distributed_executor_backend == "ray"
    with pytest.raises(OptionError, match="given twice, as worker_use_ray and as distributed_executor_backend"):
        parse_options(worker_use_ray=True, distributed_executor_backend="mp")


def test_no_name_is_both_ours_and_unsupported() -> None:
    ours = set(option_specs())
    assert not ours & set(unsupported_options())
    assert not ours & set(renamed_options())
    assert not set(unsupported_options()) & set(renamed_options())
    assert {successor(name) for name in renamed_options()} <= ours


def test_retired_names_reach_their_successors_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="kv_cache_memory is now called kv_cache_memory_bytes"):
        assert parse_options(kv_cache_memory="1GiB").kv_cache_memory_bytes == 1 << 30
    with pytest.warns(FutureWarning, match="rope_theta is now called hf_overrides="):
        options = parse_options(rope_theta=1e6, hf_overrides={"x": 1})
    assert options.hf_overrides == {"rope_theta": 1e6, "x": 1}
    with pytest.warns(FutureWarning, match="reasoning_parser is now called reasoning_config"):
        assert parse_options(reasoning_parser="qwen3").reasoning_config == {"reasoning_parser": "qwen3"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse_options(**dict.fromkeys(renamed_options())) == Options()
        # what vLLM 0.4's server printed as its own defaults
        assert parse_options(middleware=[], disable_log_requests=False, max_paddings=256) == Options()


# --- the command line -----------------------------------------------------------------------------------------------


def test_dotted_keys_go_with_short_names_and_with_options_that_only_vllm_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    speculation = from_command_line("-sc.method", "ngram", "-sc.num_speculative_tokens=3").speculative_config
    assert speculation == {"method": "ngram", "num_speculative_tokens": 3}
    assert from_command_line("--limit-mm-per-prompt.image", "0", "--limit-mm-per-prompt.video=0") == Options()
    with pytest.raises(OptionError, match=r'limit-mm-per-prompt=\{"image": 1, "video": 0\} is refused'):
        from_command_line("--limit-mm-per-prompt.image", "1", "--limit-mm-per-prompt.video=0")
    assert from_command_line("-cc.mode", "3") == Options()
    assert "has no effect: there is no compiler" in capsys.readouterr().err


def test_none_as_python_spells_it_asks_for_a_texts_default() -> None:
    assert from_command_line("--quantization", "None", "--tokenizer", "None") == Options()
    assert from_command_line("--revision", "none").revision == "none"
    assert from_command_line("--model", "None").model == "None"


@pytest.mark.parametrize(
    "values",
    [
        {"max_num_seqs": 10**24},
        {"cudagraph_capture_sizes": [10**24]},
        {"hf_overrides": {"a": 10**24}},
        {"hf_overrides": "{" + '"a":{' * 100_000},
        {"served_model_name": "[" * 100_000},
    ],
)
def test_what_no_message_can_carry_is_refused_by_name(values: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(values))):
        parse_options(**values)


def test_dashes_underscores_and_dotted_keys_are_one() -> None:
    options = from_command_line(
        "m",
        "--max_model_len=8k",
        "--hf-overrides.rope_scaling.rope_type",
        "linear",
        "--hf_overrides.rope_scaling.factor=2.0",
        "--hf-overrides",
        '{"a_b": 1}',
        "--seed",
        "-1",
        "--served-model-name",
        "x",
        "y",
    )
    assert options == parse_options(
        model="m",
        max_model_len=8000,
        hf_overrides={"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "a_b": 1},
        seed=-1,
        served_model_name=["x", "y"],
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--enable-prefix-caching"], True),
        (["--no-enable-prefix-caching"], False),
        (["--enable-prefix-caching=False"], False),
        (["--enable_prefix_caching=true"], True),
        (["--enable-prefix-caching", "False"], False),
        (["--enable-prefix-caching", "True", "m"], True),
        (["--no-enable-prefix-caching=false"], True),
    ],
)
def test_booleans_on_the_command_line(arguments: list[str], expected: bool) -> None:
    assert from_command_line(*arguments).enable_prefix_caching is expected


def test_a_list_may_be_written_as_json() -> None:
    assert from_command_line("--served-model-name", '["a", "b"]').served_model_name == ("a", "b")
    assert from_command_line("--cudagraph-capture-sizes", "[1, 2]").cudagraph_capture_sizes == (1, 2)
    assert parse_options(served_model_name='["a"]').served_model_name == ("a",)
    with pytest.raises(OptionError, match="looks like a JSON list"):
        from_command_line("--served-model-name", "[a")
    parser = OptionParser()
    add_options(parser, ServeOptions)
    arguments = parser.parse_args(["--allowed-origins", '["*"]'])  # as vLLM's documents have it
    assert struct_from_arguments(arguments, ServeOptions).allowed_origins == ("*",)


def test_a_model_after_an_api_key_is_refused_in_a_sentence_and_no_second_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = OptionParser()
    add_options(parser, positional_model=True)
    add_options(parser, ServeOptions)
    with pytest.raises(SystemExit):
        parser.parse_args(["--api-key", "K", "some/model"])
    assert "--api-key took 2 values, and no model is named: give the model first" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parser.parse_args(["--api-key", "J", "--api-key", "K", "some/model"])
    assert "--api-key took 2 values, and no model is named" in capsys.readouterr().err
    parsed = parser.parse_args(["some/model", "--api-key", "K"])
    assert struct_from_arguments(parsed, ServeOptions).api_key == (Secret("K"),)
    assert options_from_arguments(parsed).model == "some/model"


@pytest.mark.parametrize(
    ("arguments", "value"), [(["True"], True), ([], True), (["false"], False), (["--no-enable-chunked-prefill"], False)]
)
def test_a_switch_takes_a_value_as_vllms_documents_write_it(arguments: list[str], value: bool) -> None:
    if not arguments or not arguments[0].startswith("--"):
        arguments = ["--enable-chunked-prefill", *arguments]
    assert from_command_line(*arguments).enable_chunked_prefill is value


def test_a_model_that_a_list_option_would_take_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        from_command_line("--served-model-name", "mine", "some/model", "--seed", "1")
    said = capsys.readouterr().err
    assert "--served-model-name took 2 values, and no model is named: give the model first, or with --model" in said
    assert from_command_line("some/model", "--served-model-name", "a", "b").model == "some/model"
    assert from_command_line("--served-model-name", "a", "b", "--model", "m").model == "m"
    assert from_command_line("--served-model-name", "a").model == ""


def test_a_list_option_that_is_given_twice_took_no_model() -> None:
    parser = OptionParser()
    add_options(parser, positional_model=True)
    add_options(parser, ServeOptions)
    for name in ("api_key", "tool_server", "served_model_name", "allowed_origins"):
        flag = "--" + name.replace("_", "-")
        for repeated in ([flag, "http://a", flag, "http://b"], [f"{flag}=http://a", f"{flag}=http://b"]):
            parsed = parser.parse_args([*repeated, "--seed", "1"])
            assert getattr(parsed, name) == ["http://a", "http://b"]
            assert options_from_arguments(parsed).model == ""


def test_errors_name_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OptionError, match="--block-size=1k: out of range; it must be 1 to 256 tokens"):
        from_command_line("--block_size", "1k")
    with pytest.raises(SystemExit) as caught:
        from_command_line("--modle", "x")
    assert caught.value.code == 2
    assert "unknown option --modle; did you mean --model?" in capsys.readouterr().err
    with pytest.raises(OptionError, match="model is given twice"):
        from_command_line("a", "--model", "b")


def test_help_tells_groups_units_and_defaults_but_not_what_is_unsupported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        from_command_line("--help")
    text = " ".join(capsys.readouterr().out.split())
    for spec in option_specs().values():
        assert f"--{spec.name.replace('_', '-')}" in text
    for part in ("KV cache:", "Scheduler:", "--block-size TOKENS Size of one block (1 to 256 tokens; default: 16)"):
        assert part in text
    assert "data-parallel-start-rank" not in text


def test_options_can_be_added_to_any_parser() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert options_from_arguments(parser.parse_args(["--block-size", "32"])).block_size == 32


# --- the config file --------------------------------------------------------------------------------------------------


def test_the_command_line_wins_over_the_config_file(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("max-model-len: 4k\nblock_size: 32\nenable-prefix-caching: false\nhf_overrides: {a: 1}\n")
    options = from_command_line("--config", str(file), "--block-size", "64")
    assert (options.max_model_len, options.block_size, options.enable_prefix_caching) == (4000, 64, False)
    assert options.hf_overrides == {"a": 1}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("max-modle-len: 1", ["engine.yaml", "max-modle-len", "did you mean max_model_len?"]),
        ("block_size: 0", ["engine.yaml", "block_size=0", "1 to 256 tokens"]),
        ("data-parallel-start-rank: 4", ["engine.yaml", "data_parallel_start_rank=4 is refused"]),
        ("- a\n- b", ["engine.yaml", "must map option names"]),
        ("a: [", ["engine.yaml", "not YAML"]),
        ("seed: 1\nblock-size: 32\nseed: 2", ["engine.yaml", "seed is given twice, on lines 1 and 3"]),
        ("hf_overrides: {a: 1, b: 2, a: 3}", ["engine.yaml", "a is given twice, on lines 1 and 1"]),
        ("seed: 1\nblock-size: 32\nblock_size: 2", ["engine.yaml", "block_size is given twice"]),
        ("hf_overrides: &all {a: *all}", ["engine.yaml", "hf_overrides=", "or holds itself"]),
        ("a: " + "[" * 5000, ["engine.yaml", "nested too deeply"]),
    ],
)
def test_a_bad_config_file_is_named(tmp_path: Path, content: str, words: list[str]) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(content)
    with pytest.raises(OptionError) as caught:
        from_command_line("--config", str(file))
    for word in words:
        assert word in str(caught.value)
    with pytest.raises(OptionError, match=r"missing\.yaml cannot be read"):
        from_command_line("--config", str(tmp_path / "missing.yaml"))


class OtherOptions(msgspec.Struct, frozen=True, kw_only=True):
    """As a server would declare beside the engine's."""

    port: Annotated[int, Option("Server", "Where to listen", minimum=0, maximum=65535)] = 8000
    engine: Annotated[tuple[str, ...], Option("Server", "Who computes")] = ()


def test_several_sets_of_options_share_a_parser_and_a_config_file(tmp_path: Path) -> None:
    parser = OptionParser()
    add_options(parser, OtherOptions)
    add_options(parser)
    file = tmp_path / "server.yaml"
    file.write_text("port: 9000\nblock-size: 32\ndata-parallel-size: 1\n")
    arguments = parser.parse_args(["--config", str(file), "--engine", "a", "b", "--engine", "c"])
    assert struct_from_arguments(arguments, OtherOptions) == OtherOptions(port=9000, engine=("a", "b", "c"))
    assert options_from_arguments(arguments).block_size == 32
    file.write_text("prot: 9000\n")
    for read in (options_from_arguments, lambda given: struct_from_arguments(given, OtherOptions)):
        with pytest.raises(OptionError, match=r"server\.yaml: unknown option prot; did you mean port\?"):
            read(arguments)


# --- docs -------------------------------------------------------------------------------------------------------------


def test_the_docs_page_is_up_to_date() -> None:
    assert (ROOT / DOCS_PAGE).read_text(encoding="utf-8") == options_page(), "run: make docs"


def test_reading_options_loads_no_heavy_library() -> None:
    code = (
        "import sys; from headrace.core.options.parsing import parse_options; parse_options(dtype='half');"
        "print([m for m in ('torch', 'numpy', 'transformers', 'yaml') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_variables_of_vllm_stand_for_ours_and_others_are_named_once():
    environment = {
        "VLLM_API_KEY": "theirs",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "HEADRACE_LOG_LEVEL": "INFO",
        "VLLM_CACHE_ROOT": "/c",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_HOST_IP": "10.0.0.1",
        "VLLM_PORT": "7000",
        "VLLM_USE_MODELSCOPE": "True",
        "VLLM_FLASH_ATTN_VERSION": "3",
    }
    warning = take_vllm_variables(environment)
    assert warning.endswith("do nothing here: VLLM_FLASH_ATTN_VERSION, VLLM_PORT (use --master-port and --port)")
    assert (environment["HEADRACE_API_KEY"], environment["HEADRACE_LOG_LEVEL"]) == ("theirs", "INFO")
    assert (environment["HEADRACE_CACHE"], environment["HEADRACE_USE_MODELSCOPE"]) == ("/c", "True")
    assert take_vllm_variables({"VLLM_NO_USAGE_STATS": "1", "HOME": "/"}) == ""


def test_the_cache_space_of_vllms_environment_is_a_default(monkeypatch):
    assert parse_options(model="x").kv_cache_memory_bytes is None
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert parse_options(model="x").kv_cache_memory_bytes == 2 << 30
    assert parse_options(model="x", kv_cache_memory_bytes="1GiB").kv_cache_memory_bytes == 1 << 30
    assert parse_options(model="x", kv_cache_memory_bytes=None).kv_cache_memory_bytes == 2 << 30
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "much")
    with pytest.raises(OptionError, match="VLLM_CPU_KVCACHE_SPACE=much: it must be the cache's size in GiB"):
        parse_options(model="x")


def test_batch_invariance_of_vllms_environment_is_a_default(monkeypatch, tmp_path):
    (tmp_path / "off.yaml").write_text("batch-invariant: false")
    for value, expected in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        assert parse_options(model="x").batch_invariant is expected
        assert parse_options(model="x", batch_invariant=True).batch_invariant is True
        assert parse_options(model="x", batch_invariant=False).batch_invariant is False
        assert parse_options(model="x", config=tmp_path / "off.yaml").batch_invariant is False
    assert take_vllm_variables({"VLLM_BATCH_INVARIANT": "1"}) == ""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "maybe")
    with pytest.raises(OptionError, match="VLLM_BATCH_INVARIANT=maybe: it must be 0 or 1"):
        parse_options(model="x")


@pytest.mark.parametrize(
    "option",
    [
        {"attention_backend": "FLASH_ATTN"},
        {"attention_config": {"backend": "FLASHINFER"}},
        {"moe_backend": "triton"},
        {"kernel_config": {"moe_backend": "triton"}},
        {"linear_backend": "cutlass"},
        {"all2all_backend": "deepep_low_latency"},
        {"gdn_prefill_backend": "triton"},
        {"ir_op_priority": {"rms_norm": ["native"]}},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_chooses_kernels_in_vllm_passes_with_a_note(option: dict[str, Any]) -> None:
    with pytest.warns(FutureWarning, match=f"{next(iter(option))}.* has no effect: each op chooses its kernel"):
        assert parse_options(**option) == Options()
