"""What a step computes, as a model's declaration says, beside what torch counts in transformers' code."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch
from torch.utils.flop_counter import FlopCounterMode

from headrace.core.options.parsing import parse_options
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.models.implementations import find_model
from headrace.executor.models.sizes import step_work


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gemma2", "gemma3"])
def test_a_dense_model_computes_what_torch_counts(name: str, tmp_path: Path) -> None:
    model = tiny_models.build(name)
    model.save_pretrained(tmp_path)
    work = step_work(find_model(open_checkpoint(parse_options(model=str(tmp_path))), parse_options()).spec)
    assert work is not None
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.tensor([[5]]))
    pairs = sum(each.pair_flops for each in work.attention)
    counted = counter.get_total_flops()
    assert (
        work.token_flops + work.output_flops <= counted <= work.token_flops + work.output_flops + pairs + counted / 50
    )


def test_experts_count_by_those_that_a_token_chooses(tmp_path: Path) -> None:
    model = tiny_models.build("mixtral")
    model.save_pretrained(tmp_path)
    work = step_work(find_model(open_checkpoint(parse_options(model=str(tmp_path))), parse_options()).spec)
    config = model.config
    assert work is not None
    assert work.chosen_share == config.num_experts_per_tok / config.num_local_experts
    expert = 3 * config.hidden_size * config.intermediate_size
    total = sum(each.numel() for each in model.parameters())
    stored = config.num_hidden_layers * config.num_local_experts * expert
    assert work.expert_share == pytest.approx(stored / total)
    chosen = config.num_hidden_layers * config.num_experts_per_tok * expert
    assert work.token_flops > 2 * chosen
    assert work.token_flops < 2 * (chosen + total - stored)
