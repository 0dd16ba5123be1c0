"""Values that are not finite end their request whatever the KV cache's type: a quantised cache hides none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_driver import DictSource, Driver
from test_cpu_decoder import LIMITS
from test_models import config_of, random_prompts, reference, state_of
from thinned import every

from headrace.executor.cpu.decoder import CpuDecoder
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.kernels.cpu import build
from headrace.kernels.registry import choose_reference

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

BROKEN = 7
"""The token whose embedding is not finite."""
CACHES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def compiled(tensors: Any, dtype: torch.dtype) -> CpuDecoder:
    return CpuDecoder(spec_from_config(config_of("llama")), DictSource(tensors), dtype, LIMITS)


def eager(tensors: Any, dtype: torch.dtype) -> Decoder:
    return Decoder(spec_from_config(config_of("llama")), DictSource(tensors), dtype)


def by_reference(tensors: Any, dtype: torch.dtype) -> Decoder:
    spec = spec_from_config(config_of("llama"))
    return Decoder(spec, DictSource(tensors), dtype, choose=choose_reference)


@pytest.mark.parametrize("make", [compiled, eager, by_reference])
@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("scales", [(), (((0.02,), (0.02,)),) * 2], ids=["own scales", "the checkpoint's scales"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("block_size", every(2, [16, 8]))
def test_a_token_that_is_not_finite_spoils_what_attends_to_it_and_no_other_request(
    make: Callable[..., Any], cache: torch.dtype, scales: Any, value: float, block_size: int
) -> None:
    if scales and cache not in (torch.float8_e4m3fn, torch.float8_e5m2):
        pytest.skip("other caches have no scales of a checkpoint's")
    tensors = dict(state_of(reference("llama")))
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.embed_tokens.weight"][BROKEN] = value
    whole, other = ([each for each in prompt if each != BROKEN] for prompt in random_prompts((40, 21)))
    broken = [*whole[:9], BROKEN, *whole[9:]]
    decoder = make(tensors, torch.float32)
    driver = Driver(decoder, block_size, cache_dtype=cache, layer_scales=scales)
    _, (spoilt, good) = driver.greedy([broken, other], 2, chunk=8)
    assert not spoilt[0].isfinite().any()
    alone = Driver(decoder, block_size, cache_dtype=cache, layer_scales=scales).greedy([other], 2, chunk=8)[1][0]
    assert good.isfinite().all()
    assert torch.allclose(good, alone, atol=1e-4)
