"""Which kernels are compiled for which GPUs. Used by aot_compile.py and test_triton_aot.py.

sm_120 multiplies as sm_89 does, in the same tiles. It is a separate target only where registers are
scarce: in MLA and with head_dim 512.
"""

from __future__ import annotations

import re

NO_PRODUCTS = {
    "rotate_store_kernel", "rms_norm_kernel", "gate_kernel",
    "filtered_sample_kernel", "drawn_sample_kernel", "rotate_latents_kernel", "merge_kernel",
    "conv_step_kernel", "conv_scan_kernel", "conv_keep_kernel", "delta_step_kernel",
    "gates_kernel", "gate_norm_kernel", "mamba_gates_kernel", "mamba_step_kernel",
    "mamba_norm_kernel", "mamba_step_kernel_256", "mamba_norm_kernel_256",
    *(f"{name}_{experts}" for name in ("route_kernel", "align_kernel")
      for experts in (128, 256, 512)),
}  # fmt: skip
"""Kernels without matrix products, whose tiles and copies are the same for all targets. With Triton
3.9, sm_80, 89, 100 and 120 differ in instructions for single elements or pairs. These kernels are
compiled for sm_80 and sm_90 in one of their sizes, with an fp8 cache for all targets."""

AS_SM_80 = re.compile("(wide_)?(int4|int8|e2m1)_|delta_|mamba_scan")
"""Products without fp8 instructions and with the same tiles on all targets: sm_89 has the copies
and products of sm_80."""


def is_compiled(name, arch, what):
    """Whether a kernel's code for a target differs from its code for targets already compiled."""
    if name in NO_PRODUCTS and what != "fp8":
        return arch in ("80", "90")
    return arch != "89" or not AS_SM_80.match(name)
