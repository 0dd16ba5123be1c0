"""`import vllm` in a process that a program under `headrace.as_vllm` has started: Headrace, in this module's place."""

import headrace.as_vllm  # noqa: F401
