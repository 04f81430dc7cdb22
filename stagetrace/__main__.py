"""``python -m stagetrace`` is the console script."""

import sys

from stagetrace.cli import main

sys.exit(main())
