"""The experts' products on a GPU in Triton: each row is multiplied by the weight of its expert.

    rows sorted by expert    a a a a a | b | c c c         starts: 0, 5, 6, 9
    tiles of M = 4 rows      [a a a a][a][b][c c c]        tiles: 0, 2, 3

Called by `layers/triton_experts.py` alone. The grid has the maximum number of tiles, and each
program finds its expert by comparing first tiles. So nothing waits for the host, and a launch can
be captured in a CUDA graph. Each output is one sum over the inputs in tiles of one size: if the
caller keeps that size, a row has the same bits alone and among others.

The kernels have run in Triton's interpreter and been compiled to machine code ahead of time; they
have not run on a GPU yet.

Source: grouped products over sorted rows are MegaBlocks' (Gale et al., arXiv 2211.15841).
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanoengine.kernels.triton_gemm import products


@triton.jit(do_not_specialize_on_alignment=["order", "starts", "tiles"])
def expert_gemm_kernel(
    out, x, weight, scales, zeros, bias, order, starts, tiles,
    X_ROW: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, SORTED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BIAS: tl.constexpr,
    GROUP: tl.constexpr, FORM: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """out [R, OUT] = each row of x times weight [E, OUT, IN] of its expert, + bias [E, OUT]. Grid:
    [tiles * (OUT / N rounded up)]; programs that run together share rows of x.

    order [R], starts [E + 1], tiles [E]: see `align_kernel`. SORTED: x has the sorted rows, and
    results are written in the order of (token, choice) pairs. Else x has the tokens' rows, and
    results stay sorted. WIDTH: E rounded up to a power of two. Weight, scales and
    zeros are as in `products`, for one expert after the other.
    """
    column_tiles: tl.constexpr = (OUT + N - 1) // N
    tile, experts = tl.program_id(0) // column_tiles, tl.arange(0, WIDTH)
    firsts = tl.load(tiles + experts, mask=experts < EXPERTS, other=0)
    expert = tl.sum(((experts < EXPERTS) & (firsts <= tile)).to(tl.int32), 0) - 1
    first, last = tl.load(starts + expert), tl.load(starts + expert + 1)
    row = first + (tile - tl.load(tiles + expert)) * M
    if row < last:
        rows = row + tl.arange(0, M)
        pairs = tl.load(order + rows, mask=rows < last, other=0)
        columns = tl.program_id(0) % column_tiles * N + tl.arange(0, N)
        if SORTED:
            sources, targets = rows, pairs
        else:
            sources, targets = pairs // TOP_K, rows
        inside = (rows < last)[:, None]
        x_rows = x + sources.to(tl.int64)[:, None] * X_ROW
        expert_index = expert.to(tl.int64)
        row_bytes: tl.constexpr = IN // 2 if FORM == "int4" or FORM == "e2m1" else IN
        groups = expert_index * (OUT * (IN // GROUP))
        result = products(
            out, x_rows, inside, weight + expert_index * (OUT * row_bytes), scales + groups,
            zeros + groups, bias + expert_index * OUT, columns,
            IN, OUT, M, N, K, GROUP, FORM, ZEROS, BIAS,
        )  # fmt: skip
        target = out + targets.to(tl.int64)[:, None] * OUT + columns[None, :]
        tl.store(target, result, mask=inside & (columns < OUT)[None, :])
