"""The GPU's path, down to the calls of `torch.cuda`, on tensors that say they are on a GPU: nothing mixes devices, no
step waits for the device while it is submitted, and what is captured holds nothing that a capture refuses.

In a process of its own, as `torch.cuda`'s classes are replaced and Triton's interpreter is chosen there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import case_process
import pretend_cases
import published_models
import pytest
import tiny_models
import tiny_recurrent
import torch
from peft_adapters import PeftModels
from triton_cases import why_not_interpreted

if reason := why_not_interpreted() or ("" if sys.platform == "linux" else "torch's guards are found on Linux alone"):
    pytest.skip(reason, allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("there is a GPU, and tests/gpu/test_gpu_device.py runs on it", allow_module_level=True)

RUNNER = Path(pretend_cases.__file__)


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for name in (*pretend_cases.MODELS, "llama"):
        tiny_models.save(name, folder / name)
    for name in pretend_cases.RECURRENT_MODELS:
        save_recurrent(folder, name)
    for name in (*pretend_cases.PUBLISHED_MODELS, *pretend_cases.OWN_OPS):
        published_models.save(name, folder / name)
    tiny_models.save("llama", folder / "llama_other", seed=3)
    tiny_models.save("llama", folder / "llama_short", num_hidden_layers=1)
    tiny_models.save("llama", folder / "llama_short_other", seed=3, num_hidden_layers=1)
    adapters = PeftModels(tiny_models.build("llama", num_hidden_layers=1), folder)
    adapters.make("adapter_plain", seed=1, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
    adapters.make("adapter_dora", seed=2, use_dora=True, size=0.1)
    return case_process.failures(request, RUNNER, str(folder))


def save_recurrent(folder: Path, name: str) -> None:
    """The model, and one of its first layers alone."""
    tiny = tiny_recurrent.FAMILIES[name]
    tiny_models.make(tiny).save_pretrained(folder / name)
    layers = {"num_hidden_layers": 2} | (
        {"layer_types": tiny.config["layer_types"][:2]} if "layer_types" in tiny.config else {}
    )
    tiny_models.make(tiny, **layers).save_pretrained(folder / f"{name}_short")


@case_process.PATIENT
@pytest.mark.parametrize("name", case_process.parameters([RUNNER, RUNNER.with_name("pretend_rules.py")]))
def test_on_the_gpu_that_is_not_there(name: str, failures: dict[str, str]) -> None:
    assert not failures[name], failures[name]
