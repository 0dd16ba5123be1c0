"""The public names of sampling, under vLLM's module name."""

from headrace.frontend.missing import SAMPLING, no_attribute
from headrace.frontend.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["RequestOutputKind", "SamplingParams"]


def __getattr__(name: str) -> object:
    if name in SAMPLING:
        raise ImportError(str(no_attribute(__name__, name, SAMPLING)))
    raise no_attribute(__name__, name, SAMPLING)
