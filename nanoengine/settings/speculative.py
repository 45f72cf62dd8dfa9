"""NgramDrafts, MTPDrafts: the parsed values of `speculative="..."`.

    "ngram"                     NgramDrafts()
    "ngram:max=4,min=2,k=8"     the same with all options
    "mtp:k=1"                   MTPDrafts

`features/speculative/factory.py` creates the drafter from them; nothing is loaded here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from nanoengine.errors import ConfigError
from nanoengine.settings.checks import quoted

MAX_DRAFTS = 8
"""More would change the last bits of attention: `SPLIT_QUERIES` in kernels/attention_tasks.py."""
MAX_NGRAM = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramDrafts:
    """Drafts are the tokens that followed an earlier match of the last tokens, in prompt or output.

    `max` and `min` are the longest and shortest n-gram that is looked up, `k` the maximum number of
    drafts per sequence and step.
    """

    max: int = 4
    min: int = 2
    k: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPDrafts:
    """Drafts are the tokens of the checkpoint's MTP layer; at most `k` per sequence and step."""

    k: int = 1


KINDS: dict[str, type[NgramDrafts | MTPDrafts]] = {"ngram": NgramDrafts, "mtp": MTPDrafts}


def parse_speculative(text: str) -> NgramDrafts | MTPDrafts:
    """Parses the option `speculative`.

    Raises:
        ConfigError: an option is unknown, not an integer, or out of range; or the name is unknown.
    """
    name, _, options_text = text.partition(":")
    if name not in KINDS:
        raise ConfigError(
            f"speculative must be 'ngram' or 'mtp', got {quoted(text)}; draft models are not"
            " supported"
        )
    kind, options = KINDS[name], dict[str, int]()
    known = [f.name for f in fields(kind)]
    for part in filter(None, options_text.split(",")):
        option, _, value = part.partition("=")
        if option not in known or not value.isdecimal():
            allowed = f"the options of {name!r} are {', '.join(known)}, integers"
            raise ConfigError(f"speculative: {allowed}, as in '{name}:k=4'; got {quoted(part)}")
        options[option] = int(value)
    drafts = kind(**options)
    if not 1 <= drafts.k <= MAX_DRAFTS:
        raise ConfigError(f"speculative: k must be in [1, {MAX_DRAFTS}], got {drafts.k}")
    if isinstance(drafts, NgramDrafts) and not 1 <= drafts.min <= drafts.max <= MAX_NGRAM:
        got = f"min={drafts.min}, max={drafts.max}"
        raise ConfigError(f"speculative: 1 <= min <= max <= {MAX_NGRAM} must hold, got {got}")
    return drafts
