"""The GPU itself: which one, what it can do, CUDA, its memory."""
