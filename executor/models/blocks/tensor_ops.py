"""What several blocks compute with `Ops.call`, op by op: plain functions of tensors."""

from __future__ import annotations

from headrace.executor.models.blocks import Value


def columns(x: Value, first: int, last: int | None) -> Value:
    return x[:, first:last].contiguous()


def copied(x: Value) -> Value:
    """A copy, since norms may overwrite their input."""
    return x.clone()


def added(x: Value, y: Value) -> Value:
    return x + y


def beside(*parts: Value) -> Value:
    from torch import cat  # blocks are also imported where torch is not installed

    return cat(parts, dim=-1)


def scaled(x: Value, factor: Value) -> Value:
    """factor: [1] float32"""
    return (x * factor).to(x.dtype)
