"""From logits to tokens on the host, and the random numbers for it."""
