"""`python -m headrace` is the command `headrace`."""

import sys

from headrace.programs import headrace

sys.exit(headrace())
