"""Compiles the Triton kernels to machine code for GPUs that need not be present; prints JSON.

test_triton_aot.py runs it in its own process, because Triton's interpreter and its compiler exclude
each other. The launch arguments come from the package's own callers and are recorded at the launch.

    python -m tests.support.aot_compile 90,bfloat16,128,64,8,2,all ...
                    arch,dtype,head_dim,block_size,num_kv_heads,group_size,what

`what` is all, latents, attention, fp8 (an fp8 cache, including the deterministic kernels) or heads
(the same kernels without fp8). `attention` and fp8 have sinks.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import types
from dataclasses import replace
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature

from nanoengine.attention import triton_mla as latent_kernels
from nanoengine.attention.base import HeadNormWeights, LayerCache
from nanoengine.attention.batch import ScanStep, SegmentChunks
from nanoengine.attention.triton import TritonBackend, kernels, store_kernels
from nanoengine.checkpoint.layer_config import MoEConfig
from nanoengine.kernels import triton_experts as expert_kernels
from nanoengine.kernels import (
    triton_gemm,
    triton_linear_attention,
    triton_mamba,
    triton_routing,
    triton_sampling,
)
from nanoengine.kernels import triton_layers as layer_kernels
from nanoengine.kernels import triton_quantized as quantized_kernels
from nanoengine.layers import triton_experts, triton_linear, triton_quantized
from nanoengine.layers.causal_conv import CausalConv
from nanoengine.layers.triton_experts import Stack, StackForm, TritonExperts
from nanoengine.layers.triton_linear_attention import TritonDelta, delta_gates, gated_rms_norm
from nanoengine.layers.triton_mamba import TritonMamba
from nanoengine.models.triton import TritonKernels
from nanoengine.runner.sampling.triton_sampling import sample_lines
from tests.support.aot_loops import tile_loop
from tests.support.aot_targets import NO_PRODUCTS, is_compiled
from tests.support.attention_cases import Case, make_case
from tests.support.model_helpers import DenseAttention, make_context
from tests.support.recurrent_states import delta_plan


class LaunchRecorder:
    """Replaces a kernel and records the arguments of its launches."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((self.kernel, args, options))


@contextlib.contextmanager
def recorded_launches():
    """Yields a list to which (kernel, arguments, options) are appended instead of launching."""
    recorded, originals = [], []
    for module in (
        store_kernels, kernels, layer_kernels, triton_gemm, expert_kernels,
        triton_routing, triton_sampling, triton_linear_attention,
        triton_mamba, quantized_kernels, latent_kernels,
    ):  # fmt: skip
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.runtime.JITFunction) and name.endswith("_kernel"):
                originals.append((module, name, value))
                setattr(module, name, LaunchRecorder(value, recorded))
    yield recorded
    for module, name, value in originals:
        setattr(module, name, value)


def launches(arch, dtype, head_dim, block_size, num_kv_heads, group_size, what):
    """The launches of the backend and the layers for one mixed batch."""
    TritonBackend.device_type = None  # Why: only the shapes of the CPU tensors below are used.
    # Why: random values for the caches of MLA take three seconds per target.
    torch.randn = lambda *shape, **options: torch.zeros(*shape)
    if what == "latents":
        with recorded_launches() as recorded:
            run_latents(dtype, arch)
        return recorded
    case = make_case(
        (1, 40), (30, 50), num_kv_heads=num_kv_heads, group_size=group_size,
        head_dim=head_dim, block_size=block_size, dtype=dtype, fp8=what == "fp8",
        sinks=None if what in ("all", "heads") else 1.0,
    )  # fmt: skip
    case.batch.max_seq_len = 1000  # more than one split
    with recorded_launches() as recorded:
        backend = TritonBackend(
            device=torch.device("cpu"), dtype=torch.float16, head_dim=head_dim,
            block_size=block_size,
        )  # fmt: skip
        backend.arch, backend.dtype = arch, dtype
        case.run(backend)
        case.batch.attention = backend.prepare(case.batch)
        run_rotation(backend, case)
        if what != "attention":
            backend.deterministic = True
            case.run(backend)
        if what == "all":
            run_layers(dtype)
            triton_linear.arch_of = triton_experts.arch_of = lambda device: arch
            run_linear(dtype)
            if dtype != torch.float32:
                run_quantized(dtype, arch)
            run_experts(dtype)
            run_sampling(dtype)
            run_states(dtype)
            run_latents(dtype, arch)
            run_mamba(dtype)
    return recorded


def run_latents(dtype, arch, rank=512, rope=64):
    """MLA at the sizes of DeepSeek's smallest and largest models: decodes with split contexts, and
    prompts."""
    for heads in (16, 128):
        case = make_case(
            (1, 1400), (30, 50), num_kv_heads=1, group_size=heads, head_dim=rank + rope,
            block_size=64, dtype=dtype,
        )  # fmt: skip
        cache = LayerCache(case.k_cache, case.v_cache, replace(case.spec, value_dim=rank))
        backend = latent_kernels.TritonMLABackend(
            device=torch.device("cpu"), dtype=torch.float16, head_dim=rank + rope, block_size=64
        )
        backend.arch, backend.dtype = arch, dtype
        rotation = torch.zeros(len(case.q), 1, rope, dtype=dtype).chunk(2, -1)
        q = backend.rotate_and_store_latents(
            case.q[..., : 128 + rope].contiguous(), case.k.flatten(1).contiguous(), rotation,
            torch.zeros(rank, dtype=dtype), 1e-6, cache, case.batch,
        )  # fmt: skip
        backend.attend(q, cache, replace(case.batch, attention=backend.prepare(case.batch)))


def run_rotation(backend: TritonBackend, case: Case):
    """The fused cache store, with a norm."""
    heads = torch.cat([case.q, case.k, case.v], 1)
    table = torch.zeros(len(heads), 1, case.spec.head_dim, dtype=heads.dtype)
    shape = (case.spec.num_heads + case.spec.num_kv_heads, case.spec.head_dim)
    norm = HeadNormWeights(weight=torch.ones(shape, dtype=heads.dtype), eps=1e-6)
    backend.rotate_and_store(heads, table.chunk(2, -1), norm, case.cache, case.batch)


def run_layers(dtype, hidden=4096, inner=12288):
    """The fused add and norm and the gate, at the sizes of an 8B model."""
    ops = TritonKernels(DenseAttention(), dtype=dtype)
    x, weight = torch.zeros(2, hidden, dtype=dtype), torch.zeros(hidden, dtype=dtype)
    ops.rms_norm(x, x.clone(), weight, 1e-6)
    ops.gate(torch.zeros(2, 2 * inner, dtype=dtype), "silu")


def run_linear(dtype, hidden=4096, inner=12288):
    """The deterministic product."""
    x = torch.zeros(64, hidden, dtype=dtype)
    method = triton_linear.TritonLinear("layer")
    method.weight = torch.zeros(2 * inner, hidden, dtype=dtype)
    method.apply(x, None)


def run_quantized(dtype, arch, hidden=4096, outputs=6144):
    """Each weight format for one row, and for a prompt; int4 with zero points, and once in groups
    of 32 without; the widest rows of a model as fp8."""
    if arch >= 89:
        triton_quantized.e4m3_rows(torch.zeros(2, 28672, dtype=dtype))
    for form, group in (("int4", 128), ("int4", 32), ("int8", 128), ("e4m3", 128)):
        method = triton_quantized.TritonQuantizedLinear(
            "layer", bits=4 if form == "int4" else 8, group_size=group,
            activations="float",
        )  # fmt: skip
        method.create((outputs, hidden), dtype, torch.device("cpu"))
        method.form, method.tile, is_int4 = form, min(group, 64), form == "int4"
        method.weight = torch.zeros(
            outputs, hidden // (1 + is_int4), dtype=torch.uint8 if is_int4 else torch.int8
        )
        method.scales = torch.zeros(hidden // group, outputs)
        method.zeros = torch.zeros(hidden // 128, outputs) if is_int4 and group == 128 else None
        for num_rows in (1, 64, 512):
            method.matmul(torch.zeros(num_rows, hidden, dtype=dtype), None)
    run_quantized_experts(dtype)


def run_experts(dtype, hidden=2048, inner=768):
    """Mixtures of experts with biases: a decode, more sequences and a prompt with the sizes of
    Qwen3-30B-A3B, and the routing of more experts and of groups."""
    weights = torch.zeros(1, 2 * inner, hidden, dtype=dtype)
    mixture = mixture_of(
        Stack(weight=weights.expand(128, -1, -1)),
        Stack(weight=weights[:, :inner].transpose(1, 2).expand(128, -1, -1)), dtype,
    )  # fmt: skip
    for tokens in (2, 512, 4096):
        mixture(torch.zeros(tokens, hidden, dtype=dtype))
    moe = mixture.router.moe
    many_experts = replace(moe, num_experts=512, num_experts_per_tok=10)
    groups = replace(moe, num_experts=256, score="sigmoid", num_groups=8, groups_per_token=4)
    for form, correction in ((many_experts, None), (groups, torch.zeros(256))):
        triton_experts.route(torch.zeros(2, form.num_experts, dtype=dtype), correction, form, 16)


def mixture_of(gate_up, down, dtype):
    """Experts with biases, with these two stacks of weights."""
    experts, both, hidden = gate_up.shape
    mixture = TritonExperts.__new__(TritonExperts)
    mixture.activate = lambda gate_up: gate_up.new_empty(len(gate_up), both // 2)
    mixture.all_reduce = lambda tensor: tensor
    mixture.deterministic, mixture.gate_up, mixture.down = False, gate_up, down
    moe = MoEConfig(
        num_experts=experts, num_experts_per_tok=8, intermediate_size=both // 2, layers=()
    )
    mixture.gate_up_bias = torch.zeros(experts, both, dtype=dtype)
    mixture.down_bias = torch.zeros(experts, hidden, dtype=dtype)
    mixture.router = types.SimpleNamespace(
        moe=moe, e_score_correction_bias=None,
        logits=lambda x: torch.zeros(len(x), experts, dtype=dtype),
        scale_weights=lambda weights, ids: weights,
    )  # fmt: skip
    return mixture


def run_quantized_experts(dtype, hidden=2048, inner=768, experts=128):
    """A decode and a prompt at the same sizes: fp8 in blocks, int4 with zero points, MXFP4."""
    for form in (StackForm("e4m3", 64, 128), StackForm("int4", 64, 128), StackForm("e2m1", 32, 32)):
        stacks = []
        for outputs, inputs in ((2 * inner, hidden), (hidden, inner)):
            scales = torch.zeros(1, inputs // form.group, outputs).expand(experts, -1, -1)
            weight = torch.zeros(1, outputs, inputs, dtype=torch.int8)
            if form.name != "e4m3":
                weight = weight[:, :, : inputs // 2].to(torch.uint8)
            zeros = scales if form.name == "int4" else None
            weight = weight.expand(experts, -1, -1)
            stacks.append(Stack(weight=weight, form=form, scales=scales, zeros=zeros))
        mixture = mixture_of(*stacks, dtype)
        # Why not all: a compilation takes half a second, and the sizes in between are smaller.
        for tokens in (2,) if form.name == "e2m1" else (2, 4096):
            mixture(torch.zeros(tokens, hidden, dtype=dtype))


def run_sampling(dtype, size=151936):
    """Rows of logits with filters, and in 16 bits without; both include the greedy path."""
    logits, params = torch.zeros(2, size, dtype=dtype), torch.zeros(5, 2, dtype=torch.float64)
    sample_lines(logits, params, draws=True, filters=True)
    if dtype != torch.float32:
        sample_lines(logits, params, draws=True, filters=False)


def run_states(dtype):
    """A hybrid layer at the sizes of Qwen3-Next: decodes, and a prompt of a few chunks."""
    plan = delta_plan(16, 32, key_dim=128, value_dim=128)
    states = torch.zeros(2, plan.size)
    conv = CausalConv(
        4, plan.channels, bias=True, rank_channels=(plan.channels, torch.arange(plan.channels)),
        context=make_context(dtype),
    )  # fmt: skip
    conv.bind(states[:, -3 * plan.channels :])
    slots, gates = torch.zeros(1, dtype=torch.int64), torch.zeros(100, 32)
    qkv = torch.zeros(100, plan.channels, dtype=dtype)
    delta = TritonDelta(types.SimpleNamespace(plan=plan, conv1d=conv, flat_states=states))
    delta.step(qkv[:1], gates[:1], gates[:1], slots, slots)
    delta_gates(gates[0], gates[0], torch.zeros(100, 64, dtype=dtype))
    heads = torch.zeros(100, 32, 128)
    gated_rms_norm(torch.zeros(128, dtype=dtype), heads, heads.to(dtype), 1e-6)
    pieces = SegmentChunks(torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    wave = ScanStep(tokens=slice(0), reads=slots, writes=slots, pieces=pieces)
    delta.scan(qkv, gates, gates, wave, torch.zeros(100, 32, 128))


def run_mamba(dtype):
    """Mamba layers: one with 128 heads and one group (Bamba), and in 16 bits one with the largest
    states of all families (Falcon-H1)."""
    for heads, groups, key, value in ((128, 1, 128, 64), (32, 1, 256, 128)):
        if key > 128 and dtype == torch.float32:
            continue
        inner, slots = heads * value, torch.zeros(1, dtype=torch.int64)
        plan = replace(
            delta_plan(groups, heads, key_dim=key, value_dim=value), kind="mamba",
            channels=inner + 2 * groups * key, norm="after_gate",
        )  # fmt: skip
        states, gates = torch.zeros(2, plan.size), torch.zeros(100, heads)
        conv = CausalConv(
            4, plan.channels, bias=True, rank_channels=(plan.channels, torch.arange(plan.channels)),
            context=make_context(dtype),
        )  # fmt: skip
        conv.bind(states[:, -3 * plan.channels :])
        xbc, head = torch.zeros(100, plan.channels, dtype=dtype), gates[0]
        norm = types.SimpleNamespace(weight=torch.zeros(inner, dtype=dtype), eps=1e-6)
        of_heads = types.SimpleNamespace(a_log=head, dt_bias=head, d=head)
        mamba = TritonMamba(
            types.SimpleNamespace(
                plan=plan, conv1d=conv, heads=of_heads, norm=norm, flat_states=states
            )
        )
        mamba.gates(gates.to(dtype))
        mamba.gate_and_norm(torch.zeros(100, inner), torch.zeros(100, inner, dtype=dtype))
        mamba.step(xbc[:1], gates[:1], gates[:1], slots, slots)
        pieces = SegmentChunks(
            torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        )
        wave = ScanStep(tokens=slice(0), reads=slots, writes=slots, pieces=pieces)
        mamba.scan(xbc, gates, gates, wave, torch.zeros(100, heads, value))


def bind(kernel, args, options, backend):
    """Binds a launch with Triton's own binder: types and attributes of the arguments, constants.

    Why its own: Triton generates the binder of a kernel from the names of its arguments. A name
    that the binder uses itself makes every launch fail.
    """
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialized, options = binder(*args, **options)
    signature, constants, attributes = {}, {}, {}
    for i, (name, (kind, attribute)) in enumerate(zip(bound, specialized, strict=True)):
        signature[name] = kind
        if kind == "constexpr":
            constants[name] = bound[name]
            assert kernel.params[i].is_constexpr, f"{name} is specialized on its value"
        elif attribute:
            assert isinstance(bound[name], torch.Tensor), f"{name} is specialized on its value"
            attributes[(i,)] = backend.parse_attr(attribute)
    return signature, constants, attributes, options


def compile_launch(kernel, args, options, arch):
    """Machine code of one launch, as on a GPU. The tensors' addresses are multiples of 16, as on a
    GPU with torch."""
    target = GPUTarget("cuda", arch, 32)
    signature, constants, attributes, options = bind(kernel, args, options, CUDABackend(target))
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options)


def report(kernel, compiled):
    """Registers, spills and the counts of required instructions."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run(
            [tool, "-res-usage", path], capture_output=True, text=True, check=True
        ).stdout
        # Why not all: the disassembler takes as long as the compiler.
        loop = tile_loop(path) if kernel.__name__ == "decode_kernel" else {}
    ptx = compiled.asm["ptx"]
    wide_copies = len(re.findall(r"cp\.async\.cg\.shared.*?, 0x10", ptx))
    return {
        "function": kernel.__name__,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
        "local": int(re.search(r"LOCAL:(\d+)", usage)[1]),
        "shared": compiled.metadata.shared,
        "narrow_copies": len(re.findall(r"cp\.async\.c[ag]\.shared", ptx)) - wide_copies,
        "wide_copies": wide_copies,
        "in_flight": max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)), default=0),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", ptx)),
        "wide_loads": len(re.findall(r"ld\.global[\w.:]*\.v4", ptx)),
        "rounded_pairs": ptx.count("cvt.rn.satfinite.e4m3x2.f32"),
        "wide_stores": len(re.findall(r"st\.global[\w.:]*\.v4", ptx)),
        **loop,
    }


def name_of(kernel, options):
    """The kernel's name. Kernels with several variants have one name per variant."""
    name = kernel.__name__
    if name == "varlen_kernel" and options["A"].all_masked:
        return "masked_varlen_kernel"
    if "expert_gemm" in name and options["FORM"]:
        return f"{'wide_' * (options['M'] == 128)}{options['FORM']}_{name}"
    if "expert_gemm" in name:
        return {16: "narrow_", 128: "wide_"}.get(options["M"], "") + name
    if name in ("route_kernel", "align_kernel"):
        return f"{name}_{options['EXPERTS']}"
    if name.startswith("mamba"):
        return name + {256: "_256", 4096: "_256"}.get(options.get("KEY", options.get("SIZE")), "")
    if name == "gemm_kernel" and options["FORM"]:
        groups = "_in_32s" if options["GROUP"] == 32 else ""
        return f"{options['FORM']}{groups}_gemm_{options['M']}"
    if name == "mla_kernel":
        return f"latent_{'decode' if options['A'].split else 'prompt'}_{options['HEADS']}"
    if name == "sample_kernel":
        return "filtered_sample_kernel" if options["FILTER"] else "drawn_sample_kernel"
    return name


def distinct_launches(target):
    """(target, name, kernel, arguments, options) of each kernel that is compiled for a target."""
    arch, dtype, *shape, what = target.split(",")
    found, seen = [], set()
    for kernel, args, options in launches(int(arch), getattr(torch, dtype), *map(int, shape), what):
        name = name_of(kernel, options)
        key = name, "" if name in NO_PRODUCTS else str(options)
        if key not in seen and is_compiled(name, arch, what):
            seen.add(key)
            found.append((target, name, kernel, args, options))
    return found


LAUNCHES = []
"""The launches that forked compiler processes inherit."""


def compiled(index):
    """The figures of one launch."""
    target, name, kernel, args, options = LAUNCHES[index]
    arch = int(target.split(",")[0])
    binary = compile_launch(kernel, args, options, arch)
    return {"target": target, "kernel": name} | report(kernel, binary)


def main():
    torch.set_num_threads(1)  # Why: a fork has none of its parent's threads.
    LAUNCHES.extend(each for target in sys.argv[1:] for each in distinct_launches(target))
    # Why processes: a compilation uses one thread, and forks inherit all imports.
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        print(json.dumps(pool.map(compiled, range(len(LAUNCHES)), chunksize=1)))


if __name__ == "__main__":
    main()
