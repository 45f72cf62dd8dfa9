"""`nanoengine info`: shows whether a model fits and how it runs, and the hardware."""

from __future__ import annotations

import math
import re
import timeit
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoengine.cli.options import EngineArgs, ModelName, engine_options
from nanoengine.errors import NanoEngineError
from nanoengine.jobs.manifest import sampling_line
from nanoengine.settings.config import EngineConfig
from nanoengine.text.load_tokenizer import with_tokenizer_eos
from nanoengine.text.tokenizer import Tokenizer
from nanoengine.version import versions

if TYPE_CHECKING:
    import torch

    from nanoengine.checkpoint.config import ModelConfig
    from nanoengine.checkpoint.quantization import Quantization

GIB = 2**30
NO_MODEL = "-"
CACHED_BYTES = 1 << 26
"""As many bytes of weights may be in the caches of a CPU, which are faster than its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoArgs(EngineArgs):
    """Shows whether a model fits and how it runs, without loading its weights. Without a model,
    shows the device and versions.

    examples:
      nanoengine info model-Q4_K_M.gguf
      nanoengine info Qwen/Qwen3-0.6B --quantization int4 --all

    Attributes:
        all: Show all details: types of weights, stop tokens, attention backends, versions.
    """

    model: ModelName = NO_MODEL
    all: bool = False


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

    device, config = resolve_device(args.device), EngineConfig(**engine_options(args))
    use_isa(config)
    # Title -> number of lines without --all, and all lines.
    sections: dict[str, tuple[int, Iterable[str]]] = {}
    if args.model != NO_MODEL:
        directory = resolve_model(config)
        model, tokenizer = load_model_config(directory), None
        with suppress(NanoEngineError):  # Why: a checkpoint without a tokenizer runs on token ids.
            tokenizer = None if config.skip_tokenizer_init else Tokenizer.of(config)
        model = with_tokenizer_eos(model, tokenizer, chats=True)
        model.context_len(args.max_model_len)  # Why: it raises as loading does.
        quantized = args.quantization, model.quantization
        runs, backend = resolve_quantization(*quantized, device=device.type), args.attention_backend
        dtype = resolve_dtype(
            args.dtype, model.dtype, device, backend=backend, quantized=any(quantized)
        )
        kv_dtype = stored_dtype(args.kv_cache_dtype, dtype)
        needs = {"device": device, "dtype": dtype, "head_dim": model.largest_head}
        needs |= {"kv_dtype": kv_dtype, "is_mla": model.plan.mla is not None}
        sizes = weight_sizes(model, directory, dtype, runs)
        has_chats = tokenizer is not None and bool(tokenizer.chat_template)
        answers = [f"chat template: {'yes' if has_chats else 'no'}", ends_line(model, tokenizer)]
        sections = {
            "model": (4, model_lines(model, directory, dtype, kv_dtype)),
            "weights": (1, weight_lines(sizes)),
            "memory": (2, memory_lines(model, device, sizes, token_bytes(model, kv_dtype))),
            "answers": (1, [*answers, f"sampling: {sampling_line(config, model)}"]),
            "arithmetic": (1, arithmetic_lines(runs, _name(dtype), args.kv_cache_dtype)),
            "attention": (0, backend_lines(needs)),
        }
    sections["device"] = 1, device_lines(device)
    sections["versions"] = 0, map(" ".join, versions().items())
    is_full = args.all or args.model == NO_MODEL
    for title, (count, lines) in sections.items():
        for line in islice(lines, None if is_full else count):
            print(f"{title:<12}{line}")
            title = ""
    if not is_full:
        print(f"{'':<12}nanoengine info {args.model} --all shows more.")


def device_lines(device: torch.device) -> Iterator[str]:
    """The device that `--device` selects, with its memory."""
    import torch

    from nanoengine.kernels.isa import CURRENT, available, cpu_features

    if device.type == "cuda":
        free, total = (size / GIB for size in torch.cuda.mem_get_info(device))
        name = torch.cuda.get_device_name(device)
        yield f"{device}: {name}, {free:.1f} of {total:.1f} GiB free"
        return
    from nanoengine.kernels.threads import thread_reason
    from nanoengine.runner.options import use_allowed_cores

    use_allowed_cores()
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    yield f"cpu: {threads} threads ({thread_reason()}), {capability}"
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


def token_bytes(model: ModelConfig, kv_dtype: torch.dtype) -> int:
    """Bytes per token of the KV cache."""
    from nanoengine.runner.kv_cache import block_bytes

    m, gemma4 = model, model.plan.gemma4
    slices = m.attention_layers if gemma4 is None else gemma4.slices(m.sliding_windows)
    sizes = {"num_kv_heads": m.num_key_value_heads, "head_dim": m.head_dim, "block_size": 1}
    parts = 2 if m.plan.mla is None else 1
    return block_bytes(num_layers=len(slices), parts=parts, dtype=kv_dtype, **sizes)


def model_lines(
    model: ModelConfig, directory: Path, dtype: torch.dtype, kv_dtype: torch.dtype
) -> Iterable[str]:
    """The model's shape, and the memory per token of its KV cache."""
    from nanoengine.runner.kv_cache import state_bytes

    m, states, moe, kv_bytes = model, model.states, model.moe, token_bytes(model, kv_dtype)
    yield str(directory)
    heads = f"{m.num_attention_heads} query and {m.num_key_value_heads} KV heads of {m.head_dim}"
    layers = f"{m.num_hidden_layers} layers, hidden size {m.hidden_size}"
    yield f"{m.architecture}: {layers}, {heads}, vocabulary {m.vocab_size:,}"
    yield f"context {m.max_position_embeddings:,} tokens; computed in {_name(dtype)}"
    per_1000 = f"{1000 * kv_bytes / 2**20:,.1f} MiB per 1,000 tokens"
    yield f"KV cache: {kv_bytes:,} bytes per token in {_name(kv_dtype)}, {per_1000}"
    if windows := set(m.sliding_windows) - {None}:
        yield f"sliding windows of {sorted(windows)} tokens"
    if moe:
        yield f"{moe.num_experts} experts, {moe.num_experts_per_tok} per token"
    if states:
        size, count = state_bytes([states] * len(states.layers), dtype), len(states.layers)
        in_tokens = f"as much as the KV cache of {size / kv_bytes:,.0f} tokens"
        yield f"recurrent state: {size:,} bytes per sequence in {count} layers, {in_tokens}"


def weight_sizes(
    model: ModelConfig, directory: Path, dtype: torch.dtype, quantization: Quantization | None
) -> Counter[tuple[str, str]]:
    """Bytes of all weights per part of the model and stored type.

    They are counted as they are stored, but floats in at most the bits of `dtype`, GGUF's IQ1, IQ2,
    IQ3 and NVFP4 as they are packed, and layers that are quantized at load in the bits after that.
    """
    from nanoengine.checkpoint.files import stored_tensors
    from nanoengine.checkpoint.gguf import TYPES

    sizes = Counter[tuple[str, str]]()
    for name, (_, shape, kind) in stored_tensors(directory).items():
        if model.ignored_tensors and re.match(model.ignored_tensors, name):
            continue
        part = next((part for part, names in PARTS.items() if re.search(names, name)), "rest")
        if quantization and quantization.stored is None and part in ("attention", "experts", "MLP"):
            bits = float(quantization.bits)
        elif block := TYPES.get(kind):
            # Why other bits: codes and scales of these types in memory (`gguf_blocks.py`).
            bits = 4.5 if re.match("IQ[123]", kind) else 8 * block.bytes / block.inputs
            bits += 0.5 * (kind == "NVFP4")
        else:  # such as F64, F8_E4M3, I32 or BOOL
            bits = float(re.findall(r"\d+", f"{kind} 8")[0])
        bits = min(bits, 8 * dtype.itemsize) if kind.startswith(("F", "BF")) else bits
        sizes[part, kind] += math.prod(shape) * bits / 8
    return sizes


def weight_lines(sizes: Mapping[tuple[str, str], float]) -> Iterator[str]:
    """The size of all weights, and per part and type."""
    yield f"{sum(sizes.values()) / GIB:.2f} GiB"
    yield from (f"{part}: {size / GIB:.2f} GiB of {kind}" for (part, kind), size in sizes.items())


def memory_lines(
    model: ModelConfig, device: torch.device, sizes: Mapping[Any, float], kv_bytes: int
) -> Iterator[str]:
    """Whether weights and KV cache fit in the free memory, and how fast a CPU reads the weights."""
    import torch

    from nanoengine.runner.memory import free_cpu_bytes

    is_cpu, moe, num_bytes = device.type == "cpu", model.moe, sum(sizes.values())
    free = free_cpu_bytes() if is_cpu else torch.cuda.mem_get_info(device)[0]
    tokens = int(free - num_bytes) // kv_bytes
    fits = f"fits, with at most {tokens:,} tokens of KV cache" if tokens > 0 else "does not fit"
    yield f"{free / GIB:.1f} GiB are free: the model {fits}"
    experts = moe.num_experts_per_tok / moe.num_experts if moe else 1.0
    shares = {"embedding": float(model.tie_word_embeddings), "experts": experts}
    read = sum(size * shares.get(part, 1.0) for (part, _), size in sizes.items())
    if is_cpu and read > CACHED_BYTES:
        x = torch.ones(1 << 25)
        rate = x.nbytes / min(timeit.repeat(x.amax, number=1, repeat=20))
        now = f"memory is now read at {rate / GIB:.0f} GiB/s"
        speed = f"about {rate / read:,.0f} tokens per second for one prompt"
        yield f"{read / GIB:.2f} GiB are read per token, and {now}: {speed}"


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

    formats = []
    if quantization is not None and (stored := quantization.stored) is None:
        suffix = "" if quantization.activations == "int8" else "_weight_only"
        formats = [f"int{quantization.bits}{suffix}"]
    elif quantization and quantization.activations == "int8" and stored.format == "gguf":
        formats = ["stored"]  # Why only this: other formats have not been measured.
    yield f"linear layers: {quantization or f'{dtype} weights and activations'}; sums in float32"
    for name in (*formats, *["KV cache in int8"] * (kv_cache_dtype == "int8")):
        low, high = MEASURED_KL[name]
        lossy = "lossy: " if high > LOSSY else ""
        yield f"{lossy}{name}: mean KL of {low} to {high} to the same weights in float32"


MEASURED_KL = {
    "int8": (0.0008, 0.0037), "int8_weight_only": (0.0015, 0.0054),
    "int4": (0.011, 0.067), "int4_weight_only": (0.0087, 0.066),
    "stored": (0.0008, 0.0036), "KV cache in int8": (0.0002, 0.0007),
}  # fmt: skip
"""Format -> smallest and largest mean KL of three trained models: docs/quantization.md."""

PARTS = {
    "embedding": "embed|wte", "head": "lm_head", "experts": r"\.experts\.",
    "attention": "attn|attention|conv|mamba|ssm", "MLP": "mlp|ffn|feed_forward|fc",
}  # fmt: skip
"""Part of a model -> regular expression for the names of its tensors."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
