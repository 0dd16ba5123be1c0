"""Building blocks for tests of the core: plans without a model, and a loop that the test steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.core.engine.loop import Loop
from headrace.core.engine.memory_port import MemoryPort
from headrace.core.engine.sessions import Inbox, Sessions
from headrace.core.options.adapters import adapters_of
from headrace.core.options.cache_groups import CacheGroup, group_layers, request_blocks
from headrace.core.options.engine_options import Options
from headrace.core.options.plan import Facts, MemoryReading, ModelDescription, Plan
from headrace.core.options.speculation import speculation_of
from headrace.executor.testing.null import INPUT_WIDTH, NullExecutor, NullModel
from headrace.ipc.adapters import AdapterUse
from headrace.ipc.codec import Tensor
from headrace.ipc.messages import (
    SCHEMA_HASH,
    AddPrompts,
    AddRequest,
    ClientMessage,
    CoreMessage,
    Finish,
    Generate,
    Hello,
    Pool,
    Pooling,
    Sampling,
    StepOutputs,
    Welcome,
)
from headrace.ipc.row_inputs import RowInput, input_kinds

VOCAB_SIZE = 100
WINDOWS = ((None,), (None, 6), (5,), (None, 9, 9, 9), (3, 8), (1,), (None, None, None, 13, 4))
"""Sliding windows of the layers of several models, with one cache group or more."""
STATE = "state"
LAYERS = (*WINDOWS, (None, STATE), (STATE,), (None, 6, STATE), (5, STATE))
"""The same, and models with recurrent layers."""
EOS = 2


def make_plan(**changes: Any) -> tuple[Plan, Facts]:
    """A small plan and its facts. `num_blocks` includes the null block; the other changes are fields of Options and
    Plan. `windows` sets the windows of the model's layers, or STATE for one with a state, which takes `state_pages`;
    `kinds` the cache kinds of those without. Blocks that more cache groups need are added.
    """
    num_blocks = changes.pop("num_blocks", 64)
    max_model_len = changes.pop("max_model_len", 64)
    layers, state_pages = changes.pop("windows", (None,)), changes.pop("state_pages", 1)
    windows = [window for window in layers if window != STATE]
    groups = group_layers(windows, kinds=changes.pop("kinds", None)) if windows else ()
    groups += (CacheGroup(kind="state", pages=state_pages),) if STATE in layers else ()
    prompt_logprobs_cost = changes.pop("prompt_logprobs_cost", 0.0)
    values = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, **changes}
    plan_fields = {name: values[name] for name in ("block_size", "max_num_seqs", "max_num_batched_tokens")}
    options = Options(**values)
    size, step_tokens = values["block_size"], values["max_num_batched_tokens"]
    num_blocks += request_blocks(groups, max_model_len, size, step_tokens) - -(-max_model_len // size)
    description = ModelDescription(
        name="null",
        architecture="NullForCausalLM",
        checkpoint_dtype="float32",
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        num_layers=1,
        hidden_size=64,
        intermediate_size=64,
        kv_elements_per_token=128,
        kv_rows_per_token=2,
        cache_groups=groups,
        eos_token_ids=(EOS,),
        generation_defaults={},
        prompt_logprobs_cost=prompt_logprobs_cost,
        row_inputs=tuple(input_kinds()),
        input_width=INPUT_WIDTH,
        why_no_adapters="",
    )
    plan = Plan(
        options=options,
        model=description,
        served_model_names=("null",),
        dtype="float32",
        max_model_len=max_model_len,
        max_model_len_is_fixed=False,
        max_logprobs=20,
        adapters=adapters_of(options, "float32"),
        speculation=speculation_of(options.speculative_config, on_gpu=False),
        enable_prefix_caching=options.enable_prefix_caching,
        seed=0,
        decisions=(),
        **plan_fields,
    )
    reading = MemoryReading(total_bytes=1 << 30, available_bytes=1 << 30, weights_bytes=0, activation_bytes=0)
    return plan, Facts(num_blocks=num_blocks, max_model_len=max_model_len, memory=reading, kv_cache_bytes=0)


class SteppedCore:
    """A loop over a null executor that checks plans. The test runs its turns; clients are in the same thread."""

    def __init__(
        self,
        model: NullModel | None = None,
        executor_class: type[NullExecutor] = NullExecutor,
        pooling: Pooling | None = None,
        **changes: Any,
    ) -> None:
        """pooling: what the model is said to pool, if it is more than one vector of a text."""
        model = model or NullModel(vocab_size=VOCAB_SIZE, eos_token_id=EOS, check=True)
        plan, facts = make_plan(**changes)
        if model.vector_width and pooling is None:
            pooling = Pooling(kinds=("embed",), tokens="last", width=model.vector_width)
        description = msgspec.structs.replace(
            plan.model, num_rank_drafts=model.num_drafts, generates=model.generates, pooling=pooling
        )
        self.plan = msgspec.structs.replace(plan, model=description)
        executor = self.executor = executor_class(self.plan.options, model)
        executor.load(self.plan, lambda phase: None)
        executor.allocate(facts.num_blocks, facts.max_model_len)
        self.inbox = Inbox(int(self.plan.options.max_client_inbox_mb * 1e6))
        self.port = MemoryPort()
        self.loop = Loop(self.plan, facts, executor, self.port, self.inbox)
        self.port.serve(Sessions(self.inbox, welcome_of(self.plan, facts), None))
        if self.loop.adapters is not None:
            self.loop.adapters.on_change = self.port.send_all

    def open(self) -> SteppedClient:
        return SteppedClient(self)

    def run_until_idle(self, max_turns: int = 10_000) -> None:
        for _ in range(max_turns):
            if self.inbox.empty() and not self.loop.has_work:
                self.loop.scheduler.check()
                return
            self.loop.turn()
        raise AssertionError(f"requests are left after {max_turns} turns")


class SteppedClient:
    """One client, and the messages that it received."""

    def __init__(self, core: SteppedCore) -> None:
        self.heard: list[CoreMessage] = []
        self.number = core.port.open(Hello(schema_hash=SCHEMA_HASH, version="test", pid=1), self.heard.append)
        self.send = functools.partial(core.port.receive, self.number)

    def add(
        self,
        slot: int,
        prompt: list[int],
        *,
        priority: int = 0,
        cache_salt: str = "",
        output_interval: int = 1,
        num_resumed_tokens: int = 0,
        inputs: tuple[RowInput, ...] = (),
        adapters: tuple[AdapterUse, ...] = (),
        **sampling: Any,
    ) -> None:
        message: ClientMessage = AddRequest(
            slot=slot,
            request_id=f"r{slot}",
            prompt_token_ids=Tensor.of("int32", prompt),
            task=Generate(sampling=Sampling(**{"max_tokens": 8, **sampling})),
            priority=priority,
            cache_salt=cache_salt,
            output_interval=output_interval,
            num_resumed_tokens=num_resumed_tokens,
            inputs=inputs,
            adapters=adapters,
        )
        self.send(message)

    def pool(self, slot: int, prompt: list[int], **pool: Any) -> None:
        message: ClientMessage = AddRequest(
            slot=slot,
            request_id=f"r{slot}",
            prompt_token_ids=Tensor.of("int32", prompt),
            task=Pool(**{"kinds": ("embed",), **pool}),
        )
        self.send(message)

    def pool_together(self, first: int, prompts: Sequence[list[int]], **fields: Any) -> None:
        """Sends them as one message, in slots from `first` on; its fields may be changed."""
        requests = [
            AddRequest(
                slot=slot,
                request_id=f"r{slot}",
                prompt_token_ids=Tensor.of("int32", prompt),
                task=Pool(kinds=("embed",)),
            )
            for slot, prompt in enumerate(prompts, first)
        ]
        self.send(msgspec.structs.replace(AddPrompts.of(requests), **fields))

    def vectors(self) -> dict[int, list[float]]:
        """The values of all vectors by slot."""
        found: dict[int, list[float]] = {}
        for vectors in [message.vectors for message in self.outputs() if message.vectors is not None]:
            values, at = vectors.values.tolist(), 0
            numbers = (vectors.slots.tolist(), vectors.counts.tolist(), vectors.widths.tolist())
            for slot, count, width in zip(*numbers, strict=True):
                assert slot not in found, "a request has its vectors once"
                found[slot] = values[at : at + count * width]
                at += count * width
            assert at == len(values)
        return found

    def outputs(self) -> list[StepOutputs]:
        return [message for message in self.heard if isinstance(message, StepOutputs)]

    def finishes(self) -> list[Finish]:
        return [finish for message in self.outputs() for finish in message.finished]

    def tokens(self) -> dict[int, list[int]]:
        """All generated tokens by slot."""
        tokens: dict[int, list[int]] = {}
        for message in self.outputs():
            for slot, token in zip(message.slots.tolist(), message.token_ids.tolist(), strict=True):
                tokens.setdefault(slot, []).append(token)
        return tokens

    def cached(self) -> dict[int, int]:
        return {a.slot: a.num_cached_tokens for message in self.outputs() for a in message.admitted}


def welcome_of(plan: Plan, facts: Facts) -> Welcome:
    return Welcome(
        version="test",
        pid=1,
        model="null",
        served_model_names=("null",),
        max_model_len=facts.max_model_len,
        vocab_size=plan.model.vocab_size,
        dtype="float32",
        block_size=plan.block_size,
        num_blocks=facts.num_blocks,
        max_num_seqs=plan.max_num_seqs,
        max_logprobs=20,
        eos_token_ids=plan.model.eos_token_ids,
        tokenizer=None,
        generation_defaults={},
        startup_s={},
    )
