"""An executor without a model: deterministic tokens at almost no cost, and a check of the plans.

For scheduler benchmarks and for tests of processes. Needs no torch. `NullModel` configures what it imitates; its fields
may also be given as `hf_overrides`, for an engine that is started as a program.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from headrace.core.options.cache_groups import ONE_GROUP, CacheGroup
from headrace.core.options.engine_options import Options
from headrace.core.options.plan import AttentionWork, MemoryReading, ModelDescription, Plan, StepWork
from headrace.executor.placement.base import Executor
from headrace.executor.rank import Report
from headrace.executor.sampling.random_numbers import row_keys
from headrace.executor.step.verification import SampledPositions
from headrace.executor.testing.plan_check import PlanCheck
from headrace.ipc.adapters import AdapterFacts
from headrace.ipc.codec import Tensor
from headrace.ipc.failure import Failure, MissingAdapterError, ModelError, OptionError
from headrace.ipc.messages import Generate, LogprobRows, Pool, Pooling, TokenizerBundle
from headrace.ipc.row_inputs import input_kinds
from headrace.ipc.step import (
    Drafts,
    NewRow,
    PooledRows,
    PromptLogprobRun,
    RowFailure,
    StepPlan,
    StepResult,
    TokenMasks,
)
from headrace.ipc.struct_types import threadsafe

INPUT_WIDTH = 64
"""The width of row inputs that are read here."""
FIRST_ORDINARY_TOKEN = 3
"""Tokens below this are never drawn: they stand for unk, bos and eos."""


class NullModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model to imitate, and errors to simulate."""

    vocab_size: int = 32_000
    max_model_len: int = 32_768
    eos_token_id: int = 2
    memory_bytes: int = 1 << 30
    """What `load` reports as available."""
    eos_after_tokens: int = 0
    """Position in the output, counted from 1, of the end-of-sequence token; 0: never."""
    load_delay_s: float = 0.0
    step_delay_s: float = 0.0
    fail_token_id: int = -1
    """A request with this token in its prompt fails at its first output token."""
    crash_token_id: int = -1
    """A step that computes a request with this token in its prompt raises RuntimeError."""
    crash_step: int = -1
    """The step with this number raises RuntimeError."""
    cycle_tokens: int = 0
    """The output repeats with this period, except about one token in eight; 0: no repetition."""
    num_drafts: int = 0
    """Tokens that the rank drafts for each row after a step, as a draft model would; about one in four is wrong."""
    generates: bool = True
    vector_width: int = 0
    """Requests may pool by the last token, for vectors of this many values; 0: none may."""
    state_pages: int = 0
    """Pages of a row's state, beside keys and values; 0: it keeps none."""
    check: bool = False
    """Whether to check every plan by `PlanCheck`, which raises InconsistentError with the details."""


class NullExecutor(Executor):
    """Executes plans without a model. A token depends only on the request's prompt and adapters, and on the token's
    position."""

    def __init__(self, options: Options, model: NullModel | None = None, bundle: TokenizerBundle | None = None) -> None:
        """Raises OptionError for hf_overrides that are no fields of NullModel (not read when `model` is given)."""
        if model is None:
            try:
                model = msgspec.convert(options.hf_overrides, threadsafe(NullModel))
            except msgspec.ValidationError as error:
                raise OptionError(
                    f"hf_overrides of the null executor: {error}; known: {', '.join(NullModel.__struct_fields__)}"
                ) from error
        self.model = model
        self._options, self._bundle = options, bundle
        self._plan: Plan | None = None
        self._submitted: deque[StepPlan] = deque()
        self._rows: _Rows | None = None
        self._check: PlanCheck | None = None
        self.identities: dict[int, str] = {}
        """Of the adapter in each slot that has one."""

    def describe(self, report: Report) -> ModelDescription:
        report("read config")
        return ModelDescription(
            name=self._options.model or "null",
            architecture="NullForCausalLM",
            checkpoint_dtype="float32",
            max_model_len=self.model.max_model_len,
            vocab_size=self.model.vocab_size,
            num_layers=1,
            hidden_size=INPUT_WIDTH,
            intermediate_size=256,
            kv_elements_per_token=128,
            kv_rows_per_token=2,
            eos_token_ids=(self.model.eos_token_id,),
            generation_defaults={},
            num_rank_drafts=self.model.num_drafts,
            cache_groups=(
                (*ONE_GROUP, CacheGroup(kind="state", pages=self.model.state_pages))
                if self.model.state_pages
                else ONE_GROUP
            ),
            generates=self.model.generates,
            pooling=Pooling(kinds=("embed",), tokens="last", width=width)
            if (width := self.model.vector_width)
            else None,
            row_inputs=tuple(input_kinds()),
            input_width=INPUT_WIDTH,
            why_no_adapters="",
            step_work=StepWork(
                token_flops=1000.0,
                output_flops=100.0,
                attention=(AttentionWork(window=None, pair_flops=10.0, cached_elements=128),),
            ),
        )

    def tokenizer(self) -> TokenizerBundle | None:
        return None if self._options.skip_tokenizer_init else self._bundle

    def load(self, plan: Plan, report: Report) -> MemoryReading:
        report("load weights")
        self.check_attachments(plan)
        if self.model.load_delay_s:
            time.sleep(self.model.load_delay_s)
        self._plan = plan
        available_bytes = self.model.memory_bytes
        return MemoryReading(
            total_bytes=available_bytes, available_bytes=available_bytes, weights_bytes=0, activation_bytes=0
        )

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        assert self._plan is not None, "load comes before allocate"
        self._rows = _Rows(self._plan.max_num_seqs, self.model, self.identities)
        if self.model.check:
            self._check = PlanCheck(self._plan, num_blocks, max_model_len, self.identities)

    def submit(self, plan: StepPlan) -> None:
        plan.check_read(self.reads)
        self._submitted.append(plan)

    def collect(self) -> StepResult:
        assert self._rows is not None, "allocate comes before collect"
        plan = self._submitted.popleft()
        if self._check is not None:
            self._check.apply(plan)
        began_s = time.monotonic()
        if self.model.step_delay_s:
            time.sleep(self.model.step_delay_s)
        result = self._rows.step(plan, began_s)
        if self._check is not None:
            rows = result.rows if result.counts is None else np.repeat(result.rows, result.counts)
            self._check.append_sampled(rows, result.token_ids)
            # Failed rows get a token too: a plan made before the failure was known may still compute them.
            failed = np.array([failure.row for failure in result.failures], np.int32)
            self._check.append_sampled(failed, np.zeros(len(failed), np.int32))
        return result

    def load_adapter(self, slot: int, path: str, *, is_3d: bool = False) -> AdapterFacts:
        """Reads adapter_config.json and adapter_model.safetensors, of any content, in the folder `path`."""
        self.identities.pop(slot, None)
        try:
            config = (Path(path) / "adapter_config.json").read_bytes()
            content = (Path(path) / "adapter_model.safetensors").read_bytes()
            found = msgspec.json.decode(config, type=threadsafe(_AdapterConfig))
        except (OSError, msgspec.DecodeError) as error:
            kind = MissingAdapterError if isinstance(error, FileNotFoundError) else ModelError
            raise kind(f"{path}: {error}") from error
        self.identities[slot] = hashlib.sha256(config + content).hexdigest()
        return AdapterFacts(
            identity=self.identities[slot],
            rank=found.r,
            num_bytes=len(content),
            invocation_tokens=found.alora_invocation_tokens,
            task_name=found.task_name,
            prompt_prefix=found.prompt_prefix,
        )

    def drop_adapter(self, slot: int) -> None:
        self.identities.pop(slot, None)

    def stop(self) -> None:
        self._submitted.clear()


class _AdapterConfig(msgspec.Struct, frozen=True):
    r: int
    alora_invocation_tokens: tuple[int, ...] = ()
    task_name: str = ""
    prompt_prefix: str = ""


class _Rows:
    """The null executor's state of each row."""

    def __init__(self, num_rows: int, model: NullModel, identities: Mapping[int, str]) -> None:
        self._model, self._identities = model, identities
        self._key = np.zeros(num_rows, np.uint64)  # a hash of the prompt
        self._num_tokens = np.zeros(num_rows, np.int32)
        self._num_prompt_tokens = np.zeros(num_rows, np.int32)
        self._fails = np.zeros(num_rows, bool)
        self._crashes = np.zeros(num_rows, bool)
        self._num_logprobs = np.full(num_rows, -2, np.int32)  # -2: no logprobs
        self._decoding = np.zeros(0, np.int32)
        """The sampled rows of the last step."""
        self._prompts: dict[int, np.ndarray] = {}  # of the rows with prompt_logprobs
        self._num_prompt_logprobs: dict[int, int] = {}
        self._pools: dict[int, Pool] = {}

    def step(self, plan: StepPlan, began_s: float) -> StepResult:
        self._apply(plan)
        if plan.step == self._model.crash_step or self._crashes[plan.rows].any():
            raise RuntimeError(f"the null executor was told to crash in step {plan.step}")
        rows, row_of, token_ids, counts = self._sample(plan)
        failing = self._fails[rows]
        failures: tuple[RowFailure, ...] = ()
        if failing.any():
            failures = tuple(_failure(int(row)) for row in rows[failing])
            token_ids, row_of = token_ids[~self._fails[row_of]], row_of[~self._fails[row_of]]
            rows, counts = rows[~failing], counts if counts is None else counts[~failing]
        vectors = self._vectors(plan) if self._pools else None
        if vectors is not None and (failing := self._fails[vectors.rows]).any():
            failures += tuple(_failure(int(row)) for row in vectors.rows[failing])
            vectors = vectors.select(~failing)
        indices = np.flatnonzero(self._num_logprobs[row_of] != -2).astype(np.int32)
        return StepResult(
            step=plan.step,
            rows=rows,
            token_ids=token_ids,
            counts=counts,
            logprob_indices=indices if indices.size else None,
            logprobs=self._logprobs(token_ids[indices], self._num_logprobs[row_of[indices]]) if indices.size else None,
            prompt_logprobs=self._prompt_logprobs(plan) if self._prompts else (),
            vectors=vectors,
            failures=failures,
            began_s=began_s,
            ended_s=time.monotonic(),
            attachments=(self._drafts(rows),) if self._model.num_drafts else (),
        )

    def _drafts(self, rows: np.ndarray) -> Drafts:
        """The tokens that follow each row's last one, with some wrong ones among them."""
        most = self._model.num_drafts
        row_of, nth = np.repeat(rows, most), np.tile(np.arange(most, dtype=np.int32), len(rows))
        positions = self._num_tokens[row_of] + nth
        token_ids = self._draw(row_of, positions)
        token_ids[(positions * 7 + self._key[row_of].astype(np.int64)) % 4 == 0] = FIRST_ORDINARY_TOKEN
        return Drafts(counts=np.full(len(rows), most, np.int32), token_ids=token_ids)

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.released_rows.tolist() if self._prompts or self._pools else ():
            self._prompts.pop(row, None)
            self._pools.pop(row, None)
        if plan.released_rows.size:
            self._fails[plan.released_rows] = False
            self._crashes[plan.released_rows] = False
        for new in plan.new_rows:
            self._enter(new)

    def _enter(self, new: NewRow) -> None:
        row, prompt = new.row, np.asarray(new.token_ids[: new.num_prompt_tokens], np.int32)
        adapters = [(self._identities[each.slot], each.scale, each.from_position) for each in new.adapters]
        self._key[row] = zlib.crc32(prompt.tobytes() + b"".join(f"{each}".encode() for each in adapters))
        self._num_tokens[row] = len(new.token_ids)
        self._num_prompt_tokens[row] = new.num_prompt_tokens
        self._fails[row] = self._model.fail_token_id >= 0 and self._model.fail_token_id in prompt
        self._crashes[row] = self._model.crash_token_id >= 0 and self._model.crash_token_id in prompt
        if not isinstance(new.task, Generate):
            self._num_logprobs[row] = -2
            self._pools[row] = new.task
            return
        sampling = new.task.sampling
        self._num_logprobs[row] = -2 if sampling.logprobs is None else sampling.logprobs
        if sampling.prompt_logprobs is not None:
            self._prompts[row] = prompt
            self._num_prompt_logprobs[row] = sampling.prompt_logprobs

    def _sample(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """The sampled rows, the row of each new token, those tokens, and how many each row has (None: one each)."""
        rows = plan.rows
        if rows is not self._decoding:  # if it is the same array, all rows are sampled again
            rows = self._decoding = plan.rows if plan.sampled.all() else plan.rows[plan.sampled]
        drafts = plan.get(Drafts)
        if drafts is None:
            token_ids = self._masked(plan, self._draw(rows, self._num_tokens[rows]))
            self._num_tokens[rows] += 1
            return rows, rows, token_ids, None
        places = SampledPositions(plan, drafts)
        token_ids = self._masked(plan, self._draw(places.row_of, self._num_tokens[places.row_of] + places.nth))
        counts = places.counts(token_ids)
        kept = places.kept(counts)
        self._num_tokens[rows] += counts
        return rows, places.row_of[kept], token_ids[kept], counts

    def _vectors(self, plan: StepPlan) -> PooledRows | None:
        """The vectors of rows whose prompt ends in this step: they depend on the prompt alone."""
        ends = plan.num_computed_tokens + plan.num_tokens == self._num_tokens[plan.rows]
        rows = [row for row in plan.rows[ends].tolist() if row in self._pools]
        if not rows:
            return None
        widths = [self._pools[row].dimensions or self._model.vector_width for row in rows]
        values = [
            row_keys(np.full(width, self._key[row]), np.arange(width)).astype(np.float32) / 2.0**64
            for row, width in zip(rows, widths, strict=True)
        ]
        return PooledRows(
            rows=np.array(rows, np.int32),
            counts=np.ones(len(rows), np.int32),
            widths=np.array(widths, np.int32),
            values=np.concatenate(values),
        )

    def _masked(self, plan: StepPlan, token_ids: np.ndarray) -> np.ndarray:
        """Replaces tokens that the plan's masks forbid by allowed ones."""
        if (masks := plan.get(TokenMasks)) is not None:
            for place, allowed in zip(masks.positions, masks.allowed(self._model.vocab_size), strict=True):
                if not allowed[token_ids[place]] and allowed.any():
                    choices = np.flatnonzero(allowed)
                    token_ids[place] = choices[token_ids[place] % len(choices)]
        return token_ids

    def _draw(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[num_tokens] int32 tokens for positions of rows; none is special but that of eos_after_tokens."""
        model, drawn_at = self._model, positions
        if model.cycle_tokens:
            is_other = row_keys(self._key[rows], positions) % np.uint64(8) == 0
            drawn_at = np.where(is_other, positions, positions % model.cycle_tokens)
        ordinary = np.uint64(model.vocab_size - FIRST_ORDINARY_TOKEN)
        tokens = (row_keys(self._key[rows], drawn_at) % ordinary).astype(np.int32) + np.int32(FIRST_ORDINARY_TOKEN)
        if model.eos_after_tokens:
            last = positions - self._num_prompt_tokens[rows] == model.eos_after_tokens - 1
            tokens[last] = model.eos_token_id
        return tokens

    def _logprobs(self, token_ids: np.ndarray, counts: np.ndarray) -> LogprobRows:
        """The token itself ranks first, with logprob -1; the k-th alternative is token id + k, with logprob -1 - k."""
        vocab_size = self._model.vocab_size
        counts = np.where(counts < 0, vocab_size, np.minimum(counts, vocab_size))
        places = np.arange(int(counts.max(initial=0)))
        ids = (token_ids[:, None].astype(np.int64) + places) % vocab_size
        ids = np.concatenate((token_ids[:, None], np.where(places < counts[:, None], ids, -1)), 1)
        logprobs = np.concatenate(([-1.0], -1.0 - places)) + np.zeros((len(ids), 1))
        return LogprobRows(
            token_ids=Tensor.from_numpy(ids.astype(np.int32)),
            logprobs=Tensor.from_numpy(logprobs.astype(np.float32)),
            ranks=Tensor.from_numpy(np.ones(len(ids), np.int32)),
        )

    def _prompt_logprobs(self, plan: StepPlan) -> tuple[PromptLogprobRun, ...]:
        runs = []
        for row, begin, count in zip(
            plan.rows.tolist(), plan.num_computed_tokens.tolist(), plan.num_tokens.tolist(), strict=True
        ):
            tokens: np.ndarray | Sequence[int] = self._prompts.get(row, ())[begin + 1 : begin + count + 1]
            if len(tokens):
                logprobs = self._logprobs(np.asarray(tokens), np.full(len(tokens), self._num_prompt_logprobs[row]))
                runs.append(PromptLogprobRun(row=row, start=begin + 1, rows=logprobs))
        return tuple(runs)


def _failure(row: int) -> RowFailure:
    return RowFailure(row=row, failure=Failure(message="the null executor was told to fail this request", phase="step"))
