"""`python -m megalith` is the `megalith` command."""

import sys

from megalith.cli.main import main

sys.exit(main())
