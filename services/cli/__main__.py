"""`python -m services.cli` is `dspark`."""

import sys

from services.cli.main import main

sys.exit(main())
