"""Results of benchmarks: the file, its figures, comparisons and plots."""
