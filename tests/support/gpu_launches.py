"""Records the kernel launches of the real runner for the shapes of real models, on tensors without memory: it chooses a
GPU's kernels, and each launch is recorded instead of run. Anything that waited for a value of the device would fail.

`PYTHONPATH=tests/support:benchmarks python tests/support/gpu_launches.py NAME...` prints one line of JSON for each
model: for each phase, the kernels that Triton has to compile in it because no earlier phase launched them in that form.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from plan_maker import PlanMaker
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton_compile import OPTIONS, LaunchRecord, pretended

from headrace import kernels
from headrace.core.options.adapters import AdapterLimits
from headrace.executor.checkpoints.weights import StoredTensor, WeightSource, dtype_name, take_part
from headrace.executor.gpu.device_state import HostDevice
from headrace.executor.gpu.hardware.memory import largest_prefill, visit_kernels
from headrace.executor.gpu.kernels import Rounding, batch_invariant, quantising
from headrace.executor.gpu.runner import GpuRunner, RunnerLimits
from headrace.executor.gpu.sampler import StepEnding
from headrace.executor.models import kv_cache
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.sizes import weight_shapes
from headrace.executor.parallel.rank_place import SINGLE
from headrace.ipc.adapters import RowAdapter
from headrace.kernels import registry
from headrace.kernels.triton import versions

META = torch.device("meta")
GPU = torch.device("cuda", 0)
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "num_hidden_layers": 2,
}  # fmt: skip
QWEN3 = {
    **LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024,
    "intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_MOE = {
    **QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "tie_word_embeddings": False,
}  # fmt: skip
GEMMA2 = {
    **LLAMA, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 3584, "head_dim": 256,
    "num_attention_heads": 16, "vocab_size": 256000, "max_position_embeddings": 8192, "sliding_window": 4096,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256, "tie_word_embeddings": True,
}  # fmt: skip
LFM2 = {
    **{key: value for key, value in LLAMA.items() if key != "hidden_act"},
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 2048,
    "intermediate_size": 12288, "vocab_size": 65536, "max_position_embeddings": 128000, "conv_L_cache": 3,
    "conv_bias": False, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
    "norm_eps": 1e-5, "layer_types": ["conv", "full_attention"], "tie_word_embeddings": True,
}  # fmt: skip
MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 1024, "num_heads": 32,
    "head_dim": 64, "state_size": 128, "n_groups": 1, "num_hidden_layers": 2, "vocab_size": 50288, "expand": 2,
    "conv_kernel": 4, "use_conv_bias": True, "use_bias": False, "hidden_act": "silu", "tie_word_embeddings": True,
    "layer_norm_epsilon": 1e-5,
}  # fmt: skip
QWEN3_NEXT = {
    **QWEN3_MOE, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_experts": 512,
    "num_experts_per_tok": 10,
    "head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 2, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama-3.1-8B": (LLAMA, {}),
    "Llama-3.1-8B int4": (LLAMA, {"rounding": Rounding("int4", 32)}),
    "Llama-3.1-8B int8": (LLAMA, {"rounding": Rounding("int8", 32)}),
    "Llama-3.1-8B fp8": (LLAMA, {"rounding": Rounding("fp8", 32), "cached": torch.float8_e4m3fn}),
    "Llama-3.1-8B invariant": (LLAMA, {"is_invariant": True}),
    "Llama-3.1-8B adapters": (LLAMA, {"most_adapters": 2}),
    "Qwen3-0.6B": (QWEN3, {}),
    "Qwen3-30B-A3B": (QWEN3_MOE, {}),
    "Gemma-2-9B": (GEMMA2, {}),
    "LFM2-1.2B": (LFM2, {}),
    "Mamba2-370M": (MAMBA2, {}),
    "Qwen3-Next": (QWEN3_NEXT, {}),
}
"""(config with two layers, options of `LaunchNotes`)"""
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.8},
    "truncated": {"temperature": 0.8, "top_p": 0.9},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.2},
    "counted": {"temperature": 0.7, "frequency_penalty": 0.2, "logit_bias": {5: 1.0}},
    "limited": {"temperature": 0.7, "min_tokens": 3, "allowed_token_ids": (5, 6, 7), "bad_words": ((5, 6),)},
    "reported": {"temperature": 0.0, "logprobs": 3},
    "reported with the prompt": {"temperature": 0.0, "logprobs": 20, "prompt_logprobs": 1},
}
MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE = 256, 8192, 16
MOST_ROWS = 100
NUM_BLOCKS = 1000


class MetaDevice(HostDevice):
    """A device whose copies do nothing."""

    def __init__(self) -> None:
        self.device = META

    def to_host(self, into: Tensor, source: Tensor) -> None:
        """Does nothing, since the tensors have no values."""

    def to_device(self, source: Tensor) -> Tensor:
        return torch.empty(source.shape, dtype=source.dtype, device=META)


class Shapes(WeightSource):
    """Tensors without memory."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self._shapes, self._dtype = shapes, dtype

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def stored(self, name: str) -> StoredTensor:
        shape = self._shapes[name]
        whole = torch.empty(shape, dtype=self._dtype, device=META)
        return StoredTensor.plain(shape, dtype_name(self._dtype), partial(take_part, whole, shape))


def form_of(launch: LaunchRecord) -> Hashable:
    """The key by which Triton caches a compiled kernel: types, constants, which integers are 1, and which integers and
    pointers are multiples of 16. (torch's allocations are aligned to 16.)"""
    form: list[Hashable] = [launch.function.__name__, tuple(sorted(launch.options.items()))]
    for parameter in launch.function.params:
        value = launch.arguments.get(parameter.name, parameter.default)
        is_free = parameter.do_not_specialize
        if isinstance(value, Tensor):
            form.append((value.dtype, is_free or value.storage_offset() * value.itemsize % 16 == 0))
        elif parameter.is_constexpr or value is None or isinstance(value, bool):
            form.append(value)
        elif isinstance(value, int):
            is_wide = not -(1 << 31) <= value < 1 << 31
            form.append((is_wide, None if is_free else "one" if value == 1 else value % 16 == 0))
        else:
            form.append(type(value).__name__)
    return tuple(form)


class LaunchNotes:
    """Runs the steps of one model. `launches` has one launch of each form, with the phase in which it came first."""

    def __init__(
        self,
        config: dict[str, Any],
        architecture: int = 90,
        rounding: Rounding | None = None,
        is_invariant: bool = False,
        cached: torch.dtype | None = None,
        dtype: torch.dtype = torch.bfloat16,
        most_adapters: int = 0,
    ) -> None:
        """dtype: the type that the model computes in; cached: that of keys and values, by default the same.
        most_adapters: of one request."""
        self.launches: dict[Hashable, tuple[str, LaunchRecord]] = {}
        self._phase, self._architecture = "start", architecture
        self._spec, self._dtype, self._cached = spec_from_config(config), dtype, cached or dtype
        self._most_adapters = most_adapters
        choose = batch_invariant(kernels.choose) if is_invariant else kernels.choose
        self._choose = choose if rounding is None else quantising(choose, rounding)

    def run(self) -> None:
        with self._noting():
            longest = min(MAX_MODEL_LEN, self._spec.max_positions)
            sizes = MAX_NUM_SEQS, longest, BLOCK_SIZE, self._spec.vocab_size
            source = Shapes(weight_shapes(self._spec), self._dtype)
            decoder = Decoder(self._spec, source, self._dtype, META, choose=self._choose, adapters=self._adapters)
            groups = kv_cache.cache_groups(self._spec) if self._spec.has_states else kv_cache.ONE_GROUP
            cache = kv_cache.allocate(self._spec, NUM_BLOCKS, BLOCK_SIZE, self._cached, META, groups=groups)
            cache = kv_cache.with_drafts(cache, self._spec, SINGLE, MAX_NUM_SEQS + 1, 4, META)
            limits = RunnerLimits(
                *sizes,
                (2,),
                block_factors=cache.factors,
                most_adapters=self._most_adapters,
                state_pages=groups[-1].pages,
            )
            device = MetaDevice()
            runner = GpuRunner(decoder, cache, device, limits)
            for most_adapters in range(1 + min(1, limits.most_adapters)):
                largest_prefill(runner, device, limits, MAX_MODEL_LEN, most_adapters)
            runner.steps.decode(MAX_NUM_SEQS, StepEnding.TRUNCATE)
            runner.selection.visit(MAX_NUM_SEQS)
            visit_kernels(runner, device, limits, MAX_MODEL_LEN)
            for name, sampling in SAMPLINGS.items():
                self._phase = name
                self._serve(runner, sampling, groups[-1].pages)

    @property
    def _adapters(self) -> AdapterLimits | None:
        if not self._most_adapters:
            return None
        return AdapterLimits(
            max_loras=8, slots=8, max_rank=16, dtype="bfloat16", target_modules=(), in_device_memory=True
        )

    def _serve(self, runner: GpuRunner, sampling: dict[str, Any], state_pages: int) -> None:
        """Runs growing batches of requests with prompts of random length, two tokens for each batch. In turn rows
        have no adapter, one, two and so on."""
        dice = np.random.default_rng(0)
        groups = runner.batch.num_groups
        maker = PlanMaker(BLOCK_SIZE, groups, state_pages=state_pages, num_blocks=NUM_BLOCKS)
        for count in (1, 1, 6, 30, MOST_ROWS):
            for row in range(len(maker.tokens), min(MOST_ROWS, len(maker.tokens) + count)):
                own = dice.integers(3, min(999, self._spec.vocab_size), int(dice.integers(1, 90))).tolist()
                adapters = tuple(RowAdapter(slot, 0.5) for slot in range(row % (1 + self._most_adapters)))
                maker.enter(row, own, adapters=adapters, **sampling)
            for _ in range(2):
                for row in maker.tokens:
                    maker.compute(row)
                plan = maker.plan()
                runner.submit(plan)
                runner.collect()
                for row in plan.rows[plan.sampled].tolist():
                    maker.tokens[row].append(5)
        maker.enter(MOST_ROWS, [3, 4, 5], **sampling)
        for _ in range(2):  # chunks of one token, which sample nothing
            maker.compute(MOST_ROWS, 1)
            runner.submit(maker.plan())
            runner.collect()
        for row in list(maker.tokens):
            maker.release(row)
        runner.submit(maker.plan())
        runner.collect()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        choose = registry.Op.choose

        def note(function: JITFunction, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
            arguments = dict(zip(function.arg_names, args, strict=False))
            options = {name: keywords.pop(name) for name in OPTIONS if name in keywords}
            launch = LaunchRecord(function, tuple(grid), {**arguments, **keywords}, options)
            self.launches.setdefault(form_of(launch), (self._phase, launch))

        def for_a_gpu(op: registry.Op, **facts: Any) -> registry.ChosenVersion:
            return choose(op, **{**facts, "device": GPU})

        capability = divmod(self._architecture, 10)
        with ExitStack() as stack:
            stack.enter_context(pretended(self._architecture))
            stack.enter_context(mock.patch.object(JITFunction, "run", note))
            stack.enter_context(mock.patch.object(registry.Op, "choose", for_a_gpu))
            for name in ("_why_not_started", "_why_scaled_mm_fails"):  # these checks need a driver
                stack.enter_context(mock.patch.object(versions, name, return_value=""))
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=capability))
            yield


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        config, options = MODELS[name]
        notes = LaunchNotes(config, **options)
        notes.run()
        by_phase: dict[str, list[str]] = {}
        for phase, launch in notes.launches.values():
            by_phase.setdefault(phase, []).append(launch.function.__name__)
        print(json.dumps({"name": name, "forms": by_phase}), flush=True)


if __name__ == "__main__":
    main()
