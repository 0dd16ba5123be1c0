"""The requests of a benchmark, from a dataset's name. The same options and seed give the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from headrace.core.options.values import read_options
from headrace.frontend.bench.options import WorkloadOptions
from headrace.ipc.failure import OptionError

_FIRST_ORDINARY_ID = 3
"""Lower ids are special tokens in most vocabularies."""
_FIT_ROUNDS = 8


class BenchRequest(NamedTuple):
    prompt: str | list[int]
    num_prompt_tokens: int | None
    """None where only the server can count them."""
    output_len: int
    at_s: float | None = None
    """When the file says that it arrived, counted from the first."""
    part: str = ""
    """Of a mixed workload: the part that it is from."""


class TextTokenizer(Protocol):
    """What a workload needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    @property
    def ordinary_ids(self) -> Sequence[int]:
        """Those that are no special tokens."""
        ...


class FileTokenizer:
    """A tokenizer.json."""

    def __init__(self, path: str) -> None:
        """Of the file, or of the folder that holds it. Raises OptionError."""
        import tokenizers

        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise OptionError(f"--tokenizer={path}: it must be a folder with a tokenizer.json, or such a file")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for every fault
            raise OptionError(f"--tokenizer={path}: {file} cannot be read as a tokenizer: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        special = {key for key, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self.ordinary_ids = [key for key in range(self._tokenizer.get_vocab_size()) if key not in special]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text


class PromptMaker:
    """Draws prompts of a given length: as text where there is a tokenizer, else as token ids."""

    def __init__(self, vocab_size: int, tokenizer: TextTokenizer | None = None) -> None:
        self.tokenizer = tokenizer
        self.ids: Sequence[int] = (
            tokenizer.ordinary_ids
            if tokenizer is not None
            else range(min(_FIRST_ORDINARY_ID, vocab_size - 1), vocab_size)
        )

    def draw(self, numbers: random.Random, length: int) -> list[int]:
        return numbers.choices(self.ids, k=length)

    def prompt(self, token_ids: list[int], numbers: random.Random) -> tuple[str | list[int], int]:
        """These tokens as a prompt, and its length. Text keeps the length, where its tokens may become others."""
        if self.tokenizer is None:
            return token_ids, len(token_ids)
        length, tokens = len(token_ids), token_ids
        text = ""
        for _ in range(_FIT_ROUNDS):  # tokens that meet may join, so text is fitted until its length stays
            text = self.tokenizer.decode(tokens)
            again = self.tokenizer.encode(text)
            if len(again) == length:
                return text, length
            tokens = again[:length] + self.draw(numbers, max(0, length - len(again)))
        return text, len(self.tokenizer.encode(text))

    def count(self, text: str) -> int | None:
        return None if self.tokenizer is None else len(self.tokenizer.encode(text))

    def estimate(self, text: str) -> int:
        """The number of tokens; without a tokenizer from the four characters that a token of English has."""
        counted = self.count(text)
        return max(1, len(text) // 4) if counted is None else counted


Dataset = Callable[[WorkloadOptions, PromptMaker], list[BenchRequest]]


def make_workload(options: WorkloadOptions, maker: PromptMaker) -> list[BenchRequest]:
    """As many requests as asked for, or fewer with `no_oversample`. Raises OptionError that names file and line."""
    from headrace.frontend.bench import datasets

    makers: dict[str, Dataset] = {
        "random": _random,
        "prefix_repetition": _prefix_repetition,
        "sharegpt": datasets.sharegpt,
        "burstgpt": datasets.burstgpt,
        "timed_trace": datasets.timed_trace,
        "custom": datasets.custom,
        "mixed": _mixed,
    }
    requests = makers[options.dataset_name](options, maker)
    if not requests:
        raise OptionError(f"--dataset-path={options.dataset_path}: it holds no request that could be sent")
    return requests


def _random(options: WorkloadOptions, maker: PromptMaker) -> list[BenchRequest]:
    numbers = random.Random(options.seed)
    prefix = maker.draw(numbers, options.random_prefix_len)
    requests = []
    for _ in range(options.num_prompts):
        input_len = _spread(numbers, options.input_len or options.random_input_len, options.random_range_ratio)
        output_len = _spread(numbers, options.output_len or options.random_output_len, options.random_range_ratio)
        prompt, length = maker.prompt(prefix + maker.draw(numbers, input_len), numbers)
        requests.append(BenchRequest(prompt, length, output_len))
    return requests


def _spread(numbers: random.Random, length: int, ratio: float) -> int:
    return max(1, numbers.randint(int(length * (1 - ratio)), round(length * (1 + ratio))))


def _prefix_repetition(options: WorkloadOptions, maker: PromptMaker) -> list[BenchRequest]:
    num_prefixes = options.prefix_repetition_num_prefixes
    if options.num_prompts < num_prefixes:
        raise OptionError(
            f"--num-prompts={options.num_prompts}: with {num_prefixes} prefixes it must be at least {num_prefixes}"
        )
    numbers = random.Random(options.seed)
    prefixes = [maker.draw(numbers, options.prefix_repetition_prefix_len) for _ in range(num_prefixes)]
    suffix_len = options.input_len or options.prefix_repetition_suffix_len
    requests = []
    for number in range(options.num_prompts):
        tokens = prefixes[number % num_prefixes] + maker.draw(numbers, suffix_len)
        prompt, length = maker.prompt(tokens, numbers)
        requests.append(BenchRequest(prompt, length, options.output_len or options.prefix_repetition_output_len))
    if not options.disable_shuffle:
        numbers.shuffle(requests)
    return requests


class _Mix(msgspec.Struct, forbid_unknown_fields=True):
    """The file of a mixed workload: parts with a weight and the options of their dataset."""

    parts: dict[str, dict[str, Any]]


def _mixed(options: WorkloadOptions, maker: PromptMaker) -> list[BenchRequest]:
    from headrace.frontend.bench.datasets import read_file

    path, text = read_file(options)
    try:
        mix = msgspec.json.decode(text, type=_Mix)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise OptionError(
            f'--dataset-path={path}: {error}; a mix is {{"parts": {{NAME: {{"weight": 1, "dataset_name": ...}}}}}}'
        ) from None
    weights = {name: part.pop("weight", 1) for name, part in mix.parts.items()}
    wrong = [name for name, weight in weights.items() if not isinstance(weight, int | float) or not weight > 0]
    if wrong or not weights:
        raise OptionError(f"--dataset-path={path}: a mix has parts, and each weight is over 0; see {wrong or 'parts'}")
    requests: list[BenchRequest] = []
    for (name, part), count in zip(
        mix.parts.items(), _shares(list(weights.values()), options.num_prompts), strict=True
    ):
        if count == 0:
            continue
        try:
            own, _ = read_options(WorkloadOptions, {"seed": options.seed, **part, "num_prompts": count})
        except OptionError as error:
            raise OptionError(f"--dataset-path={path}: part {name}: {error}") from None
        if own.dataset_name == "mixed":
            raise OptionError(f"--dataset-path={path}: part {name}: a mix cannot hold a mix")
        if own.dataset_path is not None:  # beside the mix, wherever the command runs
            own = msgspec.structs.replace(own, dataset_path=str(path.parent / own.dataset_path))
        requests += [request._replace(part=name) for request in make_workload(own, maker)]
    if not options.disable_shuffle:
        random.Random(options.seed).shuffle(requests)
    return requests


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to the weights that add up to `total` (largest remainders)."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(each) for each in exact]
    order = sorted(range(len(exact)), key=lambda at: shares[at] - exact[at])
    for at in order[: total - sum(shares)]:
        shares[at] += 1
    return shares
