"""Logits processors of others in a running engine, and the built-in ones beside them where requests give way."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lab_processors
import msgspec
import numpy as np
import pytest
import tiny_models
import torch

from headrace import LLM, InvalidRequestError, OptionError, RequestFailedError, SamplingParams
from headrace.core.options.parsing import parse_options
from headrace.executor.sampling.logits_processors import (
    BatchUpdate,
    LogitsProcessors,
    MoveDirectionality,
    looks_at_params,
    process_dict_updates,
    processor_classes,
)
from headrace.executor.sampling.sampler import sample
from headrace.executor.step.batch import BatchState
from headrace.ipc.control import CheckSampling, WorkerCommand
from headrace.ipc.messages import Sampling
from headrace.ipc.plugins import has_logits_processors

PROCESSORS = ("lab_processors:OnlyToken", "lab_processors.NoRepeats", "lab_processors:MinP")
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "block_size": 16,
    "in_process": True,
    "skip_tokenizer_init": True,
}
PROMPTS = [[5, 6, 7], [9, 8], [11, 12, 13, 14], [200]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.save("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def plain(folder: str) -> Iterator[LLM]:
    with LLM(folder, **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def lab(folder: str) -> Iterator[LLM]:
    """Its cache is small, so that requests give way to each other."""
    tight = {"num_gpu_blocks_override": 14, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    with LLM(folder, **ENGINE, **tight, logits_processors=PROCESSORS) as llm:
        yield llm


def tokens(llm: LLM, params: Any, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]


def params_of(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields})


def test_a_request_tells_a_processor_what_to_do_and_others_are_left_alone(lab: LLM, plain: LLM) -> None:
    mixed = [
        params_of(extra_args={"only_token": 77}),
        params_of(),
        params_of(extra_args={"no_repeats": True}),
        params_of(temperature=1.0, seed=4),
    ]
    found, usual = tokens(lab, mixed), tokens(plain, [params_of(), params_of(), params_of(), mixed[3]])
    assert found[0] == [77] * 12
    assert found[1] == usual[1]
    assert found[3] == usual[3]
    assert len({*PROMPTS[2], *found[2]}) == len(PROMPTS[2]) + 12, "no token twice"


def test_one_that_keeps_the_likeliest_token_comes_after_the_temperature(lab: LLM, plain: LLM) -> None:
    drawn = {"temperature": 1.7, "seed": 3, "max_tokens": 16}
    found = tokens(lab, params_of(**drawn, extra_args={"lab_min_p": 0.4}))
    assert found == tokens(plain, params_of(**drawn, min_p=0.4))
    assert found != tokens(plain, params_of(**drawn))


@pytest.mark.parametrize("fails_at", [0, 3])
def test_one_that_raises_for_a_request_fails_that_request_alone(lab: LLM, plain: LLM, fails_at: int) -> None:
    with pytest.raises(RequestFailedError, match=r"prompts\[1\].*logits processor NoRepeats failed: \w+: "):
        lab.generate(PROMPTS, [params_of(extra_args={"fails_at": fails_at} if i == 1 else None) for i in range(4)])
    assert tokens(lab, params_of()) == tokens(plain, params_of())


def test_parameters_that_a_processor_refuses_are_refused_before_anything_is_computed(lab: LLM) -> None:
    refusal = r"SamplingParams\.extra_args: the logits processor OnlyToken refuses the parameters: only_token must be a"
    steps = lab.get_stats().steps
    with pytest.raises(InvalidRequestError, match=refusal) as caught:
        tokens(lab, params_of(extra_args={"only_token": "seven"}), [[5]])
    assert caught.value.parameter == "extra_args"
    assert lab.get_stats().steps == steps


@pytest.mark.parametrize(
    ("classes", "looks"),
    [([lab_processors.NoRepeats, object], False), ([lab_processors.NoRepeats, lab_processors.OnlyToken], True)],
)
def test_an_engine_asks_its_workers_where_a_class_looks_at_parameters(classes: list[Any], looks: bool) -> None:
    assert looks_at_params(classes) == looks


def test_a_check_of_parameters_reaches_a_worker_as_it_was_sent() -> None:
    sampling = Sampling(max_tokens=3, temperature=0.0, extra_args={"only_token": "seven"})
    sent = CheckSampling(sampling=(msgspec.Raw(msgspec.msgpack.encode(sampling)),))
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=WorkerCommand)
    assert isinstance(heard, CheckSampling)
    assert [msgspec.msgpack.decode(each, type=Sampling) for each in heard.sampling] == [sampling]


def test_arguments_that_nothing_would_read_are_refused(plain: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"SamplingParams\.extra_args has only_token, and this engine has no"):
        tokens(plain, params_of(extra_args={"only_token": 7}), [[5]])
    for wrong in ([1], {1: 2}, {"a": object()}, {"a": "b" * 70_000}):
        with pytest.raises(InvalidRequestError, match=r"SamplingParams\.extra_args"):
            SamplingParams(extra_args=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lab_processors:Nobody", "logits_processors=lab_processors:Nobody cannot be loaded: AttributeError"),
        ("nowhere.Nobody", "logits_processors=nowhere.Nobody cannot be loaded: ModuleNotFoundError"),
        ("lab_processors:NotOne", "lacks apply, is_argmax_invariant, update_state; derive it from"),
        ("lab_processors:NotMade", "the logits processor NotMade cannot be made: RuntimeError: no licence"),
    ],
)
def test_a_class_that_cannot_be_had_is_told_at_the_start(folder: str, name: str, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        LLM(folder, **ENGINE, logits_processors=[name])
    assert said in str(caught.value)


def processors_of(*classes: type[lab_processors.LogitsProcessor]) -> LogitsProcessors:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))
    return LogitsProcessors([partial(each, config, torch.device("cpu"), False) for each in classes])


def batch_with(processors: LogitsProcessors, *arguments: dict[str, Any] | None, temperature: float = 0.0) -> BatchState:
    """One request for each of the arguments, all with one token."""
    batch = BatchState(len(arguments), 32, 16, ())
    batch.sampling.logits_processors = processors
    for row, given in enumerate(arguments):
        batch.sampling.put(row, Sampling(max_tokens=5, temperature=temperature, extra_args=given), 0)
    batch.num_tokens[:] = batch.num_prompt_tokens[:] = 1
    return batch


def rows_of(batch: BatchState, *rows: int) -> tuple[list[int], dict[int, str]]:
    """What is sampled for them from logits whose highest is token 30 plus the row, and why rows failed."""
    logits = torch.zeros(len(rows), 40)
    logits[range(len(rows)), [30 + row for row in rows]] = 1.0
    sampled = sample(logits, batch, np.array(rows, np.int32))
    return sampled.token_ids.tolist(), sampled.problems


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"only_token": 13}, "RuntimeError: unlucky 13"),
        ({"when": "update"}, "RuntimeError: unlucky update"),
    ],
)
def test_a_batch_that_a_processor_fails_for_is_asked_row_by_row_and_one_request_ends(
    bad: dict[str, Any], said: str
) -> None:
    processors = processors_of(lab_processors.Unlucky, lab_processors.OnlyToken)
    batch = batch_with(processors, None, {"only_token": 7}, bad, {"only_token": 8})
    token_ids, problems = rows_of(batch, 0, 1, 2, 3)
    assert problems == {2: f"the logits processor Unlucky failed: {said}"}
    assert [token_ids[row] for row in (0, 1, 3)] == [30, 7, 8]
    assert rows_of(batch, 0, 1, 3) == ([30, 7, 8], {}), "the next step, without it"
    assert rows_of(batch, 2)[1] == {0: f"the logits processor Unlucky failed: {said}"}, "alone"
    assert rows_of(batch, 1, 0) == ([7, 30], {})


@pytest.mark.parametrize(("is_argmax_invariant", "temperature"), [(False, 0.0), (False, 1.0), (True, 1.0)])
def test_one_that_writes_nan_fails_that_request_alone(is_argmax_invariant: bool, temperature: float) -> None:
    class Spoils(lab_processors.OnlyToken):
        def is_argmax_invariant(self) -> bool:
            return is_argmax_invariant

        def apply(self, logits: Any) -> Any:
            for row in self.targets:
                logits[row, 3] = float("nan")
            return logits

    class Strict(lab_processors.OnlyToken):
        def apply(self, logits: Any) -> Any:
            assert bool(logits.isfinite().all())
            return logits

    batch = batch_with(processors_of(Spoils, Strict), None, {"only_token": 7}, None, temperature=temperature)
    token_ids, problems = rows_of(batch, 0, 1, 2)
    assert problems == {1: "the logits processor Spoils wrote NaN"}
    if not temperature:
        assert [token_ids[row] for row in (0, 2)] == [30, 32]
    assert rows_of(batch, 1)[1] == {0: "the logits processor Spoils wrote NaN"}, "alone"
    assert rows_of(batch, 0, 2)[1] == {}


INFINITE = float("inf")


def _replaced(logits: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    logits.data = data
    return logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("write", "said"),
    [
        pytest.param(lambda logits: logits.fill_(float("nan")), "wrote NaN", id="NaN"),
        pytest.param(lambda logits: logits.fill_(INFINITE), "wrote infinities", id="infinities"),
        pytest.param(lambda logits: logits.fill_(-INFINITE), "leave no token to choose", id="forbids all"),
        pytest.param(lambda logits: logits.resize_(1, 3), "logits of shape [1, 3] for [1, 40]", id="resized"),
        pytest.param(lambda logits: logits.t_(), "logits of shape [40, 1] for [1, 40]", id="transposed"),
        pytest.param(lambda logits: _replaced(logits, torch.zeros(2)), "logits of shape [2] for", id="other data"),
        pytest.param(lambda logits: logits > 0, "it returned bool, and logits are floating-point", id="booleans"),
        pytest.param(lambda logits: logits.to(torch.complex64), "it returned complex64", id="complex"),
    ],
)
def test_one_that_spoils_the_whole_batch_for_a_request_fails_that_request_alone(
    write: Any, said: str, temperature: float
) -> None:
    class Spoils(lab_processors.OnlyToken):
        def apply(self, logits: Any) -> Any:
            return write(logits) if self.targets else logits

    arguments = (None, {"only_token": 7}, None)
    usual, _ = rows_of(
        batch_with(processors_of(lab_processors.OnlyToken), *arguments, temperature=temperature), 0, 1, 2
    )
    batch = batch_with(processors_of(Spoils), *arguments, temperature=temperature)
    token_ids, problems = rows_of(batch, 0, 1, 2)
    assert list(problems) == [1]
    assert said in problems[1]
    assert [token_ids[row] for row in (0, 2)] == [usual[row] for row in (0, 2)]
    assert said in rows_of(batch, 1)[1][0], "alone"
    assert rows_of(batch, 0, 2)[1] == {}, "the next step, without it"


@pytest.mark.parametrize(
    ("process", "said"),
    [
        pytest.param(lambda output, logits: logits.max(), "logits of shape [] for [40]", id="a scalar"),
        pytest.param(lambda output, logits: logits[:1], "logits of shape [1] for [40]", id="one logit"),
        pytest.param(lambda output, logits: 1.5, "it returned float, and must return the logits", id="a number"),
        pytest.param(lambda output, logits: logits > 0, "it returned bool", id="booleans"),
        pytest.param(lambda output, logits: logits.resize_(3), "logits of shape [3] for [40]", id="resized"),
    ],
)
def test_a_requests_function_that_gives_no_logits_back_fails_by_name(process: Any, said: str) -> None:
    class OfOne(lab_processors.NoRepeats):
        def new_req_logits_processor(self, params: Any) -> Any:
            return process if params.extra_args else None

    token_ids, problems = rows_of(batch_with(processors_of(OfOne), {"any": 1}, None), 0, 1)
    assert list(problems) == [0]
    assert said in problems[0]
    assert token_ids[1] == 31


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_infinite_logit_forces_its_token(temperature: float) -> None:
    class Forces(lab_processors.OnlyToken):
        def apply(self, logits: Any) -> Any:
            for row, target in self.targets.items():
                logits[row, target] = INFINITE
            return logits

    batch = batch_with(processors_of(Forces), {"only_token": 7}, {"only_token": 9}, temperature=temperature)
    assert rows_of(batch, 0, 1) == ([7, 9], {})


def test_a_model_that_overflows_for_a_request_does_not_have_the_others_asked_again() -> None:
    class Once(lab_processors.OnlyToken):
        def apply(self, logits: Any) -> Any:
            assert len(logits) == 2, "one batch"
            assert bool(logits.isfinite().all())
            return super().apply(logits)

    logits = torch.zeros(2, 40)
    logits[0, 5] = float("nan")
    sampled = sample(logits, batch_with(processors_of(Once), None, {"only_token": 7}), np.array([0, 1], np.int32))
    assert list(sampled.problems) == [0]
    assert "the model's highest logit is nan" in sampled.problems[0]
    assert sampled.token_ids[1] == 7


def test_one_that_fails_for_several_rows_alone_harms_none(caplog: pytest.LogCaptureFixture) -> None:
    class Single(lab_processors.OnlyToken):
        def apply(self, logits: Any) -> Any:
            assert len(logits) == 1, "single rows alone"
            return super().apply(logits)

    batch = batch_with(processors_of(Single), {"only_token": 7}, None)
    for _ in range(2):
        assert rows_of(batch, 0, 1) == ([7, 31], {})
    assert caplog.text.count("for a batch of 2 requests and for none of them alone") == 1


@pytest.mark.parametrize(
    ("given_back", "said"),
    [
        (None, "TypeError: it returned NoneType, and must return the logits"),
        (torch.zeros(40), "ValueError: it returned logits of shape [40] for [1, 40]"),
    ],
)
def test_one_that_does_not_give_logits_back_fails_by_name(given_back: Any, said: str) -> None:
    class Forgets(lab_processors.OnlyToken):
        def apply(self, logits: Any) -> Any:
            return given_back

    _, problems = rows_of(batch_with(processors_of(Forgets), None, None), 0, 1)
    assert problems == dict.fromkeys((0, 1), f"the logits processor Forgets failed: {said}")


def test_a_class_itself_is_taken_for_its_name() -> None:
    options = parse_options(logits_processors=[lab_processors.MinP])
    assert options.logits_processors == ("lab_processors:MinP",)


def test_classes_of_packages_made_for_vllm_are_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(folder: Path, entry_points: str) -> None:
        package = folder / "lab-1.0.dist-info"
        package.mkdir(parents=True)
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
        (package / "entry_points.txt").write_text(entry_points)
        monkeypatch.syspath_prepend(str(folder))

    both = "[{}.logits_processors]\nlab = lab_processors:MinP\n"
    assert not has_logits_processors(())
    install(tmp_path / "first", both.format("vllm") + "\n" + both.format("headrace"))
    assert has_logits_processors(())
    assert processor_classes(()) == [lab_processors.MinP]
    install(tmp_path / "second", "[vllm.logits_processors]\nlab = lab_processors:Nobody\n")
    with pytest.raises(OptionError, match=r"the plugin lab of lab \(lab_processors:Nobody\) cannot be loaded"):
        processor_classes(())


@pytest.mark.parametrize(
    "fields",
    [
        {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.4},
        {"typical_p": 0.6, "xtc_probability": 0.5, "xtc_threshold": 0.01, "dry_multiplier": 2.0, "top_n_sigma": 3.0},
    ],
    ids=["mirostat", "others"],
)
def test_fields_of_row_processors_are_seeded_and_exact_where_requests_give_way(
    lab: LLM, plain: LLM, fields: dict[str, Any]
) -> None:
    prompts = [prompt + [20 + index] * 9 for index, prompt in enumerate(PROMPTS * 2)]
    drawn = params_of(temperature=1.2, seed=11, max_tokens=40, **fields)
    before = lab.get_stats().num_preemptions
    found = tokens(lab, drawn, prompts)
    assert found == tokens(plain, drawn, prompts)
    assert found != tokens(plain, params_of(temperature=1.2, seed=11, max_tokens=40), prompts)
    assert lab.get_stats().num_preemptions > before


def test_state_by_row_follows_removed_added_and_moved_requests() -> None:
    def only(params: Any, prompt: Any, output: Any) -> int | None:
        token: int | None = params.extra_args and params.extra_args.get("only")
        return token

    rows: dict[int, int] = {}
    params = {name: Sampling(max_tokens=1, extra_args={"only": name} if name else None) for name in range(4)}

    def update(removed: list[int], added: list[tuple[int, int]], moved: list[tuple[int, int, Any]]) -> bool:
        entered: list[Any] = [(row, params[name], [], []) for row, name in added]
        return process_dict_updates(rows, BatchUpdate(8, removed, entered, moved), only)

    assert update([], [(0, 1), (1, 0), (2, 3)], [])
    assert rows == {0: 1, 2: 3}
    assert not process_dict_updates(rows, None, only)
    assert not update([5], [(1, 0)], [])
    assert update([], [], [(0, 2, MoveDirectionality.SWAP)])
    assert rows == {2: 1, 0: 3}
    assert update([], [], [(2, 0, MoveDirectionality.UNIDIRECTIONAL)])
    assert rows == {0: 1}
    assert update([0], [(0, 2)], [])
    assert rows == {0: 2}
    assert update([], [(0, 0)], [])
    assert rows == {}
