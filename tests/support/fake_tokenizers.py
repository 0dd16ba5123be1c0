"""Two small tokenizers of the kinds that models use, built here, and the bundle that a core would send."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from headrace.ipc.messages import TokenizerBundle

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_tokenizer(vocab_size: int = 400) -> FastTokenizer:
    """BPE over bytes, as in GPT-2, Llama 3 and Qwen, with few merges so that characters are split."""
    return FastTokenizer.from_str(_trained(vocab_size))


@functools.cache
def _trained(vocab_size: int) -> str:
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog " * 20, "你好世界 😀 é ü STOP stop"],
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            show_progress=False,
        ),
    )
    return str(tokenizer.to_str())


def sentencepiece_tokenizer() -> FastTokenizer:
    """Pieces with a mark for the space, and one token per byte for the rest, as in Llama 2, Mistral and Gemma."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(each) for each in range(ord("a"), ord("z") + 1)] + list("ABCDE,.!?é世")
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("q", "u"), ("o", "x"), ("▁", "f"), ("▁f", "ox")]
    pieces += ["".join(pair) for pair in merges]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = FastTokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def bundle_of(tokenizer: FastTokenizer, **special_tokens: str) -> TokenizerBundle:
    return TokenizerBundle(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_templates={"default": CHAT_TEMPLATE},
        special_tokens=special_tokens or {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"},
    )
