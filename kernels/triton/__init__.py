"""GPU kernels in Triton. Importing this package loads nothing; README.md lists its modules."""
