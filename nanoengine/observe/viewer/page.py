"""page: the viewer's page, made of the sources beside it and the data of one trace.

The page is opened from a disk, perhaps years later and without a network, so all that it needs is
in it. Its policy names the digests of its own scripts and styles: whatever a prompt holds, nothing
else runs, and nothing is fetched.
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
    """The data as gzip: length of the JSON [4 bytes], the JSON, and at the next multiple of 4 the
    columns, one after the other, whose lengths the JSON tells."""
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


def words_of(recording: Recording, tokenizer: Path | None) -> Callable[[int], str] | None:
    """What puts a token into words; None where the run's tokenizer is not on this machine.

    Raises:
        ConfigError: a tokenizer was asked for, and there is none.
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
