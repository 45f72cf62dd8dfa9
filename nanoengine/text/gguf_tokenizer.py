"""A tokenizer out of the metadata of a GGUF file, built for the tokenizers library.

    model   what merges first           what splits a text into words        what is unknown
    gpt2    `merges`, in their order    regular expressions, named by `pre`  nothing: all is bytes
    llama   tokens of higher `scores`   nothing; a space is a "▁"            is tokens of a byte

Called by load_tokenizer.py. It knows keys that begin with "tokenizer.", and no tensors. Such a file
names the rules of words and leaves out what else a tokenizer.json says (normalizers, tokens that
take up spaces); both are in tables here, for the names that are known. No name is guessed.

Source: keys and types of tokens, docs/gguf.md of ggml; what each `pre` stands for, llama.cpp's
src/llama-vocab.cpp, which quotes the expressions of the models' own tokenizer.json; NFC of Qwen,
GPT-NeoX and Cohere, their classes in transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.processors import TemplateProcessing

from nanoengine.errors import ConfigError
from nanoengine.settings.checks import check_value, shown
from nanoengine.text.tokenizer_file import TokenizerFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE = "tokenizer.chat_template"

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens. Unused ones fill the vocabulary up: no text has them, and they have no text."""

ROLES = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token",
}  # fmt: skip
"""Tokens that keys NAME_token_id say -> their names in transformers."""

NO_ID = (1 << 32) - 1
"""What a writer makes of -1: there is no such token."""

MOST_NAMED = 3
"""Tokens that one message lists."""


class Words(NamedTuple):
    """How byte-level BPE takes a text apart.

    Attributes:
        splits: regular expressions, each of which splits what those before it have left.
        nfc: whether characters are composed first.
        whole: whether a word that is a token is one, whatever merges say.
        bos: whether texts begin with BOS where no key says so.
    """

    splits: Sequence[str]
    nfc: bool = False
    whole: bool = False
    bos: bool = False


APOSTROPHES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS = (r"\p{N}", GPT2)
QWEN2 = APOSTROPHES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN35 = QWEN2.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SEED = QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s|"
OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
TEKKEN = CASED % ("", "") + r"\p{N}" + OTHERS
GPT4O = CASED % (f"{APOSTROPHES}?", f"{APOSTROPHES}?") + r"\p{N}{1,3}" + OTHERS
HAN = "[一-龥\u0800-一가-\ud7ff]+"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES,
)
CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

WORDS = {
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4", "trillion", "granite-docling"), Words([GPT2])),
    **dict.fromkeys(("mpt", "olmo"), Words([GPT2], nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), Words(DIGITS)),
    "command-r": Words(DIGITS, nfc=True),
    **dict.fromkeys(("qwen2", "megrez"), Words([QWEN2], nfc=True)),
    "deepseek-r1-qwen": Words([QWEN2]),
    "qwen35": Words([QWEN35], nfc=True),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"),
        Words([LLAMA3], whole=True, bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Words([LLAMA3])),
    "glm4": Words([LLAMA3], whole=True),
    "tekken": Words([TEKKEN], whole=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), Words([GPT4O])),
    "deepseek-coder": Words(CODER),
    "deepseek-v3": Words(DEEPSEEK3),
    "seed-coder": Words([SEED]),
    "default": Words(DEFAULT),
}
"""Of byte-level BPE, by the name in `tokenizer.ggml.pre`."""


def read_tokenizer(path: Path) -> TokenizerFile:
    """The tokenizer of a GGUF file.

    Raises:
        ConfigError: it has none that is known, or one that contradicts itself.
        ModelError: the file can't be read.
    """
    from nanoengine.checkpoint.gguf import read_gguf

    return make_tokenizer(read_gguf(path).metadata, path)


def make_tokenizer(metadata: Mapping[str, Any], path: Path) -> TokenizerFile:
    """The tokenizer that a file's metadata describe; `path` is for messages."""
    said = _Said(metadata, path)
    model = said.value("model", str | None, None)
    if model not in ("gpt2", "llama"):
        said.refuse("model", f"is {shown(model)}; gpt2 (byte-level BPE) and llama are read")
    tokens = said.value("tokens", list[str])
    types = said.numbers("token_type", len(tokens))
    if wrong := sorted(set(types.tolist()) - set(range(NORMAL, BYTE + 1))):
        said.refuse("token_type", f"has types {wrong[:MOST_NAMED]}; known are 1 to {BYTE}")
    # Why not an empty one: some vocabularies have tokens without text, which no text has.
    kept = [(t, i) for i, t in enumerate(tokens) if t and types[i] != UNUSED]
    vocab = dict(kept)
    if len(vocab) < len(kept):
        twice = [token for token, i in kept if vocab[token] != i]
        said.refuse("tokens", f"has two tokens of one text: {shown(twice[:MOST_NAMED])}")
    ids = {role: said.token_id(role, tokens) for role in ROLES}
    if model == "llama" and "tokenizer.ggml.unknown_token_id" not in metadata and tokens:
        ids["unknown"] = 0
    try:
        if model == "gpt2":
            raw, bos = _gpt2(said, vocab)
        else:
            raw, bos = _llama(said, tokens, types, vocab, ids)
    except ConfigError:
        raise
    except Exception as error:  # Why: the library raises nothing more exact.
        said.refuse("merges", f"do not fit the vocabulary: {error}")
    _add_tokens(said, raw, tokens, types, ids)
    _add_ends(said, raw, ids, bos)
    names = {ROLES[role]: tokens[i] for role, i in ids.items() if i is not None}
    return TokenizerFile(raw, functools.partial(_load_full, raw, said.templates(), names))


class _Said:
    """What a file says of its tokenizer, checked as it is read."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self.metadata, self.path = metadata, path

    def refuse(self, name: str, problem: str) -> NoReturn:
        raise ConfigError(
            f"{self.path}: tokenizer.ggml.{name} {problem}\ngive tokenizer=... the directory or hub"
            " id of the model's own tokenizer, or set skip_tokenizer_init=True and pass token ids"
        )

    def value(self, name: str, annotation: Any, *default: Any) -> Any:
        """One value; without a default it must be there."""
        key = f"tokenizer.ggml.{name}"
        if key not in self.metadata:
            return default[0] if default else self.refuse(name, "is missing")
        return check_value(self.metadata[key], annotation, f"{self.path}: {key}", ConfigError)

    def numbers(self, name: str, count: int) -> np.ndarray:
        """A finite number for each token."""
        found = np.asarray(self.metadata.get(f"tokenizer.ggml.{name}", ()))
        if found.shape != (count,) or found.dtype.kind not in "iuf" or not count:
            self.refuse(name, f"must have a number for each of {count} tokens (1 and more)")
        if not np.isfinite(found).all():
            self.refuse(name, "has a number that is not finite")
        return found

    def token_id(self, role: str, tokens: Sequence[str]) -> int | None:
        """The id of the token with a role; None: the file has none."""
        name = f"{role}_token_id"
        found = self.value(name, int | None, None)
        if found is None or found in (-1, NO_ID):
            return None
        if not 0 <= found < len(tokens) or not tokens[found]:
            self.refuse(name, f"is {found}; the vocabulary has 0 to {len(tokens) - 1}, with texts")
        return int(found)

    def templates(self) -> str | dict[str, str] | None:
        """The chat template; by name, if there are several."""
        named = {"default": self.metadata.get(TEMPLATE)} | {
            key.removeprefix(f"{TEMPLATE}."): source
            for key, source in self.metadata.items()
            if key.startswith(f"{TEMPLATE}.")
        }
        found = {name: source for name, source in named.items() if source is not None}
        check_value(found, dict[str, str], f"{self.path}: {TEMPLATE}", ConfigError)
        return found if len(found) > 1 else next(iter(found.values()), None)


def _gpt2(said: _Said, vocab: dict[str, int]) -> tuple[RawTokenizer, bool]:
    """Byte-level BPE, and whether its texts begin with BOS if nothing else is said."""
    name = said.value("pre", str | None, None)
    if name not in WORDS:
        what = "is missing, which" if name is None else f"is {shown(name)}, and"
        said.refuse("pre", f"{what} names the rules of words; known: {', '.join(sorted(WORDS))}")
    words = WORDS[name]
    # Why the first of equal ones: so does llama.cpp, while the library takes the last.
    merges = [
        tuple(merge.split(" ", 1)) for merge in dict.fromkeys(said.value("merges", list[str]))
    ]
    if wrong := [merge for merge in merges if len(merge) != 2]:
        said.refuse("merges", f"has {shown(wrong[0][0])}, which is no two tokens")
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=words.whole))
    if words.nfc:
        raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(split), "isolated") for split in words.splits),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    raw.decoder = decoders.ByteLevel()
    return raw, words.bos


def _llama(
    said: _Said,
    tokens: list[str],
    types: np.ndarray,
    vocab: dict[str, int],
    ids: dict[str, int | None],
) -> tuple[RawTokenizer, bool]:
    """BPE by scores, as sentencepiece has it, and whether its texts begin with BOS.

    What `pre` says has no meaning here: no text is split.
    """
    if said.value("remove_extra_whitespaces", bool, False):
        said.refuse("remove_extra_whitespaces", "is True: spaces are kept with this model")
    scores = said.numbers("scores", len(tokens))
    best = np.argsort(-scores.astype(np.float64), kind="stable")
    normal = [tokens[i] for i in best[types[best] == NORMAL] if tokens[i]]
    known = set(normal)
    merges = [
        (token[:cut], token[cut:])
        for token in normal
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]
    unknown = ids["unknown"]
    raw = RawTokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=bool((types == BYTE).any()),
        )
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.normalizer = normalizers.Replace(" ", "▁")
    if said.value("add_space_prefix", bool, True):
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), raw.normalizer])
        parts.append(decoders.Strip(" ", 1, 0))
    raw.decoder = decoders.Sequence(parts)
    return raw, True


def _add_tokens(
    said: _Said,
    raw: RawTokenizer,
    tokens: list[str],
    types: np.ndarray,
    ids: dict[str, int | None],
) -> None:
    """Makes tokens that a text may name whole, special ones or not, known as such."""
    whole = np.isin(types, (UNKNOWN, CONTROL, USER_DEFINED))
    named = [i for i in ids.values() if i is not None]
    whole[named] = True
    # Source: Phi-3's tokenizer.json, whose tokens take up the spaces behind them.
    phi3 = said.metadata.get("general.architecture") == "phi3" and raw.model.unk_token is not None
    added: dict[bool, list[AddedToken]] = {True: [], False: []}
    for i in np.flatnonzero(whole & (types != UNUSED)).tolist():
        token, special = tokens[i], types[i] != USER_DEFINED or i in named
        strips = phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")
        if token:
            added[special].append(AddedToken(token, rstrip=strips, normalized=False))
    raw.add_special_tokens(added[True])
    raw.add_tokens(added[False])


def _add_ends(said: _Said, raw: RawTokenizer, ids: dict[str, int | None], bos: bool) -> None:
    """BOS and EOS around a text, where the file or its kind asks for them."""
    ends = {}
    for role, default in (("bos", bos), ("eos", False)):
        name = f"add_{role}_token"
        if said.value(name, bool, default):
            if ids[role] is None:
                said.refuse(f"{role}_token_id", f"is missing, and {name} is True")
            ends[role] = ids[role]
    # Why such names: a template has a meaning for characters that a token may have.
    single = [*(["bos"] if "bos" in ends else ()), "$A", *(["eos"] if "eos" in ends else ())]
    raw.post_processor = TemplateProcessing(single=single, special_tokens=[*ends.items()])


def _load_full(
    raw: RawTokenizer, templates: str | dict[str, str] | None, names: dict[str, str]
) -> PreTrainedTokenizerBase:
    """The same tokenizer as one of transformers, for chats and for who asks for it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        chat_template=templates,
        clean_up_tokenization_spaces=False,
        **names,
    )
