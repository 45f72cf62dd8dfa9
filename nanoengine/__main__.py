"""`python -m nanoengine COMMAND ...`, the same as `nanoengine COMMAND ...`."""

import sys

from nanoengine.cli.main import main

sys.exit(main())
