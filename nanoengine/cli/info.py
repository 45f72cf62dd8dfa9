"""`nanoengine info`: shows the hardware, the backends that run on it, and a model's needs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nanoengine.cli.options import DEMO, EngineArgs, ModelName, engine_options
from nanoengine.errors import NanoEngineError
from nanoengine.jobs.manifest import sampling_line
from nanoengine.settings.config import EngineConfig
from nanoengine.text.load_tokenizer import with_tokenizer_eos
from nanoengine.text.tokenizer import Tokenizer
from nanoengine.version import versions

if TYPE_CHECKING:
    import torch

    from nanoengine.checkpoint.config import ModelConfig
    from nanoengine.checkpoint.gguf import GGUFTensor
    from nanoengine.checkpoint.quantization import Quantization

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoArgs(EngineArgs):
    """Shows versions, device, attention backends, and a model without loading its weights.

    Attributes:
        load: Load the model as well, and show its memory plan.
    """

    model: ModelName = DEMO
    load: bool = False


def main(args: InfoArgs) -> None:
    """Prints the report.

    Raises:
        ConfigError, ModelError: the model can't be found or read.
    """
    from nanoengine.checkpoint.config import load_model_config
    from nanoengine.checkpoint.find import resolve_device, resolve_dtype, resolve_model
    from nanoengine.checkpoint.quantization import resolve_quantization
    from nanoengine.runner.kv_cache import stored_dtype
    from nanoengine.runner.options import use_isa
    from nanoengine.settings.files import is_gguf

    device, config = resolve_device(args.device), EngineConfig(**engine_options(args))
    use_isa(config)
    directory = resolve_model(config)
    model, tokenizer = load_model_config(directory), None
    with suppress(NanoEngineError):  # Why: a checkpoint without a tokenizer runs on token ids.
        tokenizer = None if config.skip_tokenizer_init else Tokenizer.of(config)
    model = with_tokenizer_eos(model, tokenizer, chats=True)
    dtype = resolve_dtype(args.dtype, model.dtype, device, backend=args.attention_backend)
    kv_dtype = stored_dtype(args.kv_cache_dtype, dtype)
    needs = {"device": device, "dtype": dtype, "head_dim": model.largest_head}
    needs |= {"kv_dtype": kv_dtype, "is_mla": model.plan.mla is not None}
    where = f"{device.type}, {_name(dtype)}, head_dim {model.largest_head}"
    sections: dict[str, Iterable[str]] = {
        "versions": map(" ".join, versions().items()),
        "device": device_lines(device),
        f"attention backends ({where})": backend_lines(needs),
        f"model {args.model}": model_lines(model, directory, dtype, kv_dtype),
        "answers": [ends_line(model, tokenizer), f"sampling: {sampling_line(config, model)}"],
    }
    runs = resolve_quantization(args.quantization, model.quantization, device=device.type)
    sections["arithmetic"] = arithmetic_lines(runs, _name(dtype), args.kv_cache_dtype)
    if is_gguf(directory):
        sections["GGUF file"] = gguf_lines(directory)
        if runs and device.type == "cpu":
            sections["kernels"] = kernel_lines(directory, runs.activations)
    if args.load:
        sections["engine"] = engine_lines(config)
    for title, lines in sections.items():
        print(title)
        for line in lines:
            print(f"  {line}")


def engine_lines(config: EngineConfig) -> Iterable[str]:
    """The size and load time of the model, and its memory plan."""
    from nanoengine.build import build_engine

    with closing(build_engine(config)) as engine:
        info = engine.info
    took = f"loaded in {info.load_s:.2f} s, ready in {info.start_s:.2f} s"
    yield f"{info.num_parameters:,} parameters, {took}"
    yield f"max_model_len {info.max_model_len}"
    yield from (*info.products, *info.memory_plan.splitlines())


def device_lines(device: torch.device) -> Iterator[str]:
    """The device that `--device` selects, with its memory."""
    import torch

    from nanoengine.kernels.isa import CURRENT, available, cpu_features
    from nanoengine.runner.memory import free_cpu_bytes

    if device.type == "cuda":
        free, total = (size / GIB for size in torch.cuda.mem_get_info(device))
        name = torch.cuda.get_device_name(device)
        yield f"{device}: {name}, {free:.1f} of {total:.1f} GiB free"
        return
    from nanoengine.kernels.threads import num_workers, thread_reason
    from nanoengine.runner.options import use_allowed_cores

    use_allowed_cores()
    capability, free = torch.backends.cpu.get_cpu_capability(), free_cpu_bytes() / GIB
    yield f"cpu: {num_workers()} threads ({thread_reason()}), {free:.1f} GiB free, {capability}"
    yield f"kernels for {CURRENT}"
    yield f"cpu_isa may be {', '.join(isa.name for isa in available(cpu_features()))}"


def backend_lines(needs: dict[str, Any]) -> Iterable[str]:
    """Per attention backend: chosen by auto, available, or why not; `make_backend` gets `needs`."""
    from nanoengine.attention import BACKENDS, backend_class, make_backend, resolve_backend

    chosen = resolve_backend("auto", needs["device"], needs["dtype"])
    for name in BACKENDS:
        try:
            block_size = backend_class(name).default_block_size
            make_backend(name, block_size=block_size, **needs)
            state = f"available, {block_size} tokens per block"
        except (NanoEngineError, ImportError) as error:
            state = f"not available: {error}"
        yield f"{name}: {state}{', chosen by auto' if name == chosen else ''}"


def model_lines(
    model: ModelConfig, directory: Path, dtype: torch.dtype, kv_dtype: torch.dtype
) -> Iterable[str]:
    """The model's shape, and the memory per token of its KV cache."""
    from nanoengine.runner.kv_cache import block_bytes, state_bytes

    m, states, moe, varied = model, model.states, model.moe, model.plan.gemma4
    slices = m.attention_layers if varied is None else varied.slices(m.sliding_windows)
    sizes = {"num_kv_heads": m.num_key_value_heads, "head_dim": m.head_dim, "dtype": kv_dtype}
    parts = 2 if m.plan.mla is None else 1
    token_bytes = block_bytes(block_size=1, num_layers=len(slices), parts=parts, **sizes)
    yield str(directory)
    yield (
        f"{m.architecture}: {m.num_hidden_layers} layers, hidden size {m.hidden_size},"
        f" {m.num_attention_heads} query and {m.num_key_value_heads} KV heads of {m.head_dim},"
        f" vocabulary {m.vocab_size:,}"
    )
    yield (
        f"context {m.max_position_embeddings:,} tokens, stored as {m.dtype}, runs in {_name(dtype)}"
    )
    per_gib = f"{GIB // token_bytes:,} tokens per GiB"
    yield f"KV cache: {token_bytes:,} bytes per token in {_name(kv_dtype)}, {per_gib}"
    if windows := set(m.sliding_windows) - {None}:
        yield f"sliding windows of {sorted(windows)} tokens"
    if moe:
        yield f"{moe.num_experts} experts, {moe.num_experts_per_tok} per token"
    if states:
        size, count = state_bytes([states] * len(states.layers), dtype), len(states.layers)
        in_tokens = f"as much as the KV cache of {size / token_bytes:,.0f} tokens"
        yield f"recurrent state: {size:,} bytes per sequence in {count} layers, {in_tokens}"


def ends_line(model: ModelConfig, tokenizer: Tokenizer | None) -> str:
    """The tokens that end an answer, each with its sources: files, keys, the chat template."""
    tokens = []
    for token_id in model.eos_token_ids:
        text = f" {tokenizer.token_text(token_id)!r}" if tokenizer else ""
        sources = ", ".join(source for source, end_id in model.eos_sources if end_id == token_id)
        tokens.append(f"{token_id}{text} ({sources})")
    return f"stop tokens: {', '.join(tokens) or 'none'}"


def arithmetic_lines(
    quantization: Quantization | None, dtype: str, kv_cache_dtype: str
) -> Iterator[str]:
    """How linear layers compute, and the measured errors of lossy formats on real models."""
    from nanoengine.bench.compare import LOSSY

    formats, linear = [], f"{dtype} weights and activations"
    if quantization is not None:
        stored, is_int8 = quantization.stored, quantization.activations == "int8"
        linear = str(quantization)
        if stored is None:
            formats = [f"int{quantization.bits}{'' if is_int8 else '_weight_only'}"]
        elif is_int8 and stored.format == "gguf":
            formats = ["stored"]  # Why only this: other formats have not been measured.
        if is_int8:
            rotated = formats == ["int8"] or (stored and stored.format == "int-quantized")
            linear += f", one scale per token and {'64 rotated' if rotated else '32'} inputs"
    yield f"linear layers: {linear}; sums in float32"
    for name in (*formats, *["KV cache in int8"] * (kv_cache_dtype == "int8")):
        low, high = MEASURED_KL[name]
        lossy = "lossy: " if high > LOSSY else ""
        yield f"{lossy}{name}: mean KL of {low} to {high} to the same weights in float32"


def gguf_lines(path: Path) -> Iterable[str]:
    """The content of a GGUF file per part of the model: number of elements, and types."""
    from nanoengine.checkpoint.gguf import read_gguf

    file = read_gguf(path)
    parts: dict[str, list[GGUFTensor]] = {}
    for name, tensor in file.tensors.items():
        part = next((part for part, names in GGUF_PARTS.items() if re.search(names, name)), "rest")
        parts.setdefault(part, []).append(tensor)
    preposition = "with" if "tokenizer.chat_template" in file.metadata else "without"
    yield f"{file.metadata.get('general.name', path.stem)}, {preposition} a chat template"
    for part, tensors in {**parts, "all": list(file.tensors.values())}.items():
        count = sum(math.prod(tensor.shape) for tensor in tensors)
        size = sum(tensor.num_rows * tensor.row_bytes for tensor in tensors)
        types = ", ".join(sorted({tensor.type for tensor in tensors}))
        bits, gib = 8 * size / count, size / GIB
        yield f"{part}: {count:,} elements of {bits:.2f} bits, {gib:.2f} GiB: {types}"


def kernel_lines(path: Path, activations: Literal["int8", "float"]) -> Iterable[str]:
    """The CPU kernel per quantized type of a GGUF file, as the layer chooses it."""
    import torch

    from nanoengine.checkpoint.gguf import read_gguf
    from nanoengine.layers.cpu_quantized import kernel_of
    from nanoengine.layers.gguf_blocks import LAYOUTS, read_blocks

    # Why the length of rows: a row must consist of whole blocks.
    tensors, sizes_of = read_gguf(path).tensors.values(), dict[str, list[str]]()
    for type, size in sorted({(t.type, t.row_bytes) for t in tensors if t.type in LAYOUTS}):
        row = read_blocks(type, torch.zeros(1, size, dtype=torch.uint8))
        kernel = kernel_of(row, activations)
        name = "plain torch" if kernel is None else f"kernel {kernel.__name__}"
        text = f"{type}: {name}, codes of {row.bits} bits, rows of"
        sizes_of.setdefault(text, []).append(f"{row.values.shape[1]:,}")
    yield from (f"{text} {' and '.join(sizes)} inputs" for text, sizes in sizes_of.items())


MEASURED_KL = {
    "int8": (0.0008, 0.0037),
    "int8_weight_only": (0.0015, 0.0054),
    "int4": (0.011, 0.067),
    "int4_weight_only": (0.0087, 0.066),
    "stored": (0.0008, 0.0036),
    "KV cache in int8": (0.0002, 0.0007),
}
"""Format -> smallest and largest mean KL of three trained models: docs/quantization.md."""

GGUF_PARTS = {
    "embedding": "token_embd", "head": "^output\\.", "attention": "attn_|shortconv|ssm_",
    "experts": "_exps", "MLP": "ffn_",
}  # fmt: skip
"""Part of a model -> regular expression for the names of its tensors."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
