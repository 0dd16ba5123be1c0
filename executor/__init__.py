"""Everything that touches a device: executors, model runner, models, weight loading, sampler. See README.md."""
