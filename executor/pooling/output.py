"""How the results of one kind are made of a model's hidden states, as data. Imports no torch.

embed            CLS > Dense > normalize                       token_embed   ALL > Dense > normalize
embed of SPLADE  vocabulary's layers > MAX > log1p_relu        embed_sparse  the same, its values that are not 0
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.executor.models.heads import HeadLayer


@dataclass(frozen=True)
class PooledOutput:
    tokens: str
    """The token pooling, one of `TOKEN_POOLINGS` (executor/pooling/pooler.py), or several with JOINT between them."""
    layers: tuple[HeadLayer, ...] = ()
    """Behind the pooling."""
    activation: str = "normalize"
    """Behind the layers: `normalize`, or one of `FUNCTIONS` (executor/pooling/head.py)."""
    mean: float = 0.0
    sigma: float = 1.0
    """Of logits: the one is taken from them, and they are divided by the other, before the activation."""
    head_first: bool = False
    """The layers come before the pooling."""
    is_sparse: bool = False
    """The result are pairs of a token id and its weight above 0: of ALL, the largest of each of the prompt's tokens;
    else those values of the vector over the vocabulary that are not 0."""
    is_flat: bool = False
    """Of ALL: one number for each token."""
    skipped: tuple[int, ...] = ()
    """Of ALL: tokens that have no vector."""
    kept: int | None = None
    """How many values are kept behind the activation, which has seen all of them; None: all."""
