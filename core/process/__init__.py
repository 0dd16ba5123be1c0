"""Programs: the engine-core daemon, and the supervisor that starts, watches and stops children."""
