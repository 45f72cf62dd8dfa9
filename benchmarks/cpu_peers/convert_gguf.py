"""Converts a Qwen3 checkpoint for llama.cpp: `convert_gguf.py CHECKPOINT FOLDER f32 q8_0`.

Reads float32 and bfloat16. Writes FOLDER/NAME-TYPE.gguf. With q4_0 the vocabulary matrix is stored
as q8_0, as in llama.cpp's own presets, which keep it at a higher precision. Needs gguf and numpy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, LlamaFileType

FILE_TYPES = {
    "f32": LlamaFileType.ALL_F32,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
}
OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor.

    >>> gguf_name("model.layers.3.mlp.up_proj.weight")
    'blk.3.ffn_up.weight'
    """
    module = name.removesuffix(".weight")
    if module in OUTER:
        return f"{OUTER[module]}.weight"
    layer, inner = module.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{INNER[inner]}.weight"


def write_metadata(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    """Sizes from config.json, and the vocabulary from tokenizer.json."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    texts = {index: text for text, index in tokenizer["model"]["vocab"].items()} | special
    kinds = [
        gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL
        for index in range(config["vocab_size"])
    ]
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    sizes = range(config["vocab_size"])  # some checkpoints have more rows than tokens
    writer.add_token_list([texts.get(index, f"[PAD{index}]") for index in sizes])
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])


def read_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and float32 values of a safetensors file.

    Why not the safetensors package: its numpy reader does not support bfloat16. The file consists
    of the length of a JSON header, the header, and the tensors.
    """
    stored = np.memmap(path, np.uint8, mode="r")
    size = int(stored[:8].view(np.uint64)[0])
    header = json.loads(stored[8 : 8 + size].tobytes())
    header.pop("__metadata__", None)
    for name in sorted(header):
        entry = header[name]
        start, end = entry["data_offsets"]
        data = stored[8 + size :][start:end]
        if entry["dtype"] == "BF16":  # the upper half of a float32
            numbers = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] == "F32":
            numbers = data.view(np.float32)
        else:
            raise SystemExit(f"{name} is {entry['dtype']}; only F32 and BF16 are read")
        yield name, numbers.reshape(entry["shape"])


def convert(checkpoint: Path, folder: Path, kind: str) -> None:
    """Writes one file: matrices as `kind`, norms in float32."""
    writer = gguf.GGUFWriter(folder / f"{checkpoint.name}-{kind}.gguf", "qwen3")
    writer.add_name(checkpoint.name)
    writer.add_file_type(FILE_TYPES[kind])
    write_metadata(writer, checkpoint)
    for name, numbers in read_tensors(checkpoint / "model.safetensors"):
        stored = GGMLQuantizationType[kind.upper() if numbers.ndim > 1 else "F32"]
        if stored is GGMLQuantizationType.Q4_0 and "layers" not in name:
            stored = GGMLQuantizationType.Q8_0
        quantized = gguf.quants.quantize(numbers, stored)
        writer.add_tensor(gguf_name(name), quantized, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Converts to every requested type."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("types", nargs="+", choices=FILE_TYPES)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for kind in args.types:
        convert(args.checkpoint.resolve(), args.folder, kind)


if __name__ == "__main__":
    main()
