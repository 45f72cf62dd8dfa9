"""Builds a tokenizer of the tokenizers library from the metadata of a GGUF file.

    model   merge order                 pre-tokenization                     unknown characters
    gpt2    `merges`, in their order    regular expressions, named by `pre`  none: bytes
    llama   tokens of higher `scores`   none; a space is a "▁"               byte tokens
    gemma4  `merges`, in their order    none; a space is a "▁"               byte tokens

load_tokenizer.py calls it. It reads keys that begin with "tokenizer.", and no tensors. GGUF files
have only a name of the pre-tokenization, and lack other parts of a tokenizer.json (normalizers,
tokens that strip spaces). Tables in this module have both for known names. For unknown names an
error is raised.

Source: keys and types of tokens, docs/gguf.md of ggml; meanings of `pre`, llama.cpp's
src/llama-vocab.cpp, which quotes the expressions of the models' own tokenizer.json; NFC of Qwen,
GPT-NeoX and Cohere, their classes in transformers; NFC of Hunyuan and StableLM 2, and the
expression of Kimi, the classes of their publishers (tokenization_hy.py,
tokenization_arcade100k.py, tokenization_kimi.py); digits and scripts of AFMoE, Trinity's
tokenizer.json.
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
from nanoengine.settings.checks import check_value, join_names, quoted, truncate
from nanoengine.text.tokenizer_file import TokenizerFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE = "tokenizer.chat_template"

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens. Unused tokens only pad the vocabulary and decode to ""."""

ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
"""X in a key X_token_id -> name of this token in transformers."""

NO_ID = (1 << 32) - 1
"""How writers store -1, which means that there is no such token."""

MAX_LISTED = 3
"""Maximum number of tokens in an error message."""

MAX_SQUARES = 1 << 26
"""Maximum sum of the squared lengths of tokens with scores, because each token is split at every
position. A vocabulary of 262,144 tokens has a quarter of it."""

PHI3_NO_STRIP = {"<unk>", "<s>", "<|endoftext|>"}
"""Tokens of Phi-3 that keep the spaces after them."""


class ByteBPE(NamedTuple):
    """Settings of a byte-level BPE tokenizer.

    Attributes:
        splits: regular expressions of the pre-tokenization; each splits the pieces of the previous.
        nfc: whether text is NFC-normalized first.
        ignore_merges: whether a word in the vocabulary is one token, regardless of merges.
        bos: whether texts begin with BOS, if no key determines it.
    """

    splits: Sequence[str]
    nfc: bool = False
    ignore_merges: bool = False
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
SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
TEKKEN = CASED % ("", "") + r"\p{N}" + SYMBOLS
GPT4O = CASED % (f"{APOSTROPHES}?", f"{APOSTROPHES}?") + r"\p{N}{1,3}" + SYMBOLS
HAN = "[一-龥\u0800-一가-\ud7ff]+"
UP_TO_3_DIGITS = r"\p{N}{1,3}"
DEEPSEEK3 = (
    UP_TO_3_DIGITS,
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES,
)
CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}")
DEEPSEEK = (
    r"[\r\n]",
    # Why these ranges: the published expression lists the letters with case of an older Unicode.
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8f\u2d00-\u2d2d\ua78f-\ua7ff"
    r"\uab30-\uab6f\x{10570}-\x{105bf}\x{10d50}-\x{10d8f}\x{16e40}-\x{1dfff}]]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    HAN,
    r"\p{N}",
)
# Why not the published expression: from each digit it looks ahead over all further digits.
DIGITS_FROM_RIGHT = r"(?<!\d)\d{1,3}(?=(?>\d{3})*%s)|\G(?<=\d)\d{3}"
AFMOE = (
    DIGITS_FROM_RIGHT % r"(?!\d)",
    r"[\u4e00-\u9fff\u3040-\u30ff\u3400-\u4dbf\uf900-\ufaff\uff65-\uff9f\u2f00-\u2fdf]+"
    r"|[\u0e00-\u0e7f]+|[\u0e80-\u0eff]+|[\u1780-\u17ff]+"
    r"|[\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff]+|[\uac00-\ud7af\u1100-\u11ff]+",
    DEEPSEEK3[-1],
)
KIMI = r"\p{Han}+|" + GPT4O.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]", r"[\r\n]")
EXAONE = QWEN2.replace(r"]?\p{L}+", r"]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+").replace(
    r"[\r\n]*|\s*[\r\n]+", r"[\r\n/]?|\s*[\r\n]"
)
JAIS = LLAMA3.removesuffix(r"\s+(?!\S)|\s+")
JAIS += "".join(rf"\s{{{1 << i}}}(?!\S)|" for i in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s"
VIKING = (r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", r"\p{N}")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

PRE_TOKENIZERS = {
    name: settings
    for names, settings in (
        ("gpt-2 phi-2 exaone4 trillion granite-docling mellum gigachat a.x-4.0", ByteBPE([GPT2])),
        ("mpt olmo", ByteBPE([GPT2], nfc=True)),
        ("smollm starcoder refact codeshell exaone minerva-7b mellum2", ByteBPE(DIGITS)),
        ("command-r", ByteBPE(DIGITS, nfc=True)),
        ("viking", ByteBPE(VIKING)),
        ("qwen2 stablelm2", ByteBPE([QWEN2], nfc=True)),
        ("hunyuan", ByteBPE([QWEN2], nfc=True, ignore_merges=True)),
        ("qwen35", ByteBPE([QWEN35], nfc=True)),
        ("deepseek-r1-qwen kormo megrez solar-open", ByteBPE([QWEN2])),
        ("llama3 llama-v3 llama-bpe falcon3", ByteBPE([LLAMA3], ignore_merges=True, bos=True)),
        ("falcon-h1 pixtral lfm2 midm-2.0", ByteBPE([LLAMA3], ignore_merges=True, bos=True)),
        ("dbrx smaug-bpe chatglm-bpe", ByteBPE([LLAMA3])),
        ("glm4", ByteBPE([LLAMA3], ignore_merges=True)),
        ("minicpm5", ByteBPE([UP_TO_3_DIGITS, LLAMA3], ignore_merges=True)),
        ("tekken", ByteBPE([TEKKEN], ignore_merges=True, bos=True)),
        ("gpt-4o llama4 minimax-m2 kanana2", ByteBPE([GPT4O])),
        ("tiny_aya", ByteBPE([DIGITS_FROM_RIGHT % r"\b", GPT4O], nfc=True)),
        ("kimi-k2", ByteBPE([KIMI], ignore_merges=True)),
        ("deepseek-llm", ByteBPE(DEEPSEEK)),
        ("deepseek-coder", ByteBPE(CODER)),
        ("deepseek-v3 hunyuan-dense joyai-llm", ByteBPE(DEEPSEEK3)),
        ("seed-coder", ByteBPE([SEED])),
        ("exaone-moe", ByteBPE([EXAONE])),
        ("afmoe", ByteBPE(AFMOE)),
        ("jais-2", ByteBPE([JAIS])),
        ("laguna", ByteBPE([r"[^\n]+|\n+", QWEN2])),
        ("default", ByteBPE(DEFAULT)),
    )
    for name in names.split()
}
"""Name in `tokenizer.ggml.pre` -> settings of the byte-level BPE tokenizer."""


def read_tokenizer(path: Path) -> TokenizerFile:
    """Reads the tokenizer of a GGUF file.

    Raises:
        ConfigError: the file has no tokenizer, or it is of an unknown kind or inconsistent.
        ModelError: the file can't be read.
    """
    from nanoengine.checkpoint.gguf import read_gguf

    metadata = read_gguf(path).metadata
    return make_tokenizer(metadata, path)


def make_tokenizer(metadata: Mapping[str, Any], path: Path) -> TokenizerFile:
    """Builds a tokenizer from metadata; `path` is for error messages."""
    keys = _Keys(metadata, path)
    model = keys.get("model", str)
    if model not in MODELS:
        keys.reject("model", f"is {quoted(model)}; supported: {', '.join(MODELS)}")
    raw, bos = MODELS[model](keys)
    # Source: Phi-3's tokenizer.json, in which most of these tokens strip the spaces after them.
    strip = model == "llama" and str(metadata.get("general.architecture")) == "phi3"
    for add, kinds in (raw.add_special_tokens, (UNKNOWN, CONTROL)), (raw.add_tokens, USER_DEFINED):
        found = [keys.tokens[i] for i in np.flatnonzero(np.isin(keys.types, kinds))]
        strips = {token: strip and token not in PHI3_NO_STRIP for token in found if token}
        add([AddedToken(token, normalized=False, rstrip=strips[token]) for token in strips])
    ends = []
    for role, default in (("bos", bos), ("eos", False)):
        if keys.get(f"add_{role}_token", bool, default):
            if (token_id := keys.token_id(role)) is None:
                keys.reject(f"{role}_token_id", f"is missing, but add_{role}_token is True")
            ends.append((role, token_id))
    # Why these names: the text of a token may have a special meaning in a template.
    single = [name for name in ("bos", "$A", "eos") if name == "$A" or name in dict(ends)]
    raw.post_processor = TemplateProcessing(single=single, special_tokens=ends)
    names = keys.special_tokens()
    known = {"clean_up_tokenization_spaces": False, **names}
    found = TokenizerFile(raw, functools.partial(_load_full, raw, str(path), known), names)
    found.chat_template = keys.chat_templates()
    return found


class _Keys:
    """Reads and checks the tokenizer keys of a file.

    Attributes:
        vocab: token -> id, without unused and empty tokens.
    """

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self.metadata, self.path = metadata, path
        self.tokens: list[str] = self.get("tokens", list[str])
        self.types = self.per_token("token_type")
        if wrong := sorted(set(self.types.tolist()) - set(range(NORMAL, BYTE + 1))):
            self.reject("token_type", f"has {wrong[:MAX_LISTED]}; supported: {NORMAL} to {BYTE}")
        used = [i for i in np.flatnonzero(self.types != UNUSED).tolist() if self.tokens[i]]
        self.vocab = {self.tokens[i]: i for i in used}
        if len(self.vocab) < len(used):
            twice = [self.tokens[i] for i in used if self.vocab[self.tokens[i]] != i]
            self.reject("tokens", f"has the same token twice: {quoted(twice[:MAX_LISTED])}")

    def reject(self, name: str, problem: str) -> NoReturn:
        raise ConfigError(
            f"{self.path}: tokenizer.ggml.{name} {problem}; give tokenizer=... a directory or hub"
            " id with the model's tokenizer, or set skip_tokenizer_init=True and pass token ids"
        )

    def get(self, name: str, annotation: Any, *default: Any) -> Any:
        """The value of a key. Without a default the key is required."""
        key = f"tokenizer.ggml.{name}"
        if key not in self.metadata:
            return default[0] if default else self.reject(name, "is missing")
        return check_value(self.metadata[key], annotation, f"{self.path}: {key}", ConfigError)

    def per_token(self, name: str) -> np.ndarray:
        """The value of a key that has a finite number per token."""
        found = np.asarray(self.metadata.get(f"tokenizer.ggml.{name}", ()))
        count = len(self.tokens)
        if found.shape != (count,) or found.dtype.kind not in "iuf" or not count:
            self.reject(name, f"must have {count} numbers, one per token, and at least one")
        if not np.isfinite(found).all():
            self.reject(name, "must have finite numbers")
        return found

    def token_id(self, role: str, default: int = NO_ID) -> int | None:
        """The id of the token with this role; None: there is none."""
        name = f"{role}_token_id"
        found: int = self.get(name, int, default)
        if found in (-1, NO_ID):
            return None
        if not 0 <= found < len(self.tokens):
            self.reject(name, f"is {found}; it must be from 0 to {len(self.tokens) - 1}")
        return found

    def special_tokens(self) -> dict[str, str]:
        """Name in transformers -> the token with this role. transformers makes them special tokens.

        Why not all of them: writers copy the padding token from config.json, which may name any
        token.
        """
        ids = {role: i for role in ROLES if (i := self.token_id(role)) is not None}
        return {
            ROLES[role]: self.tokens[i]
            for role, i in ids.items()
            if self.types[i] in (UNKNOWN, CONTROL)
            or (role in ("bos", "eos") and self.tokens[i] in self.vocab)
        }

    def chat_templates(self) -> str | dict[str, str] | None:
        """The chat template, or a dict of name -> template if there are several."""
        found = {
            key.removeprefix(TEMPLATE).removeprefix(".") or "default": source
            for key, source in self.metadata.items()
            if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")
        }
        check_value(found, dict[str, str], f"{self.path}: {TEMPLATE}", ConfigError)
        return found if found.keys() - {"default"} else found.get("default")


def _merges(keys: _Keys) -> list[tuple[str, str]]:
    # Why dict.fromkeys: of equal merges, llama.cpp uses the first, but the library the last.
    merges = [tuple(pair.split(" ", 1)) for pair in dict.fromkeys(keys.get("merges", list[str]))]
    if wrong := [merge for merge in merges if len(merge) != 2]:
        keys.reject("merges", f"has {quoted(wrong[0][0])}, which is not a pair of tokens")
    return merges


def _bpe(keys: _Keys, merges: list[tuple[str, str]], **options: Any) -> RawTokenizer:
    try:
        return RawTokenizer(models.BPE(vocab=keys.vocab, merges=merges, **options))
    except Exception as error:  # Why all: the library has no specific exceptions.
        keys.reject("merges", f"does not match the vocabulary: {truncate(error)}")


def _byte_level(keys: _Keys) -> tuple[RawTokenizer, bool]:
    """Returns a BPE tokenizer over bytes, and whether texts begin with BOS by default."""
    name = keys.get("pre", str)
    if name not in PRE_TOKENIZERS:
        known = join_names(sorted(PRE_TOKENIZERS), name)
        keys.reject("pre", f"is {quoted(name)}; supported: {known}")
    settings = PRE_TOKENIZERS[name]
    raw = _bpe(keys, _merges(keys), ignore_merges=settings.ignore_merges)
    if settings.nfc:
        raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(split), "isolated") for split in settings.splits),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    raw.decoder = decoders.ByteLevel()
    return raw, settings.bos


def _sentencepiece_bpe(keys: _Keys) -> tuple[RawTokenizer, bool]:
    """Returns a BPE tokenizer as in sentencepiece, and True: texts begin with BOS by default.

    `pre` has no effect, because text is not split.
    """
    best = np.argsort(-keys.per_token("scores").astype(np.float64), kind="stable")
    merged = best[np.isin(keys.types[best], (NORMAL, USER_DEFINED))]
    by_score = [token for i in merged.tolist() if (token := keys.tokens[i])]
    if sum(len(token) ** 2 for token in by_score) > MAX_SQUARES:
        keys.reject("tokens", f"has too long tokens: their squared lengths exceed {MAX_SQUARES}")
    known = set(by_score)
    merges = [
        (start, end)
        for token in by_score
        for cut in range(len(token) - 1, 0, -1)
        if (end := token[cut:]) in known and (start := token[:cut]) in known
    ]
    return _char_bpe(keys, merges, prefix=True), True


def _gemma4_bpe(keys: _Keys) -> tuple[RawTokenizer, bool]:
    """Returns a BPE tokenizer as in Gemma 4, and True: texts begin with BOS by default."""
    return _char_bpe(keys, _merges(keys), prefix=False), True


def _char_bpe(keys: _Keys, merges: list[tuple[str, str]], prefix: bool) -> RawTokenizer:
    """Returns a BPE tokenizer over the characters of a whole text, in which "▁" replaces spaces.

    Args:
        prefix: whether "▁" is prepended to texts by default.
    """
    if keys.get("remove_extra_whitespaces", bool, False):
        keys.reject("remove_extra_whitespaces", "is True, which is not supported")
    unknown = keys.token_id("unknown", 0)
    if unknown is None or keys.tokens[unknown] not in keys.vocab:
        keys.reject("unknown_token_id", f"is {unknown}, which is not a used token")
    in_bytes = bool((keys.types == BYTE).any())
    name = keys.tokens[unknown]
    raw = _bpe(keys, merges, unk_token=name, fuse_unk=True, byte_fallback=in_bytes)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.normalizer = normalizers.Replace(" ", "▁")
    if keys.get("add_space_prefix", bool, prefix):
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), raw.normalizer])
        parts.append(decoders.Strip(" ", 1, 0))
    raw.decoder = decoders.Sequence(parts)
    return raw


MODELS = {"gpt2": _byte_level, "llama": _sentencepiece_bpe, "gemma4": _gemma4_bpe}
"""Name in `tokenizer.ggml.model` -> the function that builds the tokenizer."""


def _load_full(
    raw: RawTokenizer, name: str, known: dict[str, Any], chat_template: Any
) -> PreTrainedTokenizerBase:
    """Converts the tokenizer to a transformers tokenizer, for `get_tokenizer`."""
    from transformers import PreTrainedTokenizerFast

    full = PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=chat_template, **known)
    # Why not an argument: with a large vocabulary, transformers would look up the name on the hub.
    full.name_or_path = name
    return full
