"""A causal language model around transformers' text half of Muse Glimmer: transformers itself has only the model that
sees images, whose head this has. Importing it makes it one of the classes that `tiny_models` finds."""

from __future__ import annotations

from typing import Any

import tiny_models
import torch
import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.muse_glimmer import modeling_muse_glimmer as muse


class MuseGlimmerForCausalLM(muse.MuseGlimmerPreTrainedModel, transformers.GenerationMixin):
    config_class = muse.MuseGlimmerTextConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = muse.MuseGlimmerTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **options: Any) -> CausalLMOutputWithPast:
        cap = self.config.final_logit_softcapping
        logits = self.lm_head(self.model(input_ids, **options).last_hidden_state)
        return CausalLMOutputWithPast(logits=torch.tanh(logits * self.config.output_multiplier / cap) * cap)


setattr(tiny_models.transformers, "MuseGlimmerForCausalLM", MuseGlimmerForCausalLM)  # noqa: B010 - the module has no such name itself
