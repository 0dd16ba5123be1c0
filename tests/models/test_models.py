"""The decoder against transformers' own models: tiny random checkpoints, greedy, token by token."""

from __future__ import annotations

import copy
import json
import mmap
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tiny_models
import torch
from model_driver import DictSource, Driver
from thinned import every, thinned
from tiny_models import state_of
from torch import Tensor

from headrace import kernels
from headrace.executor.cpu.decoder import CpuDecoder
from headrace.executor.cpu.program import StepLimits
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.eager import ChooseKernel
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.kv_cache import HUGE_BYTES, SMALL_BYTES, allocate, block_bytes
from headrace.ipc.failure import ModelError

PROMPT_LENGTHS = (300, 1, 17, 64, 2, 33, 129)
NEW_TOKENS = 12


@cache
def reference(name: str) -> Any:
    return tiny_models.build(name)


@cache
def double_reference(name: str) -> Any:
    """The same computed in float64, which torch's grouped product of experts does not know."""
    model = copy.deepcopy(reference(name)).double()
    model.config._experts_implementation = "eager"
    return model


def make_decoder(name: str, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Decoder:
    model = reference(name)
    return Decoder(spec_from_config(config_of(name)), DictSource(state_of(model)), dtype, **kwargs)


def config_of(name: str) -> dict[str, Any]:
    model = reference(name)
    return model.config.to_dict() | {"architectures": [type(model).__name__]}


def random_prompts(lengths: Sequence[int] = PROMPT_LENGTHS, seed: int = 7) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(tiny_models.VOCAB_SIZE) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def reference_logits(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """What transformers says after the prompt and after each token of the answer but the last."""
    ids = torch.tensor([prompt + answer[:-1]])
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@torch.inference_mode()
def reference_greedy(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Step by step with transformers' cache, for models whose past depends on when it was computed."""
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    answer: list[int] = []
    past, ids = None, prompt
    for _ in range(new_tokens):
        output = model(torch.tensor([ids]), past_key_values=past, use_cache=True)
        past = output.past_key_values
        answer.append(int(output.logits[0, -1].argmax()))
        ids = answer[-1:]
    return answer


CASES = [name for name in tiny_models.TINY_MODELS if name != "llama_dynamic"]
MIXTURES = [name for name in CASES if "moe" in name or "mixtral" in name]


BY_REFERENCE = {"llama", "qwen3", "gemma3", "opt_projected_post_norm", "qwen2_moe"}
"""By the reference ops these are computed in `make test`, and all others in `make test-system`."""
AS_ANOTHER = {
    *("llama3", "llama_linear", "llama_yarn", "mistral", "opt_plain", "qwen2_window", "smollm3_window"),
    *("mixtral_window", "qwen3_moe_some_dense"),
}
"""What differs from another in positions, windows or the order of layers, of which tests of the CPU's program tell."""


@pytest.mark.parametrize(
    ("name", "choose"),
    [
        *(
            pytest.param(
                name,
                kernels.choose,
                id=f"{name}-chosen",
                marks=[pytest.mark.system] if name in AS_ANOTHER or place % 2 else [],  # test_end_to_end.py has them
            )
            for place, name in enumerate(tiny_models.TINY_MODELS)
            if name in CASES
        ),
        *(
            pytest.param(
                name,
                kernels.choose_reference,
                id=f"{name}-reference",
                marks=[] if name in BY_REFERENCE else [pytest.mark.system],
            )
            for name in CASES
        ),
    ],
)
def test_greedy_tokens_equal_transformers_whole_and_in_chunks(name: str, choose: ChooseKernel) -> None:
    prompts = random_prompts()
    decoder = make_decoder(name, choose=choose)
    for block_size, chunk, budget in ((8, 512, 1 << 30), (16, 7, 40)):
        answers, logits = Driver(decoder, block_size).greedy(prompts, NEW_TOKENS, chunk, budget)
        for prompt, answer, rows in zip(prompts, answers, logits, strict=True):
            expected = reference_logits(reference(name), prompt, answer)
            assert answer == expected.argmax(-1).tolist(), f"{len(prompt)} prompt tokens in chunks of {chunk}"
            if not torch.allclose(rows, expected, atol=1e-4, rtol=1e-4):
                # Some random models magnify rounding: then ours may be no further from float64's than transformers' is.
                exact = reference_logits(double_reference(name), prompt, answer)
                ours, theirs = (float((each - exact).abs().max()) for each in (rows, expected))
                assert ours <= 1.5 * theirs, f"{ours:.2e} from float64's logits, and transformers {theirs:.2e}"
        assert len({token for answer in answers for token in answer}) > NEW_TOKENS, "the model answers one thing"


def test_dynamic_rope_equals_transformers_step_by_step_beyond_the_trained_context() -> None:
    prompts = random_prompts((200, 1, 90, 96, 97))
    decoder = make_decoder("llama_dynamic")
    assert decoder.spec.max_positions == 384
    assert decoder.spec.uses_prompt_lens
    for chunk, budget in ((512, 1 << 30), (16, 50)):
        answers, _ = Driver(decoder).greedy(prompts, NEW_TOKENS, chunk, budget)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer == reference_greedy(reference("llama_dynamic"), prompt, NEW_TOKENS), len(prompt)


@pytest.mark.parametrize("name", every(3, sorted(set(CASES) - set(MIXTURES))))
def test_bf16_is_as_close_to_float32_as_transformers_bf16(name: str) -> None:
    prompts = random_prompts((40, 3))
    answers, logits = Driver(make_decoder(name, torch.bfloat16)).greedy(prompts, 4, chunk=512)
    model = reference(name)
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    for prompt, answer, rows in zip(prompts, answers, logits, strict=True):
        exact = reference_logits(model, prompt, answer)
        theirs = reference_logits(narrow, prompt, answer)
        their_error, our_error = (theirs - exact).square().mean().sqrt(), (rows - exact).square().mean().sqrt()
        assert our_error < 1.5 * their_error + 1e-3 * exact.std()


@pytest.mark.parametrize("name", thinned(MIXTURES, lambda name: name not in AS_ANOTHER))
def test_bf16_of_a_mixture_is_as_close_to_float32_as_transformers_bf16_in_the_middle_of_many_rows(name: str) -> None:
    """Where two experts are near, rounding chooses the other now and then, in transformers as here."""
    prompts = random_prompts(range(1, 41, 3))
    answers, logits = Driver(make_decoder(name, torch.bfloat16)).greedy(prompts, 4, chunk=512)
    model = reference(name)
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    errors: list[list[Tensor]] = [[], []]
    for prompt, answer, rows in zip(prompts, answers, logits, strict=True):
        exact = reference_logits(model, prompt, answer)
        for found, each in zip(errors, (reference_logits(narrow, prompt, answer), rows), strict=True):
            found.append((each - exact).square().mean(-1).sqrt())
    theirs, ours = (torch.cat(found).median() for found in errors)
    assert 0 < ours < 1.2 * theirs


def test_fp16_runs_close_to_float32() -> None:
    prompts = random_prompts((40, 3))
    answers, logits = Driver(make_decoder("llama3", torch.float16)).greedy(prompts, 4, chunk=16)
    for prompt, answer, rows in zip(prompts, answers, logits, strict=True):
        exact = reference_logits(reference("llama3"), prompt, answer)
        assert (rows - exact).abs().max() < 0.02 * exact.std()


def test_a_saved_tiny_model_loads_and_generates_as_in_transformers(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_models.save("smollm3", tmp_path / "model", tokenizer=True)
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    spec = spec_from_config(json.loads((folder / "config.json").read_text()))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("The headrace carries, naïvely, water \U0001f30a")["input_ids"]
    assert max(prompt) < tiny_models.VOCAB_SIZE
    assert tokenizer.decode(prompt) == "The headrace carries, naïvely, water \U0001f30a"
    answers, _ = Driver(Decoder(spec, DictSource(weights), torch.float32)).greedy([prompt], 20, chunk=512)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20, eos_token_id=None)
    assert answers[0] == expected[0, len(prompt) :].tolist()


def test_the_cache_takes_memory_only_where_it_is_written() -> None:
    spec = spec_from_config(config_of("llama3"))
    before = psutil.Process().memory_info().rss
    cache = allocate(spec, num_blocks=200_000, block_size=16, dtype=torch.float32)
    assert cache.nbytes == 200_000 * block_bytes(spec, 16, torch.float32) > 1 << 30
    cache.keys[1][199_999] = 1.0
    assert cache.keys[1][199_999].sum() == cache.keys[1][199_998:].sum() == 2 * 16 * 16
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_the_first_blocks_of_a_cache_take_small_pages_until_others_are_used() -> None:
    cache = allocate(spec_from_config(config_of("llama3") | {"num_hidden_layers": 8}), 200_000, 16, torch.float32)
    tensors = (*cache.keys, *cache.values)
    assert all(each.data_ptr() % HUGE_BYTES == 0 for each in tensors)
    in_small = SMALL_BYTES // cache.keys[0][0].nbytes
    before = psutil.Process().memory_info().rss
    for each in tensors:
        each[: in_small // 2] = 1.0
    cache.will_use(np.arange(in_small))
    assert psutil.Process().memory_info().rss - before < len(tensors) * HUGE_BYTES // 8
    assert len(cache.beginnings) == len(tensors)
    cache.will_use(np.array([in_small]))
    assert not cache.beginnings
    assert all((each[: in_small // 2] == 1.0).all() and not each[in_small // 2 : in_small].any() for each in tensors)
    if collapses():
        assert psutil.Process().memory_info().rss - before > len(tensors) * HUGE_BYTES // 2


def collapses() -> bool:
    """Whether the kernel makes a huge page of small ones when it is asked to."""
    with suppress(OSError), mmap.mmap(-1, 2 * HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        first = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % HUGE_BYTES
        pages[first] = 1
        pages.madvise(mmap.MADV_HUGEPAGE, first, HUGE_BYTES)
        pages.madvise(25, first, HUGE_BYTES)
        return True
    return False


def test_a_cache_that_cannot_be_had_is_refused_with_its_size() -> None:
    with pytest.raises(ModelError, match="needs 8,192,000,000,000,000,000 bytes"):
        allocate(spec_from_config(config_of("llama3")), 10**15, 16, torch.float32)


Tensors = dict[str, Tensor]


def edited(change: Callable[[Tensors], Any]) -> Tensors:
    tensors = state_of(reference("llama"))
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"no weight model\.layers\.1\.mlp\.up_proj\.weight; expected one of shape \[96, 64\]",
        ),
        (lambda t: t.pop("model.embed_tokens.weight"), r"no weight model\.embed_tokens\.weight"),
        (lambda t: t.pop("lm_head.weight"), r"no weight lm_head\.weight"),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(32, 64)}),
            r"k_proj\.weight has shape \[32, 64\], but the config needs \[64, 64\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(65)}),
            r"model\.norm\.weight has shape \[65\], but the config needs \[64\]",
        ),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(96, 64)}),
            r"no place for: model\.layers\.2\.mlp\.up_proj\.weight",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
            r"no place for: model\.layers\.0\.self_attn\.q_proj\.bias",
        ),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named(tensors: Callable[[Tensors], Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Decoder(spec_from_config(config_of("llama")), DictSource(edited(tensors)), torch.float32)


def test_leftovers_that_do_no_harm_are_ignored() -> None:
    tensors = edited(lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    Decoder(spec_from_config(config_of("llama")), DictSource(tensors), torch.float32)
    state = state_of(reference("llama3"))
    copied = state["model.embed_tokens.weight"].bfloat16()
    decoder = Decoder(
        spec_from_config(config_of("llama3")), DictSource(state | {"lm_head.weight": copied}), torch.float32
    )
    assert decoder.weight_bytes == sum(t.nbytes for t in state.values())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "mixtral",
            lambda t: t.pop("model.layers.1.block_sparse_moe.experts.2.w3.weight"),
            r"no weight model\.layers\.1\.block_sparse_moe\.experts\.2\.w3\.weight; expected one of shape",
        ),
        (
            "mixtral",
            lambda t: t.update({"model.layers.0.block_sparse_moe.experts.5.w1.weight": torch.zeros(96, 64)}),
            r"no place for: model\.layers\.0\.block_sparse_moe\.experts\.5\.w1\.weight",
        ),
        (
            "mixtral",
            lambda t: t.update({"model.layers.0.block_sparse_moe.gate.weight": torch.zeros(4, 64)}),
            r"block_sparse_moe\.gate\.weight has shape \[4, 64\], but the config needs \[5, 64\]",
        ),
        (
            "deepseek_v3_moe",
            lambda t: t.pop("model.layers.1.mlp.gate.e_score_correction_bias"),
            r"no weight model\.layers\.1\.mlp\.gate\.e_score_correction_bias",
        ),
        (
            "deepseek_v3_moe",
            lambda t: t.update({"model.layers.0.self_attn.kv_b_proj.weight": torch.zeros(8, 8)}),
            r"self_attn\.kv_b_proj\.weight has shape \[8, 8\], but the config needs",
        ),
    ],
)
@pytest.mark.parametrize("kind", [Decoder, CpuDecoder])
def test_experts_and_latent_weights_that_do_not_fit_the_config_are_named(
    name: str, change: Callable[[Tensors], Any], message: str, kind: type[Decoder | CpuDecoder]
) -> None:
    tensors, spec = state_of(reference(name)), spec_from_config(config_of(name))
    change(tensors)
    limits = (StepLimits(max_tokens=8, max_seqs=1, max_positions=8),) if kind is CpuDecoder else ()
    with pytest.raises(ModelError, match=message):
        kind(spec, DictSource(tensors), torch.float32, *limits)


@pytest.mark.parametrize(
    ("text_prefix", "head"),
    [("language_model.model.", "language_model.lm_head.weight"), ("model.language_model.", "lm_head.weight")],
)
def test_a_multimodal_gemma3_serves_its_language_model(text_prefix: str, head: str) -> None:
    tensors = {name.replace("model.", text_prefix, 1): t for name, t in state_of(reference("gemma3")).items()}
    tensors |= {head: tensors[f"{text_prefix}embed_tokens.weight"], "model.vision_tower.patch.weight": torch.zeros(3)}
    tensors["multi_modal_projector.mm_input_projection_weight"] = torch.zeros(3)
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": reference("gemma3").config.to_dict()}
    prompts = random_prompts((50, 4))
    decoder = Decoder(spec_from_config(config), DictSource(tensors), torch.float32)
    answers, _ = Driver(decoder).greedy(prompts, 5, chunk=512)
    assert answers == Driver(make_decoder("gemma3")).greedy(prompts, 5, chunk=512)[0]
