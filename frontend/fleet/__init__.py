"""Several engine-cores as one."""
