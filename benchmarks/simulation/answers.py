"""Checks that a reader in a simulation got each token of its answer exactly once.

A token of a simulated engine is a function of the prompt, the model's version, the seed and the position.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.frontend.client.request_stream import RequestStream
from simulation.engines import ends_with, prompt_key_of, token_of, version_of


class AnswerCheck:
    """Checks one output of a request."""

    def __init__(self, stream: RequestStream, index: int, prompt: bytes | memoryview, violations: list[str]) -> None:
        """prompt: its tokens as little-endian int32; violations: a list to which errors are added."""
        self._stream, self._index, self._prompt, self._violations = stream, index, prompt, violations
        self.got: list[int] = []
        self._num_right = 0  # leading tokens that have been checked, for this version, key and seed:
        self._version: str | None = None
        self._key = self._seed = 0
        self._has_ended = False

    def take(self, token_ids: Sequence[int], finish_reason: str | None, *, is_delta: bool) -> None:
        """Checks an output: the new tokens (is_delta), or all so far."""
        if self._has_ended:
            self._found("it went on after its end")
        if is_delta:
            self.got += token_ids
        else:
            self._num_right = 0
            self.got = list(token_ids)
        self._has_ended = is_delta and finish_reason is not None
        if self._look_up():
            self._check_tokens()
            self._check_end(finish_reason)

    def _look_up(self) -> bool:
        """Finds the key and seed to check tokens with; returns whether they can be checked. If the version or the seed
        has changed, all are checked again, since tokens of another version are wrong from the first on."""
        stream = self._stream
        sequence, version = stream.sequences[self._index], stream.route.version
        seed = sequence.seed if sequence.seed is not None else stream.params.to_wire(1, self._index, {}).seed
        if self.got and seed is None:
            self._found("it has tokens, and nobody knows their seed")
            return False
        if version != self._version or seed != self._seed:
            self._version, self._seed, self._num_right = version, seed or 0, 0
            self._key = prompt_key_of(self._prompt, version_of(version))
        return True

    def _check_tokens(self) -> None:
        got, key, seed, ignore_eos = self.got, self._key, self._seed, self._stream.params.ignore_eos
        last = len(got) - 1
        for position in range(self._num_right, len(got)):
            token_id = got[position]
            if token_id != token_of(key, seed, position):
                self._found(f"tokens were lost, doubled or changed: {got}")
                return
            if not ignore_eos and position < last and ends_with(token_id):
                self._found(f"it went on after its end at {position}")
        self._num_right = max(0, last)  # the last token is checked again: it may be an end that others follow

    def _check_end(self, finish_reason: str | None) -> None:
        got, params = self.got, self._stream.params
        if finish_reason == "length" and len(got) != params.max_tokens:
            self._found(f"it ended with {len(got)} tokens of {params.max_tokens}")
        if finish_reason == "stop" and not (got and ends_with(got[-1]) and not params.ignore_eos):
            self._found(f"it stopped at {got[-1:]}")

    def _found(self, what: str) -> None:
        self._violations.append(f"{self._stream.request_id}.{self._index}: {what}")
