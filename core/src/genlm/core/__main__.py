"""``python -m genlm.core`` is the command ``genlm``."""

import sys

from genlm.core.cli import main

sys.exit(main())
