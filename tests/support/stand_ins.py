"""Small files in the place of those that commands on the pages name but no page writes.

A model is a random one of two layers, as a checkpoint and as a GGUF file with the same weights.
"""

from __future__ import annotations

import functools
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

TEXTS = {
    "questions.csv": "id,prompt\n1,What is above us?\n2,Why?\n",
    "prompts.txt": "Long ago\nOnce upon a time\n",
    "prompts.jsonl": '{"prompt": "Long ago"}\n{"prompt": "Once upon a time"}\n',
    "requests.jsonl": '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",'
    ' "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}}\n',
    "rows.jsonl": '{"prompt": "Long ago", "text": "Long ago"}\n',
    "texts.txt": "Long ago\nOnce upon a time\n",
}
"""Name of a file -> its content."""

DIRECTORIES = re.compile(r"MODEL|CHECKPOINT|(\./)?model|Qwen/Qwen3-[\w.-]+")


@functools.cache
def model() -> Path:
    """Writes the model once per process: `model.gguf` and the directory `model`, in a folder."""
    # Why here: they import transformers, which most pages don't need.
    from tokenizers.pre_tokenizers import ByteLevel

    from nanoengine.text.tokenizer import Tokenizer
    from tests.support.gguf_files import make_gguf
    from tests.support.text_fixtures import CHAT_TEMPLATE

    folder = Path(tempfile.mkdtemp(prefix="stand_ins"))
    special = ["</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    tokens = [*special, *sorted(ByteLevel.alphabet()), "th"]
    tokens += [f"<{n}>" for n in range(-len(tokens) % 64)]
    ggml = {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": ["t h"], "eos_token_id": 0,
        "token_type": [3 if n < 4 else 1 for n in range(len(tokens))],
    }  # fmt: skip
    keys = {f"tokenizer.ggml.{key}": value for key, value in ggml.items()}
    keys["tokenizer.chat_template"] = CHAT_TEMPLATE
    path = folder / "model.gguf"
    make_gguf(path, "qwen3", types=lambda name: "Q4_0", keys=keys, vocab_size=len(tokens))
    Tokenizer.load(str(path)).backend.save_pretrained(folder / "model")
    return path


def write(arguments: Sequence[str], folder: Path) -> None:
    """Writes what these arguments of a command name, unless it exists in the folder. `MODEL@...`
    and `...=FILE` name what is before or after the sign."""
    for word in {part for argument in arguments for part in re.split("[@=]", argument)}:
        path = folder / word
        if path.exists():
            continue
        if word in TEXTS:
            path.write_text(TEXTS[word], encoding="utf-8")
        elif word.endswith(".gguf"):
            shutil.copy(model(), path)
        elif DIRECTORIES.fullmatch(word):
            path.parent.mkdir(exist_ok=True)
            path.symlink_to(model().with_suffix(""))
