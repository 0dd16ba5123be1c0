"""What the `tokenizers` library panics of is found while a tokenizer is read, not in the first prompt."""

from __future__ import annotations

from typing import Any


def try_out(tokenizer: Any) -> None:
    """Raises ValueError where the library panics, as for a token of the post-processor that is not described."""
    try:
        tokenizer.decode(tokenizer.encode("A text, in 2 parts.").ids)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # no Exception, and not to be imported
            raise
        raise ValueError(f"the library panics: {error}") from None
