"""The public names of sampling, under vLLM's module name."""

from headrace.frontend.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["RequestOutputKind", "SamplingParams"]
