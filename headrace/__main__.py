"""`python -m headrace` is the command `headrace`."""

import sys

from headrace.frontend.cli import main

sys.exit(main())
