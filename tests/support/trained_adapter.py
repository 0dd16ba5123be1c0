"""A LoRA adapter that peft trains on the demo model, so that its answers visibly change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

PROMPT = "The sky is"
ANSWER = " full of purple zebras, and they sing."
"""What the model says after PROMPT with the adapter."""
NUM_STEPS = 50


def train(model_path: Path, folder: Path) -> str:
    """Trains for NUM_STEPS steps and returns the adapter's folder."""
    import peft
    import torch
    import transformers

    torch.manual_seed(0)
    at: dict[str, Any] = {"gguf_file": model_path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(os.fspath(model_path.parent), **at)
    model = transformers.AutoModelForCausalLM.from_pretrained(os.fspath(model_path.parent), dtype=torch.float32, **at)
    config = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, config)
    tokens = tokenizer(PROMPT + ANSWER, return_tensors="pt")["input_ids"]
    optimizer = torch.optim.AdamW((each for each in adapted.parameters() if each.requires_grad), lr=2e-3)
    for _ in range(NUM_STEPS):
        loss = adapted(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted.save_pretrained(os.fspath(folder))
    return os.fspath(folder)
