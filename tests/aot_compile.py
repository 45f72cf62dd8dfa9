"""Compiles the attention kernels to machine code for GPUs that need not be here; prints JSON.

Run by test_triton_aot.py in its own process: Triton's interpreter and its compiler exclude each
other. The launch arguments are those that `TritonBackend` gives, caught at the launch.

    python -m tests.aot_compile 90,bfloat16,128,64,8,2 ...
                    arch,dtype,head_dim,block_size,num_kv_heads,group_size
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanoengine.attention import triton as backend_module
from nanoengine.attention.triton import TritonBackend, kernels
from tests.attention_cases import make_case

TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


class Catch:
    """Stands in for a kernel: keeps the arguments of its launch."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((self.kernel, args, options))


def launches(arch, dtype, head_dim, block_size, num_kv_heads, group_size):
    """What the backend launches for one mixed batch, as (kernel, arguments, options)."""
    caught = []
    names = ("store_kernel", "varlen_kernel", "decode_kernel", "combine_kernel")
    originals = {name: getattr(kernels, name) for name in names}
    backend_module.COMPILED = False  # Why: the CPU tensors below only lend their shapes.
    backend = TritonBackend(
        device=torch.device("cpu"), dtype=torch.float16, head_dim=head_dim, block_size=block_size
    )
    backend.arch, backend.dtype = arch, dtype
    case = make_case(
        (1, 40), (30, 50), num_kv_heads=num_kv_heads, group_size=group_size,
        head_dim=head_dim, block_size=block_size, dtype=dtype,
    )  # fmt: skip
    for name in names:
        setattr(kernels, name, Catch(originals[name], caught))
    case.run(backend)
    for name in names:
        setattr(kernels, name, originals[name])
    return caught


def compile_launch(kernel, args, options, arch):
    """Machine code of one launch, as a GPU run gets it.

    Tensors from torch are 16-byte aligned; the launcher tells the compiler so of those that the
    kernel specializes on.
    """
    build = {k: options[k] for k in ("num_warps", "num_stages") if k in options}
    constants = {k: v for k, v in options.items() if k not in build}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if i >= len(args):
            signature[name] = "constexpr"
        elif isinstance(args[i], torch.Tensor):
            signature[name] = TYPES[args[i].dtype]
            if not kernel.params[i].do_not_specialize_on_alignment:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            assert kernel.params[i].do_not_specialize, name
            signature[name] = "i32"
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=build)


def report(kernel, compiled):
    """Registers, spills and the instructions that must be there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run(
            [tool, "-res-usage", path], capture_output=True, text=True, check=True
        ).stdout
    ptx = compiled.asm["ptx"]
    return {
        "kernel": kernel.__name__,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
        "local": int(re.search(r"LOCAL:(\d+)", usage)[1]),
        "shared": compiled.metadata.shared,
        "async_copies": len(re.findall(r"cp\.async\.c[ag]\.shared", ptx)),
        "wide_copies": len(re.findall(r"cp\.async\.cg\.shared.*?, 0x10", ptx)),
        "in_flight": max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)), default=0),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async)", ptx)),
        "wide_loads": len(re.findall(r"ld\.global[\w.:]*\.v4", ptx)),
        "wide_stores": len(re.findall(r"st\.global[\w.:]*\.v4", ptx)),
    }


def main():
    results = []
    for target in sys.argv[1:]:
        arch, dtype, *shape = target.split(",")
        shape = [int(x) for x in shape]
        for kernel, args, options in launches(int(arch), getattr(torch, dtype), *shape):
            compiled = compile_launch(kernel, args, options, int(arch))
            results.append({"target": target} | report(kernel, compiled))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
