"""A rank on a GPU: its device state, CUDA graphs, sampler on the device, and memory."""
