"""`SamplingParams` and the structures within it, checked with errors in the user's terms."""
