"""The version of the package, which pyproject.toml reads, and of packages that it uses."""

from __future__ import annotations

__version__ = "0.1.0"

PACKAGES = ("torch", "transformers", "tokenizers", "numba", "triton", "flash-attn")


def versions() -> dict[str, str]:
    """The versions of nanoengine, Python, and the packages that determine the speed."""
    import platform  # Why here: `import nanoengine` reads this file.
    from importlib import metadata

    found = {"nanoengine": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
