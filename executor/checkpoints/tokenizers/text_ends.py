"""The special tokens that a tokenizer puts around a text."""

from __future__ import annotations

from typing import Any


def add_ends(tokenizer: Any, bos: str | None, eos: str | None) -> None:
    """Sets the post-processor to put these tokens around a text, and no others. They must be in the vocabulary."""
    from tokenizers import processors

    ends = [text for text in (bos, eos) if text is not None]
    first, last = ([text] if text is not None else [] for text in (bos, eos))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *(f"{text}:1" for text in first), "$B:1", *(f"{text}:1" for text in last)],
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in dict.fromkeys(ends)],
    )


def add_ends_of_encoder(tokenizer: Any, first: str, last: str, *, is_doubled: bool) -> None:
    """Puts `first` and `last` around a text, and `last` between two texts. is_doubled: twice, and both texts have one
    type of tokens, as RoBERTa has them; otherwise they have two, as BERT's."""
    from tokenizers import processors

    between, kind = ([last, last], 0) if is_doubled else ([last], 1)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", *between, f"$B:{kind}", f"{last}:{kind}"],
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in dict.fromkeys((first, last))],
    )
