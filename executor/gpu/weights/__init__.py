"""A GPU's weights: how they are loaded, and where they are while not in use."""
