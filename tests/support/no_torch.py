"""A pytest plugin, `-p tests.support.no_torch`: whoever imports torch fails."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
