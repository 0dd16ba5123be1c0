"""A rank on a GPU: device state, CUDA graphs, the sampler on the device, and memory."""
