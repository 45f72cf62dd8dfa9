"""`python -m nanoengine.core.tiers` draws a minute of the tiers."""

from __future__ import annotations

from nanoengine.core.demos import tiers

if __name__ == "__main__":
    tiers.main()
