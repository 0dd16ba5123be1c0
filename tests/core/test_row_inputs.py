"""Row inputs: from a request to the ranks, in the names of blocks, and kinds that other packages bring."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from engine_parts import SteppedCore
from test_steady import Noting

from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.executor.placement.step_codec import StepCodec
from headrace.executor.step.row_inputs import InputColumns, PlacedInput
from headrace.executor.testing.null import INPUT_WIDTH
from headrace.frontend.request.embeds import cut
from headrace.ipc import plugins
from headrace.ipc.adapters import KeyAdapter
from headrace.ipc.codec import Codec, Tensor
from headrace.ipc.failure import InvalidRequestError, OptionError
from headrace.ipc.messages import (
    AddRequest,
    ClientMessage,
    FinishReason,
    FollowPrefixes,
    Generate,
    PrefixEvents,
    Sampling,
)
from headrace.ipc.prefix_names import PrefixKey, chunk_tokens, prefix_names
from headrace.ipc.row_inputs import HASH_BYTES, RowInput, hashes_of, input_kinds, kinds_of, prompt_embeds_input
from headrace.ipc.step import NewRow, StepPlan, StepResult

SOFT = '''
import numpy as np
from headrace.ipc.codec import Tensor
from headrace.ipc.row_inputs import InputKind

class Soft(InputKind):
    """One vector that stands at every position, times the position's number."""

    name = "soft"

    def most_bytes(self, num_positions, width):
        return 4 * width

    def problem(self, given, width):
        return "" if given.tensors[0].shape == (width,) else f"a vector of {width} is needed"

    def values(self, given, first, last):
        vector = given.tensors[0].numpy()
        return Tensor.from_numpy(np.float32(vector) * np.arange(first + 1, last + 1, dtype=np.float32)[:, None])


class Seen(Soft):
    """Of models that see."""

    name = "seen"

    def is_for(self, architecture, config):
        return "vision_config" in config
'''


@pytest.fixture
def soft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with a kind of its own."""
    (tmp_path / "lab_inputs.py").write_text(SOFT)
    install(tmp_path, "soft = lab_inputs:Soft\nseen = lab_inputs:Seen", monkeypatch)
    yield
    monkeypatch.undo()
    forget_installed()


def install(folder: Path, entry_points: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / "lab-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[headrace.row_inputs]\n{entry_points}\n")
    monkeypatch.syspath_prepend(str(folder))
    forget_installed()


def forget_installed() -> None:
    plugins._installed_on.cache_clear()
    input_kinds.cache_clear()


def rows(count: int, seed: int = 0, width: int = INPUT_WIDTH) -> Tensor:
    return Tensor.from_numpy(np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32))


def soft_input(start: int, count: int, width: int = INPUT_WIDTH) -> RowInput:
    vector = Tensor.from_numpy(np.arange(width, dtype=np.float32) / width)
    hashes = hashes_of([bytes(vector.data) + bytes((at,)) for at in range(count)], "soft")
    return RowInput(kind="soft", start=start, hashes=hashes, tensors=(vector,))


def entered(core: SteppedCore) -> list[NewRow]:
    return [new for plan in cast(Noting, core.executor).plans for new in plan.new_rows]


def test_inputs_reach_the_ranks_with_their_row_and_again_after_a_preemption() -> None:
    core = SteppedCore(executor_class=Noting, enable_prompt_embeds=True, num_blocks=24, max_num_seqs=4)
    client = core.open()
    given = [prompt_embeds_input(rows(9, seed), 1) for seed in range(4)]
    for slot, each in enumerate(given):
        client.add(slot, [5, *[0] * 9, 6], inputs=(each,), max_tokens=30, ignore_eos=True)
    core.run_until_idle()
    assert {finish.reason for finish in client.finishes()} == {FinishReason.LENGTH}
    assert core.loop.scheduler.num_preemptions > 0
    again = [new for new in entered(core) if len(new.token_ids) > 11 and new.num_computed_tokens < 10]
    assert again
    assert all(new.inputs in [(each,) for each in given] for new in again)


def test_blocks_and_routers_names_of_a_prefix_have_its_inputs_in_them() -> None:
    core = SteppedCore(enable_prompt_embeds=True, num_blocks=200, max_model_len=256)
    client = core.open()
    client.send(FollowPrefixes())
    one, other = (prompt_embeds_input(rows(40, seed), 10) for seed in (1, 2))
    prompt = [5] * 10 + [0] * 40 + [6] * 50
    for slot, (inputs, cached) in enumerate((((one,), 0), ((one,), 96), ((other,), 8), ((), 8), ((one,), 96))):
        client.add(slot, prompt, inputs=inputs, max_tokens=1)
        core.run_until_idle()
        assert client.cached()[slot] == cached
    core.loop._followers.tell()
    told = {name for each in client.heard if isinstance(each, PrefixEvents) for name in each.stored.tolist()}
    chunk = chunk_tokens(core.loop.scheduler.config.block_size)
    for inputs in ((one,), (other,), ()):
        key = PrefixKey("", core.loop._admission._version_of_weights, (), inputs)
        names = prefix_names(bytes(Tensor.of("int32", prompt).data), key, chunk)
        assert names
        assert set(names) <= told


def test_a_key_tells_apart_what_its_parts_tell_apart() -> None:
    one = prompt_embeds_input(rows(3), 2)
    moved, halves = msgspec.structs.replace(one, start=3), rows(3)
    keys = [
        PrefixKey(),
        PrefixKey("a"),
        PrefixKey(weights="a"),
        PrefixKey(adapters=(KeyAdapter("a"),)),
        PrefixKey(inputs=(one,)),
        PrefixKey(inputs=(moved,)),
        PrefixKey(inputs=(msgspec.structs.replace(one, kind="soft"),)),
    ]
    assert len({(key.root, key.of(0, 4), key.of(4, 8)) for key in keys}) == len(keys)
    assert PrefixKey(inputs=(one,)).of(5, 9) == b""
    as_bytes = Tensor("float16", (3, 2 * INPUT_WIDTH), halves.data)
    assert prompt_embeds_input(as_bytes).hashes != prompt_embeds_input(halves).hashes  # the same bytes of another type


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ((prompt_embeds_input(rows(3), 4),), r"at the positions \[4, 7\) of a prompt of 6"),
        (
            (prompt_embeds_input(rows(3)), prompt_embeds_input(rows(2), 2)),
            "must be in order, not empty, and not overlap",
        ),
        ((prompt_embeds_input(rows(0)),), "not empty"),
        ((prompt_embeds_input(rows(3, width=7)),), r"its shape is \[3, 7\], and \[3, 64\] is needed"),
        ((soft_input(0, 3),), "is of the kind soft, which this engine does not read; it reads: prompt_embeds"),
        ((msgspec.structs.replace(prompt_embeds_input(rows(3)), hashes=rows(3)),), f"must be uint8.*{HASH_BYTES}"),
        ((msgspec.structs.replace(prompt_embeds_input(rows(3)), tensors=()),), "must be one tensor of"),
        ((msgspec.structs.replace(prompt_embeds_input(rows(3)), tensors=(rows(300),)),), "for its positions at most"),
        (
            (prompt_embeds_input(Tensor.from_numpy(np.full((3, 64), np.nan, np.float16))),),
            "row 0 has a value that is not",
        ),
    ],
)
def test_inputs_that_cannot_be_computed_are_refused_and_others_go_on(inputs: Any, words: str) -> None:
    core = SteppedCore(enable_prompt_embeds=True)
    client = core.open()
    client.add(0, [5, 0, 0, 0, 0, 6], max_tokens=2)
    client.add(1, [5, 0, 0, 0, 0, 6], inputs=inputs, max_tokens=2)
    core.run_until_idle()
    refused, done = sorted(client.finishes(), key=lambda finish: finish.slot != 1)
    assert done.reason is FinishReason.LENGTH
    assert refused.failure is not None
    with pytest.raises(ValueError, match=words):
        raise ValueError(refused.failure.message)


def test_inputs_travel_whole_in_messages_and_plans() -> None:
    given = prompt_embeds_input(rows(100))
    request = AddRequest(
        slot=1,
        request_id="a",
        prompt_token_ids=Tensor.of("int32", [0] * 100),
        task=Generate(sampling=Sampling(max_tokens=1)),
        inputs=(given,),
    )
    codec: Codec[ClientMessage] = Codec(ClientMessage)
    assert codec.decode(codec.encode(request)) == request
    core = SteppedCore(executor_class=Noting, enable_prompt_embeds=True)
    core.open().add(0, [0] * 20, inputs=(prompt_embeds_input(rows(20)),), max_tokens=1)
    core.run_until_idle()
    plan = cast(Noting, core.executor).plans[0]
    steps = StepCodec(StepPlan)
    assert steps.decode(steps.encode(plan)).new_rows[0].inputs == plan.new_rows[0].inputs != ()


@pytest.mark.usefixtures("soft")
def test_an_installed_kind_is_taken_and_named_like_ours() -> None:
    core = SteppedCore(executor_class=Noting)
    client = core.open()
    for slot in range(2):
        client.add(slot, [0] * 12 + [6], inputs=(soft_input(0, 12),), max_tokens=2)
        core.run_until_idle()
    assert client.cached()[1] == 12
    assert entered(core)[0].inputs == (soft_input(0, 12),)
    client.add(2, [0] * 12 + [6], inputs=(prompt_embeds_input(rows(12)),), max_tokens=2)
    client.add(3, [0] * 12 + [6], inputs=(soft_input(0, 12, width=9),), max_tokens=2)
    core.run_until_idle()
    said = {finish.slot: finish.failure.message for finish in client.finishes() if finish.failure is not None}
    assert "prompt_embeds, which this engine does not read; it reads: seen, soft" in said[2]
    assert "soft: a vector of 64 is needed" in said[3]


@pytest.mark.usefixtures("soft")
@pytest.mark.parametrize(
    ("hook", "answer", "why"),
    [
        ("problem", sys.exit, "SystemExit"),
        ("problem", None, "it returned None; expected: str"),
        ("most_bytes", "many", "it returned 'many'; expected: int"),
        ("problem_of_type", False, "it returned False; expected: str"),
        ("values", None, "it returned None; expected: [1, 64] of one of float32"),
        ("values", rows(1).numpy(), "it returned array("),
        ("values", Tensor.from_numpy(np.full((1, INPUT_WIDTH), np.nan)), "row 0 has a value that is not finite in"),
    ],
)
def test_a_hook_of_a_kind_that_fails_on_admission_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, hook: str, answer: Any, why: str
) -> None:
    monkeypatch.setattr(type(input_kinds()["soft"]), hook, lambda *_: answer() if callable(answer) else answer)
    core = SteppedCore()
    client = core.open()
    client.add(0, [0] * 12 + [6], inputs=(soft_input(0, 12),), max_tokens=2)
    client.add(1, [5, 6], max_tokens=2)
    core.run_until_idle()
    failed, done = sorted(client.finishes(), key=lambda finish: finish.slot)
    assert failed.failure is not None
    assert f"the row input soft, lab_inputs.Soft, failed in {hook}" in failed.failure.message
    assert why in failed.failure.message
    assert done.reason is FinishReason.LENGTH


@pytest.mark.usefixtures("soft")
def test_a_model_computes_an_installed_kind(tmp_path: Path) -> None:
    import tiny_models

    from headrace import LLM, SamplingParams

    folder = str(tiny_models.save("llama", tmp_path / "llama"))
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "in_process": True, "max_model_len": 64}
    with LLM(folder, enable_prompt_embeds=True, num_gpu_blocks_override=40, **options) as llm:
        given = soft_input(2, 9)
        values = input_kinds()["soft"].values(given, 0, 9).numpy()
        params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1)
        prompt = {"prompt_token_ids": [5, 6, *[0] * 9, 7], "row_inputs": [given]}
        filled = np.zeros((12, INPUT_WIDTH), np.float32)
        filled[2:11] = values
        mask = [not 2 <= at < 11 for at in range(12)]
        same = {"prompt_embeds": filled, "prompt_token_ids": prompt["prompt_token_ids"], "prompt_is_token_ids": mask}
        other = {**prompt, "row_inputs": [msgspec.structs.replace(given, kind="seen")]}
        with pytest.raises(
            InvalidRequestError, match="of the kind seen, which this engine does not read; it reads: prompt"
        ):
            llm.generate(other, params, use_tqdm=False)
        (found,), (expected,) = (llm.generate(each, params, use_tqdm=False) for each in (prompt, same))
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.outputs[0].cumulative_logprob == expected.outputs[0].cumulative_logprob


def test_truncation_keeps_inputs_of_any_kind_whole_or_divides_none() -> None:
    given = RowInput(kind="lab", start=2, hashes=hashes_of([b"1", b"2", b"3"], "lab"), tensors=())
    rows = prompt_embeds_input(Tensor("float32", (3, 2), memoryview(np.zeros((3, 2), "<f4").tobytes())), 6)
    moved, after = cut([given, rows], 1, 8)
    assert (moved.kind, moved.start, moved.hashes, moved.tensors) == ("lab", 1, given.hashes, ())
    assert (after.start, after.end) == (5, 7)
    assert cut([given], 5, 8) == ()
    with pytest.raises(InvalidRequestError, match="would divide its input of kind 'lab' at 2 to 4"):
        cut([given, rows], 3, 8)


def test_a_kind_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, f"soft = {__name__}:SOFT", monkeypatch)
    try:
        with pytest.raises(OptionError, match=r"the row input soft, test_row_inputs:SOFT, .* must be a class derived"):
            input_kinds()
    finally:
        monkeypatch.undo()
        forget_installed()


@pytest.mark.usefixtures("soft")
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (rows(4), r"it returned .*; expected: \[3, 64\] of one of float32"),
        (rows(1), r"it returned .*; expected: \[3, 64\] of one of float32"),
        (Tensor("int32", (3, 1), memoryview(bytes(12))), r"it returned .*; expected: \[3, 64\] of one of float32"),
        (rows(3, width=1), r"it returned .*; expected: \[3, 64\] of one of float32"),
        (None, r"it returned None; expected: \[3, "),
        (Tensor.from_numpy(np.float64([[0.0] * 64, [1e39] * 64, [0.0] * 64])), "row 1 .* not finite in float32"),
        (ZeroDivisionError("lab"), r"ZeroDivisionError\('lab'\)"),
    ],
)
def test_rows_that_would_stand_in_the_place_of_others_are_refused_by_their_kinds_name(
    monkeypatch: pytest.MonkeyPatch, answer: Any, why: str
) -> None:
    def values(*_: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(type(input_kinds()["soft"]), "values", values)
    columns = InputColumns()
    columns.bind(INPUT_WIDTH, "float32", RankCoordinates())
    assert PlacedInput(0, soft_input(0, 9), 2, 5, 3, 7, columns).values().shape == (3, INPUT_WIDTH)
    result = StepResult(step=7, rows=np.array([1, 3, 4], np.int32), token_ids=np.array([10, 11, 12], np.int32))
    failing = columns.failing(result)
    assert (failing.rows.tolist(), failing.token_ids.tolist()) == ([1, 4], [10, 12])
    ((row, failure),) = [(each.row, each.failure) for each in failing.failures]
    assert row == 3
    where = rf"row input soft, lab_inputs.Soft, failed in values for .* \[2, 5\): {why}"
    assert re.search(where, failure.message)
    assert columns.failing(result) is result, "the step is over"


@pytest.mark.usefixtures("soft")
def test_a_kind_that_cannot_say_which_models_it_is_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_for(*_: Any) -> bool:
        raise KeyError("vision")

    monkeypatch.setattr(type(input_kinds()["seen"]), "is_for", is_for)
    with pytest.raises(OptionError, match=r"row input seen, lab_inputs.Seen, failed in is_for: KeyError\('vision'\)"):
        kinds_of("LlamaForCausalLM", {})


@pytest.mark.usefixtures("soft")
@pytest.mark.parametrize("name", [None, 7, "", "x" * 65])
def test_a_kind_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch, name: Any) -> None:
    soft = type(input_kinds()["soft"])
    monkeypatch.delattr(soft, "name") if name is None else monkeypatch.setattr(soft, "name", name)
    input_kinds.cache_clear()
    with pytest.raises(OptionError, match=r"row input lab_inputs\.Soft has no `name`; it must be text"):
        input_kinds()
