"""The `headrace` command; a subcommand is one module `command_<name>.py`."""
