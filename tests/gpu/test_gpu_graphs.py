"""Which decode batches are captured and when, and that a replay depends on the device's state alone."""

from __future__ import annotations

import logging

import pytest
import torch
from gpu_parts import BLOCK_SIZE, MAX_MODEL_LEN, NUM_ROWS, VOCAB_SIZE, LateDevice, TensorHashModel, new_cache
from graph_recorder import OUT_OF_MEMORY, RecordingCapturer, address
from plan_maker import PlanMaker
from triton.runtime.errors import OutOfResources

from headrace.executor.gpu.graphs import STEPS_BETWEEN_CAPTURES, DecodeGraphs, GraphKey, capture_sizes
from headrace.executor.gpu.runner import GpuRunner, RunnerLimits
from headrace.executor.gpu.sampler import StepEnding
from headrace.executor.parallel.rank_place import PeerError
from headrace.ipc.failure import InconsistentError, OptionError
from headrace.ipc.step import StepResult

SIZES = (1, 2, 4, 6)


# --- sizes ------------------------------------------------------------------------------------------------------


def test_default_sizes_are_vllms_up_to_the_most_requests() -> None:
    assert capture_sizes(256)[:6] == (1, 2, 4, 8, 16, 24)
    assert capture_sizes(256)[-2:] == (248, 256)
    assert capture_sizes(1024)[-3:] == (480, 496, 512)
    assert capture_sizes(1) == (1,)
    assert capture_sizes(5) == (1, 2, 4, 5)
    assert capture_sizes(256, largest=20) == (1, 2, 4, 8, 16, 20)


def test_given_sizes_are_taken_up_to_the_first_that_holds_all_requests() -> None:
    assert capture_sizes(16, (8, 1, 32, 64, 8)) == (1, 8, 32)
    assert capture_sizes(100, (3, 7)) == (3, 7)
    with pytest.raises(OptionError, match="cudagraph_capture_sizes holds 0"):
        capture_sizes(8, (0, 1))
    with pytest.raises(OptionError, match="max_cudagraph_capture_size=4 contradicts cudagraph_capture_sizes"):
        capture_sizes(8, (1, 8), largest=4)
    assert capture_sizes(8, (1, 8), largest=8) == (1, 8)


def graphs(capturer: RecordingCapturer | None) -> tuple[DecodeGraphs, list[GraphKey]]:
    ran: list[GraphKey] = []
    return DecodeGraphs(SIZES, capturer, ran.append), ran


def test_the_largest_is_captured_first_then_what_steps_lack_then_the_rest() -> None:
    found, ran = graphs(RecordingCapturer())
    assert found.find(2, StepEnding.ARGMAX) is None
    while found.capture_next():
        pass
    assert [key.size for key in ran[::2]] == [6, 2, 4, 1]
    assert {key.ending for key in ran} == {StepEnding.ARGMAX}
    assert found.find(3, StepEnding.ARGMAX).key == GraphKey(4, StepEnding.ARGMAX)
    assert found.find(7, StepEnding.ARGMAX) is None, "larger than all"
    assert not found.capture_next()
    assert found.find(6, StepEnding.DRAW) is None
    assert found.capture_next(), "another kind of choice is captured once a step has asked for it"
    assert found.find(6, StepEnding.DRAW).key == GraphKey(6, StepEnding.DRAW)


def test_a_capture_waits_until_steps_have_lacked_one_for_a_while() -> None:
    found, _ = graphs(RecordingCapturer())
    for _ in range(STEPS_BETWEEN_CAPTURES):
        assert not found.due()
        found.find(1, StepEnding.ARGMAX)
    assert found.due()
    found.capture_next()
    assert not found.due()


@pytest.mark.parametrize(
    "error", [OUT_OF_MEMORY, OutOfResources(300_000, 232_448, "shared memory")], ids=["torch", "triton"]
)
def test_a_capture_that_fails_costs_its_own_graph_alone(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    found, ran = graphs(RecordingCapturer(fail_at=2, error=error))
    with caplog.at_level(logging.WARNING):
        while found.capture_next():
            pass
    assert sorted(key.size for key in set(ran)) == list(SIZES)
    assert len(found) == len(SIZES) - 1
    assert [found.find(size, StepEnding.ARGMAX).key.size for size in (1, 2, 3, 4, 5, 6)] == [1, 2, 6, 6, 6, 6]
    (record,) = caplog.records
    why = str(error).partition("\n")[0]
    assert record.getMessage() == f"decode steps of a batch of 4 run without a CUDA graph of its size: {why}"
    assert found.why_eager == f"1 graphs could not be captured, the last for a batch of 4: {why}"
    found.forget()
    assert found.why_eager == "", "all are tried again where the weights have moved"
    assert found.key_for(4, StepEnding.ARGMAX) == GraphKey(4, StepEnding.ARGMAX)


def test_a_capture_whose_step_cannot_be_run_ends_the_rank_with_its_cause() -> None:
    """Not the graph's fault: another rank is gone, or waits for this one."""
    found, _ = graphs(RecordingCapturer(fail_at=1, error=PeerError("rank 1 cannot go on: timed out")))
    with pytest.raises(PeerError, match="rank 1 cannot go on"):
        found.capture_next()


def test_batches_without_a_graph_that_holds_them_run_eagerly_and_the_others_do_not() -> None:
    found, _ = graphs(RecordingCapturer(fail_at=1))
    while found.capture_next():
        pass
    assert found.find(5, StepEnding.ARGMAX) is None, "the largest is what failed"
    assert found.find(4, StepEnding.ARGMAX).key.size == 4


def test_enforce_eager_captures_nothing() -> None:
    found, ran = graphs(None)
    for _ in range(100):
        assert found.find(1, StepEnding.ARGMAX) is None
    assert not found.due()
    assert not found.capture_next()
    assert not ran


# --- replays ----------------------------------------------------------------------------------------------------


class Bench:
    def __init__(self, capturer: RecordingCapturer | None = None) -> None:
        self.device, self.capturer = LateDevice(), capturer or RecordingCapturer()
        self.model, self.cache, self.maker = TensorHashModel(), new_cache(), PlanMaker(block_size=BLOCK_SIZE)
        limits = RunnerLimits(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE, capture_sizes=SIZES)
        self.runner = GpuRunner(self.model, self.cache, self.device, limits, self.capturer)

    def submit(self, *rows: int) -> None:
        for row in rows:
            self.maker.compute(row)
        plan = self.maker.plan()
        self.runner.submit(plan)
        for row in plan.rows[plan.sampled].tolist():
            self.maker.tokens[row].append(-1)  # the core does not know it either

    def collect(self) -> StepResult:
        return self.runner.collect()


def captured(*prompts: list[int]) -> Bench:
    """A bench with all graphs, and rows 0, 1 ... whose prompts are computed."""
    bench = Bench()
    while bench.runner.idle():
        pass
    for row, prompt in enumerate(prompts):
        bench.maker.enter(row, prompt, temperature=0.0)
    bench.submit(*range(len(prompts)))
    bench.collect()
    return bench


def test_steady_decode_ships_nothing_and_waits_for_one_event_a_step() -> None:
    bench = captured([1, 2, 3], [4, 5], [6])
    bench.submit(0, 1, 2)  # tells the device which rows there are
    for _ in range(10):
        shipped, waits, replays = bench.runner.deltas.num_shipped, bench.device.num_waits, bench.capturer.num_replays
        new_blocks = sum(len(bench.maker.tokens[row]) % BLOCK_SIZE == 1 for row in range(3))
        bench.submit(0, 1, 2)
        assert bench.device.num_waits == waits, "submitting waits for nothing"
        assert bench.runner.deltas.num_shipped - shipped == new_blocks
        assert bench.capturer.num_replays == replays + 1
        bench.collect()
        assert bench.device.num_waits - waits <= 2  # the result's event, passed or not, and nothing else
    bench.collect()


def test_a_step_is_started_before_the_one_before_it_is_read_and_gives_the_same_tokens() -> None:
    one, two = captured([1, 2, 3], [4, 5]), captured([1, 2, 3], [4, 5])
    expected, found = [], []
    for _ in range(12):
        one.submit(0, 1)
        expected.append(one.collect().token_ids.tolist())
    two.submit(0, 1)
    for _ in range(11):
        two.submit(0, 1)
        found.append(two.collect().token_ids.tolist())
    found.append(two.collect().token_ids.tolist())
    assert found == expected
    assert len({tuple(tokens) for tokens in found}) > 6, "the tokens change from step to step"


def test_more_steps_in_flight_than_buffers_is_a_bug_that_shows() -> None:
    bench = captured([1, 2, 3])
    bench.submit(0)
    bench.submit(0)
    with pytest.raises(InconsistentError, match="one too many in flight"):
        bench.submit(0)


def test_graphs_read_only_what_stays_where_it_is() -> None:
    bench = captured([1, 2, 3])
    runner = bench.runner
    model = [value for value in vars(bench.model).values() if isinstance(value, torch.Tensor)]
    fixed = {address(tensor) for tensor in (runner.state.words, bench.cache, runner.steps.results, *model)}
    fixed |= {address(value) for value in vars(runner.steps).values() if isinstance(value, torch.Tensor)}
    assert len(bench.capturer.graphs) == len(SIZES)
    for graph in bench.capturer.graphs:
        foreign = [tensor.shape for at, tensor in graph.read.items() if at not in fixed and tensor.numel() > 1]
        assert not foreign, "a replay would read memory that nobody keeps"


def test_padding_touches_no_request_whether_it_is_in_the_batch_or_not() -> None:
    bench = captured([9, 8], [1, 2, 3], [4, 5], [6])
    state = bench.runner.state
    cache, idle = bench.cache.clone(), (int(state.num_computed[0]), int(state.last_token[0]))
    bench.submit(1, 2, 3)  # in the graph for 4; row 0 has a request too, which is not computed in this step
    bench.collect()
    assert bench.capturer.num_replays == 1
    assert (int(state.num_computed[0]), int(state.last_token[0])) == idle
    written = (bench.cache != cache).nonzero()[:, 0]
    blocks = {block for row in (1, 2, 3) for block in bench.maker.blocks[row]}
    assert set((written // BLOCK_SIZE).tolist()) <= {0} | blocks
    assert int((written >= BLOCK_SIZE).sum()) == 3, "one slot for each request"
    assert int(state.num_computed[state.padding_row]) == 0
    assert not state.block_tables[:, state.padding_row].any()


def test_an_operation_that_must_wait_is_refused_as_in_a_real_capture() -> None:
    capturer = RecordingCapturer()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        capturer.capture(lambda: torch.ones(3)[torch.ones(3).nonzero()])
