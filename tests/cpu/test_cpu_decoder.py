"""The decoder as one CPU program: against transformers, in floats and over weights packed as they are stored."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import pytest
import tiny_models
import torch
from gguf.constants import GGMLQuantizationType as Kind
from model_driver import DictSource, Driver
from source_tree import PYTHONPATH
from test_models import (
    CASES,
    NEW_TOKENS,
    config_of,
    make_decoder,
    random_prompts,
    reference,
    reference_greedy,
    reference_logits,
    state_of,
)
from thinned import every
from tiny_gguf import save_gguf
from torch import Tensor

from headrace.executor.checkpoints.sources.gguf.file import GGUFFile
from headrace.executor.checkpoints.weights import Numbers, StoredTensor, WeightSource
from headrace.executor.cpu.decoder import CpuDecoder, why_not
from headrace.executor.cpu.program import StepLimits
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.ipc.failure import ModelError
from headrace.kernels.cpu import build
from headrace.kernels.cpu.attention.latent import NEVER
from headrace.kernels.cpu.linear.linear import runtime
from headrace.kernels.cpu.program.program import Builder

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

LIMITS = StepLimits(max_tokens=1024, max_seqs=16, max_positions=512)
CANNOT = {
    "llama_gqa_tied": "heads of 8 to 512 values in steps of 8, not 10",
    "llama_dynamic": "dynamic rotary scaling depends on the length of a prompt",
}
CAN = [name for name in CASES if name not in CANNOT]
PACKED_ERROR = 1e-3
"""Bound of the RMS error of packed computing over the spread of the logits: activations are rounded to 16 bits."""
BF16_ERROR = 0.05
"""The same with keys and values (or some of the weights, and what meets them) in bf16."""


def program_of(
    spec: ArchSpec, source: WeightSource, dtype: torch.dtype = torch.float32, *, num_threads: int = 1, **options: Any
) -> CpuDecoder:
    """On one thread: these models are so small that a second one only waits, and for whom else the machine runs."""
    used = runtime(num_threads=num_threads)
    return CpuDecoder(spec, source, dtype, options.pop("limits", LIMITS), used=used, **options)


def make_program(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> CpuDecoder:
    return program_of(spec_from_config(config_of(name)), DictSource(state_of(reference(name))), dtype, **options)


def relative_error(decoder: CpuDecoder, model: Any, lengths: tuple[int, ...] = (130, 17, 90, 200)) -> float:
    """RMS over greedy answers, over the standard deviation of the exact logits."""
    prompts = random_prompts(lengths)
    answers, logits = Driver(decoder).greedy(prompts, 4, chunk=64)
    error = spread = 0.0
    for prompt, answer, rows in zip(prompts, answers, logits, strict=True):
        exact = reference_logits(model, prompt, answer)
        error += (rows - exact).square().mean().item()
        spread += exact.var().item()
    return float((error / spread) ** 0.5)


# --- floats -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", every(2, CAN))
def test_greedy_tokens_equal_transformers_whole_and_in_chunks(name: str) -> None:
    prompts = random_prompts()
    decoder = make_program(name)
    for block_size, chunk, budget in ((8, 512, 1 << 30), (16, 7, 40)):
        answers, logits = Driver(decoder, block_size).greedy(prompts, NEW_TOKENS, chunk, budget)
        for prompt, answer, rows in zip(prompts, answers, logits, strict=True):
            expected = reference_logits(reference(name), prompt, answer)
            assert answer == expected.argmax(-1).tolist(), f"{len(prompt)} prompt tokens in chunks of {chunk}"
            torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)
        assert len({token for answer in answers for token in answer}) > NEW_TOKENS, "the model answers one thing"


@pytest.mark.parametrize("name", every(3, CAN))
def test_bf16_is_no_further_from_float32_than_transformers_bf16(name: str) -> None:
    prompts = random_prompts((130, 17, 90, 200))
    answers, logits = Driver(make_program(name, torch.bfloat16)).greedy(prompts, 4, chunk=512)
    model = reference(name)
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    ours = theirs = 0.0
    for prompt, answer, rows in zip(prompts, answers, logits, strict=True):
        exact = reference_logits(model, prompt, answer)
        ours += (rows - exact).square().mean().item()
        theirs += (reference_logits(narrow, prompt, answer) - exact).square().mean().item()
    assert 0 < ours <= theirs


@pytest.mark.parametrize(("cache_dtype", "chunk"), [(torch.int8, 20), (torch.int8, 64), (torch.float8_e4m3fn, 64)])
def test_a_compressed_vector_is_kept_with_a_scale_of_its_own(cache_dtype: torch.dtype, chunk: int) -> None:
    """In the absorbed form and (from 27 tokens at once on) in the expanded one, with the errors that op by op leaves.

    Of a model without experts: one that is chosen instead of another makes more of an error than a cache does.
    """
    tiny = tiny_models.TINY_MODELS["deepseek_v3_moe"]
    model = tiny_models.make(replace(tiny, config=dict(tiny.config) | {"first_k_dense_replace": 3}))
    spec = spec_from_config(model.config.to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]})
    source, prompts, errors = DictSource(state_of(model)), random_prompts((90, 60, 120, 75)), []
    for decoder in (program_of(spec, source), Decoder(spec, source, torch.float32)):
        error = spread = 0.0
        answers, logits = Driver(decoder, cache_dtype=cache_dtype).greedy(prompts, 4, chunk)
        for prompt, answer, rows in zip(prompts, answers, logits, strict=True):
            exact = reference_logits(model, prompt, answer)
            error += (rows - exact).square().mean().item()
            spread += exact.var().item()
        errors.append((error / spread) ** 0.5)
    ours, op_by_op = errors
    assert 1e-4 < ours < 1.2 * op_by_op


def test_many_tokens_at_once_take_the_expanded_form() -> None:
    decoder = make_program("deepseek_v2_moe")
    prompts = random_prompts((26, 100))
    attended: list[int] = []
    builder_attend = Builder.attend_latent

    def attend(builder: Builder, *values: Any, most_tokens: int = 0, **options: Any) -> None:
        attended.append(most_tokens)
        builder_attend(builder, *values, most_tokens=most_tokens, **options)

    with mock.patch.object(Builder, "attend_latent", attend):
        answers, _ = Driver(decoder).greedy(prompts, NEW_TOKENS, chunk=512)
    assert attended == [26, 26, NEVER - 1]  # in the last layer few rows are wanted of any
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == reference_logits(reference("deepseek_v2_moe"), prompt, answer).argmax(-1).tolist()


def test_chunks_that_take_the_expanded_form_have_the_same_bits_however_a_prompt_is_divided() -> None:
    decoder = make_program("deepseek_v2_moe")
    prompts = random_prompts((400, 270))
    _, whole = Driver(decoder).greedy(prompts, NEW_TOKENS, chunk=512)
    for chunk in (200, 90, 60, 45):  # the last chunks have 27 tokens or more
        _, divided = Driver(decoder).greedy(prompts, NEW_TOKENS, chunk)
        assert all(torch.equal(rows, expected) for rows, expected in zip(divided, whole, strict=True)), chunk


def test_fp16_runs_close_to_float32() -> None:
    assert 0 < relative_error(make_program("llama3", torch.float16), reference("llama3")) < 0.01


def test_a_row_is_the_same_to_the_bit_alone_in_a_batch_and_on_two_threads() -> None:
    prompts = random_prompts((90, 3, 31))
    # Latent attention has two forms, and a sequence's tokens of a step decide which: its chunks are the same.
    cases = (("qwen3", torch.float32, 17), ("qwen3", torch.bfloat16, 17), ("deepseek_v3_moe", torch.bfloat16, 32))
    for name, dtype, chunk in cases:
        decoder = make_program(name, dtype)
        _, together = Driver(make_program(name, dtype, num_threads=2)).greedy(prompts, 6, chunk=32)
        for prompt, rows in zip(prompts, together, strict=True):
            _, (alone,) = Driver(decoder).greedy([prompt], 6, chunk=chunk)
            assert torch.equal(alone, rows)


def test_logits_of_a_whole_step_are_had_in_pieces_when_there_is_room_for_few() -> None:
    prompt = random_prompts((40,))[0]
    decoder = make_program("llama", limits=StepLimits(64, 7, 64))
    driver = Driver(decoder)
    tables: list[list[int]] = [[]]
    arrays = driver._arrays([(0, 0, 40)], [prompt], tables, [40])
    last = decoder.step(arrays, driver.cache, None)
    sampled = last.sampled.clone()
    every = last.at(0, 40)
    exact = reference_logits(reference("llama"), prompt[:1], [*prompt[1:], 0])
    torch.testing.assert_close(every, exact, atol=1e-4, rtol=1e-4)
    assert torch.equal(every[39:], sampled)
    assert torch.equal(last.at(5, 9), every[5:9])


def test_weights_that_do_not_fit_the_config_are_named() -> None:
    spec = spec_from_config(config_of("llama"))
    state = state_of(reference("llama"))
    missing = {name: tensor for name, tensor in state.items() if "layers.1.mlp.up_proj" not in name}
    with pytest.raises(ModelError, match=r"no weight model\.layers\.1\.mlp\.up_proj\.weight"):
        program_of(spec, DictSource(missing))
    with pytest.raises(ModelError, match=r"no place for: model\.extra\.weight"):
        program_of(spec, DictSource(state | {"model.extra.weight": torch.zeros(3)}))
    wrong = state | {"lm_head.weight": torch.zeros(320, 32)}
    with pytest.raises(ModelError, match=r"lm_head\.weight has shape \[320, 32\], but the config needs \[320, 64\]"):
        program_of(spec, DictSource(wrong))


# --- packed -----------------------------------------------------------------------------------------------------


class PackedSource(DictSource):
    """Some of the weights as GGUF rows; `get` gives their exact dequantisation."""

    def __init__(self, tensors: Mapping[str, Tensor], packed: Mapping[str, tuple[Kind, np.ndarray]]) -> None:
        exact = {name: torch.from_numpy(gguf.quants.dequantize(rows, kind)) for name, (kind, rows) in packed.items()}
        super().__init__({**tensors, **exact})
        self._packed = packed

    def stored(self, name: str) -> StoredTensor:
        floats = super().stored(name)
        if name not in self._packed:
            return floats
        kind, rows = self._packed[name]
        numbers = Numbers(floats.numbers.part, lambda: (kind.name, rows))
        return replace(floats, format=kind.name, group=gguf.GGML_QUANT_SIZES[kind][0], numbers=numbers)


def exact_model(name: str, source: PackedSource) -> Any:
    """The transformers model of the dequantised weights, in float32."""
    model = copy.deepcopy(reference(name))
    model.load_state_dict({key: value.float() for key, value in source.tensors.items()}, strict=False)
    model.tie_weights()
    return model


def packed_matrices(name: str, kind: Kind) -> PackedSource:
    state = state_of(reference(name))
    matrices = {key: value.numpy() for key, value in state.items() if value.dim() == 2}
    return PackedSource(state, {key: (kind, gguf.quants.quantize(value, kind)) for key, value in matrices.items()})


@pytest.mark.parametrize(
    "kind", every(2, [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]), ids=lambda kind: kind.name
)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_packed_weights_compute_what_their_exact_dequantisation_does(name: str, kind: Kind) -> None:
    source = packed_matrices(name, kind)
    spec, exact = spec_from_config(config_of(name)), exact_model(name, source)
    decoder = program_of(spec, source, keep_packed=True)
    assert 0 < relative_error(decoder, exact) < PACKED_ERROR
    in_bf16 = program_of(spec, source, torch.bfloat16, keep_packed=True)
    assert 0 < relative_error(in_bf16, exact) < BF16_ERROR
    stored = sum(rows.nbytes for _, rows in source._packed.values())
    vectors = sum(tensor.nbytes for tensor in source.tensors.values() if tensor.dim() == 1)
    assert decoder.weight_bytes == stored + vectors, "tied or not, a matrix is in memory once"


def test_weights_of_latent_attention_are_counted_with_the_copy_that_expands_vectors() -> None:
    head = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    sizes = head | {"kv_lora_rank": 64, "n_routed_experts": 32}  # whole tiles, so that packing adds nothing
    model = tiny_models.build("deepseek_v2_moe", **sizes)
    spec = spec_from_config(model.config.to_dict() | {"architectures": ["DeepseekV2ForCausalLM"]})
    state = state_of(model)
    up = sum(tensor.nbytes for name, tensor in state.items() if name.endswith("kv_b_proj.weight"))
    assert program_of(spec, DictSource(state)).weight_bytes == sum(tensor.nbytes for tensor in state.values()) + up


K_BLOCKS: dict[Kind, dict[int, float]] = {
    # fp16 fields of a block: byte offset -> value; all other bytes are random
    Kind.Q4_K: {0: 4e-4, 2: 3e-3},
    Kind.Q5_K: {0: 2e-4, 2: 3e-3},
    Kind.Q6_K: {208: 8e-5},
}


@pytest.mark.parametrize("kind", K_BLOCKS, ids=lambda kind: kind.name)
def test_k_types_compute_what_their_exact_dequantisation_does(kind: Kind) -> None:
    model = tiny_models.build("llama", hidden_size=256, intermediate_size=256, head_dim=64)
    generator = np.random.default_rng(3)
    state, packed = state_of(model), {}
    for name, tensor in state.items():
        if tensor.dim() == 2:
            block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
            rows = generator.integers(0, 256, (tensor.shape[0], block_bytes), dtype=np.uint8)
            for offset, value in K_BLOCKS[kind].items():
                rows[:, offset : offset + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
            packed[name] = (kind, rows)
    source = PackedSource(state, packed)
    model.load_state_dict(source.tensors)
    spec = spec_from_config(model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    decoder = program_of(spec, source, keep_packed=True)
    assert 0 < relative_error(decoder, model) < PACKED_ERROR


MIXED: dict[str, Kind] = {
    "q_proj": Kind.Q4_1,
    "k_proj": Kind.Q4_1,
    "v_proj": Kind.Q8_0,
    "gate_proj": Kind.Q4_0,
    "up_proj": Kind.Q5_1,
    "down_proj": Kind.Q8_0,
    "embed_tokens": Kind.Q8_0,
}


def mixed_source(name: str, kinds: Mapping[str, Kind]) -> PackedSource:
    state = state_of(reference(name))
    kind_of = {key: kind for key in state for part, kind in kinds.items() if f"{part}.weight" in key}
    # What is not quantised comes in several float types too.
    floats = {k: v.half() if "o_proj" in k else v.bfloat16() if "lm_head" in k else v for k, v in state.items()}
    packed = {key: (kind, gguf.quants.quantize(state[key].numpy(), kind)) for key, kind in kind_of.items()}
    return PackedSource(floats, packed)


@pytest.mark.parametrize("name", ["llama", "llama_biases", "gemma3"])
def test_types_may_differ_within_one_layer(name: str) -> None:
    source = mixed_source(name, MIXED)
    decoder = program_of(spec_from_config(config_of(name)), source, keep_packed=True)
    layer = decoder._model.layers[0]
    assert [weight.type_name for weight in layer.mixer["qkv"].weights] == ["Q4_1", "Q8_0"]
    assert [weight.type_name for weight in layer.ffn["up"].weights] == ["Q4_0", "Q5_1"]
    assert layer.mixer["output"].weights[0].type_name == "F16"
    assert 0 < relative_error(decoder, exact_model(name, source)) < BF16_ERROR


def test_a_type_that_the_kernels_do_not_compute_becomes_floats_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    wide = tiny_models.build("qwen3", hidden_size=256)
    state = state_of(wide)
    kinds = {"model.layers.0.self_attn.q_proj.weight": Kind.TQ2_0, "model.layers.0.mlp.up_proj.weight": Kind.Q8_0}
    packed = {name: (kind, gguf.quants.quantize(state[name].numpy(), kind)) for name, kind in kinds.items()}
    source = PackedSource(state, packed)
    wide.load_state_dict(source.tensors)
    spec = spec_from_config(wide.config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]})
    with caplog.at_level(logging.WARNING):
        decoder = program_of(spec, source, keep_packed=True)
    assert [record.getMessage() for record in caplog.records] == [
        "weights of type TQ2_0 cannot be computed as they are stored; they are kept in float32"
    ]
    assert relative_error(decoder, wide) < PACKED_ERROR


def test_a_gguf_file_is_computed_packed_with_rows_in_the_order_of_the_model(tmp_path: Path) -> None:
    file = GGUFFile(save_gguf(reference("llama"), tmp_path / "model.gguf", Kind.Q8_0))
    weights = file.weights()
    model = copy.deepcopy(reference("llama"))
    model.load_state_dict({name: weights.get(name) for name in weights.names()})
    decoder = program_of(spec_from_config(file.config), weights, torch.bfloat16, keep_packed=True)
    assert relative_error(decoder, model) < BF16_ERROR
    assert abs(decoder.weight_bytes / sum(record.nbytes for record in file.tensors.values()) - 1) < 0.05


def test_asked_for_floats_a_gguf_file_is_dequantised_exactly(tmp_path: Path) -> None:
    file = GGUFFile(save_gguf(reference("llama"), tmp_path / "model.gguf", Kind.Q4_1))
    weights = file.weights()
    model = copy.deepcopy(reference("llama"))
    model.load_state_dict({name: weights.get(name) for name in weights.names()})
    decoder = program_of(spec_from_config(file.config), weights)
    prompts = random_prompts()
    answers, _ = Driver(decoder).greedy(prompts, NEW_TOKENS, chunk=64)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == reference_logits(model, prompt, answer).argmax(-1).tolist()


# --- what it cannot do ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "reason"), CANNOT.items())
def test_what_the_program_cannot_do_it_says_why(name: str, reason: str) -> None:
    spec = spec_from_config(config_of(name))
    assert reason in why_not(spec, torch.float32)
    with pytest.raises(ValueError, match=f"The CPU program cannot be used: .*{reason}"):
        make_program(name)


def test_ranks_and_dtypes_that_the_program_does_not_have_are_reasons() -> None:
    spec = spec_from_config(config_of("llama"))
    assert why_not(spec, torch.float32) == ""
    apart = "the program adds up over its ranks in memory that they share, and these 2 share none."
    assert why_not(spec, torch.float32, RankCoordinates(tp_size=2)) == apart
    assert "not in torch.float64" in why_not(spec, torch.float64)
    assert why_not(spec, torch.float32, RankCoordinates(pp_size=2)) == ""


SERVE = """
import sys, torch
sys.path[:0] = sys.argv[1].split(':')
from plan_maker import PlanMaker
from headrace.core.options.engine_options import Options
from headrace.core.options.resolve import resolve
from headrace.executor.cpu.rank import CpuRank
for model, dtype in zip(sys.argv[2::2], sys.argv[3::2]):
    options = Options(model=model, dtype=dtype, block_size=4, max_num_seqs=4, skip_tokenizer_init=True)
    executor = CpuRank(options)
    executor.load(resolve(options, executor.describe(lambda name: None)), lambda name: None)
    executor.allocate(64, 128)
    maker = PlanMaker(block_size=4)
    maker.enter(0, [7, 8, 9, 10, 11], temperature=0.0)
    for step in range(10):
        maker.compute(0)
        executor.submit(maker.plan())
        result = executor.collect()
        maker.sampled(result.rows, result.token_ids)
    print(type(executor._model).__name__, *maker.tokens[0][5:])
"""


def serve(checkpoints: dict[Path, str], cache: Path, **variables: str) -> tuple[list[tuple[str, list[int]]], list[str]]:
    """Of each checkpoint with its dtype, one after another in one process: the model class that served and its ten
    greedy tokens. And the lines of the standard error."""
    environment = {**os.environ, "HEADRACE_CACHE": str(cache), "OMP_NUM_THREADS": "1", **variables}
    models = [each for checkpoint, dtype in checkpoints.items() for each in (str(checkpoint), dtype)]
    command = [sys.executable, "-c", SERVE, PYTHONPATH, *models]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    served = [line.split() for line in done.stdout.splitlines()]
    return [(kind, [int(token) for token in tokens]) for kind, *tokens in served], done.stderr.splitlines()


def expected_tokens(name: str) -> list[int]:
    return reference_greedy(reference(name), [7, 8, 9, 10, 11], 10)


def test_without_a_compiler_each_model_warns_once_answers_the_same_and_is_dequantised_where_packed(
    tmp_path: Path,
) -> None:
    plain = tiny_models.save("qwen3", tmp_path / "model")
    packed = save_gguf(reference("llama"), tmp_path / "model.gguf", Kind.Q8_0)
    served, errors = serve({plain: "float32", packed: "auto"}, tmp_path / "cache", CXX="/nonexistent/compiler")
    assert served[0] == ("Decoder", expected_tokens("qwen3"))
    assert (served[1][0], len(served[1][1])) == ("Decoder", 10)
    said = [line for line in errors if "CPU kernels are not used" in line]
    assert len(said) == 2
    assert "CXX='/nonexistent/compiler' was not found" in said[0]


@pytest.mark.system
def test_a_model_that_the_program_cannot_do_runs_op_by_op_and_says_so_once(tmp_path: Path) -> None:
    checkpoint = tiny_models.save("llama_gqa_tied", tmp_path / "model")
    served, errors = serve({checkpoint: "float32"}, Path(build.cache_folder() or tmp_path).parent)
    assert served == [("Decoder", expected_tokens("llama_gqa_tied"))]
    said = [line for line in errors if "op by op" in line]
    assert len(said) == 1
    assert CANNOT["llama_gqa_tied"] in said[0]


def test_the_reference_decoder_gives_the_same_answers() -> None:
    prompts = random_prompts((60, 5))
    program, _ = Driver(make_program("smollm3")).greedy(prompts, 8, chunk=16)
    decoder, _ = Driver(make_decoder("smollm3")).greedy(prompts, 8, chunk=512)
    assert program == decoder
