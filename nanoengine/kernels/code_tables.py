"""Values of 4-bit codes that are not evenly spaced. This file imports nothing.

Source: kvalues_iq4nl of ggml-common.h; OCP Microscaling Formats (MX) v1.0, section 5.3.3.
"""

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of IQ4_NL and IQ4_XS."""

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each code: a sign, two bits of exponent and one of fraction."""
IQ2 = (8, 25, 43, *[0] * 5, -8, -25, -43, *[0] * 5)
IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
IQ3_S = (*range(1, 16, 2), *range(-1, -16, -2))
"""Values of grids, bit 3 of a code is the sign. IQ3_S also has 8 times the values of IQ1."""
ROTATED, GROUP = 16, 64
"""For int8 weights with int8 activations: the number of inputs that are rotated together, and of
rotated inputs that share a scale. A group holds whole rotations."""
