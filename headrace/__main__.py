"""`python -m headrace` is the command `headrace`."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]  # the current folder, which Python puts there for -m: the installed command does not import from it
    if sys.modules["headrace"].__file__ is None:  # a folder of that name in it, as a clone is, which has no __init__.py
        del sys.modules["headrace"]

from headrace.programs import headrace

sys.exit(headrace())
