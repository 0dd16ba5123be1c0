"""`import vllm` in a process that a program under `headrace.as_vllm` has started: Headrace, in this module's place."""

from headrace.frontend.vllm.as_vllm import install

install()
