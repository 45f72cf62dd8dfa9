"""Loads a tokenizer from a complete tokenizer.json, from a GGUF file, or with transformers.

`Tokenizer.load` calls it, and `build.py` for the end tokens of a model.
"""

from __future__ import annotations

import functools
import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoengine.errors import ConfigError
from nanoengine.settings.checks import truncate
from nanoengine.settings.files import is_gguf, read_object, wrong_content
from nanoengine.text.tokenizer_file import TokenizerFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanoengine.checkpoint.config import ModelConfig
    from nanoengine.settings.config import EngineConfig
    from nanoengine.text.tokenizer_file import LoadFull

NAMED_TOKENS = {f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}

UNUSED_KEYS = {"chat_template", "clean_up_tokenization_spaces", "model_max_length"}
"""Keys of tokenizer_config.json that do not affect encoding and decoding in nanoengine."""

MODEL_TYPES = {"gemma3_text", "llama", "qwen3", "qwen3_moe"}
"""Models for which transformers uses the tokenizer class of the checkpoint. Counterexamples: for
qwen2 it builds its own; for mistral it may use another library or patch the pre-tokenization."""

HUB_ID = re.compile(r"(?![./~])[\w.-]+(/[\w.-]+)?")
"""Valid hub ids. For other names, the errors of the hub's library are about allowed characters."""

OLD_FILES = ("added_tokens.json", "special_tokens_map.json")
"""Files of older checkpoints, which may add tokens."""

JSON_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", *OLD_FILES)
"""JSON files that transformers may read for a tokenizer."""

ALL_FILES = {*JSON_FILES, "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja"}
"""All files that transformers may read for a tokenizer."""


ADVICE = (
    "give tokenizer=... another directory or hub id, or set skip_tokenizer_init=True and pass token"
    " ids"
)


def load_configured(config: EngineConfig) -> PreTrainedTokenizerBase | TokenizerFile:
    """Loads the tokenizer that an engine's settings name: see `Tokenizer.of`."""
    from nanoengine.checkpoint.find import resolve_model

    name = config.tokenizer or str(resolve_model(config))
    try:
        found = find_or_load(name, config.trust_remote_code)
    except ConfigError:
        from nanoengine.checkpoint.config import load_model_config

        if not config.tokenizer:
            load_model_config(name)  # Why: transformers reads config.json for tokenizers too.
        raise
    if config.chat_template is not None:
        found.chat_template = config.chat_template
        if isinstance(found, TokenizerFile):
            found.load_full = functools.partial(_load_with, config.chat_template, found.load_full)
    return found


def _load_with(chat_template: str, load_full: LoadFull) -> PreTrainedTokenizerBase:
    """Loads the transformers tokenizer, and replaces its chat template."""
    full = load_full()
    full.chat_template = chat_template
    return full


def find_or_load(name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase | TokenizerFile:
    """Loads the tokenizer of a checkpoint directory, a GGUF file or a hub id.

    Raises:
        ConfigError: there is none, or it can't be read.
        ModelError: a GGUF file is damaged.
    """
    name = os.path.expanduser(name)
    directory = Path(name)
    gguf = directory if is_gguf(directory) else None
    if os.path.isdir(name):  # Why not Path.is_dir: it raises for names that are too long.
        _check_files(directory)
        gguf = _find_gguf(directory)
    if gguf is not None:
        from nanoengine.text.gguf_tokenizer import read_tokenizer

        return read_tokenizer(gguf)
    found = find_file(directory)
    if found is None:
        return load_backend(name, trust_remote_code)
    config, file = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    found.chat_template = read_object(config, ConfigError).get("chat_template")
    if file.is_file():
        found.chat_template = file.read_text(encoding="utf-8", errors="replace")
    return found


def with_tokenizer_eos(model: ModelConfig, tokenizer: Any, *, chats: bool = False) -> ModelConfig:
    """Adds the EOS token of the tokenizer to the `eos_sources` of a model's config, as vLLM does.

    Args:
        tokenizer: a `Tokenizer`; None: the config is returned unchanged.
        chats: whether to also add the token with which the chat template closes a message. It is
            always added if there is no EOS token.
    """
    if tokenizer is None:
        return model
    ends = (*model.eos_sources, ("the tokenizer", tokenizer.token_id(tokenizer.eos_token)))
    if chats or not (model := replace(model, eos_sources=ends)).eos_token_ids:
        from nanoengine.text.end_tokens import turn_end_ids

        ends += tuple(("the chat template", token_id) for token_id in turn_end_ids(tokenizer, None))
    return replace(model, eos_sources=ends)


def find_file(directory: Path) -> TokenizerFile | None:
    """Loads the tokenizer of a checkpoint, if `tokenizer.json` is complete. None: transformers must
    load it, and reports errors.
    """
    try:
        config = read_object(directory / "tokenizer_config.json", ConfigError)
        model_type = read_object(directory / "config.json", ConfigError).get("model_type")
    except ConfigError:
        return None
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        return None
    role_tokens = [config.get(key) for key in NAMED_TOKENS if config.get(key) is not None]
    extra = config.get("extra_special_tokens", [])
    known = NAMED_TOKENS | UNUSED_KEYS | {"backend", "tokenizer_class"}
    if (
        config.get("tokenizer_class") != "TokenizersBackend"
        or config.get("backend") != "tokenizers"
        or config.keys() - known - {"extra_special_tokens"}
        or not isinstance(extra, list)
        or not all(isinstance(token, str) for token in [*role_tokens, *extra])
        or any((directory / name).exists() for name in OLD_FILES)
    ):
        return None
    from tokenizers import Tokenizer as RawTokenizer

    try:
        raw = RawTokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception:  # Why all: the library has no specific exceptions.
        return None
    # Why: transformers disables truncation and padding, adds a missing post-processor, and marks
    # the tokens that the config names as special.
    if raw.truncation is not None or raw.padding is not None or raw.post_processor is None:
        return None
    special = {t.content for t in raw.get_added_tokens_decoder().values() if t.special}
    if not special.issuperset([*role_tokens, *extra]):
        return None
    load_full = functools.partial(load_backend, str(directory))
    return TokenizerFile(raw, load_full, config.get("eos_token"))


def _find_gguf(directory: Path) -> Path | None:
    """The GGUF file of a folder without another tokenizer."""
    if any((directory / f"tokenizer{end}").exists() for end in (".json", ".model", "_config.json")):
        return None
    from nanoengine.checkpoint.gguf import find_gguf

    return find_gguf(directory)


def load_backend(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads a tokenizer with transformers."""
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        why = "it is not an existing directory, a GGUF file or a hub id"
        if os.path.isdir(name) or HUB_ID.fullmatch(name):
            why = _find_damage(Path(name)) or truncate(error)
        raise ConfigError(f"tokenizer {name!r} can't be loaded: {why}; {ADVICE}") from error
    # Why: without files, transformers returns a tokenizer that has only special tokens.
    if len(found) <= len(found.added_tokens_decoder):
        raise ConfigError(
            f"{name!r} has no tokenizer: no tokenizer.json, tokenizer.model or vocab.json has a"
            f" vocabulary; {ADVICE}"
        )
    return found


def _find_damage(directory: Path) -> str:
    """The error of the first damaged JSON file, because transformers does not name the file."""
    try:
        for path in (directory / name for name in JSON_FILES):
            if os.path.lexists(path):
                read_object(path, ConfigError)
    except ConfigError as error:
        return str(error)
    return ""


def _check_files(directory: Path) -> None:
    """Raises an error if the directory has a FIFO, socket or device, which would block a reader, or
    a tokenizer file with other content, such as a Git LFS pointer.

    Why all files: transformers determines which of them it opens.
    """
    for path in sorted(directory.iterdir()):
        try:
            mode = path.stat().st_mode
        except OSError:  # a broken link can't be opened either
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ConfigError(f"{path} is not a regular file: remove it from the checkpoint")
        if path.name in ALL_FILES and (why := wrong_content(path)):
            raise ConfigError(f"{path} can't be read: {why}; {ADVICE}")
