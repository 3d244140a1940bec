"""`python -m eqzoo`: the command eqzoo."""

import sys

from .cli.main import main

sys.exit(main())
