"""The requests of a benchmark, from a dataset's name or file, and their schedule, which is fixed before the run.

The same options and seed give the same requests at the same times. An error in a file names the file, the line and the
field.
"""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from headrace.core.options.values import nearest, read_options
from headrace.frontend.bench.options import TrafficOptions, WorkloadOptions
from headrace.ipc.failure import OptionError
from headrace.ipc.struct_types import threadsafe

_FIRST_ORDINARY_ID = 3
"""Lower ids are special tokens in most vocabularies."""
_FIT_ROUNDS = 8


class BenchRequest(NamedTuple):
    prompt: str | list[int]
    num_prompt_tokens: int | None
    """None if only the server can count them."""
    output_len: int
    at_s: float | None = None
    """The arrival time in the dataset's file, in seconds since the first request's."""
    part: str = ""
    """In a mixed workload, the name of the part that it comes from."""
    more: tuple[str | list[int], ...] = ()
    """Further inputs of a request for vectors, or a query's documents. `num_prompt_tokens` counts them too."""


class TextTokenizer(Protocol):
    """The tokenizer methods that a workload uses."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    @property
    def ordinary_ids(self) -> Sequence[int]:
        """The ids of all tokens that are not special."""
        ...


class FileTokenizer:
    """A tokenizer from a tokenizer.json."""

    def __init__(self, path: str) -> None:
        """path: the file, or the folder that holds it. Raises OptionError."""
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
    """Draws random prompts of a given length: as text if there is a tokenizer, else as token ids."""

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
        """These tokens as a prompt, and its length. A text is adjusted so that it encodes to as many tokens, which may
        be others; the length returned is the one reached."""
        if self.tokenizer is None:
            return token_ids, len(token_ids)
        length, tokens = len(token_ids), token_ids
        text = ""
        for _ in range(_FIT_ROUNDS):  # neighbouring tokens may merge when encoded again
            text = self.tokenizer.decode(tokens)
            again = self.tokenizer.encode(text)
            if len(again) == length:
                return text, length
            tokens = again[:length] + self.draw(numbers, max(0, length - len(again)))
        return text, len(self.tokenizer.encode(text))

    def count(self, text: str) -> int | None:
        return None if self.tokenizer is None else len(self.tokenizer.encode(text))

    def estimate(self, text: str) -> int:
        """The number of tokens; without a tokenizer, one for every four characters, as in English text."""
        counted = self.count(text)
        return max(1, len(text) // 4) if counted is None else counted


Dataset = Callable[[WorkloadOptions, PromptMaker], list[BenchRequest]]


def make_workload(options: WorkloadOptions, maker: PromptMaker) -> list[BenchRequest]:
    """The requests: num_prompts, or fewer with `no_oversample`. Raises OptionError, which names file and line."""
    makers: dict[str, Dataset] = {
        "random": _random,
        "random-rerank": _random_rerank,
        "prefix_repetition": _prefix_repetition,
        "sharegpt": sharegpt,
        "burstgpt": burstgpt,
        "timed_trace": timed_trace,
        "custom": custom,
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
        more = _more(options, maker, numbers, options.random_batch_size - 1, prefix)
        num_tokens = length + sum(each for _, each in more)
        requests.append(BenchRequest(prompt, num_tokens, output_len, more=tuple(each for each, _ in more)))
    return requests


def _more(
    options: WorkloadOptions, maker: PromptMaker, numbers: random.Random, count: int, prefix: list[int]
) -> list[tuple[str | list[int], int]]:
    """Further inputs of a request, with their lengths."""
    found = []
    for _ in range(count):
        length = _spread(numbers, options.input_len or options.random_input_len, options.random_range_ratio)
        found.append(maker.prompt(prefix + maker.draw(numbers, length), numbers))
    return found


def _random_rerank(options: WorkloadOptions, maker: PromptMaker) -> list[BenchRequest]:
    """A query and its documents. A server reads the query once for each of them."""
    numbers, requests = random.Random(options.seed), list[BenchRequest]()
    for _ in range(options.num_prompts):
        ((query, length), *documents) = _more(options, maker, numbers, 1 + options.random_batch_size, [])
        num_tokens = sum(length + each for _, each in documents)
        requests.append(BenchRequest(query, num_tokens, 0, more=tuple(each for each, _ in documents)))
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
    """The file of a mixed workload: parts, each with a weight and the options of its dataset."""

    parts: dict[str, dict[str, Any]]


def _mixed(options: WorkloadOptions, maker: PromptMaker) -> list[BenchRequest]:
    path, text = read_file(options)
    try:
        mix = msgspec.json.decode(text, type=threadsafe(_Mix))
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
        if own.dataset_path is not None:  # relative to the mix's file, not to the working directory
            own = msgspec.structs.replace(own, dataset_path=str(path.parent / own.dataset_path))
        requests += [request._replace(part=name) for request in make_workload(own, maker)]
    if not options.disable_shuffle:
        random.Random(options.seed).shuffle(requests)
    return requests


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """Integers in proportion to the weights, whose sum is `total` (largest remainder method)."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(each) for each in exact]
    order = sorted(range(len(exact)), key=lambda at: shares[at] - exact[at])
    for at in order[: total - sum(shares)]:
        shares[at] += 1
    return shares


T = TypeVar("T")

DEFAULT_CUSTOM_OUTPUT_LEN = 256
# As in vLLM, a conversation is left out if its turns are outside these limits, in tokens.
SHAREGPT_LEAST, SHAREGPT_LONGEST_PROMPT, SHAREGPT_LONGEST = 4, 1024, 2048
BURST_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
CUSTOM_FIELDS = ("prompt", "output_tokens")


def read_file(options: WorkloadOptions) -> tuple[Path, str]:
    """The dataset's file and its text. Raises OptionError."""
    if options.dataset_path is None:
        raise OptionError(f"--dataset-name={options.dataset_name} is read from a file: give --dataset-path")
    path = Path(options.dataset_path)
    try:
        return path, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--dataset-path={path}: it cannot be read: {error}") from None


def sharegpt(options: WorkloadOptions, maker: PromptMaker) -> list[BenchRequest]:
    """The first turn of each conversation is the prompt; the second's length is the output length."""
    path, text = read_file(options)
    rows = _json(path, text)
    if not isinstance(rows, list):
        raise OptionError(f"--dataset-path={path}: a ShareGPT file is a list of conversations")
    found = []
    for number, row in enumerate(rows, 1):
        turns = row.get("conversations", row.get("conversation")) if isinstance(row, dict) else None
        if not isinstance(turns, list) or not all(map(_is_turn, turns)):
            raise OptionError(
                f"--dataset-path={path}: conversation {number} has no list `conversations` of turns with a `value`"
            )
        if len(turns) < 2:
            continue
        prompt = turns[0]["value"]
        asked_len = options.output_len or options.sharegpt_output_len
        num_tokens, output_len = maker.estimate(prompt), asked_len or maker.estimate(turns[1]["value"])
        is_usual = SHAREGPT_LEAST <= num_tokens <= SHAREGPT_LONGEST_PROMPT and output_len >= SHAREGPT_LEAST
        if (is_usual or asked_len) and num_tokens + output_len <= SHAREGPT_LONGEST:
            found.append(BenchRequest(prompt, maker.count(prompt), output_len))
    return _take(found, options)


def custom(options: WorkloadOptions, maker: PromptMaker) -> list[BenchRequest]:
    """JSON lines with `prompt` (text or token ids) and optionally `output_tokens`."""
    path, text = read_file(options)
    found = []
    for number, row in _json_lines(path, text):
        for name in row.keys() - set(CUSTOM_FIELDS):
            close = nearest(name, CUSTOM_FIELDS)
            raise OptionError(
                f"--dataset-path={path}, line {number}: unknown field {name}"
                + (f"; did you mean {close}?" if close else f"; known: {', '.join(CUSTOM_FIELDS)}")
            )
        prompt: Any = row.get("prompt")
        is_ids = isinstance(prompt, list) and prompt and all(type(each) is int and each >= 0 for each in prompt)
        if not is_ids and not (isinstance(prompt, str) and prompt):
            raise OptionError(f"--dataset-path={path}, line {number}: `prompt` must be a text or a list of token ids")
        asked_len = options.output_len or options.custom_output_len
        output_len = asked_len or row.get("output_tokens", DEFAULT_CUSTOM_OUTPUT_LEN)
        if type(output_len) is not int or output_len < 1:
            raise OptionError(f"--dataset-path={path}, line {number}: `output_tokens` must be a whole number over 0")
        found.append(BenchRequest(prompt, len(prompt) if is_ids else maker.count(prompt), output_len))
    return _take(found, options)


def burstgpt(options: WorkloadOptions, maker: PromptMaker) -> list[BenchRequest]:
    """A CSV file in the form of BurstGPT (Wang et al. 2024): arrival times and lengths; prompts are random.

    Rows of failed requests are left out. Rows keep their order and times, so `--self-timed` replays the trace.
    """
    path, text = read_file(options)
    reader = csv.DictReader(io.StringIO(text))
    missing = [name for name in BURST_COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        there = ", ".join(reader.fieldnames or ()) or "none"
        raise OptionError(f"--dataset-path={path}: column {missing[0]} is missing; it has {there}")
    rows = []
    for row in reader:
        try:
            at, input_len, output_len = float(row[BURST_COLUMNS[0]]), *(int(row[name]) for name in BURST_COLUMNS[1:])
        except (TypeError, ValueError):
            raise OptionError(
                f"--dataset-path={path}, line {reader.line_num}: {', '.join(BURST_COLUMNS)} must be numbers"
            ) from None
        if input_len > 0 and output_len > 0:
            rows.append((at, input_len, output_len))
    numbers = random.Random(options.seed)
    return [
        _drawn(maker, numbers, input_len=row[1], output_len=options.output_len or row[2], at_s=at_s)
        for row, at_s in _replayed(rows, options)
    ]


def timed_trace(options: WorkloadOptions, maker: PromptMaker) -> list[BenchRequest]:
    """JSON lines in the form of Mooncake's traces (Qin et al. 2024): arrival times, lengths and shared blocks."""
    path, text = read_file(options)
    labels = (
        options.timed_trace_label_timestamp,
        options.timed_trace_label_input_length,
        options.timed_trace_label_output_length,
    )
    rows: list[tuple[float, int, int, list[Any]]] = []
    for number, row in _json_lines(path, text):
        for label in labels:
            if type(row.get(label)) not in (int, float) or row[label] < 0:
                raise OptionError(
                    f"--dataset-path={path}, line {number}: field {label} must be a number, 0 or over; the line has "
                    f"{', '.join(row) or 'none'}"
                )
        hashes = row.get(options.timed_trace_label_hash_ids, [])
        if not isinstance(hashes, list):
            raise OptionError(f"--dataset-path={path}, line {number}: {options.timed_trace_label_hash_ids} is no list")
        rows.append((row[labels[0]], max(1, int(row[labels[1]])), max(1, int(row[labels[2]])), hashes))
    numbers = random.Random(options.seed)
    requests = []
    for (_, input_len, output_len, hashes), at_s in _replayed(rows, options):
        tokens: list[int] = []
        for each in hashes:  # the hash id seeds its block's tokens, so that prompts share blocks as in the trace
            block = random.Random(f"{options.seed}/{each}")
            tokens += maker.draw(block, options.timed_trace_chunk_hash_size)
        tokens = tokens[:input_len] + maker.draw(numbers, max(0, input_len - len(tokens)))
        prompt, length = maker.prompt(tokens, numbers)
        requests.append(BenchRequest(prompt, length, options.output_len or output_len, at_s))
    return requests


def _is_turn(turn: object) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("value"), str)


def _replayed(rows: Sequence[Any], options: WorkloadOptions) -> list[tuple[Any, float]]:
    """The first num_prompts rows in order of time, with seconds since the first. A shorter trace is repeated."""
    rows = sorted(rows, key=lambda row: row[0])
    if not rows:
        return []
    times = [(row[0] - rows[0][0]) * options.timed_trace_sec_multiplier for row in rows]
    span_s = times[-1] + (times[-1] / (len(times) - 1) if len(times) > 1 else 1.0)
    count = min(options.num_prompts, len(rows)) if options.no_oversample else options.num_prompts
    return [(rows[at % len(rows)], times[at % len(rows)] + at // len(rows) * span_s) for at in range(count)]


def _drawn(maker: PromptMaker, numbers: random.Random, *, input_len: int, output_len: int, at_s: float) -> BenchRequest:
    prompt, length = maker.prompt(maker.draw(numbers, input_len), numbers)
    return BenchRequest(prompt, length, output_len, at_s)


def _take(found: list[BenchRequest], options: WorkloadOptions) -> list[BenchRequest]:
    """num_prompts of the requests, shuffled unless disabled. Fewer are repeated, unless `no_oversample` is set."""
    numbers = random.Random(options.seed)
    if not options.disable_shuffle:
        numbers.shuffle(found)
    if options.no_oversample or not found:
        return found[: options.num_prompts]
    return [found[at % len(found)] for at in range(options.num_prompts)]


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise OptionError(f"--dataset-path={path}: it is not JSON: {error}") from None


def _json_lines(path: Path, text: str) -> list[tuple[int, dict[str, Any]]]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append((number, msgspec.json.decode(line, type=dict[str, Any])))
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise OptionError(f"--dataset-path={path}, line {number}: it is no JSON object: {error}") from None
    return rows


def check_traffic(options: TrafficOptions) -> None:
    """Raises OptionError for invalid rates; one error names all of them."""
    problems = []
    if not options.request_rate > 0:
        problems.append(f"--request-rate={options.request_rate:g}: it must be over 0, or inf for all at once")
    if not options.burstiness > 0:
        problems.append(f"--burstiness={options.burstiness:g}: it must be over 0; 1 is Poisson")
    ramp = (options.ramp_up_strategy, options.ramp_up_start_rps, options.ramp_up_end_rps)
    if any(each is not None for each in ramp):
        if any(each is None for each in ramp):
            problems.append("a ramp needs all of --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps")
        for name in ("ramp_up_start_rps", "ramp_up_end_rps"):
            value = getattr(options, name)
            if value is not None and not 0 < value < math.inf:
                problems.append(f"--{name.replace('_', '-')}={value:g}: it must be over 0")
        if not math.isinf(options.request_rate):
            problems.append("--request-rate does not go with a ramp, which has rates of its own")
    if options.self_timed and (not math.isinf(options.request_rate) or options.ramp_up_strategy):
        problems.append("--self-timed sends at the file's times: leave out --request-rate and the ramp")
    if problems:
        raise OptionError("; ".join(problems))


def schedule(requests: Sequence[BenchRequest], options: TrafficOptions, seed: int) -> list[float] | None:
    """Seconds after the start at which each request is due, ascending; None when all are sent at once.

    Intervals are gamma-distributed with mean 1 / rate and shape `burstiness`. Without a ramp they are scaled so that
    the last request is due at exactly len(requests) / rate, so that runs with different seeds offer the same load.
    Raises OptionError.
    """
    if options.self_timed:
        if any(request.at_s is None for request in requests):
            raise OptionError("--self-timed needs a file with times: --dataset-name timed_trace or burstgpt")
        times = [request.at_s or 0.0 for request in requests]
        if not all(math.isfinite(at_s) for at_s in times) or times != sorted(times):
            raise OptionError("--self-timed: the file's times, with --timed-trace-sec-multiplier, must be ascending")
        return times
    if options.ramp_up_strategy is None and math.isinf(options.request_rate):
        return None
    numbers = random.Random(f"arrivals/{seed}")
    due_s, now_s = [], 0.0
    for index in range(len(requests)):
        now_s += _interval_s(numbers, _rate(options, index / max(1, len(requests) - 1)), options.burstiness)
        due_s.append(now_s)
    if options.ramp_up_strategy is None and now_s > 0:
        stretch = len(requests) / options.request_rate / now_s
        due_s = [each * stretch for each in due_s]
    return due_s


def _interval_s(numbers: random.Random, rate: float, burstiness: float) -> float:
    if math.isinf(burstiness):
        return 1.0 / rate
    return numbers.gammavariate(burstiness, 1.0 / (rate * burstiness))


def _rate(options: TrafficOptions, progress: float) -> float:
    """The rate in requests per second when this share of the requests (0 to 1) has been sent."""
    start, end = options.ramp_up_start_rps, options.ramp_up_end_rps
    if options.ramp_up_strategy is None or start is None or end is None:
        return options.request_rate
    if options.ramp_up_strategy == "linear":
        return start + (end - start) * progress
    return float(start * (end / start) ** progress)
