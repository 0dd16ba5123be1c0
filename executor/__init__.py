"""Everything that uses a device: ranks and their placement, models, checkpoints, sampling. See README.md."""
