"""Embeddings of n-grams beside those of tokens (LongCat-Flash-Lite: Meituan 2026): a token's embedding is the mean of
its own and of projected rows of several tables, in which each n-gram that ends with the token has a row by its hash."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.executor.models.blocks import Declared, Weight


@dataclass(frozen=True)
class NGrams(Declared):
    """Its eager form is called with (token_ids, earlier_ids, embedded).

    The n-gram of tokens t, t - 1, ... t - n + 1 has the row (id[t] + id[t - 1] vocab_size + id[t - 2] vocab_size^2 +
    ...) modulo the table's rows. Tokens before the sequence, and an end token and all before it, count as 0; but a
    token's own id counts even if it is the end token, as in the code beside the checkpoints."""

    eager_reader = "headrace.executor.models.eager_ngrams:EagerNGrams"

    longest: int
    """Tokens of the longest n-grams; the shortest have two."""
    splits: int
    """Tables of each length."""
    first_rows: int
    """Rows of the first table; each further one has two more."""
    width: int
    """Columns of a table."""
    hidden: int
    vocab_size: int
    end_id: int
    at: str = "ngram_embeddings"
    """What the names of its weights begin with."""

    @property
    def reach(self) -> int:
        """Number of tokens before a token that its embedding depends on."""
        return self.longest - 1

    @property
    def rows(self) -> tuple[int, ...]:
        """Of each table; those of the shortest n-grams come first."""
        return tuple(self.first_rows + 2 * index for index in range(self.reach * self.splits))

    def weights(self) -> Iterator[Weight]:
        for index, rows in enumerate(self.rows):
            yield Weight(f"{self.at}.embedders.{index}.weight", (rows, self.width), "embedding")
            yield Weight(f"{self.at}.post_projs.{index}.weight", (self.hidden, self.width), "matrix")

    def problem(self) -> str:
        """What is inconsistent in its numbers, as the end of a sentence; "" if nothing is."""
        if self.longest < 2 or self.splits < 1:
            return f"n-grams of up to {self.longest} tokens in {self.splits} tables; at least 2 and 1 are needed"
        if self.width < 1 or self.width * len(self.rows) > self.hidden:
            return f"{len(self.rows)} tables of n-grams for {self.hidden} columns"
        return "" if self.first_rows >= 1 else f"tables of {self.first_rows} n-grams"
