"""`nanoengine info`: what there is to run on, what runs on it, and what a model needs."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from nanoengine import __version__
from nanoengine.cli.options import DEMO, EngineArgs, engine_options
from nanoengine.errors import NanoEngineError
from nanoengine.settings.config import EngineConfig

if TYPE_CHECKING:
    import torch

    from nanoengine.checkpoint.config import ModelConfig

PACKAGES = ("torch", "transformers", "tokenizers", "numba", "triton", "flash-attn")


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoArgs(EngineArgs):
    """Shows versions, device, attention backends, and a model without loading its weights."""

    model: Annotated[Positional[str], arg(metavar="MODEL")] = DEMO
    """Directory of a Hugging Face checkpoint, a hub id, or demo: the small bundled model."""
    load: bool = False
    """Load the model too, and show the memory plan that it runs with."""


def main(args: InfoArgs) -> None:
    """Prints the report.

    Raises:
        ConfigError, ModelError: the model can't be found or read.
    """
    from nanoengine.checkpoint.config import load_model_config
    from nanoengine.checkpoint.find import resolve_device, resolve_dtype, resolve_model
    from nanoengine.runner.kv_cache import stored_dtype
    from nanoengine.runner.numerics import use_isa

    device = resolve_device(args.device)
    config = EngineConfig(**engine_options(args))
    use_isa(config)
    directory = resolve_model(config)
    model = load_model_config(directory)
    dtype = resolve_dtype(args.dtype, model.dtype, device, backend=args.attention_backend)
    _print_section("versions", versions())
    _print_section("device", device_lines(device))
    kv_dtype = stored_dtype(args.kv_cache_dtype, dtype)
    _print_section(
        f"attention backends ({device.type}, {_name(dtype)}, head_dim {model.head_dim})",
        backend_lines(device, dtype, model.head_dim, kv_dtype),
    )
    _print_section(f"model {args.model}", model_lines(model, directory, dtype, kv_dtype))
    if args.load:
        from nanoengine.build import build_engine

        engine = build_engine(config)
        try:
            info = engine.info
            lines = [
                f"{info.num_parameters:,} parameters, loaded in {info.load_s:.2f} s,"
                f" ready in {info.start_s:.2f} s",
                f"max_model_len {info.max_model_len}",
                *info.memory_plan.splitlines(),
            ]
        finally:
            engine.close()
        _print_section("engine", lines)


def versions() -> list[str]:
    """nanoengine, Python and the packages that matter, with "not installed" where so."""
    lines = [f"nanoengine {__version__}, Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package} not installed")
    return lines


def device_lines(device: torch.device) -> list[str]:
    """The device that `--device` means, with its memory."""
    import torch

    from nanoengine.kernels.isa import CURRENT, available, cpu_features
    from nanoengine.runner.memory import free_cpu_bytes

    gib = 2**30
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        return [f"{device}: {name}, {free / gib:.1f} of {total / gib:.1f} GiB free"]
    from nanoengine.kernels.threads import num_workers, why_so_many

    return [
        f"cpu: {num_workers()} threads ({why_so_many()}), {free_cpu_bytes() / gib:.1f} GiB free,"
        f" {torch.backends.cpu.get_cpu_capability()}",
        f"kernels for {CURRENT}",
        f"cpu_isa may be {', '.join(isa.name for isa in available(cpu_features()))}",
    ]


def backend_lines(
    device: torch.device, dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None
) -> list[str]:
    """Each attention backend: chosen by auto, available, or why not."""
    from nanoengine.attention import BACKENDS, backend_class, make_backend, resolve_backend

    chosen, lines = resolve_backend("auto", device, dtype), []
    for name in BACKENDS:
        try:
            block_size = backend_class(name).default_block_size
            make_backend(
                name, device=device, dtype=dtype, head_dim=head_dim, block_size=block_size,
                kv_dtype=kv_dtype,
            )  # fmt: skip
            state = f"available, {block_size} tokens a block"
        except (NanoEngineError, ImportError) as error:
            state = f"not available: {error}"
        lines.append(f"{name}: {state}{', chosen by auto' if name == chosen else ''}")
    return lines


def model_lines(
    model: ModelConfig, directory: Path, dtype: torch.dtype, kv_dtype: torch.dtype
) -> list[str]:
    """The model's shape, and what its KV cache costs."""
    from nanoengine.runner.kv_cache import block_bytes, state_bytes

    token_bytes = block_bytes(
        block_size=1,
        num_kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        num_layers=model.num_hidden_layers - (len(model.states.layers) if model.states else 0),
        dtype=kv_dtype,
    )
    states = model.states
    size = state_bytes([states] * len(states.layers), dtype) if states else 0
    windows = {window for window in model.sliding_windows if window is not None}
    moe = model.moe
    return [
        str(directory),
        f"{model.architecture}: {model.num_hidden_layers} layers, hidden size {model.hidden_size},"
        f" {model.num_attention_heads} query and {model.num_key_value_heads} KV heads of"
        f" {model.head_dim}, vocabulary {model.vocab_size:,}",
        f"context {model.max_position_embeddings:,} tokens, stored as {model.dtype},"
        f" runs in {_name(dtype)}, EOS {list(model.eos_token_ids)}",
        *([f"sliding windows of {sorted(windows)} tokens"] if windows else []),
        *([f"{moe.num_experts} experts, {moe.num_experts_per_tok} a token"] if moe else []),
        f"KV cache: {token_bytes:,} bytes a token in {_name(kv_dtype)},"
        f" {2**30 // token_bytes:,} tokens a GiB",
        *(
            [
                f"state: {size:,} bytes a sequence in {len(states.layers)} layers, as much as"
                f" {size / token_bytes:,.0f} tokens"
            ]
            if states
            else []
        ),
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _print_section(title: str, lines: Iterable[str]) -> None:
    print(title)
    for line in lines:
        print(f"  {line}")
