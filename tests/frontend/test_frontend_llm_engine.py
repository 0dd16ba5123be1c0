"""Requests added by hand and stepped, on a core in memory."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_core import Faults, MemoryCore, expected_text, memory_core
from fake_llm import core, llm

from headrace import LLM, EngineArgs, InvalidRequestError, LLMEngine, OptionError, RequestFailedError, SamplingParams
from headrace.core.options.engine_options import Options
from headrace.core.options.parsing import parse_options
from headrace.frontend.api.sync_stream import MOST_UNREAD
from headrace.frontend.client.request_stream import RequestStream
from headrace.frontend.request.checks import CheckedRequest
from headrace.ipc.messages import Abort
from headrace.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["core", "llm"]  # fixtures
pytestmark = pytest.mark.usefixtures("private_cache")


def test_every_request_is_stepped_to_its_one_finished_output(llm: LLM) -> None:
    engine = LLMEngine(llm)
    lengths = {"a": 9, "b": 3, "c": 6}
    for name, length in lengths.items():
        engine.add_request(name, f"Hello {name}", SamplingParams(max_tokens=length))
    assert engine.get_num_unfinished_requests() == 3
    finished = {}
    while engine.has_unfinished_requests():
        outputs = engine.step()
        assert outputs, "a step waits for news"
        for output in outputs:
            assert output.request_id not in finished
            if output.finished:
                finished[output.request_id] = output
    assert engine.step() == []
    for name, length in lengths.items():
        assert finished[name].outputs[0].text == expected_text(llm, finished[name].prompt_token_ids, length)


def test_a_step_returns_one_output_of_a_request_though_several_have_come(llm: LLM, core: MemoryCore) -> None:
    (output,) = llm.generate("Hello", SamplingParams(max_tokens=1), use_tqdm=False)
    output.finished = False
    core.pause()
    engine = LLMEngine(llm)
    for name in "ab":
        engine.add_request(name, f"Hello {name}", SamplingParams(max_tokens=2))
    running = engine._running
    for name in "aba":
        engine._news.put((running[name], output))
    engine._news.put((running["b"], None))
    assert len(engine.step()) == 2
    assert len(engine.step()) == 1
    engine.abort_request("ab")
    core.resume()


def test_an_id_is_free_again_after_an_abort_and_the_old_request_is_silent(llm: LLM, core: MemoryCore) -> None:
    core.pause()
    engine = LLMEngine(llm)
    engine.add_request("a", "one that goes on", SamplingParams(max_tokens=500, ignore_eos=True))
    with pytest.raises(InvalidRequestError, match="'a' is running; ids must be unique"):
        engine.add_request("a", "another")
    engine.abort_request("a")
    assert not engine.has_unfinished_requests()
    engine.add_request("a", "another", SamplingParams(max_tokens=2))
    core.resume()
    seen = []
    while engine.has_unfinished_requests():
        seen += engine.step()
    assert [output.request_id for output in seen if output.finished] == ["a"]
    assert seen[-1].prompt == "another"
    assert any(isinstance(message, Abort) for message in core.core.received)


def test_a_failed_request_is_raised_once_and_the_others_go_on() -> None:
    with memory_core(faults=Faults(failing_prompts=(9,))) as core, LLM.attach(core.transport) as llm:
        engine = LLMEngine(llm)
        for name, token in (("good", 5), ("bad", 9)):
            engine.add_request(name, [token], SamplingParams(max_tokens=4))
        finished, errors = [], []
        while engine.has_unfinished_requests():
            try:
                finished += [output.request_id for output in engine.step() if output.finished]
            except RequestFailedError as error:
                errors.append(str(error))
        assert finished == ["good"]
        assert len(errors) == 1
        assert "the model gave NaN" in errors[0]


def test_other_calls_take_no_id_that_a_request_of_the_engine_has(llm: LLM, core: MemoryCore) -> None:
    core.pause()
    for number in range(4):
        llm.llm_engine.add_request(str(number), "Hello", SamplingParams(max_tokens=2))
    core.resume()
    outputs = llm.generate(["Hello", "World"], SamplingParams(max_tokens=3), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


@pytest.mark.parametrize("call", ["generate", "enqueue", "stream"])
def test_an_id_that_another_call_has_drawn_but_not_used_yet_is_free(
    llm: LLM, core: MemoryCore, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread adds a request while that of a call is checked."""
    core.pause()
    engine, params, submit = LLMEngine(llm), SamplingParams(max_tokens=3), llm._client.submit

    def drawn(names: Iterator[str]) -> Iterator[str]:
        for name in names:
            if name == "0":
                engine.add_request(name, "Hello", SamplingParams(max_tokens=2))
            yield name

    def submitted(request: CheckedRequest, *others: Any) -> RequestStream:
        stream = submit(request, *others)
        if len(llm._client) == 2:
            core.resume()
        return stream

    monkeypatch.setattr(llm, "_request_ids", drawn(llm._request_ids))
    monkeypatch.setattr(llm._client, "submit", submitted)
    if call == "generate":
        (output,) = llm.generate("World", params, use_tqdm=False)
    elif call == "enqueue":
        (name,) = llm.enqueue("World", params)
        (output,) = llm.wait_for_completion(use_tqdm=False)
        assert name == output.request_id
    else:
        *_, output = llm.stream("World", params)
    assert output.finished
    assert output.request_id == "1"
    finished = []
    while engine.has_unfinished_requests():
        finished += [each for each in engine.step() if each.finished]
    assert [(each.request_id, len(each.outputs[0].token_ids)) for each in finished] == [("0", 2)]


def test_bad_input_is_refused_before_anything_runs(llm: LLM) -> None:
    engine = LLMEngine(llm)
    with pytest.raises(InvalidRequestError):
        engine.add_request("a", {"no": "prompt"})
    for no_id in (["a"], None, 5):
        with pytest.raises(InvalidRequestError, match="request_id must be a string"):
            engine.add_request(no_id, "a")  # type: ignore[arg-type]
    assert not engine.has_unfinished_requests()
    with pytest.raises(OptionError, match="max_model_len"):
        EngineArgs(max_model_length=3)  # type: ignore[call-arg]


def test_engine_args_are_the_options_of_an_llm() -> None:
    args = EngineArgs(model="some/model", max_num_seqs=4)
    assert vars(args) == {"model": "some/model", "max_num_seqs": 4}
    assert (args.max_num_seqs, args.block_size) == (4, 16)
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--mine")
    found = parser.parse_args(["--model", "some/model", "--max-num-seqs", "4", "--mine", "x"])
    assert vars(EngineArgs.from_cli_args(found)) == vars(args)


def test_what_a_parser_of_engine_args_found_is_the_keywords_of_an_llm(tmp_path: Path) -> None:
    """vLLM's examples: `LLM(**vars(parser.parse_args()))`."""
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    assert parse_options(**vars(parser.parse_args([]))) == parse_options()
    found = vars(parser.parse_args(["--model", "some/model", "--seed", "7", "--swap-space", "4", "-dp", "1"]))
    assert parse_options(**found) == parse_options(model="some/model", seed=7)
    file = tmp_path / "engine.yaml"
    file.write_text("seed: 3\nblock-size: 32\n")
    found = vars(parser.parse_args(["--config", str(file), "--seed", "7"]))
    assert parse_options(**found) == parse_options(seed=7, block_size=32)
    assert parse_options(config=file, block_size=64) == parse_options(seed=3, block_size=64)


def test_engine_args_are_a_dataclass_to_those_who_ask() -> None:
    args = EngineArgs(model="some/model", max_num_seqs=4)
    found = dataclasses.asdict(args)  # type: ignore[call-overload]
    assert found.keys() == {field.name for field in dataclasses.fields(args)} == set(Options.__struct_fields__)
    assert (found["model"], found["max_num_seqs"], found["block_size"]) == ("some/model", 4, 16)
    assert parse_options(**found) == parse_options(model="some/model", max_num_seqs=4)
    assert dataclasses.asdict(EngineArgs())["model"] is None  # type: ignore[call-overload]
    assert dataclasses.replace(args, seed=5).seed == 5  # type: ignore[type-var]


@pytest.mark.parametrize("kind", [argparse.ArgumentParser, FlexibleArgumentParser])
def test_a_namespace_has_every_option_typed_with_its_default(kind: type[argparse.ArgumentParser]) -> None:
    parser = EngineArgs.add_cli_args(kind())
    parser.add_argument("--mine", type=int, default=3)
    found = parser.parse_args(
        ["--max-num-seqs", "4", "--hf-overrides", '{"rope_theta": 1}', "--no-enable-prefix-caching"]
    )
    assert (found.max_num_seqs, found.block_size, found.model, found.mine) == (4, 16, None, 3)
    assert (found.tensor_parallel_size, found.enforce_eager, found.hf_overrides) == (1, False, {"rope_theta": 1})
    assert vars(found).keys() == {*Options.__struct_fields__, "mine", "config"}
    found.seed = 5  # a script may set what it likes
    assert vars(EngineArgs.from_cli_args(found)) == {
        "max_num_seqs": 4,
        "hf_overrides": {"rope_theta": 1},
        "enable_prefix_caching": False,
        "seed": 5,
    }


@pytest.mark.parametrize("kind", [argparse.ArgumentParser, FlexibleArgumentParser])
def test_a_config_file_fills_a_namespace_with_a_scripts_own_options_too(
    kind: type[argparse.ArgumentParser], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = EngineArgs.add_cli_args(kind())
    parser.add_argument("--num-prompts", type=int, default=1)
    parser.add_argument("--names", nargs="+", default=[])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cache", action=argparse.BooleanOptionalAction, default=True)
    file = tmp_path / "run.yaml"
    file.write_text(
        "max-num-seqs: 8\nblock_size: 32\nnum-prompts: 7\nnames: [a, b]\nquick: true\ncache: false\n"
        "hf-overrides: {rope_theta: 2}\nenable-prefix-caching: false\n"
    )
    found = parser.parse_args(["--config", str(file), "--block-size", "16", "--num-prompts", "9"])
    assert (found.max_num_seqs, found.block_size, found.enable_prefix_caching) == (8, 16, False)
    assert (found.num_prompts, found.names, found.quick, found.cache) == (9, ["a", "b"], True, False)
    assert found.hf_overrides == {"rope_theta": 2}
    for wrong, said in (
        ("max-num-seqs: many", "max-num-seqs"),
        ("max-nmu-seqs: 3", "max-nmu-seqs"),
        ("[1]", "must map"),
    ):
        file.write_text(wrong)
        with pytest.raises(SystemExit):
            parser.parse_args([f"--config={file}"])
        assert said in capsys.readouterr().err


def test_a_parser_reads_a_config_file_as_arguments_and_dotted_options(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("port: 123\ntensor-parallel-size: 4\nenforce-eager: true\n")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert parser.load_config_file(str(file)) == ["--port=123", "--tensor-parallel-size=4", "--enforce-eager"]
    parser.add_argument("--mine", type=json.loads)
    dotted = ["--hf-overrides.rope.rope_theta", "5", "--hf_overrides.x+", "1", "--hf-overrides.x+=2,b", "--mine.a.b=1"]
    found = parser.parse_args([*dotted, "--mine.a.c", "x"])
    assert found.hf_overrides == {"rope": {"rope_theta": 5}, "x": [1, 2, "b"]}
    assert found.mine == {"a": {"b": 1, "c": "x"}}


def test_engine_args_make_configs_of_what_they_ask_for(tmp_path: Path) -> None:
    asked = EngineArgs(model="some/model", max_num_seqs=4, max_model_len=64).create_engine_config()
    assert (asked.model_config.model, asked.model_config.max_model_len, asked.model_config.dtype) == (
        "some/model",
        64,
        "auto",
    )
    assert (asked.cache_config.block_size, asked.cache_config.num_gpu_blocks) == (16, None)
    assert asked.scheduler_config.max_num_seqs == 4
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512, "vocab_size": 99}')
    stored = EngineArgs(model=str(tmp_path)).create_model_config()
    assert (stored.max_model_len, stored.get_vocab_size()) == (512, 99)


def test_outputs_that_nobody_takes_do_not_pile_up_and_the_last_one_is_whole(llm: LLM) -> None:
    engine = LLMEngine(llm)
    engine.add_request("slow reader", "Hello", SamplingParams(max_tokens=100))
    llm.generate("Hello", SamplingParams(max_tokens=200), use_tqdm=False)  # ends later than the other
    assert engine._news.qsize() <= MOST_UNREAD
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[-1].finished
    assert len(outputs[-1].outputs[0].token_ids) == 100


def test_a_streams_unread_pieces_do_not_pile_up_and_none_is_lost(llm: LLM) -> None:
    with llm.stream("Hello", SamplingParams(max_tokens=100)) as stream:
        llm.generate("Hello", SamplingParams(max_tokens=200), use_tqdm=False)
        pieces = [piece.outputs[0].token_ids for piece in stream]
    assert len(pieces) <= MOST_UNREAD + 3
    assert sum(map(len, pieces)) == 100
