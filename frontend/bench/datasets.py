"""Workloads that are read from files. Every fault names the file, the line and the field."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.core.options.values import nearest
from headrace.frontend.bench.options import WorkloadOptions
from headrace.frontend.bench.workload import BenchRequest, PromptMaker
from headrace.ipc.failure import OptionError

T = TypeVar("T")

DEFAULT_CUSTOM_OUTPUT_LEN = 256
# A conversation is left out when its turns are outside these, as vLLM does: tokens.
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
    """Each conversation's first turn; the length of its second is that of the output."""
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
    """One JSON object a line: `prompt` (text or token ids), and perhaps `output_tokens`."""
    path, text = read_file(options)
    found = []
    for number, row in _json_lines(path, text):
        for name in row.keys() - set(CUSTOM_FIELDS):
            close = nearest(name, CUSTOM_FIELDS)
            raise OptionError(
                f"--dataset-path={path}, line {number}: unknown field {name}"
                + (f"; did you mean {close}?" if close else f"; known are {', '.join(CUSTOM_FIELDS)}")
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
    """A CSV in the form of BurstGPT (Wang et al. 2024): when, and how long; prompts are drawn.

    Failed rows are left out. Rows keep their order and times, so `--self-timed` replays the trace.
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
    """JSON lines in the form of Mooncake's traces (Qin et al. 2024): when, how long, and which blocks are shared."""
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
        for each in hashes:  # a hash names its block's content, so that prompts share what the trace shared
            block = random.Random(f"{options.seed}/{each}")
            tokens += maker.draw(block, options.timed_trace_chunk_hash_size)
        tokens = tokens[:input_len] + maker.draw(numbers, max(0, input_len - len(tokens)))
        prompt, length = maker.prompt(tokens, numbers)
        requests.append(BenchRequest(prompt, length, options.output_len or output_len, at_s))
    return requests


def _is_turn(turn: object) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("value"), str)


def _replayed(rows: Sequence[Any], options: WorkloadOptions) -> list[tuple[Any, float]]:
    """The first rows in order with their seconds since the first; a trace that is too short begins anew."""
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
    """As many as asked for; a file with fewer is repeated."""
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
