"""A pytest plugin, `-p tests.support.no_torch`: imports of torch fail."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
