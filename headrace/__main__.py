"""`python -m headrace` is the command `headrace`."""

import sys

from headrace.frontend.cli.main import main

sys.exit(main())
