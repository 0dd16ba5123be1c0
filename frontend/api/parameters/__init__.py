"""`SamplingParams` and the structures within it, checked in the words of whoever wrote them."""
