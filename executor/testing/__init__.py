"""An executor without a model, and a checker of step plans."""
