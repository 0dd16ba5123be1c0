"""`TransformersNames`: tokenizer methods of transformers that scripts use and Headrace itself does not need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.ipc.failure import InvalidRequestError

if TYPE_CHECKING:
    from headrace.ipc.messages import TokenizerBundle

WITH_TRANSFORMERS = "get_tokenizer(hf=True) gives transformers' own tokenizer, where that is installed"
_ROLES = ("unk_token", "sep_token", "cls_token", "mask_token")
_OF_A_CALL: Mapping[str, tuple[Any, ...]] = {"return_attention_mask": (True,), "clean_up_tokenization_spaces": ()}
"""Values of transformers' arguments that are accepted, because they ask for what a tokenizer does anyway."""


def refuse_others(method: str, given: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError for an argument of transformers' whose value would have an effect."""
    for name, value in given.items():
        if value is not None and value is not False and value not in _OF_A_CALL.get(name, ()):
            raise InvalidRequestError(f"{method}: {name} is refused: {WITH_TRANSFORMERS}")


class TransformersNames:
    """A mixin of Tokenizer. A missing attribute's error says how to get transformers' own tokenizer."""

    _tokenizer: Any
    _bundle: TokenizerBundle
    _pad_token: str | None = None
    unk_token: str | None  # this and the following are read by __getattr__
    unk_token_id: int | None
    sep_token: str | None
    sep_token_id: int | None
    cls_token: str | None
    cls_token_id: int | None
    mask_token: str | None
    mask_token_id: int | None

    is_fast = True

    @property
    def truncation_side(self) -> str:
        """For `truncation` in a tokenizer's call, and for texts that are pooled. Other requests truncate on the left by
        default (truncate_prompt_tokens)."""
        return self._bundle.truncation_side

    @property
    def chat_template(self) -> str | None:
        """The model's default chat template."""
        return self._bundle.chat_templates.get("default")

    @property
    def pad_token(self) -> str | None:
        """May be set, for scripts that pad batches."""
        return self._pad_token or self._bundle.special_tokens.get("pad_token")

    @pad_token.setter
    def pad_token(self, token: str | None) -> None:
        self._pad_token = token

    @property
    def pad_token_id(self) -> int | None:
        return None if self.pad_token is None else self.convert_tokens_to_ids(self.pad_token)

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens' texts, ordered by id."""
        added = self._tokenizer.get_added_tokens_decoder()
        return [token.content for _, token in sorted(added.items()) if token.special]

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Added tokens of the `tokenizers` library, by id."""
        return dict(sorted(self._tokenizer.get_added_tokens_decoder().items()))

    @property
    def added_tokens_encoder(self) -> dict[str, int]:
        return {token.content: token_id for token_id, token in self.added_tokens_decoder.items()}

    def get_added_vocab(self) -> dict[str, int]:
        return self.added_tokens_encoder

    def get_vocab(self) -> dict[str, int]:
        """Ids by token, with added tokens."""
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocab

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()

    @property
    def max_token_id(self) -> int:
        return max(self.get_vocab().values())

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """Number of special tokens that encoding adds to a text, or to a pair of texts."""
        count: int = self._tokenizer.num_special_tokens_to_add(pair)
        return count

    def convert_ids_to_tokens(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> Any:
        """The tokens of a list of ids as the vocabulary spells them; None for an unknown id. For a single id, its
        token."""
        if isinstance(ids, int):
            return self._tokenizer.id_to_token(ids)
        spelt = [self._tokenizer.id_to_token(token_id) for token_id in ids]
        if not skip_special_tokens:
            return spelt
        special = set(self.all_special_tokens)
        return [token for token in spelt if token not in special]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token in the vocabulary's spelling, or those of a list; for an unknown token, unk_token's id or
        None."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id: int | None = self._tokenizer.token_to_id(tokens)
        unknown = self._bundle.special_tokens.get("unk_token")
        return self._tokenizer.token_to_id(unknown) if token_id is None and unknown is not None else token_id

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """The text of tokens in the vocabulary's spelling."""
        decoder = self._tokenizer.decoder
        text: str = " ".join(tokens) if decoder is None else decoder.decode(list(tokens))
        return text

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            role = name.removesuffix("_id")
            if role not in _ROLES:
                raise AttributeError(f"{type(self).__name__} has no {name!r}: {WITH_TRANSFORMERS}")
            token = self._bundle.special_tokens.get(role)
            return token if name == role or token is None else self._tokenizer.token_to_id(token)
