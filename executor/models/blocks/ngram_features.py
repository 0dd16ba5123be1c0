"""Features of n-grams that a layer adds to a residual stream of several rows (Qwen4-Exp's "per-layer embeddings"):
each n-gram that ends with a token has rows in a table by its hashes, from which a value and a key for each row of the
stream are projected; how well a row fits its key decides how much of the value it gets, and a convolution over what
it got, of tokens some distance apart, is added too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.executor.models.arch import ArchSpec, Kept
from headrace.executor.models.blocks import (
    Declared,
    LayerOps,
    Linear,
    Norm,
    Value,
    Weight,
)
from headrace.executor.models.blocks.linear_attention import DeltaRule
from headrace.executor.models.blocks.short_convolution import Convolve
from headrace.executor.models.blocks.tensor_ops import added, copied

HISTORY = "history_ngrams"
LEAST_FIT = 1e-6
"""The least magnitude of the product of a row and its key, of which the root is taken."""


@dataclass(frozen=True)
class NGramRows(Declared):
    """mix(): each token's rows of the table, side by side, [num_tokens, number of hashes * width].

    The hash of the n-gram of tokens t, t - 1, ... is the exclusive or of their ids times a multiplier each, modulo the
    number of rows that the hash has; the rows of the next hash follow. Tokens before the sequence, and an end token and
    all before it, count as the end token."""

    eager_reader = "headrace.executor.models.eager_ngrams:EagerNGramRows"

    at: str
    hashes: int
    """For each length of n-grams, which are 2 tokens and more."""
    rows: tuple[int, ...]
    """Of each hash; those of the shortest n-grams come first."""
    stored_rows: int
    width: int
    multipliers: tuple[int, ...]
    """Of a token's own id, of that before it, and so on."""
    end_id: int

    @property
    def reach(self) -> int:
        """Number of tokens before a token that its rows depend on."""
        return len(self.multipliers) - 1

    @property
    def columns(self) -> int:
        return len(self.rows) * self.width

    def weights(self) -> Iterator[Weight]:
        yield Weight(f"{self.at}.ngram_embedding.weight", (self.stored_rows, self.width), "embedding")


@dataclass(frozen=True, kw_only=True)
class NGramDeltaRule(DeltaRule):
    """A gated delta network's mixer in a layer that adds features of n-grams to the stream before it. Names of their
    weights begin with `ple`."""

    cpu_alone = "embeddings of n-grams in layers"

    ngrams: NGramRows
    num_rows: int
    """Of the stream."""
    hidden: int
    taps: int
    """Of the convolution, which are as many tokens apart as the longest n-gram has."""

    @property
    def lookback(self) -> int:
        return self.ngrams.reach

    @property
    def _width(self) -> int:
        return self.num_rows * self.hidden

    @property
    def _distance(self) -> int:
        return len(self.ngrams.multipliers)

    def state(self, tp_size: int) -> tuple[Kept, ...]:
        return (*super().state(tp_size), Kept(HISTORY, ((self.taps - 1) * self._distance, self._width)))

    def draft_elements(self, tp_size: int) -> int:
        """The features' come first."""
        return self._width + super().draft_elements(tp_size)

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        columns = self.ngrams.columns
        norms = {
            name: replace(Norm.of(spec, f"ple.norm_{name}", self._width), groups=self.num_rows)
            for name in ("key", "query", "conv")
        }
        return {
            **super().declare(spec),
            **norms,
            "ngrams": self.ngrams,
            "keys": Linear((("ple.key_proj", self._width),), columns),
            "values": Linear((("ple.value_proj", self.hidden),), columns),
            "convolve_ngrams": Convolve(
                (("ple.conv1d", self._width),),
                self.taps,
                activation="silu",
                distance=self._distance,
                history=HISTORY,
            ),
        }

    @property
    def first_draft_element(self) -> int:
        return self._width

    def with_features(self, ops: LayerOps, held: Mapping[str, Any], x: Value) -> Value:
        """x: the stream -> the stream with the features"""
        found = ops.mix(held["ngrams"])
        keys = ops.norm(held["key"], ops.linear(held["keys"], found))
        rows = ops.norm(held["query"], ops.call(copied, x))
        taken = ops.call(self._taken, rows, keys, ops.linear(held["values"], found))
        convolved = ops.mix(held["convolve_ngrams"], ops.norm(held["conv"], ops.call(copied, taken)))
        return ops.call(added, x, ops.call(added, taken, convolved))

    def _taken(self, rows: Value, keys: Value, values: Value) -> Value:
        """rows, keys [num_tokens, num_rows * hidden], values [num_tokens, hidden] -> as rows"""
        shape = (self.num_rows, self.hidden)
        fit = (keys.unflatten(1, shape).float() * rows.unflatten(1, shape).float()).sum(-1) * self.hidden**-0.5
        share = (fit.abs().clamp(min=LEAST_FIT).sqrt() * fit.sign()).sigmoid()
        return (share[..., None] * values[:, None]).flatten(1).to(rows.dtype)

    def values_per_token(self, tp_size: int) -> int:
        return super().values_per_token(tp_size) + 6 * self._width + 2 * self.ngrams.columns

    def problem(self) -> str:
        if self.taps < 2:
            return f"a convolution of {self.taps} taps; it must have at least 2"
        return super().problem()

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return "the program reads no n-grams."
