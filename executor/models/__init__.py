"""Models as data: architectures, families, layers, and the decoder that runs them."""
