"""`python -m regard` is the command `regard`."""

from __future__ import annotations

import sys

from regard.cli import main

sys.exit(main())
