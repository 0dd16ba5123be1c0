"""The `headrace` command; a subcommand is one module `commands/<name>.py`."""
