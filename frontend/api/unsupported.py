"""vLLM's names that Headrace does not have, and what to use instead: a script that is ported hears it by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

ONLY_GENERATION = "only generation is supported so far"
DECISIONS = "what the engine decided is in `engine`, and its options in describe_engine()"

METHODS = {
    "classify": ONLY_GENERATION,
    "embed": ONLY_GENERATION,
    "encode": ONLY_GENERATION,
    "reward": ONLY_GENERATION,
    "score": ONLY_GENERATION,
    "apply_model": "the model is in another process; worker_extension_cls and call_extension reach it",
    "get_metrics": "get_stats() has the engine's load and counters",
    "get_world_size": "describe_engine() has the workers",
    "get_model_config": DECISIONS,
    "get_vllm_config": DECISIONS,
    "is_tracing_enabled": "traces are not supported yet",
    "llm_engine": "`engine` has what the engine said of itself; LLMEngine takes requests one by one",
    "model_config": DECISIONS,
}
SAMPLING = {}
PACKAGE = SAMPLING | {
    "ClassificationRequestOutput": ONLY_GENERATION,
    "EmbeddingRequestOutput": ONLY_GENERATION,
    "PoolingParams": ONLY_GENERATION,
    "PoolingRequestOutput": ONLY_GENERATION,
    "ScoringRequestOutput": ONLY_GENERATION,
}


def no_attribute(owner: str, name: str, reasons: dict[str, str]) -> AttributeError:
    """To raise where `owner` has no such name: with the reason where it is one that vLLM has."""
    why = f": {reasons[name]}" if name in reasons else ""
    return AttributeError(f"{owner} has no {name!r}{why}")


class NamesWhatIsMissing:
    """A class whose instances tell why they lack one of vLLM's methods."""

    if not TYPE_CHECKING:  # which would take every name for one that exists

        def __getattr__(self, name: str) -> object:
            raise no_attribute(type(self).__name__, name, METHODS)
