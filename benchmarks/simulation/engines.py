"""Simulated engines, with queues, batches, prefix caches and step times. Tokens depend on prompt, seed and position.

An engine compares the tokens of a resumed request with those that it would have generated itself. So a token that was
lost, duplicated or changed is found by the engine or by the reader.
"""

from __future__ import annotations

import asyncio
import random
import struct
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

import msgspec

from headrace import __version__
from headrace.ipc.codec import Tensor
from headrace.ipc.failure import SHUT_DOWN, Failure, QueueFullError
from headrace.ipc.messages import (
    Abort,
    AddRequest,
    Admitted,
    ClientMessage,
    CoreMessage,
    Draining,
    Finish,
    FinishReason,
    FollowPrefixes,
    Generate,
    Goodbye,
    Hello,
    Load,
    PrefixEvents,
    StepOutputs,
    Welcome,
)
from headrace.ipc.prefix_names import PrefixKey, prefix_names, tell_every_s
from simulation.network import Link

MODEL = "simulated"
POISON = 2
"""A prompt that begins with this token kills the engine that computes it."""
_POSITION = struct.Struct("<qq")
_VOCABULARY = 32_000
_END_OF_256 = 3
"""Number of token ids out of 256 that end an answer, unless it ignores end-of-sequence tokens."""
_LOAD_EVERY_S = 1.0
_PREFIXES_LOST = 0.1
"""Share of prefix cache events that are lost: this may make routing worse, but must not make results wrong."""


class EngineShape(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity and speed of a simulated engine."""

    max_num_seqs: int = 8
    max_waiting: int = 1_000
    step_s: float = 0.02
    """Fixed time of a step."""
    row_s: float = 0.0005
    """Additional time of a step for each row."""
    prompt_tokens_per_s: float = 20_000.0
    block_size: int = 16
    cached_chunks: int = 4_096
    """Capacity of the prefix cache, in chunks of 64 tokens."""


def token_of(prompt_key: int, seed: int, position: int) -> int:
    """The token at this position of an answer; 3 or higher, so that it is never POISON."""
    return 3 + zlib.crc32(_POSITION.pack(seed, position), prompt_key) % (_VOCABULARY - 3)


def prompt_key_of(token_ids: bytes | memoryview, version: int) -> int:
    """The key of a prompt, from which its answers derive. token_ids: little-endian int32; version: of the model."""
    return zlib.crc32(token_ids, version)


def version_of(routed: str | None) -> int:
    """The number in a model version as the router reports it."""
    return int(str(routed).partition(" v")[2].partition(" ")[0])


def ends_with(token_id: int) -> bool:
    """Whether this token is an end-of-sequence token."""
    return token_id % 256 < _END_OF_256


class _Row:
    """One output of a request, waiting or running."""

    def __init__(self, link: Link, request: AddRequest, seed: int, version: int) -> None:
        assert isinstance(request.task, Generate)
        data = memoryview(request.prompt_token_ids.data).cast("B")
        num_resumed = request.num_resumed_tokens
        self.link, self.slot, self.seed, self.sampling = link, request.slot, seed, request.task.sampling
        self.prompt = data[: len(data) - 4 * num_resumed]
        self.key = prompt_key_of(self.prompt, version)
        self.num_tokens = num_resumed
        self.resumed = data[len(self.prompt) :].cast("i").tolist()
        self.interval, self.untold = request.output_interval, list[int]()
        self.told_any = False
        self.num_cached = 0
        self.prefix_key = PrefixKey(request.cache_salt, f"{MODEL} v{version}")
        self.is_poison = data[:4].cast("i")[0] == POISON


class SimulatedEngine:
    """An engine that serves, is frozen (as by SIGSTOP) or is down. `name` is its address."""

    def __init__(self, name: str, shape: EngineShape, chance: random.Random) -> None:
        self.name, self.shape, self._chance = name, shape, chance
        self._loop = asyncio.get_running_loop()
        self.slowness = 1.0
        self.version = self.next_version = 1
        """The model's version. The next start makes `next_version` the current one."""
        self.violations: list[str] = []
        self.on_death: Callable[[], None] = lambda: None
        """Called when the engine has died; its supervisor sets it."""
        self.on_start: Callable[[], None] = lambda: None
        """Called when the engine has started."""
        self.killed_by: Counter[bytes] = Counter()
        """Number of deaths by the prompt of the request that caused them."""
        self.num_deaths = self.num_steps = self.num_generated = 0
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.busy_s = 0.0
        self._is_up = self._is_frozen = self._is_draining = False
        self._life = 0
        self.start()

    # --- life cycle and faults ----------------------------------------------------------------------------------

    def start(self) -> None:
        self._is_up, self._is_frozen, self._is_draining = True, False, False
        self._life += 1
        self.version = self.next_version
        self.links: dict[Link, None] = {}
        self._rows: dict[tuple[Link, int], _Row] = {}
        self._waiting: deque[_Row] = deque()
        self._running: dict[_Row, None] = {}
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._prefix_changes: dict[int, bool] = {}
        self._prefix_followers: dict[Link, None] = {}
        self._backlog: list[tuple[Link, ClientMessage]] = []
        self._step_due = self._step_is_late = False
        self._welcome = self._new_welcome()  # shared, since a thousand frontends may connect
        self._loop.call_later(_LOAD_EVERY_S, self._tell_load, self._life)
        self.on_start()

    def die(self, why: str = "it was killed") -> None:
        if not self._is_up:
            return
        self._is_up = False
        self.num_deaths += 1
        self._life += 1
        for link in list(self.links):
            link.lose(why)
        self.on_death()

    def freeze(self) -> None:
        self._is_frozen = True

    def thaw(self) -> None:
        if not self._is_frozen:
            return
        self._is_frozen = False
        backlog, self._backlog = self._backlog, []
        for link, message in backlog:
            self.received(link, message)
        if self._step_is_late:
            self._step_is_late = False
            self._step(self._life)

    def drain(self) -> None:
        """Refuses new requests from now on. The simulation ends the engine later."""
        self._is_draining = True
        self._tell_all(Draining(deadline_s=60.0))

    @property
    def is_frozen(self) -> bool:
        return self._is_frozen

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def load(self) -> Load:
        return Load(num_running=len(self._running), num_waiting=len(self._waiting))

    @property
    def listens(self) -> bool:
        return self._is_up

    @property
    def is_healthy(self) -> bool:
        return self._is_up and not self._is_frozen and not self._is_draining

    # --- messages from clients ----------------------------------------------------------------------------------

    def opened(self, link: Link) -> None:
        self.links[link] = None

    def closed(self, link: Link) -> None:
        self.links.pop(link, None)
        self._prefix_followers.pop(link, None)
        for key in [key for key in self._rows if key[0] is link]:
            self._forget(self._rows[key])

    def received(self, link: Link, message: ClientMessage) -> None:
        if self._is_frozen:
            self._backlog.append((link, message))
        elif isinstance(message, Hello):
            link.push(self._welcome)
        elif isinstance(message, AddRequest):
            self._add(link, message)
        elif isinstance(message, FollowPrefixes):
            if not self._prefix_followers:
                self._prefix_changes.clear()
                self._loop.call_later(tell_every_s(len(self._prefix_followers)), self._tell_prefixes, self._life)
            self._prefix_followers[link] = None
            link.push(_prefix_events(dict.fromkeys(self._cache, True)))
        elif isinstance(message, Abort):
            ended = [row for slot in message.slots if (row := self._rows.get((link, slot))) is not None]
            for row in ended:
                self._forget(row)
            finished = tuple(Finish(slot=row.slot, reason=FinishReason.ABORT) for row in ended)
            if finished:
                link.push(_outputs(self.num_steps, [], [], finished=finished))
        elif isinstance(message, Goodbye):
            link.lose("the client said goodbye")

    def _add(self, link: Link, request: AddRequest) -> None:
        assert isinstance(request.task, Generate)
        failure = None
        if self._is_draining:
            failure = Failure(message="the engine is shutting down", type=SHUT_DOWN, process="engine-core")
        elif len(self._waiting) >= self.shape.max_waiting:
            full = QueueFullError.__name__
            failure = Failure(message="the queue is full", type=full, process="engine-core", retry_after_s=1.0)
        if failure is not None:
            finish = Finish(slot=request.slot, reason=FinishReason.REJECTED, failure=failure)
            link.push(_outputs(self.num_steps, [], [], finished=(finish,)))
            return
        seed = request.task.sampling.seed
        row = _Row(link, request, self._chance.getrandbits(62) if seed is None else seed, self.version)
        if (link, row.slot) in self._rows:
            self.violations.append(f"{self.name}: slot {row.slot} was used twice")
        expected = [token_of(row.key, row.seed, position) for position in range(row.num_tokens)]
        if row.resumed and (seed is None or row.resumed != expected):
            self.violations.append(f"{self.name}: a request is to go on after tokens that it never had")
        self._rows[link, row.slot] = row
        if row.resumed:  # ahead of requests that have not begun, as in a core's queue
            self._waiting.appendleft(row)
        else:
            self._waiting.append(row)
        self._go_on()

    # --- steps --------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Starts a step, unless one is running or there is nothing to do."""
        if self._step_due or not (self._running or self._waiting):
            return
        self._step_due = True
        self._admitted: list[_Row] = []
        num_computed = 0
        while self._waiting and len(self._running) < self.shape.max_num_seqs:
            row = self._waiting.popleft()
            self._running[row] = None
            self._admitted.append(row)
            num_computed += self._compute_prompt(row)
        seconds = self.shape.step_s + self.shape.row_s * len(self._running)
        seconds += num_computed / self.shape.prompt_tokens_per_s
        self.busy_s += seconds * self.slowness
        self._loop.call_later(seconds * self.slowness, self._step, self._life)

    def _compute_prompt(self, row: _Row) -> int:
        """Looks up the row's prompt in the prefix cache and adds it; returns the number of tokens to compute."""
        chunk = 64
        keys = prefix_names(row.prompt, row.prefix_key, chunk)
        num_cached = 0
        for key in keys:
            if key not in self._cache:
                break
            self._cache.move_to_end(key)
            num_cached += chunk
        for key in keys[num_cached // chunk :]:
            self._cache[key] = None
            self._prefix_changes[key] = True
        while len(self._cache) > self.shape.cached_chunks:
            key, _ = self._cache.popitem(last=False)
            self._prefix_changes[key] = False
        num_tokens = len(row.prompt) // 4
        row.num_cached = min(num_cached, num_tokens - 1)
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += row.num_cached
        return num_tokens + row.num_tokens - row.num_cached

    def _step(self, life: int) -> None:
        if life != self._life:
            return
        if self._is_frozen:
            self._step_is_late = True
            return
        if killers := {bytes(row.prompt) for row in self._running if row.is_poison}:
            self.killed_by.update(killers)
            self.die("a request killed it")
            return
        self._step_due = False
        self.num_steps += 1
        if len(self._running) > self.shape.max_num_seqs:
            self.violations.append(f"{self.name}: {len(self._running)} rows ran at once")
        news: dict[Link, tuple[list[int], list[int], list[Finish], list[Admitted]]] = {}
        for row in self._admitted:
            admitted = Admitted(slot=row.slot, num_cached_tokens=row.num_cached, seed=row.seed)
            news.setdefault(row.link, ([], [], [], []))[3].append(admitted)
        for row in list(self._running):
            slots, token_ids, finished, _ = news.setdefault(row.link, ([], [], [], []))
            reason = self._next_token(row)
            if reason is not None or not row.told_any or len(row.untold) >= row.interval:
                slots += [row.slot] * len(row.untold)
                token_ids += row.untold
                row.untold.clear()
                row.told_any = True
            if reason is not None:
                finished.append(Finish(slot=row.slot, reason=reason))
                self._forget(row)
        for link, (slots, token_ids, finished, told) in news.items():
            if slots or finished or told:
                link.push(_outputs(self.num_steps, slots, token_ids, finished=tuple(finished), admitted=tuple(told)))
        self._admitted = []
        self._go_on()

    def _next_token(self, row: _Row) -> FinishReason | None:
        token_id = token_of(row.key, row.seed, row.num_tokens)
        row.num_tokens += 1
        self.num_generated += 1
        row.untold.append(token_id)
        if not row.sampling.ignore_eos and row.num_tokens > row.sampling.min_tokens and ends_with(token_id):
            return FinishReason.STOP
        return FinishReason.LENGTH if row.num_tokens >= row.sampling.max_tokens else None

    def _forget(self, row: _Row) -> None:
        self._rows.pop((row.link, row.slot), None)
        if row in self._running:
            del self._running[row]
        elif row in self._waiting:
            self._waiting.remove(row)

    # --- messages to clients ------------------------------------------------------------------------------------

    def _tell_load(self, life: int) -> None:
        if life != self._life:
            return
        if not self._is_frozen:
            for link in {row.link: None for row in self._rows.values()}:
                link.push(self.load)
        self._loop.call_later(_LOAD_EVERY_S, self._tell_load, life)

    def _tell_prefixes(self, life: int) -> None:
        if life != self._life or not self._prefix_followers:
            return
        if not self._is_frozen:
            changes, self._prefix_changes = self._prefix_changes, {}
            events = _prefix_events(changes)
            for link in self._prefix_followers if changes else ():
                if self._chance.random() >= _PREFIXES_LOST:
                    link.push(events)
        self._loop.call_later(tell_every_s(len(self._prefix_followers)), self._tell_prefixes, life)

    def _tell_all(self, message: CoreMessage) -> None:
        for link in list(self.links):
            link.push(message)

    def _new_welcome(self) -> Welcome:
        return Welcome(
            version=__version__,
            pid=0,
            model=MODEL,
            served_model_names=(MODEL,),
            max_model_len=1 << 16,
            vocab_size=_VOCABULARY,
            dtype="float32",
            model_version=f"{MODEL} v{self.version}",
            block_size=self.shape.block_size,
            num_blocks=1 << 16,
            max_num_seqs=self.shape.max_num_seqs,
            max_waiting_requests=self.shape.max_waiting,
            max_logprobs=0,
            eos_token_ids=(),
            tokenizer=None,
            generation_defaults={},
            startup_s={},
            enable_prefix_caching=True,
        )


def _outputs(
    step: int,
    slots: list[int],
    token_ids: list[int],
    *,
    finished: tuple[Finish, ...] = (),
    admitted: tuple[Admitted, ...] = (),
) -> StepOutputs:
    ids = [Tensor.of("int32", each) for each in (slots, token_ids)]
    return StepOutputs(step=step, slots=ids[0], token_ids=ids[1], finished=finished, admitted=admitted)


def _prefix_events(changes: dict[int, bool]) -> PrefixEvents:
    parts = [[key for key, stored in changes.items() if stored is wanted] for wanted in (True, False)]
    return PrefixEvents(stored=Tensor.of("int64", parts[0]), evicted=Tensor.of("int64", parts[1]))
