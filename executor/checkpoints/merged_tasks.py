"""Jina Embeddings 3 as its authors publish it: the LoRA factors of all tasks are stacked beside each matrix. One task
is merged into the weights, as vLLM does it.

    mixer.Wqkv.parametrizations.weight.original    [rows, columns]
    mixer.Wqkv.parametrizations.weight.0.lora_A    [tasks, rank, columns]; of embeddings [tasks, rows, rank]
    mixer.Wqkv.parametrizations.weight.0.lora_B    [tasks, rows, rank]; of embeddings [tasks, rank, columns]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headrace.executor.checkpoints.weights import StoredTensor, Weights, take_part
from headrace.ipc.failure import ModelError

MARK = ".parametrizations.weight."
ORIGINAL, A, B = f"{MARK}original", f"{MARK}0.lora_A", f"{MARK}0.lora_B"
DEFAULT_TASK = "text-matching"


def with_task(weights: Weights, config: Mapping[str, Any]) -> Weights:
    """The weights with the config's task; unchanged without such factors. Raises ModelError for an unknown task."""
    tasks, held = config.get("lora_adaptations"), weights.names()
    makes = frozenset(name.replace(ORIGINAL, ".weight") for name in held if name.endswith(ORIGINAL))
    if not makes:
        return weights
    task = config.get("default_task") or DEFAULT_TASK
    if not isinstance(tasks, list) or task not in tasks:
        known = ", ".join(map(str, tasks)) if isinstance(tasks, list) else "none"
        raise ModelError(f"the config's default_task is {task!r:.100}; its lora_adaptations are {known}")
    index, alpha, rank = tasks.index(task), config.get("lora_alpha", 1), config.get("lora_rank")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ModelError(f"the config's lora_rank is {rank!r:.100} and its lora_alpha {alpha!r:.100}: not numbers")

    def stored(name: str) -> StoredTensor:
        stem = name.removesuffix(".weight")
        original = weights.stored(stem + ORIGINAL)

        def part(rows: slice | None, columns: slice | None) -> Tensor:
            found = weights.get(stem + ORIGINAL, rows, columns)
            if stem + A not in held:
                return found
            first, second = (weights.get(stem + each)[index].float() for each in (A, B))
            delta = second @ first if second.shape[0] == original.shape[0] else first @ second
            return (found.float() + take_part(delta, original.shape, rows, columns) * (alpha / rank)).to(found.dtype)

        return StoredTensor.plain(original.shape, original.format, part)

    gone = frozenset(name for name in held if MARK in name)
    return weights.then(f"the task {task}", makes, stored, gone)
