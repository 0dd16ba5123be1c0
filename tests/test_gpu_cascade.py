"""A beginning that all running requests share is read once: how far it goes, when it is used, and the same tokens."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

import pytest
import tiny_models
import torch
from gpu_parts import BLOCK_SIZE, MAX_MODEL_LEN, NUM_ROWS, VOCAB_SIZE, GpuOnCpu, LateDevice, TensorHashModel, new_cache
from graph_recorder import RecordingCapturer
from plan_maker import PlanMaker
from test_gpu_runner import HostModel, same

from headrace import LLM, SamplingParams
from headrace.core.options.engine_options import Options
from headrace.executor.cpu.batch import BatchState
from headrace.executor.cpu.runner import ModelRunner
from headrace.executor.gpu import cascade as gpu_cascade
from headrace.executor.gpu.cascade import CascadeRule, CommonBlocks, check_cascade
from headrace.executor.gpu.graphs import DecodeGraphs, GraphKey
from headrace.executor.gpu.runner import GpuRunner, RunnerLimits
from headrace.executor.gpu.sampler import Choice
from headrace.ipc.failure import HeadraceError, OptionError
from headrace.ipc.step import StepResult
from headrace.kernels import ops

RULE = CascadeRule(least_rows=2, least_tokens=BLOCK_SIZE, least_saved_tokens=0)
BEGINNING = [5, 6, 7, 8, 9, 10, 11, 12, 14]


def common_by_hand(tables: list[list[int]]) -> int:
    """Leading entries that all tables have in common."""
    if len(tables) < 2:
        return 0
    return next(
        (i for i, column in enumerate(zip(*tables, strict=False)) if len(set(column)) > 1), min(map(len, tables))
    )


def test_common_blocks_follow_whatever_enters_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_cascade, "COLUMNS_AT_ONCE", 2)  # so that these tables are compared in pieces
    exact = 0
    for seed in range(60):
        dice, maker = random.Random(seed), PlanMaker(block_size=1)
        batch, common = BatchState(5, 40, 1), CommonBlocks(5)
        for _ in range(25):
            for row in range(5):
                if row in maker.tokens and dice.random() < 0.25:
                    maker.release(row)
                if row not in maker.tokens and dice.random() < 0.5:
                    tokens = [1] * dice.randint(1, 9) + [dice.randint(2, 3)] * dice.randint(0, 4)
                    maker.enter(row, tokens, like=dice.choice([None, *maker.tokens]))
                elif row in maker.tokens and len(maker.tokens[row]) < 30:
                    maker.tokens[row].append(1)
                if row in maker.tokens and maker.computed[row] < len(maker.tokens[row]):
                    maker.compute(row)
            plan = maker.plan()
            batch.apply(plan)
            common.apply(plan, batch)
            tables = [batch.block_tables[0, row, : batch.num_blocks[row]].tolist() for row in maker.tokens]
            expected = common_by_hand(tables)
            assert common.count <= expected, "never more than there is"
            exact += common.count == expected > 0
            assert common.count == expected or expected == min(map(len, tables)), "less only by what a row grew into"
    assert exact > 300, "most of these batches share something"


class Twins:
    """The same plans for the CPU's runner and the GPU's, two steps in flight; with `rule`, and without."""

    def __init__(self, capturer: RecordingCapturer | None, rule: CascadeRule | None = RULE) -> None:
        limits = RunnerLimits(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE, (3,), capture_sizes=(2, 6), cascade=rule)
        self.maker = PlanMaker(block_size=BLOCK_SIZE)
        batch = BatchState(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, (3,))
        self.reference = ModelRunner(HostModel(), new_cache(), batch, vocab_size=VOCAB_SIZE)
        self.runner = GpuRunner(TensorHashModel(), new_cache(), LateDevice(), limits, capturer)
        self._expected: deque[StepResult] = deque()

    def step(self, *rows: int) -> None:
        for row in rows:
            self.maker.compute(row)
        plan = self.maker.plan()
        self.runner.submit(plan)
        result = self.reference.step(plan)
        self.maker.sampled(result.rows, result.token_ids)
        self._expected.append(result)
        if len(self._expected) == 2:
            self.compare()

    def compare(self) -> None:
        same(self.runner.collect(), self._expected.popleft())

    def drain(self) -> None:
        while self._expected:
            self.compare()
        self.runner.idle()


def play(seed: int, twins: Twins, steps: int = 40) -> None:
    """Requests with one beginning enter, mostly finding its blocks, leave, are preempted and come back."""
    dice, maker, left = random.Random(seed), twins.maker, []
    for _ in range(steps):
        for row in range(NUM_ROWS):
            if row in maker.tokens:
                if len(maker.tokens[row]) == MAX_MODEL_LEN or dice.random() < 0.05:
                    maker.release(row)
                elif dice.random() < 0.05:
                    left.append((list(maker.tokens[row]), maker.prompts[row]))
                    maker.release(row)
            elif dice.random() < 0.4:
                like = dice.choice(list(maker.tokens)) if maker.tokens and dice.random() < 0.98 else None
                if left and dice.random() < 0.5:
                    maker.enter(row, *left.pop(), like=like)
                else:
                    end = [dice.randint(15, VOCAB_SIZE - 1) for _ in range(dice.randint(0, 3))]
                    maker.enter(row, BEGINNING + end, like=like, temperature=dice.choice((0.0, 0.0, 1.0)), seed=seed)
        twins.step(*maker.tokens)
        if dice.random() < 0.2:
            twins.drain()
    twins.drain()


@pytest.mark.parametrize("capturer", [None, RecordingCapturer], ids=["eager", "graphs"])
def test_tokens_are_the_cpus_whatever_enters_leaves_and_returns(capturer: type[RecordingCapturer] | None) -> None:
    cascaded = replayed = 0
    for seed in range(3):
        twins = Twins(capturer() if capturer else None)
        play(seed, twins)
        cascaded += twins.runner.num_cascaded
        replayed += sum(key.cascade for key in twins.runner.graphs._graphs)
    assert cascaded > 20, "most of these steps share a beginning"
    assert capturer is None or replayed > 0


def test_one_graph_serves_every_length() -> None:
    twins = Twins(recorder := RecordingCapturer())
    maker = twins.maker
    maker.enter(0, BEGINNING, temperature=0.0)
    twins.step(0)
    maker.enter(1, [*BEGINNING, 20], like=0, temperature=0.0)
    twins.step(0, 1)
    for _ in range(3):
        twins.step(0, 1)
    for _ in range(4):
        twins.drain()
    assert GraphKey(2, Choice.ARGMAX, cascade=True) in twins.runner.graphs._graphs
    captured, cascaded = len(recorder.graphs), twins.runner.num_cascaded
    lengths = [int(twins.runner.state.shared_tokens)]
    maker.release(1)
    maker.enter(
        1, [*maker.tokens[0], 21], like=0, temperature=0.0
    )  # the same as the other one so far, what that has sampled included
    twins.step(0, 1)
    twins.step(0, 1)
    lengths.append(int(twins.runner.state.shared_tokens))
    maker.release(1)
    maker.enter(1, [*BEGINNING[:5], 22, 23, 24, 25], like=0, temperature=0.0)
    twins.step(0, 1)
    twins.step(0, 1)
    lengths.append(int(twins.runner.state.shared_tokens))
    twins.drain()
    assert lengths == [8, 12, 4]
    assert twins.runner.num_cascaded == cascaded + 2
    assert len(recorder.graphs) == captured


def test_steady_steps_ship_nothing_for_it_and_others_read_plainly() -> None:
    twins = Twins(None)
    maker = twins.maker
    maker.enter(0, BEGINNING, temperature=0.0)
    twins.step(0)
    maker.enter(1, [*BEGINNING, 20], like=0, temperature=0.0)
    twins.step(0, 1)
    twins.step(0, 1)
    assert twins.runner.num_cascaded == 1, "a step that computes a prompt does not"
    shipped = twins.runner.deltas.num_shipped
    twins.step(0, 1)
    assert twins.runner.deltas.num_shipped == shipped, "neither begins a block"
    assert twins.runner.num_cascaded == 2
    maker.enter(2, [30, 31])
    twins.step(0, 1, 2)
    twins.step(0, 1, 2)
    assert twins.runner.num_cascaded == 2, "one that shares nothing ends it for all"
    maker.release(2)
    twins.step(0, 1)
    assert twins.runner.num_cascaded == 3
    twins.drain()


def test_a_rule_weighs_rows_tokens_and_what_is_saved() -> None:
    rule = CascadeRule.for_layers(bytes_per_token=4096)  # Llama-3.1-8B in 16 bits
    assert rule.is_worth_it(256, 256)
    assert rule.is_worth_it(8, 4096)
    assert not rule.is_worth_it(7, 100_000), "too few requests"
    assert not rule.is_worth_it(256, 255), "too few tokens"
    assert not rule.is_worth_it(8, 1024), "8 readings of 4 MiB cost less than the kernels for one"


def test_graphs_with_cascade_are_wanted_beside_those_without() -> None:
    graphs = DecodeGraphs((1, 2, 4), RecordingCapturer(), lambda key: None)
    while graphs.capture_next():
        pass
    assert len(graphs) == 3
    plain = graphs.find(2, Choice.ARGMAX, cascade=True)
    assert plain is not None, "there is one that does as well"
    assert not plain.key.cascade
    assert graphs.is_one_left
    graphs.capture_next()
    assert graphs.find(2, Choice.ARGMAX, cascade=True).key == GraphKey(2, Choice.ARGMAX, cascade=True)
    assert graphs.find(3, Choice.DRAW, cascade=True) is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"batch_invariant": True}, "batch_invariant=True excludes"), ({"enable_prefix_caching": False}, "never share")],
)
def test_what_excludes_it_is_named(options: dict[str, bool], sentence: str) -> None:
    check_cascade(Options(model="m", **options))
    with pytest.raises(OptionError, match=sentence):
        check_cascade(Options(model="m", disable_cascade_attn=False, **options))


def test_what_no_kernel_does_is_said() -> None:
    (version,) = ops()["cascade_attention"].versions
    facts = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 128, "num_heads": 8}
    assert "tokens see 4096 before them" in version.why_not(**facts, num_kv_heads=1, sliding_window=4096)
    assert "not batch-invariant" in version.why_not(**facts, num_kv_heads=1, batch_invariant=True)
    assert "64 query heads" in version.why_not(**facts, num_kv_heads=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cascade")
    tiny_models.save("llama_gqa_tied", path)
    return path


def test_on_a_cpu_it_is_refused(folder: Path) -> None:
    with pytest.raises(HeadraceError, match="disable_cascade_attn=False asks a GPU"):
        LLM(str(folder), in_process=True, device="cpu", skip_tokenizer_init=True, disable_cascade_attn=False)


def test_an_engine_answers_the_same_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_cascade, "LEAST_SAVED_BYTES", 1)
    monkeypatch.setattr(gpu_cascade, "LEAST_TOKENS", 32)
    prompts = [{"prompt_token_ids": [*range(5, 45), 50 + i]} for i in range(9)]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    answers, cascaded = {}, {}
    for disable in (True, False):
        with LLM(
            str(folder), in_process=True, skip_tokenizer_init=True, dtype="float32", max_model_len=64, max_num_seqs=10,
            distributed_executor_backend="gpu_parts:GpuOnCpu", disable_cascade_attn=disable, block_size=8,
            cudagraph_capture_sizes=(10,),
        ) as llm:  # fmt: skip
            llm.generate(prompts[:1], params, use_tqdm=False)  # the beginning is in the prefix cache from now on
            answers[disable] = [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
            cascaded[disable] = GpuOnCpu.latest.facts()["cascaded_steps"]
    assert answers[True] == answers[False]
    assert cascaded[True] == 0
    assert cascaded[False] > 0, "after the eight steps that lacked a graph for it"
