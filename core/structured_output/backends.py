"""Chooses the library for a request's grammar. The first request that needs a library, or `prepare`, loads it."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.core.options.structured_outputs import BACKENDS, StructuredOutputs
from headrace.core.structured_output.backend import Backend, Matcher, Vocabulary
from headrace.core.structured_output.held_memory import HeldMemory
from headrace.core.structured_output.plain import is_plain
from headrace.core.structured_output.thinking import allow, split
from headrace.core.structured_output.trial import OTHER, PLAIN, Trial
from headrace.ipc.failure import HeadraceError, InvalidRequestError
from headrace.ipc.messages import StructuredOutput

logger = logging.getLogger(__name__)


def make_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """Loads a library, in up to a second. Raises InvalidRequestError if it is missing or cannot read the tokenizer."""
    try:
        module = importlib.import_module(f"headrace.core.structured_output.{name}_backend")
        backend: Backend = module.BACKEND(
            vocabulary.tokenizer_json.decode(), vocabulary.vocab_size, vocabulary.eos_token_ids
        )
        return backend
    except ModuleNotFoundError as error:
        raise InvalidRequestError(f"{name} cannot be used: the engine lacks {error.name}; pip install {name}") from None
    except HeadraceError:
        raise
    except Exception as error:  # libraries raise various types for an unknown kind of tokenizer
        raise InvalidRequestError(f"{name} cannot read this model's tokenizer: {error}") from error


class Backends:
    """The libraries of a plan as one `Backend`: a grammar that the first library refuses is tried with the next."""

    name = "auto"

    def __init__(self, options: StructuredOutputs, vocabulary: Vocabulary) -> None:
        self._options, self._vocabulary = options, vocabulary
        self._trial = Trial(vocabulary, options.backends[0])
        self._memory = HeldMemory()
        self._lock = threading.Lock()
        self._made: dict[str, Backend] = {}

    def compile(self, wanted: StructuredOutput) -> Matcher:
        """Compiles the grammar in the trial process, and then here. Raises QueueFullError if there is no memory."""
        if not self._vocabulary.tokenizer_json:
            raise InvalidRequestError(
                "SamplingParams.structured_outputs needs the model's tokenizer, and the engine runs without one "
                "(skip_tokenizer_init)"
            )
        options = self._options
        wanted = msgspec.structs.replace(
            wanted,
            disable_any_whitespace=wanted.disable_any_whitespace or options.disable_any_whitespace,
            disable_additional_properties=wanted.disable_additional_properties or options.disable_additional_properties,
        )
        first, *others = self._named(wanted.backend)
        try:
            return self._compile(first, wanted)
        except InvalidRequestError as error:
            if options.disable_fallback or wanted.disable_fallback:
                raise
            for name in others:
                try:
                    matcher = self._compile(name, wanted)
                except InvalidRequestError:
                    continue  # report the first library's reason
                logger.info("a grammar is compiled by %s, which the first backend refuses: %s", name, error)
                return matcher
            raise

    def prepare(self) -> None:
        """Loads the first library, here and in the trial process, before a request needs it."""
        with contextlib.suppress(HeadraceError):  # the first request gets the error
            self.compile(StructuredOutput(kind="regex", text="a"))

    def load(self) -> None:
        """Loads the first library here. That takes a second or more of the interpreter's time, in which nothing else of
        this process runs: so it is done before the engine serves where others may take its silence for a loss."""
        if self._vocabulary.tokenizer_json:
            with contextlib.suppress(HeadraceError):  # the first request gets the error
                self._backend(self._options.backends[0])

    def fill(self, positions: Sequence[tuple[Matcher, int, list[int]]], masks: np.ndarray) -> None:
        positions, openers = split(positions, masks)
        made = list(self._made.values())
        for backend in made:
            own = positions if len(made) == 1 else [each for each in positions if each[0].backend is backend]
            if own:
                backend.fill(own, masks)
        for at, token_id in openers:
            allow(masks[at], token_id)

    def forget(self) -> None:
        for each in self._made.values():
            each.forget()

    def stop(self) -> None:
        self._trial.stop()

    def _named(self, backend: str) -> Sequence[str]:
        if backend in ("", "auto"):
            return self._options.backends
        if backend not in BACKENDS:
            raise InvalidRequestError(
                f"SamplingParams.structured_outputs.backend is {backend!r}; allowed: {', '.join(BACKENDS)}"
            )
        return BACKENDS[backend]

    def _compile(self, name: str, wanted: StructuredOutput) -> Matcher:
        self._trial.start()  # the trial process starts while the library is loaded here
        backend = self._backend(name)
        held = self._memory.hold(self._trial.check(name, wanted, PLAIN if is_plain(wanted) else OTHER))
        matcher = backend.compile(wanted)
        matcher.held = held
        return matcher

    def _backend(self, name: str) -> Backend:
        with self._lock:
            if name not in self._made:
                self._made[name] = make_backend(name, self._vocabulary)
                logger.info("structured outputs use the backend %s", name)
            return self._made[name]
