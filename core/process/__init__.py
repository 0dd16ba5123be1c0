"""Programs: the engine-core program, and the supervisor that starts, watches and stops child processes."""
