"""One module for each subcommand of `headrace`."""
