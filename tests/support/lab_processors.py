"""Logits processors written like those of vLLM's users, for tests of engines that load them."""

from __future__ import annotations

from typing import Any

import torch

from headrace.executor.sampling.logits_processors import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor


class OnlyToken(LogitsProcessor):
    """extra_args={"only_token": id} allows only that token."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        target = sampling_params.extra_args and sampling_params.extra_args.get("only_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"only_token must be a token id, not {target!r}")

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.most = vllm_config.scheduler_config.max_num_seqs
        self.targets: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.targets.pop(index, None)
        for index, params, _, _ in batch_update.added:
            self.targets.pop(index, None)
            target: Any = params.extra_args and params.extra_args.get("only_token")  # as vLLM's documents write it
            if target is not None:
                self.targets[index] = target
        assert batch_update.batch_size <= self.most

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, target in self.targets.items():
            kept = logits[row, target].clone()
            logits[row] = float("-inf")
            logits[row, target] = kept
        return logits


class NoRepeats(AdapterLogitsProcessor):
    """extra_args={"no_repeats": True} forbids tokens of prompt and output; {"fails_at": n} raises after n tokens."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        arguments = params.extra_args or {}
        if arguments.get("fails_at") == 0:
            raise ValueError("as was asked")
        if "fails_at" in arguments:
            return lambda output, logits: logits if len(output) < arguments["fails_at"] else 1 / 0
        if not arguments.get("no_repeats"):
            return None

        def forbid(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[[*prompt, *output]] = float("-inf")
            return logits

        return forbid


class MinP(LogitsProcessor):
    """vLLM's min_p, as extra_args={"lab_min_p": share}: applied after the temperature, and not to greedy requests."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.shares: dict[int, float] = {}

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.shares.pop(index, None)
        for index, params, _, _ in batch_update.added:
            self.shares[index] = (params.extra_args or {}).get("lab_min_p", 0.0)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        shares = torch.tensor([self.shares[row] for row in range(len(logits))], dtype=torch.float64)
        p = logits.double().softmax(1)
        return logits.masked_fill(p < shares[:, None] * p.amax(1, keepdim=True), float("-inf"))


class Unlucky(OnlyToken):
    """As OnlyToken, but fails for extra_args={"only_token": 13} in `apply`, after it has overwritten the logits of the
    whole batch, and for {"when": "update"} in `update_state`, after it has corrupted its state."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        for _, params, _, _ in batch_update.added if batch_update is not None else ():
            if params.extra_args and params.extra_args.get("when") == "update":
                self.targets = dict.fromkeys(range(self.most), 5)
                raise RuntimeError("unlucky update")
        super().update_state(batch_update)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        logits = super().apply(logits)
        if 13 in self.targets.values():
            logits[:] = 0.0
            raise RuntimeError("unlucky 13")
        return logits


class NotOne:
    """Lacks the methods of a logits processor."""


class NotMade(LogitsProcessor):
    def __init__(self, *_: Any) -> None:
        raise RuntimeError("no licence")

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None: ...

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits
