"""The GPU itself: choice of the device, its capabilities, CUDA and memory."""
