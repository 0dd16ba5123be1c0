"""The public names of sampling, under vLLM's module name."""

from headrace.frontend.api.sampling_params import RequestOutputKind, SamplingParams
from headrace.frontend.api.structured_outputs import GuidedDecodingParams, StructuredOutputsParams
from headrace.frontend.api.unsupported import SAMPLING, no_attribute

__all__ = ["GuidedDecodingParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]


def __getattr__(name: str) -> object:
    if name in SAMPLING:
        raise ImportError(str(no_attribute(__name__, name, SAMPLING)))
    raise no_attribute(__name__, name, SAMPLING)
