"""`Tokenizer`: text to tokens and back, and chat templates, from the TokenizerBundle that a core sends."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from headrace.frontend.text.chat_template import ContentFormat, Message, render_chats
from headrace.frontend.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from headrace.frontend.text.guarded_tokenizer import GuardedTokenizer, is_panic
from headrace.frontend.text.transformers_names import TransformersNames, refuse_others
from headrace.ipc.failure import InvalidRequestError, ModelError
from headrace.ipc.messages import TokenizerBundle


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts are kept in a room, as the `tokenizers` library cuts them: the longer one first."""
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return (shorter, longer) if first <= second else (longer, shorter)


class Encoding(dict[str, Any]):
    """The result of calling a tokenizer: a dict whose fields are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"an encoding has no {name!r}; it has {', '.join(self)}") from None


def _unreadable(texts: Sequence[Any], error: TypeError) -> InvalidRequestError:
    """Why the library takes one of these for no text."""
    for text in texts:
        try:
            text.encode()
        except (AttributeError, UnicodeEncodeError) as found:
            return InvalidRequestError(f"the text {text!r:.50} is not valid Unicode text: {found}")
    return InvalidRequestError(f"the texts cannot be tokenized: {error}")


class Tokenizer(TransformersNames):
    """A model's tokenizer. Thread-safe. Method names are those of transformers."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        """Raises ModelError if the `tokenizers` library cannot read the bundle."""
        import tokenizers

        try:
            library = tokenizers.Tokenizer.from_buffer(bundle.tokenizer_json)
        except BaseException as error:  # the library raises plain Exception for its faults, and panics, which are none
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise ModelError(
                "the model's tokenizer cannot be read by tokenizers "
                f"{getattr(tokenizers, '__version__', f'({tokenizers.__file__})')}: {error}"
            ) from error
        self._tokenizer = GuardedTokenizer(library, bundle.tokenizer_json)
        # Files often carry truncation and padding settings of a training run; prompts must not be cut or padded.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = bundle.split_special_tokens
        self._bundle = bundle
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._token_bytes: dict[bool, Mapping[int, bytes]] | None = None
        if _is_byte_level(self._tokenizer):
            self._token_bytes = {
                True: _TokenBytes(self._tokenizer, self.special_ids),
                False: _TokenBytes(self._tokenizer, frozenset()),
            }
        self._decoded_tokens: dict[int, str] = {}
        self._near: dict[str, dict[int, bytes]] = {}

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        *,
        truncation: bool | None = None,
        max_length: int | None = None,
        **others: Any,
    ) -> Encoding:
        """`input_ids`, and an `attention_mask` of as many ones; for a list of texts, lists of these.

        truncation: keep the first `max_length` tokens, or the last if `truncation_side` is left. `others` are
        transformers' further arguments; each must have a value that has no effect. Raises InvalidRequestError, also if
        `text` is no text or list of texts.
        """
        refuse_others("a tokenizer's call", others)
        if isinstance(text, str):
            ids: Any = self.encode(text, add_special_tokens, truncation=truncation, max_length=max_length)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        if not isinstance(text, Sequence) or not all(isinstance(each, str) for each in text):
            raise InvalidRequestError(f"a tokenizer is called with a text or a list of them, not {type(text).__name__}")
        if truncation:
            ids = [self.encode(each, add_special_tokens, truncation=True, max_length=max_length) for each in text]
        else:
            ids = self.encode_batch(text, add_special_tokens)
        return Encoding(input_ids=ids, attention_mask=[[1] * len(each) for each in ids])

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        truncation: bool | None = None,
        max_length: int | None = None,
        **others: Any,
    ) -> list[int]:
        """The token ids of a text. Arguments and errors are those of `__call__`."""
        if others:
            refuse_others("encode", others)
        try:
            encoded = self._tokenizer.encode(text, add_special_tokens=add_special_tokens and not truncation)
        except TypeError as error:
            raise _unreadable([text], error) from None
        if truncation:
            if max_length is None:
                raise InvalidRequestError("truncation needs max_length: a tokenizer does not know the engine's limit")
            num_special = self.num_special_tokens_to_add() if add_special_tokens else 0
            encoded.truncate(max(0, max_length - num_special), direction=self.truncation_side)
            encoded = self._tokenizer.post_process(encoded, None, add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def count_tokens(self, text: str) -> int:
        """Number of tokens in a text, without added special tokens."""
        return len(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def beginning(self, text: str, num_tokens: int) -> str:
        """The part of a text of which its first tokens are."""
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return text[: offsets[num_tokens - 1][1]] if len(offsets) > num_tokens else text

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` for many texts at once, on several threads."""
        try:
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise _unreadable(texts, error) from None
        return [each.ids for each in encoded]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], max_length: int | None = None, *, from_left: bool = False
    ) -> list[tuple[list[int], int | None]]:
        """For each pair its token ids, as the model joins two texts, and the index of the second text's first token, if
        the model has a token type for it. max_length: the longer text is cut first, at its end or its beginning."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        try:
            encoded = dict(zip(texts, self._tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True))
        except TypeError as error:
            raise _unreadable(texts, error) from None
        num_special, found = self._tokenizer.num_special_tokens_to_add(True), list[tuple[list[int], int | None]]()
        for pair in pairs:
            parts = [encoded[text] for text in pair]
            if max_length is not None:
                room = max(0, max_length - num_special)
                kept = _longest_first(len(parts[0].ids), len(parts[1].ids), room)
                for index, most in enumerate(kept):
                    if len(parts[index].ids) > most:
                        (parts[index],) = self._tokenizer.encode_batch_fast([pair[index]], add_special_tokens=False)
                        parts[index].truncate(most, direction="left" if from_left else "right")
            joined = self._tokenizer.post_process(parts[0], parts[1], True)
            ids, types = joined.ids, joined.type_ids
            found.append((ids, types.index(1) if 1 in types else None))
        return found

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **others: Any) -> str:
        """The text of a token id, or of several in a list, an array or a tensor. Raises InvalidRequestError."""
        if others:
            refuse_others("decode", others)
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = [ids] if isinstance(ids, int) else list(ids)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False, **others: Any) -> list[str]:
        """`decode` for many sequences. Raises InvalidRequestError."""
        refuse_others("batch_decode", others)
        listed = [each.tolist() if hasattr(each, "tolist") else list(each) for each in sequences]
        texts: list[str] = self._tokenizer.decode_batch(listed, skip_special_tokens=skip_special_tokens)
        return texts

    def decode_token(self, token_id: int) -> str:
        """The text of a single token, as log-probabilities show it. Cached."""
        text = self._decoded_tokens.get(token_id)
        if text is None:
            text = self._decoded_tokens[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, which may be part of a character."""
        if self._token_bytes is not None:
            return self._token_bytes[False][token_id]
        byte = _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "")
        return bytes.fromhex(byte.group(1)) if byte is not None else self.decode_token(token_id).encode()

    def tokens_near(self, text: str) -> dict[int, bytes]:
        """The bytes of each token that may write a part of `text`, alone or with more around it. Cached: the first call
        takes tenths of a second for a large vocabulary."""
        if (found := self._near.get(text)) is not None:
            return found
        added, written = self._tokenizer.get_added_tokens_decoder(), _Overlap(text)
        found = {at: each.content.encode() for at, each in added.items() if written.has(each.content)}
        is_byte_level, letters = self._token_bytes is not None, {byte: each for each, byte in _byte_alphabet().items()}
        spelt = "".join(letters[byte] for byte in text.encode()) if is_byte_level else text.replace(" ", _SPACE)
        overlap, bytes_of_text = _Overlap(spelt), {f"<0x{byte:02X}>" for byte in text.encode()}
        for token, token_id in self._tokenizer.get_vocab(with_added_tokens=False).items():
            if (is_byte_level and overlap.has(token)) or (not is_byte_level and token in bytes_of_text):
                found[token_id] = self.token_bytes(token_id)
            elif not is_byte_level and overlap.has(token):
                found[token_id] = token.replace(_SPACE, " ").encode()
        self._near[text] = found
        return found

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
    ) -> Detokenizer:
        """An incremental detokenizer for one output, which continues `prompt_token_ids`.

        spaces_between_special_tokens: False leaves out the spaces that a decoder of words puts between added tokens.
        """
        if self._token_bytes is not None:
            return ByteDetokenizer(self._token_bytes[skip_special_tokens])
        skipped = self.special_ids if skip_special_tokens else frozenset()
        joined = {} if spaces_between_special_tokens else self._added
        return WindowDetokenizer(self, skipped, prompt_token_ids, joined)

    def tokenize(self, text: str) -> list[str]:
        """A text's tokens as the vocabulary spells them, without added special tokens."""
        tokens: list[str] = self._tokenizer.encode(text, add_special_tokens=False).tokens
        return tokens

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary without added tokens."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=False)
        return size

    @functools.cached_property
    def longest_token(self) -> int:
        """Length of the longest token's spelling in characters; a token's text is no longer than its spelling."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def __len__(self) -> int:
        """Size of the vocabulary with added tokens."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def added_tokens(self) -> Iterable[str]:
        """The texts of the tokens that were added to the vocabulary, special ones among them."""
        return self._added.values()

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """The id of every special token, by its text."""
        return {text: each for each in sorted(self.special_ids) if (text := self._tokenizer.id_to_token(each))}

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it; None if it has none."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    @property
    def special_tokens_map(self) -> dict[str, str]:
        return dict(self._bundle.special_tokens)

    @property
    def bos_token(self) -> str | None:
        return self._bundle.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._bundle.special_tokens.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self._tokenizer.token_to_id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self._tokenizer.token_to_id(self.eos_token)

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self.special_ids)

    @property
    def chat_template_names(self) -> tuple[str, ...]:
        """Names of the chat templates that the model ships."""
        return tuple(self._bundle.chat_templates)

    def get_chat_template(self, chat_template: str | None = None, tools: Sequence[Any] | None = None) -> str:
        """The template's text: of the model's template of that name, else the given text; without one, the model's
        default (tool_use with tools, if it has that). Raises InvalidRequestError if there is none."""
        templates = self._bundle.chat_templates
        if chat_template is not None:
            return templates.get(chat_template, chat_template)
        name = "tool_use" if tools is not None and "tool_use" in templates else "default"
        if name in templates:
            return templates[name]
        if templates:
            raise InvalidRequestError(
                f"the model has no usual chat template; name one of {', '.join(sorted(templates))} as chat_template"
            )
        raise InvalidRequestError(
            "the model has no chat template, so it may not be a chat model: pass chat_template, or use generate"
        )

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tokenize: bool = True,
        return_dict: bool = False,
        **options: Any,
    ) -> Any:
        """The prompt for a conversation: token ids, or its text if `tokenize` is False; return_dict asks for an
        Encoding. options: as `render_chats`. Raises InvalidRequestError.
        """
        (text,) = self.render_chats([conversation], **options)
        # The template writes the special tokens itself.
        if not tokenize:
            return text
        return self(text, add_special_tokens=False) if return_dict else self.encode(text, add_special_tokens=False)

    def render_chats(
        self,
        conversations: Sequence[Sequence[Message]],
        /,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_content_format: ContentFormat = "auto",
        **variables: Any,
    ) -> Iterator[str]:
        """The prompts' texts for several conversations; the next are rendered while the caller works with the first.
        variables: further template variables. Raises InvalidRequestError."""
        return render_chats(
            self.get_chat_template(chat_template, tools),
            conversations,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            variables={**self._bundle.special_tokens, **variables},
            content_format=chat_template_content_format,
        )


_SPACE = "\u2581"
"""SentencePiece's spelling of a space."""
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"""SentencePiece's spelling of a single byte, for characters that its vocabulary lacks."""


class _Overlap:
    """Finds tokens that may have a part of a text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._beginnings = tuple(text[:count] for count in range(1, len(text) + 1))
        self._ends = tuple(text[at:] for at in range(len(text)))

    def has(self, token: str) -> bool:
        is_affix = token.endswith(self._beginnings) or token.startswith(self._ends)
        return bool(token) and (is_affix or token in self._text or self._text in token)


class _TokenBytes(dict[int, bytes]):
    """Each token's bytes, computed on first use, since an output uses little of a large vocabulary."""

    def __init__(self, tokenizer: Any, skipped_ids: frozenset[int]) -> None:
        super().__init__()
        self._token_of, self._skipped_ids = tokenizer.id_to_token, skipped_ids
        self._byte_of = _byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        token: str = "" if token_id in self._skipped_ids else self._token_of(token_id) or ""
        try:
            value = bytes(map(self._byte_of.__getitem__, token))
        except KeyError:
            value = token.encode()  # an added token, spelt as text
        self[token_id] = value
        return value


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character in the byte-level alphabet (GPT-2; Radford et al. 2019, section 2.2): printable bytes
    stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _is_byte_level(tokenizer: Any) -> bool:
    decoder = tokenizer.decoder
    return decoder is not None and json.loads(decoder.__getstate__()).get("type") == "ByteLevel"
