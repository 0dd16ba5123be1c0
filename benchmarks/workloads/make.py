"""Makes the small workloads beside it, from word lists and a seed; running it again changes nothing.

python benchmarks/workloads/make.py [FOLDER]
"""

from __future__ import annotations

import csv
import json
import random
import sys
from pathlib import Path
from typing import Any

SEED = 7
TOPICS = ("tides", "bridges", "bread", "compilers", "bees", "glaciers", "maps", "violins", "turbines", "gardens")
TASKS = (
    "Explain {topic} to a child in two sentences.",
    "List five surprising facts about {topic}.",
    "Write a short letter to a museum that wants to open a room about {topic}.",
    "What do people most often get wrong about {topic}? Give one example and set it right.",
    "Compare {topic} with {other}: what do they share, and where do they differ?",
    "Draft a plan of three lessons on {topic}, each with one exercise.",
)
OPENINGS = ("Well", "In short", "To begin with", "It depends", "Put simply", "As far as we know")
CLAUSES = (
    "{topic} have a longer history than most people think",
    "the details matter more than the outline",
    "a good first step is to look closely and take notes",
    "what holds for {other} does not hold for {topic}",
    "nobody has measured it well enough to be sure",
    "small changes add up over the years",
    "it is best seen in the early morning",
)


def fill(numbers: random.Random, template: str) -> str:
    topic, other = numbers.sample(TOPICS, 2)
    return template.format(topic=topic, other=other)


def reply(numbers: random.Random, sentences: int) -> str:
    lines = [f"{numbers.choice(OPENINGS)}, {fill(numbers, numbers.choice(CLAUSES))}." for _ in range(sentences)]
    return " ".join(lines)


def chat(numbers: random.Random) -> list[dict[str, Any]]:
    """Custom JSONL: short questions with outputs of many lengths."""
    return [
        {
            "prompt": fill(numbers, numbers.choice(TASKS)),
            "output_tokens": round(min(400, 16 + numbers.expovariate(1 / 80))),
        }
        for _ in range(80)
    ]


def conversations(numbers: random.Random) -> list[dict[str, Any]]:
    """ShareGPT's form: turns of two speakers."""
    rows = []
    for number in range(40):
        turns = []
        for _ in range(numbers.choice((1, 1, 2, 3))):
            turns.append({"from": "human", "value": fill(numbers, numbers.choice(TASKS))})
            turns.append({"from": "gpt", "value": reply(numbers, numbers.randint(1, 12))})
        rows.append({"id": f"made-{number}", "conversations": turns})
    return rows


def bursts(numbers: random.Random) -> list[list[Any]]:
    """BurstGPT's columns: bursts (gamma intervals of shape 0.3) of heavy-tailed lengths, a few of them failed."""
    rows, at_s = [], 0.0
    for _ in range(200):
        at_s += numbers.gammavariate(0.3, 1.0)
        request_tokens = round(min(1500, 8 + numbers.lognormvariate(4.5, 0.9)))
        response_tokens = 0 if numbers.random() < 0.03 else round(min(600, 4 + numbers.lognormvariate(4.0, 0.8)))
        rows.append([round(at_s, 2), "made", request_tokens, response_tokens, request_tokens + response_tokens, "API"])
    return rows


def trace(numbers: random.Random) -> list[dict[str, Any]]:
    """Sessions that grow: each request repeats the blocks of the one before it. Milliseconds, blocks of 16 tokens."""
    rows: list[dict[str, Any]] = []
    next_block = 1
    for _ in range(25):
        at_ms, blocks = numbers.uniform(0, 60_000), [0]
        for _ in range(numbers.randint(1, 6)):
            new = numbers.randint(1, 8)
            blocks += range(next_block, next_block + new)
            next_block += new
            rows.append(
                {
                    "timestamp": round(at_ms),
                    "input_length": 16 * len(blocks) - numbers.randrange(16),
                    "output_length": numbers.randint(8, 120),
                    "hash_ids": list(blocks),
                }
            )
            at_ms += 2000 + numbers.expovariate(1 / 6000)
    return sorted(rows, key=lambda row: row["timestamp"])


MIX = {
    "parts": {
        "chat": {"weight": 6, "dataset_name": "custom", "dataset_path": "chat.jsonl"},
        "assistants": {
            "weight": 3,
            "dataset_name": "prefix_repetition",
            "prefix_repetition_num_prefixes": 2,
            "prefix_repetition_prefix_len": 192,
            "prefix_repetition_suffix_len": 32,
            "prefix_repetition_output_len": 64,
        },
        "long": {"weight": 1, "random_input_len": 1024, "random_output_len": 32},
    }
}


def write_all(folder: Path) -> None:
    numbers = random.Random(SEED)
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat(numbers)))
    (folder / "conversations.json").write_text(json.dumps(conversations(numbers), indent=1) + "\n")
    with (folder / "bursts.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"])
        writer.writerows(bursts(numbers))
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in trace(numbers)))
    (folder / "mix.json").write_text(json.dumps(MIX, indent=1) + "\n")


if __name__ == "__main__":
    write_all(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
