"""LoRA adapters at run time: vLLM's, SageMaker's and llama.cpp's routes."""
