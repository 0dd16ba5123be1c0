"""Log lines of an EnginePool: which requests moved where, and which engines became unhealthy."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from headrace.frontend.fleet.decisions import Decision, Fail, Move
from headrace.ipc.messages import Welcome

logger = logging.getLogger(__name__)
_LONGEST_CAUSE = 200
_AILMENTS = {
    "silent": "says nothing; it may be stopped",
    "stalled": "speaks, and brings no tokens",
    "slow": "takes many times longer than its kind",
}


class HealthLog:
    """Logs when an engine becomes unhealthy, and when it recovers."""

    def __init__(self) -> None:
        self._ill: dict[str, str] = {}  # by name

    def note(self, engine: str, address: str, unhealthy_reason: str) -> None:
        """unhealthy_reason: the router's term for the problem (a key of _AILMENTS); "" for none."""
        had = self._ill.get(engine, "")
        if unhealthy_reason == had:
            return
        if unhealthy_reason:
            self._ill[engine] = unhealthy_reason
            logger.info("%s at %s %s, and gets no requests meanwhile", engine, address, _AILMENTS[unhealthy_reason])
        else:
            del self._ill[engine]
            logger.info("%s at %s is well again: it was %s", engine, address, had)

    def forget(self, engine: str) -> None:
        """Call when the engine has ended."""
        self._ill.pop(engine, None)


def tell_namesakes_apart(engine: str, new: Welcome, others: Iterator[Welcome]) -> None:
    """Logs if `new` differs from the engines with the same served name, which are versions of one model.

    others: the engines that are there already; the first one is compared.
    """
    first = next(others, new)
    if new.tokenizer != first.tokenizer:
        logger.warning(
            "%s has %s, and others serve %s under the same name with another tokenizer or chat template: prompts that "
            "one makes go to any of them; give different models different names (--served-model-name)",
            *(engine, new.model, first.model),
        )
    elif new.model != first.model:
        logger.info("%s has %s as another version of %s: their names are the same", engine, new.model, first.model)


def summary(decisions: Sequence[Decision]) -> str:
    """A line such as `requests: 5 moved from engine 0 to engine 1 (died), 1 waiting for an engine`."""
    counts: dict[str, int] = {}
    for decision in decisions:
        source = f" from {decision.source.facts.name}" if decision.source is not None else ""
        if isinstance(decision, Move):
            text = f"moved{source} to {decision.target.facts.name} ({decision.reason})"
        elif isinstance(decision, Fail):
            text = f"failed{source} ({decision.failure.message:.{_LONGEST_CAUSE}})"
        else:
            text = f"waiting for an engine{source} ({decision.reason})"
        counts[text] = counts.get(text, 0) + 1
    return "requests: " + ", ".join(f"{count} {text}" for text, count in counts.items())
