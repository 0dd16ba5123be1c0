"""What a library says of a grammar that it cannot follow, in the words of the request."""

from __future__ import annotations

from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import StructuredOutput

LONGEST_REASON = 600
"""Characters of a library's reason, which may quote the grammar."""
NO_ANSWER = "there is no text of that form: what it refers to leads back to itself, or excludes every text"
_IN_WORDS = {"NoExtensionBias": NO_ANSWER}
"""Of llguidance's codes that stand for a sentence."""
_NAMES = {
    "json": "JSON schema",
    "json_object": "JSON object",
    "regex": "regular expression",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural tag",
}


def refusal(wanted: StructuredOutput, problem: str, where: str = "", title: str = "") -> InvalidRequestError:
    """where: the JSON pointer of the part of a schema that has the problem. title: that schema's, within a grammar."""
    place = " of ".join(filter(None, (where, f"the schema {title!r:.120}" if title else "")))
    place = f" at {place}" if place else ""
    return InvalidRequestError(
        f"SamplingParams.structured_outputs: the {_NAMES[wanted.kind]} cannot be used{place}: {reason(problem)}"
    )


def reason(problem: str) -> str:
    """In one line, and without the library's own stack."""
    problem = " ".join(problem.split("<backtrace>", maxsplit=1)[0].removesuffix("<non-verbose/>").split())
    problem = _IN_WORDS.get(problem, problem)
    return problem if len(problem) <= LONGEST_REASON else f"{problem[: LONGEST_REASON - 3]}..."
