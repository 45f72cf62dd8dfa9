"""Writes Qwen3 checkpoints with seeded random weights and a tokenizer, which every peer can load.

    python benchmarks/cpu_peers/checkpoints.py DIRECTORY --shapes tiny small qwen3-0.6b
    python benchmarks/cpu_peers/checkpoints.py DIRECTORY --shapes small --dtype bfloat16

Random weights are as fast as trained ones. Prompts are token ids, so the tokenizer only has to
exist: byte-level, with a merge for each pair of lower-case letters, filled up to the vocabulary.
"""

from __future__ import annotations

import argparse
import string
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.suite.shapes import SHAPES

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of exactly `vocab_size` entries, the last three special."""
    pairs = [(a, b) for a in string.ascii_lowercase for b in string.ascii_lowercase]
    entries = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in pairs]
    entries += [f"<unused{i}>" for i in range(len(entries), vocab_size - len(SPECIALS))]
    vocab = {entry: index for index, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIALS[0], eos_token=SPECIALS[2]
    )


def write_checkpoint(shape: str, directory: Path, seed: int, dtype: str = "float32") -> None:
    """Writes one shape: matrices from normal(0, 0.02), norms 1. The bfloat16 checkpoint is the
    rounded float32 one, in a directory whose name ends with -bf16."""
    sizes = {k: v for k, v in SHAPES[shape].items() if not k.endswith("dtype")}
    tokenizer = make_tokenizer(sizes["vocab_size"])
    config = Qwen3Config(
        **sizes,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=dtype,
    )
    model = Qwen3ForCausalLM(config).float()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02, generator=draw)
            else:
                parameter.fill_(1)
    target = directory / (f"{shape}-bf16" if dtype == "bfloat16" else shape)
    tokenizer.save_pretrained(target)
    model.to(getattr(torch, dtype)).save_pretrained(target, max_shard_size="10GB")


def main() -> None:
    """Writes the chosen shapes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["small"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for shape in args.shapes:
        write_checkpoint(shape, args.directory, args.seed, args.dtype)


if __name__ == "__main__":
    main()
