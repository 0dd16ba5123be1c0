"""CPU kernels in C++: compiled on first use for this machine, cached, called through ctypes."""
