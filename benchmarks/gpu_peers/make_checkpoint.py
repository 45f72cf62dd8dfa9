"""Writes a checkpoint with random weights that every engine can load: `make_checkpoint.py DIR`.

config.json, one safetensors file with the names of Hugging Face's Qwen3, and the tokenizer of the
demo model (nano-vllm loads it, although requests are token ids). Random weights are as fast as
trained ones; all engines get the same.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import common  # noqa: F401 - finds the package
import torch
from safetensors.torch import save_file

from benchmarks.suite.shapes import SHAPES, write_shape
from nanoengine.assets import demo_model_path


def weights(shape: str, seed: int) -> dict[str, torch.Tensor]:
    """bf16 weights of a shape with tied embeddings: norms are 1, all others normal, std 0.02."""
    sizes = SHAPES[shape]
    hidden, inner, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    q, kv = sizes["num_attention_heads"] * dim, sizes["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (sizes["vocab_size"], hidden),
        "norm": (hidden,),
    }
    for layer in range(sizes["num_hidden_layers"]):
        parts = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"layers.{layer}.{name}": size for name, size in parts.items()}
    generator = torch.Generator().manual_seed(seed)
    return {
        f"model.{name}.weight": (
            torch.ones(size)
            if len(size) == 1
            else torch.empty(size).normal_(std=0.02, generator=generator)
        ).bfloat16()
        for name, size in shapes.items()
    }


def main() -> None:
    """Writes the directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    dense = [name for name, sizes in SHAPES.items() if "model_type" not in sizes]  # Qwen3's
    parser.add_argument("--shape", choices=dense, default="qwen3-0.6b")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    write_shape(args.shape, args.directory)
    save_file(
        weights(args.shape, seed=0),
        args.directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    for path in Path(demo_model_path()).glob("tokenizer*"):
        shutil.copy(path, args.directory)


if __name__ == "__main__":
    main()
