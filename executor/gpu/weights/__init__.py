"""A GPU's weights: how they get there, and where they are when not in use."""
