"""The public names of sampling, under vLLM's module name."""

from headrace.frontend.api.beam_search import BeamSearchParams
from headrace.frontend.api.sampling_params import RequestOutputKind, SamplingParams
from headrace.frontend.api.structured_outputs import GuidedDecodingParams, StructuredOutputsParams

__all__ = ["BeamSearchParams", "GuidedDecodingParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
