"""page: builds the viewer's page from the sources in this directory and the data of one trace.

The page contains all that it needs, because it may be opened years later and without a network. Its
content security policy allows only its own scripts and styles, by their digests: whatever text a
prompt contains, no other code runs, and no file is fetched.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import struct
from collections.abc import Callable
from pathlib import Path
from string import Template

from nanoengine.errors import ConfigError
from nanoengine.observe.trace_reader import Recording
from nanoengine.observe.viewer.page_data import PageData

SOURCES = Path(__file__).parent
SCRIPTS = ("uplot/uPlot.iife.min.js", "viewer.js")
STYLES = ("uplot/uPlot.min.css", "viewer.css")


def page(data: PageData) -> str:
    """The whole page as text."""
    scripts = [_source(name) for name in SCRIPTS]
    styles = [_source(name) for name in STYLES]
    policy = (
        f"default-src 'none'; script-src {_digests(scripts)}; style-src {_digests(styles)};"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )
    licence = " ".join(_source("uplot/LICENSE").split())
    return Template(_source("page.html")).substitute(
        policy=policy,
        title=html.escape(str(data.meta["title"])),
        styles="".join(f"<style>{style}</style>\n" for style in styles),
        scripts="".join(f"<script>{script}</script>\n" for script in scripts),
        licence=html.escape(licence),
        data=base64.b64encode(packed(data)).decode(),
    )


def packed(data: PageData) -> bytes:
    """The data as gzip: length of the JSON [4 bytes], the JSON, padding to a multiple of 4 bytes,
    then the columns in order; the JSON contains their lengths."""
    columns = {name: len(values) for name, values in data.columns.items()}
    meta = json.dumps(data.meta | {"columns": columns}, separators=(",", ":"), default=str).encode()
    meta += b" " * (-len(meta) % 4)
    parts = [struct.pack("<I", len(meta)), meta, *map(bytes, data.columns.values())]
    return gzip.compress(b"".join(parts), compresslevel=6, mtime=0)


def _source(name: str) -> str:
    return (SOURCES / name).read_text(encoding="utf-8")


def _digests(sources: list[str]) -> str:
    hashes = (base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in sources)
    return " ".join(f"'sha256-{one}'" for one in hashes)


def token_decoder(recording: Recording, tokenizer: Path | None) -> Callable[[int], str] | None:
    """A function that returns the text of a token; None if this machine lacks the run's tokenizer.

    Raises:
        ConfigError: a tokenizer was given, and it can't be loaded.
    """
    config = recording.header["config"]
    if tokenizer is not None and not tokenizer.is_dir():
        raise ConfigError(f"tokenizer must be a model's directory, got {str(tokenizer)!r}")
    name = str(tokenizer or config.get("tokenizer") or config.get("model"))
    if not Path(name).is_dir():
        return None
    from nanoengine.text.tokenizer import Tokenizer

    try:
        return Tokenizer.load(name).token_text
    except ConfigError:
        if tokenizer is not None:
            raise
        return None
