"""exp for kernels compiled by numba, in a form that vectorizes. Call it as `exp(x)` for x <= 0.

`CacheTile.exp2`, for register tiles, is 2 ** x: its argument needs no reduction by a rounded ln 2.

Source: range reduction and coefficients of Cephes' expf (Moshier); the coefficients of 2 ** x by
Lawson's iteration for the least relative error in [-1/2, 1/2], 9.2e-8 before rounding, and exact at
0.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types

from nanoengine.kernels.jit import specialize

LOG2_E, LN2_HIGH, LN2_LOW = 1.4426950, 0.693359375, -2.1219444e-4
COEFFICIENTS = (1.9875691e-4, 1.3981999e-3, 8.3334519e-3, 4.1665796e-2, 1.6666665e-1, 0.5)
LOWEST = -87.0  # below it e ** x is not a normal number
COEFFICIENTS_2 = (1.32647272e-3, 9.67151264e-3, 0.0555073374, 0.240222421, 0.693146978, 1.0)
LOWEST_2 = -127.0  # here the exponent of a float32 is 0, and 2 ** x too
SHIFT_2 = 3 * 2.0**22 + 127  # adding it to a float32 rounds fractions away


@specialize(("contract",))
def exp(x):
    """e ** x for x <= 0, exactly 0 below the smallest normal number."""
    if x != types.float32:
        return lambda x: math.exp(x)
    log2_e, ln2_high, ln2_low = np.float32(LOG2_E), np.float32(LN2_HIGH), np.float32(LN2_LOW)
    c7, c6, c5, c4, c3, c2 = (np.float32(c) for c in COEFFICIENTS)
    half, one, lowest, zero = np.float32(0.5), np.float32(1), np.float32(LOWEST), np.float32(0)
    bias, shift = np.int32(127), np.int32(23)

    def polynomial(x):
        # Why: libm's expf is one call per element; this vectorizes. Comparisons let NaN through.
        clamped = lowest if x < lowest else x
        n = np.floor(clamped * log2_e + half)
        r = clamped - n * ln2_high - n * ln2_low
        tail = ((((c7 * r + c6) * r + c5) * r + c4) * r + c3) * r + c2
        power = np.int32(np.int32(np.int32(n) + bias) << shift).view(np.float32)
        value = (tail * r * r + r + one) * power
        return zero if x < lowest else value

    return polynomial
