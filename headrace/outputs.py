"""What requests answer with, under vLLM's module name."""

from headrace.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

__all__ = ["CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"]
