"""Errors for grammars that a library refuses, in the request's terms."""

from __future__ import annotations

from headrace.ipc.failure import InvalidRequestError
from headrace.ipc.messages import StructuredOutput

LONGEST_REASON = 600
"""Most characters of a library's reason, which may quote the grammar."""
NO_ANSWER = "there is no text of that form: what it refers to leads back to itself, or excludes every text"
TOO_MANY_STATES = (
    "its expressions and counts take too many states together: leave out maxLength, minLength or pattern where they "
    "are beside one another, or make the bounds smaller"
)
_IN_WORDS = {"NoExtensionBias": NO_ANSWER}
"""Sentences for codes that llguidance returns as reasons."""
_NAMES = {
    "json": "JSON schema",
    "json_object": "JSON object",
    "regex": "regular expression",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural tag",
}


def refusal(wanted: StructuredOutput, problem: str, where: str = "", title: str = "") -> InvalidRequestError:
    """The error for a form that a library refuses. where: JSON pointer of the part of a schema that has the problem.
    title: the title of that schema, if it is part of a grammar."""
    place = " of ".join(filter(None, (where, f"the schema {title!r:.120}" if title else "")))
    place = f" at {place}" if place else ""
    return InvalidRequestError(
        f"SamplingParams.structured_outputs: the {_NAMES[wanted.kind]} cannot be used{place}: {reason(problem)}"
    )


def reason(problem: str) -> str:
    """A library's reason in one line, without its backtrace."""
    problem = " ".join(problem.split("<backtrace>", maxsplit=1)[0].removesuffix("<non-verbose/>").split())
    problem = _IN_WORDS.get(problem, problem)
    if problem.startswith("fuel exhausted when checking relevance"):
        problem = f"{TOO_MANY_STATES} ({problem})"
    return problem if len(problem) <= LONGEST_REASON else f"{problem[: LONGEST_REASON - 3]}..."
