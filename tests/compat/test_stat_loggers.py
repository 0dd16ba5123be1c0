"""Loggers of one's own: `from_engine_args(args, stat_loggers=[...])`, with vLLM's interface."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace import LLM, AsyncLLM, EngineArgs, InvalidRequestError, LLMEngine, SamplingParams
from headrace.frontend.vllm.engine_config import engine_config
from headrace.frontend.vllm.stat_loggers import StatLoggers
from headrace.v1.metrics.loggers import (
    AggregatedLoggingStatLogger,
    AggregateStatLoggerBase,
    LoggingStatLogger,
    PrometheusStatLogger,
    StatLoggerBase,
)
from headrace.v1.metrics.stats import IterationStats, SchedulerStats

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class Counting(StatLoggerBase):
    """Keeps what it is told. The newest one is `last`."""

    last: Counting

    def __init__(self, vllm_config: Any, engine_index: Any = 0) -> None:
        self.config, self.index = vllm_config, engine_index
        self.calls: list[str] = []
        self.records: list[tuple[SchedulerStats, IterationStats]] = []
        type(self).last = self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: None = None, engine_idx: int = 0
    ) -> None:
        assert (mm_cache_stats, engine_idx) == (None, 0)
        self.records.append((scheduler_stats, iteration_stats))

    def log_engine_initialized(self) -> None:
        self.calls.append("initialized")

    def log(self) -> None:
        self.calls.append("log")


class Together(Counting, AggregateStatLoggerBase):
    pass


class Broken(Counting):
    def record(self, *arguments: Any, **more: Any) -> None:
        raise ValueError("no disk")


# tests/v1/engine/test_async_llm.py::test_customize_loggers, test_customize_aggregated_loggers
def test_a_logger_is_told_what_ran_and_logs_when_asked(address: str) -> None:
    async def run() -> None:
        llm = await AsyncLLM.connect(address)
        client = await llm._ready()
        loggers = llm._stat_loggers = StatLoggers([Counting, Together, Broken])
        await loggers.start(client, engine_config(client.welcome))
        async for _ in llm.generate("hello there", GREEDY, "mine"):
            pass
        await llm.do_log_stats()
        await llm.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    told = Counting.last
    assert (told.index, Together.last.index) == (0, [0])
    assert told.config.model_config.max_model_len == 256
    assert told.calls == Together.last.calls == ["initialized", "log"]
    assert Broken.last.calls == ["initialized"]
    assert sum(each.num_generation_tokens for _, each in told.records) >= 4
    (mine,) = [one for _, each in told.records for one in each.finished_requests]
    assert (mine.request_id, str(mine.finish_reason), mine.num_generation_tokens) == ("mine", "length", 4)
    assert mine.e2e_latency >= mine.inference_time > 0
    assert any(each.time_to_first_tokens_iter for _, each in told.records)
    assert all(0 <= each.kv_cache_usage <= 1 for each, _ in told.records)
    with pytest.raises(AttributeError, match="mean_time_per_output_token"):
        _ = told.records[0][1].inter_token_latencies_iter


def test_an_llm_tells_loggers_too(address: str) -> None:
    with LLM.connect(address) as llm:
        llm.start_stat_loggers(StatLoggers([Counting]))
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
        LLMEngine(llm).do_log_stats()
    assert Counting.last.calls == ["initialized", "log"]
    assert sum(len(each.finished_requests) for _, each in Counting.last.records) == 2


# examples/features/data_parallel/multi_instance_data_parallel.py gives vLLM's own classes
def test_vllms_loggers_are_taken_and_the_one_of_prometheus_is_refused(address: str) -> None:
    made: list[LoggingStatLogger] = []

    class Mine(LoggingStatLogger):
        def log(self) -> None:
            made.append(self)

    class Ours(Mine, AggregatedLoggingStatLogger):
        pass

    with LLM.connect(address) as llm:
        llm.start_stat_loggers(StatLoggers([LoggingStatLogger, AggregatedLoggingStatLogger, Mine, Ours]))
        llm.generate("a", GREEDY, use_tqdm=False)
        llm.do_log_stats()
        assert [(type(each), each.engine_index) for each in made] == [(Mine, 0), (Ours, [0])]
        assert all(each.last_scheduler_stats.step_counter > 0 for each in made)
        with pytest.raises(InvalidRequestError, match=r"^PrometheusStatLogger is refused: .*/metrics"):
            llm.start_stat_loggers(StatLoggers([PrometheusStatLogger]))


def test_what_makes_no_logger_is_refused_before_an_engine_starts() -> None:
    for start in (AsyncLLM.from_engine_args, LLMEngine.from_engine_args):
        with pytest.raises(InvalidRequestError, match="stat_loggers has 7"):
            start(EngineArgs(model="nowhere"), stat_loggers=[7])  # type: ignore[list-item]
