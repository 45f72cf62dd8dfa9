"""The loops of machine code, as NVIDIA's disassembler shows them. Used by aot_compile.py."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import triton

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"


def inner_loops(cubin: Path) -> list[list[str]]:
    """The instructions of each innermost loop, in the order of the code."""
    command = [NVDISASM, "-c", cubin]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(instruction[1])
    back = []
    for i, instruction in enumerate(code):
        jump = re.search(r"\bBRA\b.*`\((\.L\w+)\)", instruction)
        if jump and labels[jump[1]] < i:
            back.append((labels[jump[1]], i))
    inner = [
        (start, end)
        for start, end in back
        if not any(start <= a and b < end for a, b in back)
    ]  # fmt: skip
    return [code[start : end + 1] for start, end in sorted(inner)]


def tile_loop(cubin: Path) -> dict[str, int]:
    """Figures of the first innermost loop that multiplies matrices; none if no loop does.

    In attention this is the loop over full key tiles. `conversions` counts conversions of single
    elements, such as between float16 and bfloat16; conversions of pairs are not counted.
    """
    for loop in inner_loops(cubin):
        text = "\n".join(loop)
        if re.search(r"\bH?G?MMA\b", text):
            return {
                "loop": len(loop),
                "loop_barriers": len(re.findall(r"\bBAR\.SYNC\b", text)),
                "loop_conversions": len(re.findall(r"\bF2F\b", text)),
            }
    return {}
