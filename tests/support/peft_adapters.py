"""Random adapters of tiny models, made and saved by peft, and what peft computes with them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LINEARS = "all-linear"


class PeftModels:
    """One model with adapters, each saved into a folder."""

    def __init__(self, model: Any, folder: Path) -> None:
        self._base, self.folder = model, folder
        self._adapted: dict[str, Any] = {}

    def make(self, name: str, *, seed: int = 1, size: float = 0.2, **config: Any) -> Path:
        """Saves an adapter with random factors of about this size, and returns its folder."""
        import peft

        settings = {"r": 4, "lora_alpha": 8, "target_modules": LINEARS} | config
        model = peft.get_peft_model(copy.deepcopy(self._base), peft.LoraConfig(**settings)).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for each, parameter in model.named_parameters():
                if not parameter.requires_grad:
                    continue
                if "magnitude" in each:
                    parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
                    continue
                if "lora_" in each:  # peft's own are of torch's generator
                    parameter.zero_()
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))
        path = self.folder / name
        model.save_pretrained(str(path))
        self._adapted[name] = model
        return path

    def take(self, name: str) -> None:
        """An adapter of the folder, which was made for another model."""
        import peft

        self._adapted[name] = peft.PeftModel.from_pretrained(copy.deepcopy(self._base), str(self.folder / name)).eval()

    def add(self, name: str, parts: Sequence[str], scales: Sequence[float]) -> None:
        """What peft says with the sum of these adapters under another name; nothing is saved."""
        import peft

        model = peft.PeftModel.from_pretrained(copy.deepcopy(self._base), self.folder / parts[0], parts[0])
        for part in parts[1:]:
            model.load_adapter(str(self.folder / part), part)
        tuner: Any = model.base_model
        tuner.set_adapter(list(parts))
        for module in model.modules():
            for part, scale in zip(parts, scales, strict=True):
                if isinstance(scaling := getattr(module, "scaling", None), dict) and part in scaling:
                    scaling[part] *= scale
        self._adapted[name] = model.eval()

    def adapted(self, name: str) -> Any:
        """peft's model with an adapter; "": without any."""
        return self._adapted[name] if name else self._base

    @torch.inference_mode()
    def logits(self, name: str, prompt: list[int], answer: list[int]) -> Tensor:
        """What peft says with an adapter, not merged, after the prompt and each token of the answer but the last.
        name "": without any."""
        found: Tensor = self.adapted(name)(input_ids=torch.tensor([prompt + answer[:-1]]), use_cache=False).logits
        return found[0, len(prompt) - 1 :]
