"""`python -m headrace` is the command `headrace`."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]  # the current folder, which Python puts there for -m: the installed command does not import from it

from headrace.programs import headrace

sys.exit(headrace())
