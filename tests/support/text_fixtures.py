"""Small tokenizers of the common kinds, built in memory."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from nanoengine.text.tokenizer import Tokenizer

CORPUS = [
    "Once upon a time there was a little dog who lived in a big house.",
    "The little girl and her dog went to the park. They saw a cat!",
    "User: what is the time?\nAssistant: it is late, go home.\n\n",
    "def f(x):\n    return x + 1\n",
    "naïve café, 10 € — 你好世界 🙂🙂 👩‍👩‍👧",
]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def byte_level() -> Tokenizer:
    """Byte-level BPE, as in GPT-2, Llama 3 and Qwen; `</s>` is EOS."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.add_tokens([AddedToken("<tool>", special=False)])
    backend = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    return Tokenizer(backend)


@functools.cache
def byte_fallback() -> Tokenizer:
    """BPE with "▁" for spaces, and byte tokens for unknown characters, as in Llama 2."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set("abcdefghijklmnopqrstuvwxyzOTU.,:!?▁é"))
    merges = [
        ("▁", "a"),
        ("▁", "t"),
        ("▁t", "h"),
        ("▁th", "e"),
        ("o", "g"),
        ("d", "og"),
        ("▁", "dog"),
    ]
    tokens += letters + [a + b for a, b in merges if a + b not in letters]
    raw = RawTokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    return Tokenizer(backend)


@functools.cache
def metaspace() -> Tokenizer:
    """The same vocabulary with the Metaspace pre-tokenizer and decoder (T5, older Mistral)."""
    raw = RawTokenizer.from_str(byte_fallback().backend.backend_tokenizer.to_str())
    raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    return Tokenizer(backend)


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}


def text_checkpoint(directory: Path, **options: Any) -> Path:
    """A random Llama of two layers with the byte-level tokenizer and a chat template."""
    from tests.support.checkpoints import make_checkpoint

    make_checkpoint(directory, "llama", vocab_size=len(byte_level().backend), **options)
    byte_level().backend.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return directory
