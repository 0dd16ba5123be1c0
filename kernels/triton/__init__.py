"""GPU kernels in Triton. Importing this loads nothing; see README.md for what is where."""
