"""Prometheus metrics under vLLM's names, correct with several HTTP processes and several engines.

Each engine's own statistics (load, cache, tokens) are requested from it at each scrape. Request metrics are counted by
`RequestMeter`s, in one page of float64 numbers per HTTP process:

    file:  | page of process 0 | page of process 1 | ...
    page:  | process | handler 0 | handler 1 | ... | engine 0 | engine 1 | ...

Only one process writes a page, by plain stores; any process answers a scrape with the sum over all pages.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import platform
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from headrace.frontend.client.engine_metrics import (
    ENGINE_HISTOGRAMS,
    ENGINE_METRICS,
    LORA_INFO,
    METRICS_BY_LABEL,
    lora_labels,
)
from headrace.frontend.client.request_metrics import (
    FINISH_REASONS,
    REJECTIONS,
    REQUEST_HISTOGRAMS,
    REQUEST_LAYOUT,
    SHORT,
    SUCCESS,
    Histograms,
    Layout,
    RequestMeter,
    cumulative,
    observe,
)
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.fleet.router import CHOICES, MIGRATIONS, PROMPT_TOKENS
from headrace.frontend.http.server.hidden_metrics import HIDDEN, hidden_names
from headrace.ipc.messages import EngineStats

_ITEM_BYTES = 8
_PAUSES = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
_FULL = "max_num_queued_reqs"
"""The only reason for rejections, under vLLM's name: queues are bounded by their number of requests
(max_waiting_requests)."""
PROCESS_HISTOGRAMS: Histograms = {
    "gc_pause_seconds": (_PAUSES, "Garbage collections in the HTTP processes."),
    "router_gap_seconds": (SHORT, "For requests that lost their engine: from the last token before to the next one."),
}
PROCESS_COUNTERS = {
    "http_requests": "HTTP requests for completions.",
    "http_disconnects": "Requests whose client left before the end.",
    "tokens_after_disconnect": "Tokens generated for requests whose client had disconnected.",
}
ROUTER_COUNTERS = {
    "router_choices": ("Requests, by why the router chose their engine.", CHOICES),
    "router_migrations": ("Moves of requests to another engine, by reason.", MIGRATIONS),
    "router_quarantined": ("Requests that were ended since two engines had died while running them.", ("died",)),
    "router_prompt_tokens": (
        "Prompt tokens of routed requests: all, expected in a prefix cache, and found in it.",
        PROMPT_TOKENS,
    ),
}
"""By name: help text, and the values of the label `reason`."""
_IN_FLIGHT, _UP, _CACHE = "requests_in_flight", "engine_up", "cache_config_info"
_ACCEPTED = "spec_decode_num_accepted_tokens_per_pos"
OTHER_METRICS = {
    _ACCEPTED: ("counter by `position`", "Draft tokens that were accepted, by their position in the draft."),
    _UP: ("gauge", "Whether the engine is connected."),
    _CACHE: ("gauge", "1, with the cache's shape as labels."),
    LORA_INFO: ("gauge", "Unix time; the labels name the LoRA adapters of waiting and of running requests."),
    REJECTIONS: ("counter by `reason`", "Requests that were rejected since a queue was full."),
    _IN_FLIGHT: ("gauge", "HTTP requests in progress."),
}
"""By name: kind and help of metrics with labels or values of their own kind."""
_OF_ENGINE = ("model_name", "engine")
_STATUSES = ("2xx", "3xx", "4xx", "5xx")
_DURATIONS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_HTTP_DURATION, _HTTP_REQUESTS = "http_request_duration_seconds", "http_requests_total"
_PROCESS_LAYOUT = Layout(
    PROCESS_HISTOGRAMS,
    (
        *PROCESS_COUNTERS,
        _IN_FLIGHT,
        *(f"{name}/{reason}" for name, (_, reasons) in ROUTER_COUNTERS.items() for reason in reasons),
    ),
)
_HANDLER_LAYOUT = Layout({_HTTP_DURATION: (_DURATIONS, "")}, _STATUSES)
Handler = tuple[str, str]
"""The method and path of a route."""
_NO_ROUTE: Handler = ("", "none")
MOST_HANDLERS = 256
"""Routes whose requests are counted separately; those of others, and of no route, are counted as those of "none"."""
MOST_ENGINES = 1024
"""Engines whose requests are counted separately; those of further engines are counted with the last one's."""
_FIRST_ENGINE = _PROCESS_LAYOUT.size + MOST_HANDLERS * _HANDLER_LAYOUT.size
_PAGE_SIZE = _FIRST_ENGINE + MOST_ENGINES * REQUEST_LAYOUT.size


def pages_bytes(num_processes: int) -> int:
    """The size of all processes' pages in bytes. They take memory only where something was counted."""
    return num_processes * _PAGE_SIZE * _ITEM_BYTES


def _engine_offset(index: int) -> int:
    return _FIRST_ENGINE + min(index, MOST_ENGINES - 1) * REQUEST_LAYOUT.size


def _handler_offset(index: int) -> int:
    return _PROCESS_LAYOUT.size + index * _HANDLER_LAYOUT.size


class Pages:
    """The pages of all processes, of which this process writes one."""

    def __init__(self, *, file: Path | None = None, num_processes: int = 1, index: int = 0) -> None:
        """file: shared by all processes of a server; None for a single, private page. index: of this process's page."""
        size = pages_bytes(num_processes)
        if file is None:
            memory = mmap.mmap(-1, size)
            self.server = secrets.token_hex(8)
        else:
            with file.open("r+b") as opened:
                memory = mmap.mmap(opened.fileno(), size)
                status = os.fstat(opened.fileno())
            shared = f"{platform.node()} {status.st_dev} {status.st_ino}"
            self.server = hashlib.sha256(shared.encode()).hexdigest()[:16]
        """Tells these counts from those of another server at the same address; the same in all processes."""
        self._numbers: memoryview[float] = memoryview(memory).cast("d")
        self._num_processes = num_processes
        self._start = index * _PAGE_SIZE
        self.process = self._numbers[self._start : self._start + _PROCESS_LAYOUT.size]
        self.handlers: dict[Handler, int] = {_NO_ROUTE: 0}
        """By route: the index of its counts, the same in all processes."""
        self._meters: dict[int, RequestMeter] = {}
        self.set(_IN_FLIGHT, 0.0)  # the page may be that of a process which died

    def engine(self, index: int) -> memoryview[float]:
        """This process's counts of one engine's requests, to be written by a `RequestMeter`."""
        first = self._start + _engine_offset(index)
        return self._numbers[first : first + REQUEST_LAYOUT.size]

    def meter(self, engine: int) -> RequestMeter:
        """Of this process's requests that begin at the engine of this rank."""
        if engine not in self._meters:
            self._meters[engine] = RequestMeter(self.engine(engine), self.gap, {})
        return self._meters[engine]

    def count_handlers(self, handlers: Iterable[Handler]) -> None:
        """Counts requests of these routes separately from now on."""
        for handler in handlers:
            if len(self.handlers) < MOST_HANDLERS:
                self.handlers.setdefault(handler, len(self.handlers))

    def num_generated(self) -> int:
        """Tokens generated for requests of this process that have ended, over all engines."""
        bounds, _ = REQUEST_HISTOGRAMS["request_generation_tokens"]
        at = REQUEST_LAYOUT.at["request_generation_tokens"] + len(bounds) + 1
        return int(sum(self.engine(index)[at] for index in range(MOST_ENGINES)))

    def count(self, name: str, amount: float = 1.0) -> None:
        self.process[_PROCESS_LAYOUT.at[name]] += amount

    def count_rejection(self, index: int) -> None:
        """Counts a request that was rejected because the queue of the engine `index` was full."""
        self.engine(index)[REQUEST_LAYOUT.at[REJECTIONS]] += 1.0

    def set(self, name: str, value: float) -> None:
        self.process[_PROCESS_LAYOUT.at[name]] = value

    def in_flight(self, change: int) -> None:
        self.count(_IN_FLIGHT, change)

    def http_request(self, handler: Handler | None, status: int, seconds: float) -> None:
        """Counts a request of a route (None: of none) and its duration. A status of 0, no response, counts as 2xx."""
        first = self._start + _handler_offset(self.handlers.get(handler or _NO_ROUTE, 0))
        counts = self._numbers[first : first + _HANDLER_LAYOUT.size]
        counts[_HANDLER_LAYOUT.at[f"{min(max(status // 100, 2), 5)}xx"]] += 1.0
        observe(counts, _HANDLER_LAYOUT.at[_HTTP_DURATION], _DURATIONS, seconds)

    def total_in_flight(self) -> int:
        return int(self.total(_PROCESS_LAYOUT.at[_IN_FLIGHT], 1)[0])

    def total(self, offset: int, count: int) -> list[float]:
        """The sums over all processes of `count` adjacent numbers at `offset` of the page."""
        starts = [page * _PAGE_SIZE + offset for page in range(self._num_processes)]
        return [sum(self._numbers[start + i] for start in starts) for i in range(count)]

    def of_requests(self, index: int, name: str) -> list[float]:
        """A histogram of one engine's requests, over all processes: the count of each bucket, then the values' sum."""
        bounds, _ = REQUEST_HISTOGRAMS[name]
        return self.total(_engine_offset(index) + REQUEST_LAYOUT.at[name], len(bounds) + 2)

    def of_engine(self, index: int, name: str) -> float:
        """A counter of one engine's requests, over all processes."""
        return self.total(_engine_offset(index) + REQUEST_LAYOUT.at[name], 1)[0]

    def gc_pause(self, seconds: float) -> None:
        """Records the duration of a garbage collection in this process."""
        observe(self.process, _PROCESS_LAYOUT.at["gc_pause_seconds"], _PAUSES, seconds)

    def gap(self, seconds: float) -> None:
        """Records how long a stream paused because its request moved to another engine."""
        observe(self.process, _PROCESS_LAYOUT.at["router_gap_seconds"], SHORT, seconds)


class Exposition:
    """The text of /metrics."""

    def __init__(self, pages: Pages, pool: EnginePool, prefix: str, hidden_for: str | None = None) -> None:
        """hidden_for: the option show_hidden_metrics_for_version."""
        self._pages, self._pool, self._prefix = pages, pool, prefix
        self._former = {f"{prefix}:{HIDDEN[name][0]}": f"{prefix}:{name}" for name in hidden_names(hidden_for)}
        self._last_stats: dict[int, EngineStats] = {}

    async def text(self, accept: str) -> tuple[bytes, str]:
        """The text and its content type. accept: the header of that name; OpenMetrics, which has exemplars, goes to
        those who ask for it."""
        from prometheus_client import CollectorRegistry

        for engine, stats in (await self._pool.stats()).items():
            self._last_stats[engine.index] = stats
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return _encoded(registry, accept)

    def describe(self) -> list[Any]:
        """No descriptions, so that registering does not call `collect` to find the names."""
        return []

    def collect(self) -> Iterator[Any]:
        """All metric families, as prometheus_client reads them."""
        for family in chain(self._engine_families(), self._request_families(), self._process_families()):
            yield family
            if (former := self._former.get(family.name)) is not None:
                yield _renamed(family, former)

    def _family(self, kind: str, name: str, text: str, labels: Sequence[str] = _OF_ENGINE) -> Any:
        """A family without samples. kind: counter, gauge or histogram."""
        from prometheus_client import core

        families = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        return families[kind](f"{self._prefix}:{name}", text, labels=labels)

    def _other_family(self, name: str, labels: Sequence[str]) -> Any:
        kind, text = OTHER_METRICS[name]
        return self._family(kind.partition(" ")[0], name, text, labels)

    def _told(self) -> Iterator[tuple[tuple[str, str], EngineStats]]:
        """The labels and the last statistics of each engine that has told some."""
        for engine in self._pool.engines:
            if (stats := self._last_stats.get(engine.index)) is not None:
                yield _labels(engine), stats

    def _engine_families(self) -> Iterator[Any]:
        for kind, name, text, value in ENGINE_METRICS:
            family = self._family(kind, name, text)
            for labels, stats in self._told():
                if (number := value(stats)) is not None:
                    family.add_metric(labels, number)
            yield family
        accepted = self._other_family(_ACCEPTED, (*_OF_ENGINE, "position"))
        for labels, stats in self._told():
            for position, count in enumerate(stats.num_accepted_tokens_per_pos):
                accepted.add_metric((*labels, str(position)), count)
        yield accepted
        for kind, name, text, label, values in METRICS_BY_LABEL:
            family = self._family(kind, name, text, (*_OF_ENGINE, label))
            for labels, stats in self._told():
                for value_of_label, number in values(stats).items():
                    family.add_metric((*labels, value_of_label), number)
            yield family
        names = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        loras = self._other_family(LORA_INFO, (*_OF_ENGINE, *names))
        for labels, stats in self._told():
            if (of_loras := lora_labels(stats)) is not None:
                loras.add_metric((*labels, *(of_loras[name] for name in names)), time.time())
        yield loras
        for name, text, bounds, counted in ENGINE_HISTOGRAMS:
            family = self._family("histogram", name, text)
            for labels, stats in self._told():
                if (found := counted(stats)) is not None:
                    family.add_metric(labels, cumulative(bounds, found.counts), sum_value=found.sum)
            yield family
        up = self._other_family(_UP, ("engine",))
        shape = ("block_size", "num_gpu_blocks", "enable_prefix_caching")
        info = self._other_family(_CACHE, ("engine", *shape, "kv_cache_size_tokens", "kv_cache_max_concurrency"))
        for engine in self._pool.engines:
            up.add_metric((str(engine.index),), float(engine.usable))
            if engine.client is not None:
                told = engine.client.welcome
                of_blocks = (told.block_size, told.num_blocks, told.enable_prefix_caching)
                values_of = (engine.index, *of_blocks, told.kv_cache_tokens, told.kv_cache_requests)
                info.add_metric(tuple(map(str, values_of)), 1.0)
        yield from (up, info)

    def _request_families(self) -> Iterator[Any]:
        for name, (bounds, text) in REQUEST_HISTOGRAMS.items():
            family = self._family("histogram", name, text)
            for engine in self._pool.engines:
                *counts, total = self._pages.of_requests(engine.index, name)
                buckets = self._with_exemplars(engine, name, cumulative(bounds, counts))
                family.add_metric(_labels(engine), buckets, sum_value=total)
            yield family
        success = self._family("counter", SUCCESS, "Requests that ended, by how.", (*_OF_ENGINE, "finished_reason"))
        for engine in self._pool.engines:
            for reason in FINISH_REASONS:
                success.add_metric((*_labels(engine), reason), self._pages.of_engine(engine.index, reason))
        yield success
        rejections = self._other_family(REJECTIONS, ("model_name", "reason"))
        counted: dict[str, float] = {}
        for engine in self._pool.engines:
            name, _ = _labels(engine)
            counted[name] = counted.get(name, 0.0) + self._pages.of_engine(engine.index, REJECTIONS)
        for name, count in counted.items():
            rejections.add_metric((name, _FULL), count)
        yield rejections

    def _with_exemplars(self, engine: Engine, name: str, buckets: list[tuple[str, float]]) -> list[Any]:
        """The buckets of a histogram, each with the last traced request in it that this process has answered."""
        if not (found := self._pages.meter(engine.index).exemplars):
            return buckets
        from prometheus_client.samples import Exemplar

        return [
            (*bucket, Exemplar({"trace_id": last.trace_id}, last.value, last.at_s))
            if (last := found.get((name, index))) is not None
            else bucket
            for index, bucket in enumerate(buckets)
        ]

    def _process_families(self) -> Iterator[Any]:
        for name, text in PROCESS_COUNTERS.items():
            family = self._family("counter", name, text, ())
            family.add_metric((), self._pages.total(_PROCESS_LAYOUT.at[name], 1)[0])
            yield family
        for name, (text, reasons) in ROUTER_COUNTERS.items():
            family = self._family("counter", name, text, ("reason",))
            for reason in reasons:
                family.add_metric((reason,), self._pages.total(_PROCESS_LAYOUT.at[f"{name}/{reason}"], 1)[0])
            yield family
        in_flight = self._other_family(_IN_FLIGHT, ())
        in_flight.add_metric((), self._pages.total_in_flight())
        yield in_flight
        for name, (bounds, text) in PROCESS_HISTOGRAMS.items():
            family = self._family("histogram", name, text, ())
            *counts, total = self._pages.total(_PROCESS_LAYOUT.at[name], len(bounds) + 2)
            family.add_metric((), cumulative(bounds, counts), sum_value=total)
            yield family
        yield from self._http_families()

    def _http_families(self) -> Iterator[Any]:
        """Metrics that vLLM gets from prometheus_fastapi_instrumentator: under its names, without a prefix."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        durations = HistogramMetricFamily(
            _HTTP_DURATION, "From a request's arrival to the end of its answer.", labels=("handler", "method")
        )
        requests = CounterMetricFamily(_HTTP_REQUESTS, "HTTP requests.", labels=("handler", "method", "status"))
        for (method, path), index in self._pages.handlers.items():
            counts = self._pages.total(_handler_offset(index), _HANDLER_LAYOUT.size)
            if index and not any(counts):
                continue  # routes that nobody has called
            *buckets, total = counts[: len(_DURATIONS) + 2]
            durations.add_metric((path, method), cumulative(_DURATIONS, buckets), sum_value=total)
            for status in _STATUSES:
                requests.add_metric((path, method, status), counts[_HANDLER_LAYOUT.at[status]])
        yield from (durations, requests)


def _renamed(family: Any, name: str) -> Any:
    """The family and its samples under another name."""
    from prometheus_client.core import Metric

    renamed = Metric(name, f"The same as {family.name}, under its former name.", family.type)
    renamed.samples = [each._replace(name=name + each.name.removeprefix(family.name)) for each in family.samples]
    return renamed


_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPEN_METRICS = "application/openmetrics-text"


def _encoded(registry: Any, accept: str) -> tuple[bytes, str]:
    if _OPEN_METRICS not in accept:
        from prometheus_client import generate_latest

        return generate_latest(registry), _TEXT
    from prometheus_client.openmetrics import exposition

    # By default some versions of the library write the colons in samples' names as underscores. No name here needs more
    # than the characters that every reader takes.
    as_they_are = {"escaping": exposition.ALLOWUTF8} if hasattr(exposition, "ALLOWUTF8") else {}
    return exposition.generate_latest(registry, **as_they_are), f"{_OPEN_METRICS}; version=1.0.0; charset=utf-8"


def _labels(engine: Engine) -> tuple[str, str]:
    return (engine.names[0] if engine.names else "", str(engine.index))
