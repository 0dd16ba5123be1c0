"""A causal language model around transformers' text half of GLM 5.3: transformers itself has only the model that sees
images, whose head this has. Importing it makes it one of the classes that `tiny_models` finds."""

from __future__ import annotations

from typing import Any

import tiny_models
import torch
import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.glm5_next import modeling_glm5_next as glm


class Glm5NextForCausalLM(glm.Glm5NextPreTrainedModel, transformers.GenerationMixin):
    config_class = glm.Glm5NextTextConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = glm.Glm5NextTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **options: Any) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids, **options).last_hidden_state))


setattr(tiny_models.transformers, "Glm5NextForCausalLM", Glm5NextForCausalLM)  # noqa: B010 - the module has no such name itself
