"""Hostile clients on an engine core's wire protocol, beside a client whose seeded tokens must not change.

    python benchmarks/fuzz_wire.py [--minutes 30] [--seed 0]
    python benchmarks/fuzz_wire.py --adds-and-aborts 100000

The engine is a real one with a tiny random model, in its own process. Hostile clients send whatever the types of the
messages allow, and more: numbers at and beyond the limits of their ranges (ipc/ranges.py); damaged, truncated and large
frames; messages out of order; slots that are in use or belong to others; thousands of requests that are aborted at
once; floods of aborts and queries; and replays of what they had sent before. They read little, and vanish. An
accountant sends requests of any content with slots of its own and must get exactly one terminal answer for each. The
engine must not end, and its memory must not grow. The exit status is 1 when any of that fails.

With --adds-and-aborts one client sends so many requests, each aborted at once, and the core's memory may grow by 10 MB
over the last half of them.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import random
import statistics
import sys
import tempfile
import time
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq
from report import write_report

from headrace.ipc import messages
from headrace.ipc.codec import Codec, Tensor
from headrace.ipc.control import DrainEngine, PauseGeneration, ReloadWeights, ResumeGeneration, Sleep
from headrace.ipc.messages import (
    SCHEMA_HASH,
    Abort,
    AddRequest,
    ClientMessage,
    CoreMessage,
    Hello,
    StepOutputs,
    Welcome,
)
from headrace.ipc.ranges import Longest, Range
from headrace.ipc.transport.sockets import new_dealer

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "fuzz_wire.json"
VOCAB_SIZE, MAX_MODEL_LEN = 320, 128
EDGES = (0, 1, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32, 2**63 - 1, -(2**63), 2**64 - 1)
FLOAT_EDGES = (0.0, -0.0, 1.0, 1e-300, 1e-38, 3.4e38, 1e308, math.inf, -math.inf, math.nan)
MOST_GROWTH_BYTES = 10_000_000
"""Over the last half of a run."""
IDLE_S = 1.5
"""Wait before memory is read: an engine that is idle for a second returns what it has freed."""
LEAST_SAMPLES = 20
"""A run takes so many, however long: memory grows until the largest messages have come a few times."""
RESTS_USING_S, RESTS_WITHIN_S, MOST_PROCESSOR_S = 0.02, 20.0, 60.0
"""An engine rests if it uses no more processor time than this within so many seconds. It needs at most so many seconds
of processor time for what waits."""
ROOM_WITHIN_MS = 1000
"""How long a client waits when its messages in transit have reached the limit."""
RECENT_MESSAGES = 2000
"""How many of the latest messages may be replayed."""
STOPS_EVERYBODY = (PauseGeneration, Sleep, ReloadWeights, DrainEngine)
"""Commands that affect other clients by design: whoever may send commands may do that."""


Drawer = Callable[["Generator", bool], Any]
"""Draws a value with the generator's random numbers; the flag says whether it is to be a wild one."""


class Generator:
    """Draws values of any annotated type, mostly plausible, from any object with the methods of random.Random."""

    def __init__(self, numbers: random.Random) -> None:
        self.numbers = numbers

    def message(self) -> Any:
        kind = self.numbers.choice(typing.get_args(ClientMessage))
        return self.struct(AddRequest if self.numbers.random() < 0.5 else kind)

    def request(self, slot: int) -> AddRequest:
        """A request of any content, with this slot."""
        return msgspec.structs.replace(self.struct(AddRequest), slot=slot)

    def struct(self, kind: Any) -> Any:
        hints, fields = _fields_of(kind)
        wild = {field.name for field in fields if self.numbers.random() < 0.15}
        values = {}
        for field in fields:
            if field.required or field.name in wild:
                values[field.name] = self.value(hints[field.name], is_wild=field.name in wild)
        return kind(**values)

    def value(self, hint: Any, *, is_wild: bool) -> Any:
        return _drawer(hint)(self, is_wild)

    def several(self, draw: Drawer, is_wild: bool) -> Iterator[Any]:
        """Items of a tuple or dict. Long ones repeat a few items, as drawing each one would take most of the time."""
        length = self.length()
        few = [draw(self, is_wild) for _ in range(min(length, 20))]
        return itertools.islice(itertools.cycle(few), length)

    def length(self) -> int:
        return self.numbers.choice((0, 1, 1, 2, 3, 5, 300))

    def integer(self, span: Range | None, *, is_wild: bool) -> int:
        if not is_wild:
            low, high = (0, 40) if span is None else (int(max(span.low, 0)), int(min(span.high, 40)))
            return self.numbers.randint(low, max(low, high))
        return self.numbers.choice(_wild_integers(span))

    def real(self, span: Range | None, *, is_wild: bool) -> float:
        if not is_wild:
            low, high = (0.0, 1.0) if span is None else (max(span.low, 0.0), min(span.high, 2.0))
            return low + (high - low) * (1.0 - self.numbers.random())
        return self.numbers.choice(_wild_reals(span))

    def text(self, length: int | None = None) -> str:
        if length is not None:
            return "x" * length
        return self.numbers.choice(("", "a", "é" * 20, "\0", "r1", "\x1b[2J", "x" * 200))

    def tensor(self, *, is_wild: bool) -> Tensor:
        if not is_wild:
            count = self.numbers.randint(1, 40)
            return Tensor.of("int32", [self.numbers.randrange(2, VOCAB_SIZE) for _ in range(count)])
        kind = self.numbers.randrange(5)
        if kind == 0:
            return Tensor.of("int32", [self.numbers.choice((-1, VOCAB_SIZE, 2**31 - 1, -(2**31))) for _ in range(3)])
        if kind == 1:
            return Tensor.of("int32", [5] * self.numbers.choice((0, MAX_MODEL_LEN - 1, MAX_MODEL_LEN, 5000)))
        if kind == 2:
            dtype, size = self.numbers.choice((("int64", 8), ("float32", 4), ("bool", 1), ("uint8", 1), ("float16", 2)))
            return Tensor(dtype, (2,), memoryview(b"\1" * (2 * size)))
        if kind == 3:
            return Tensor("int32", (2, 2), memoryview(b"\1\0\0\0" * 4))
        return Tensor("int32", (), memoryview(b"\1\0\0\0"))

    def anything(self, depth: int = 0) -> Any:
        kind = self.numbers.randrange(6 if depth < 3 else 4)
        if kind < 2:
            return self.numbers.choice(EDGES)
        if kind == 2:
            return self.numbers.choice(FLOAT_EDGES)
        if kind == 3:
            return self.text()
        if kind == 4:
            return [self.anything(depth + 1) for _ in range(3)]
        return {self.text(): self.anything(depth + 1) for _ in range(3)}

    def damage(self, frames: list[bytes], largest_bytes: int) -> list[bytes]:
        """Frames that are no message, or a different one."""
        kind, frames = self.numbers.randrange(11), list(frames)
        if kind == 0:
            at = self.numbers.randrange(len(frames))
            frames[at] = frames[at][: self.numbers.randrange(len(frames[at]) + 1)]
        elif kind == 1:
            changed = bytearray(frames[0])
            for _ in range(self.numbers.randint(1, 4)):
                changed[self.numbers.randrange(len(changed))] = self.numbers.randrange(256)
            frames[0] = bytes(changed)
        elif kind == 2:
            frames = [self.numbers.randbytes(self.numbers.randrange(200)) for _ in range(self.numbers.randrange(4))]
        elif kind == 3:
            frames = frames[1:] or [b""]
        elif kind == 4:
            frames += [b"\0" * self.numbers.choice((1, 1000, largest_bytes))]
        elif kind == 5:
            frames = [b"\x91" * self.numbers.choice((100, 5000, 100_000)) + b"\xc0"]  # nested arrays
        elif kind == 6:
            frames = [self.numbers.choice((b"\xdd", b"\xdf", b"\xc6", b"\xdb")) + b"\xff\xff\xff\xff"]  # 4 G entries
        elif kind == 7:  # a tensor whose sizes take long to multiply
            prompt = ["int32", [1] * self.numbers.choice((8, 9, 100_000)), b"\1\0\0\0"]
            frames = [msgspec.msgpack.encode(["AddRequest", 1, "r", prompt, ["Generate", [4]]])]
        elif kind == 8:
            frames += [b"\0"] * self.numbers.choice((16, 5000))
        elif kind == 9:  # entries of one byte, each of which becomes an object when decoded
            slots = [7] * self.numbers.choice((1000, 1 << 18, min(1 << 22, largest_bytes)))
            frames = [msgspec.msgpack.encode(["Abort", slots])]
        else:  # an extension whose payload is an endlessly nested tree
            header = msgspec.msgpack.encode(["Control", 1, ["CallExtension"]])
            frames = [header[:-15] + b"\x92\xadCallExtension\x81\xa1x" + b"\x91" * 2000 + b"\xc0"]
        return frames


@functools.cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], tuple[msgspec.structs.FieldInfo, ...]]:
    return typing.get_type_hints(kind, include_extras=True), msgspec.structs.fields(kind)


@functools.cache
def _wild_integers(span: Range | None) -> tuple[int, ...]:
    near = () if span is None else tuple(int(end) + step for end in (span.low, span.high) for step in (-1, 0, 1))
    return tuple(max(-(2**63), min(2**64 - 1, edge)) for edge in (*EDGES, *near, VOCAB_SIZE, VOCAB_SIZE - 1))


@functools.cache
def _wild_reals(span: Range | None) -> tuple[float, ...]:
    ends = () if span is None else (float(span.low), float(span.high))
    near = [step for end in ends for step in (end, math.nextafter(end, math.inf), math.nextafter(end, -math.inf))]
    return (*FLOAT_EDGES, *near)


@functools.cache
def _drawer(hint: Any) -> Drawer:
    """A drawer for an annotated type, which is inspected only once."""
    marks = getattr(hint, "__metadata__", ())
    if marks:
        hint = hint.__origin__
    span = next((mark for mark in marks if isinstance(mark, Range)), None)
    longest = next((mark for mark in marks if isinstance(mark, Longest)), None)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        drawers = [_drawer(part) for part in parts if part not in STOPS_EVERYBODY]
        return lambda generator, is_wild: generator.numbers.choice(drawers)(generator, is_wild)
    if origin is typing.Literal:
        return lambda generator, _: generator.numbers.choice(parts)
    if origin is tuple:
        draw = _drawer(parts[0])
        return lambda generator, is_wild: tuple(generator.several(draw, is_wild))
    if origin is dict:
        key, entry = map(_drawer, parts)
        return lambda generator, is_wild: dict(
            zip(generator.several(key, is_wild), generator.several(entry, is_wild), strict=False)
        )
    if hint is Tensor:
        return lambda generator, is_wild: generator.tensor(is_wild=is_wild)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return lambda generator, _: generator.struct(hint)
    if hint is int:
        return lambda generator, is_wild: generator.integer(span, is_wild=is_wild)
    if hint is float:
        return lambda generator, is_wild: generator.real(span, is_wild=is_wild)
    if hint is str:
        return lambda generator, is_wild: generator.text(longest.count + 1 if longest is not None and is_wild else None)
    if hint is bool:
        return lambda generator, _: generator.numbers.random() < 0.5
    return lambda generator, _: None if hint is type(None) else generator.anything()


class Patience:
    """How long an engine's answers are waited for: while it computes, and no longer than it needs for all that came
    before. Not by the clock, which says nothing of an engine on a busy machine."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._began_s = self._used_s = self._processor_s()
        self._rests_since_s = time.monotonic()

    def is_over(self) -> bool:
        used_s, now_s = self._processor_s(), time.monotonic()
        if used_s - self._used_s > RESTS_USING_S:
            self._used_s, self._rests_since_s = used_s, now_s
        return used_s - self._began_s > MOST_PROCESSOR_S or now_s - self._rests_since_s > RESTS_WITHIN_S

    def _processor_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


class Session:
    """One connection. It waits briefly for room, and drops what it cannot send by then."""

    def __init__(self, context: zmq.Context[Any], address: str, *, greets: bool = True) -> None:
        self.socket = new_dealer(context, address)
        self.socket.connect(address)
        self.codec: Codec[CoreMessage] = Codec(CoreMessage)
        self.engine: psutil.Process | None = None
        if greets:
            self.send(Hello(schema_hash=SCHEMA_HASH, version="fuzz", pid=1))

    def send(self, message: Any) -> bool:
        return self.send_frames([bytes(frame) for frame in self.codec.encode(message)])

    def send_frames(self, frames: list[bytes]) -> bool:
        for wait_ms in (ROOM_WITHIN_MS, 0):
            try:
                self.socket.send_multipart(frames or [b""], zmq.NOBLOCK)
                return True
            except zmq.Again:
                self.socket.poll(wait_ms, zmq.POLLOUT)
        return False

    def received(self, timeout_s: float = 0.0) -> Iterator[Any]:
        while self.socket.poll(int(timeout_s * 1e3)):
            message = self.codec.decode(self.socket.recv_multipart())
            if isinstance(message, Welcome):
                self.engine = psutil.Process(message.pid)
            yield message

    def waits(self) -> Iterator[None]:
        """Turns of a wait for answers, until there is no use in waiting."""
        end_s, patience = time.monotonic() + RESTS_WITHIN_S, None
        while not (time.monotonic() > end_s if patience is None else patience.is_over()):
            yield
            patience = patience or (Patience(self.engine) if self.engine is not None else None)


@dataclasses.dataclass
class Counts:
    messages: int = 0
    refused_sends: int = 0
    victims: int = 0
    accounted: int = 0


class Hostile:
    """Clients that mean harm."""

    def __init__(self, context: zmq.Context[Any], address: str, generator: Generator, counts: Counts) -> None:
        self._context, self._address = context, address
        self._generator, self._numbers, self._counts = generator, generator.numbers, counts
        self._recent: collections.deque[list[bytes]] = collections.deque(maxlen=RECENT_MESSAGES)
        self._session = Session(context, address)

    def act(self, *, burst: int, largest_bytes: int) -> None:
        """One attack. burst: number of messages of the largest flood."""
        chance = self._numbers.random()
        if chance < 0.5:
            self._send(self._generator.message())
        elif chance < 0.7:
            frames = self._encoded(self._generator.message())
            if frames:
                self._send_frames(self._generator.damage(frames, largest_bytes))
        elif chance < 0.75:
            self._add_and_abort(self._numbers.randint(1, burst))
        elif chance < 0.8:
            self._ask(self._numbers.randint(1, burst))
        elif chance < 0.85:
            for _ in range(self._numbers.randint(1, burst)):
                self._send_frames(self._numbers.choice(self._recent or [[b""]]))
        elif chance < 0.93:
            for _ in self._session.received():
                pass
        else:
            self.vanish()
            self._session = Session(self._context, self._address, greets=self._numbers.random() < 0.8)

    def vanish(self) -> None:
        """Drops the connection; messages in transit may still arrive, or not."""
        self._session.socket.close(self._numbers.choice((0, 2000, 2000, 2000)))

    def _add_and_abort(self, count: int) -> None:
        """Sends few contents with many slots, all before the first abort or each beside its own."""
        first, few = self._numbers.randrange(10_000), [self._generator.request(0) for _ in range(5)]
        adds = [msgspec.structs.replace(few[slot % 5], slot=slot) for slot in range(first, first + count)]
        aborts = [Abort(slots=(add.slot,)) for add in adds]
        in_pairs = itertools.chain.from_iterable(zip(adds, aborts, strict=True))
        for message in in_pairs if self._numbers.random() < 0.5 else (*adds, *aborts):
            self._send(message)

    def _ask(self, count: int) -> None:
        """Sends small messages that the loop or the session must answer or look up."""
        few = (
            Abort(slots=(self._numbers.randrange(10_000),)),
            Abort(slots=tuple(range(self._numbers.choice((2, 300))))),
            messages.GetStats(call=self._numbers.randrange(9)),
            messages.ResetPrefixCache(call=1),
            messages.FetchTokenizer(call=1),
            messages.Control(call=1, command=ResumeGeneration()),
        )
        frames = [self._encoded(message) for message in few]
        for _ in range(count):
            self._send_frames(self._numbers.choice(frames))

    def _send(self, message: Any) -> None:
        if frames := self._encoded(message):
            self._send_frames(frames)
            self._recent.append(frames)

    def _encoded(self, message: Any) -> list[bytes]:
        """The message's frames; none if msgpack cannot represent it."""
        try:
            return [bytes(frame) for frame in self._session.codec.encode(message)]
        except (OverflowError, msgspec.ValidationError):
            return []

    def _send_frames(self, frames: list[bytes]) -> None:
        if self._session.send_frames(frames):
            self._counts.messages += 1
        else:
            self._counts.refused_sends += 1
            for _ in self._session.received():
                pass


class Accountant:
    """Sends requests of any content, and counts their terminal answers."""

    def __init__(self, context: zmq.Context[Any], address: str, generator: Generator, counts: Counts) -> None:
        self._session, self._generator, self._counts = Session(context, address), generator, counts
        self._open: set[int] = set()
        self._next_slot = 0
        self.problems: list[str] = []

    def act(self) -> None:
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        if self._session.send(self._generator.request(slot)):
            self._open.add(slot)
            self._counts.messages += 1
            self._counts.accounted += 1
        if self._generator.numbers.random() < 0.3:
            self._session.send(Abort(slots=(slot,)))
        self.take()

    def take(self, timeout_s: float = 0.0) -> None:
        for message in self._session.received(timeout_s):
            for finish in getattr(message, "finished", ()):
                if finish.slot not in self._open:
                    self.problems.append(f"a second terminal answer for slot {finish.slot}: {finish}")
                self._open.discard(finish.slot)

    def settle(self) -> None:
        """Receives all terminal answers, which must arrive."""
        for _ in self._session.waits():
            if not self._open:
                break
            self.take(0.1)
        if self._open:
            self.problems.append(f"no terminal answer for {len(self._open)} requests, such as slot {min(self._open)}")
            self._open.clear()

    def close(self) -> None:
        self._session.socket.close(0)


class Victim:
    """A client whose seeded requests must give the same tokens whatever other clients do."""

    REQUESTS = ({"temperature": 1.0, "seed": 7}, {"temperature": 0.0}, {"temperature": 0.8, "seed": 8, "top_p": 0.9})

    def __init__(self, context: zmq.Context[Any], address: str, counts: Counts) -> None:
        self._session, self._counts = Session(context, address), counts
        self._next_slot = 0
        self.expected = self.answers(self.send())

    def send(self) -> list[int]:
        slots = []
        for number, fields in enumerate(self.REQUESTS):
            slot, self._next_slot = self._next_slot, self._next_slot + 1
            sampling = messages.Sampling(max_tokens=24, ignore_eos=True, **fields)  # type: ignore[arg-type]
            prompt = Tensor.of("int32", [9 + number, 20, 33, 40 + number])
            task = messages.Generate(sampling=sampling)
            self._session.send(AddRequest(slot=slot, request_id="victim", prompt_token_ids=prompt, task=task))
            slots.append(slot)
        return slots

    def answers(self, slots: list[int]) -> list[list[int]]:
        """The tokens of each request. Raises AssertionError when an answer is missing."""
        tokens: dict[int, list[int]] = {slot: [] for slot in slots}
        left = set(slots)
        for _ in self._session.waits():
            if not left:
                break
            for message in self._session.received(0.1):
                if isinstance(message, StepOutputs):
                    for slot, token in zip(message.slots.tolist(), message.token_ids.tolist(), strict=True):
                        tokens[slot].append(token)
                    left -= {finish.slot for finish in message.finished}
        assert not left, "the victim got no answer from an engine that has rested, or has computed for long"
        self._counts.victims += len(slots)
        return [tokens[slot] for slot in slots]

    def close(self) -> None:
        self._session.socket.close(0)


@contextlib.contextmanager
def engine(folder: Path) -> Iterator[tuple[str, psutil.Process, Any]]:
    """A real core with a tiny model: its address, its process, and the child."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import tiny_models

    from headrace.core.options.parsing import parse_options
    from headrace.core.process.child import start_engine

    tiny_models.save("llama", folder)
    child = start_engine(
        parse_options(
            model=str(folder),
            dtype="float32",
            skip_tokenizer_init=True,
            block_size=8,
            max_num_seqs=16,
            max_model_len=MAX_MODEL_LEN,
            num_gpu_blocks_override=400,
        )
    )
    try:
        address = child.wait_ready().address
        with zmq.Context() as context:
            session = Session(context, address)
            welcome = next(session.received(10.0))
            session.socket.close()
        yield address, psutil.Process(welcome.pid), child
    finally:
        child.stop(1.0)


def fuzz(
    address: str, numbers: random.Random, counts: Counts, *, rounds: int = 1, acts: int = 60, burst: int = 60,
    largest_bytes: int = 1 << 20, hostile: int = 3, expected: list[list[int]] | None = None,
) -> list[str]:  # fmt: skip
    """Runs rounds of attacks by hostile clients beside the victim. Returns the errors in sentences, if any."""
    problems: list[str] = []
    with zmq.Context() as context:
        generator = Generator(numbers)
        victim, accountant = Victim(context, address, counts), Accountant(context, address, generator, counts)
        expected = expected or victim.expected
        attackers = [Hostile(context, address, generator, counts) for _ in range(hostile)]
        try:
            for _ in range(rounds):
                slots = victim.send()
                for _ in range(acts):
                    numbers.choice(attackers).act(burst=burst, largest_bytes=largest_bytes)
                    accountant.act()
                tokens = victim.answers(slots)
                if tokens != expected:
                    problems.append(f"the victim's tokens changed: {tokens} instead of {expected}")
            accountant.settle()
        except AssertionError as error:
            problems.append(str(error))
        finally:
            for attacker in attackers:
                attacker.vanish()
            accountant.close()
            victim.close()
    return problems + accountant.problems


def add_and_abort(address: str, process: psutil.Process, count: int, *, at_once: int = 250) -> list[dict[str, int]]:
    """Sends requests, each aborted at once, and receives the one terminal answer of each. Returns samples of the number
    of requests and the core's memory (bytes). Raises AssertionError when an answer is missing or repeated."""
    samples = []
    prompt = Tensor.of("int32", [2 + place % (VOCAB_SIZE - 2) for place in range(MAX_MODEL_LEN - 8)])
    task = messages.Generate(sampling=messages.Sampling(max_tokens=4))
    with zmq.Context() as context:
        session = Session(context, address)
        for first in range(0, count, at_once):
            left = set(range(first, min(first + at_once, count)))
            for slot in sorted(left):
                assert session.send(AddRequest(slot=slot, request_id="r", prompt_token_ids=prompt, task=task))
                assert session.send(Abort(slots=(slot,)))
            end_s = time.monotonic() + 60.0
            while left and time.monotonic() < end_s:
                for message in session.received(0.1):
                    for finish in getattr(message, "finished", ()):
                        assert finish.slot in left, f"slot {finish.slot} has a second terminal answer"
                        left.discard(finish.slot)
            assert not left, f"no terminal answer for {len(left)} requests, such as slot {min(left)}"
            samples.append({"requests": min(first + at_once, count), "rss": process.memory_info().rss})
        session.socket.close(0)
    return samples


def growth_of_last_half(samples: list[dict[str, Any]]) -> int | None:
    """Growth in bytes between the medians of the last half's first and last tenth; None without samples."""
    half = [sample["rss"] for sample in samples[len(samples) // 2 :]]
    tenth = -(-len(half) // 10)
    return int(statistics.median(half[-tenth:]) - statistics.median(half[:tenth])) if half else None


def run_adds_and_aborts(count: int) -> int:
    with tempfile.TemporaryDirectory() as folder, engine(Path(folder)) as (address, process, child):
        samples = add_and_abort(address, process, count)
        growth = growth_of_last_half(samples)
        assert growth is not None, "there is at least one sample"
        print({"requests": count, "growth_of_last_half_bytes": growth, "rss": samples[-1]["rss"]})
        return 0 if child.failure is None and growth < MOST_GROWTH_BYTES else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--adds-and-aborts", type=int, default=0, metavar="N", help="Instead: N requests aborted at once"
    )
    parser.add_argument("--no-report", action="store_true", help="Print the figures, and write no file")
    arguments = parser.parse_args()
    if arguments.adds_and_aborts:
        return run_adds_and_aborts(arguments.adds_and_aborts)
    counts, samples = Counts(), list[dict[str, Any]]()
    problems: list[str] = []
    numbers, began_s = random.Random(arguments.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, engine(Path(folder)) as (address, process, child):
        while not problems and (
            (elapsed_s := time.monotonic() - began_s) < 60 * arguments.minutes or len(samples) < LEAST_SAMPLES
        ):
            problems = fuzz(address, numbers, counts, rounds=5, acts=200, burst=500, largest_bytes=64 << 20)
            if child.failure is not None:
                problems.append(f"the engine ended: {child.failure.describe()}")
                break
            time.sleep(IDLE_S)
            samples.append({"s": round(elapsed_s, 1), "messages": counts.messages, "rss": process.memory_info().rss})
            print(samples[-1], flush=True)
    growth = growth_of_last_half(samples)
    if growth is not None and growth > MOST_GROWTH_BYTES:
        problems.append(f"the engine's memory grew by {growth} bytes over the last half")
    result = {
        "seed": arguments.seed,
        "minutes": arguments.minutes,
        **dataclasses.asdict(counts),
        "problems": problems,
        "growth_of_last_half_bytes": growth,
        "samples": samples,
    }
    print({name: value for name, value in result.items() if name != "samples"})
    if not arguments.no_report:
        write_report(RESULTS, "fuzz_wire", result, seed=arguments.seed)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
