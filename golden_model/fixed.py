"""Fixed-point primitives: rounding shifts, saturation and the function tables.

The tables are built here once and read by both the integer model and the
hardware, so the two cannot disagree about an entry. Everything works on int64
arrays of raw values.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from golden_model.config import Fixed

Ints = npt.NDArray[np.int64]

#: Fractional bits of values in [0, 1]: gates, decays, probabilities (17 bits, 1.0 included).
UNIT_FRAC = 16
#: Width of the argument of the reciprocal and the reciprocal square root.
SCALAR_WIDTH = 56
#: log2(e) and 5·log2(e) (the decay's lower bound), as integers with these fractional bits.
LOG2E_FRAC = 16
LOG2E = round(np.log2(np.e) * 2**LOG2E_FRAC)
DECAY_FRAC = 13
DECAY = round(5 * np.log2(np.e) * 2**DECAY_FRAC)
#: 2.828, the scale of routed experts, with 14 fractional bits.
EXPERT_SCALE_FRAC = 14
EXPERT_SCALE = round(2.828 * 2**EXPERT_SCALE_FRAC)


def round_shift(x: Ints, n: int | Ints) -> Ints:
    """``x / 2**n`` rounded half up; a negative ``n`` shifts left."""
    x = np.asarray(x, np.int64)
    if isinstance(n, (int, np.integer)):
        if n <= 0:
            return x << -n
        return (x + (1 << (n - 1))) >> n
    n = np.asarray(n, np.int64)
    half = np.where(n > 0, np.int64(1) << np.maximum(n - 1, 0), 0)
    return np.where(n >= 0, (x + half) >> np.maximum(n, 0), x << np.maximum(-n, 0))


def saturate(x: Ints, fmt: Fixed) -> Ints:
    """Clamp raw values to what ``fmt`` can hold."""
    return np.clip(x, fmt.min, fmt.max)


def convert(x: Ints, frac: int, fmt: Fixed) -> Ints:
    """Raw values with ``frac`` fractional bits, rounded and saturated to ``fmt``."""
    return saturate(round_shift(x, frac - fmt.frac), fmt)


def to_float(x: Ints, frac: int) -> npt.NDArray[np.float64]:
    """Raw values as real numbers."""
    return np.asarray(x, np.float64) / 2.0**frac


# Sigmoid: |t| < 16 in 512 segments of 1/32, linear in between (error < 1.3e-5).
SIGMOID_SEGMENTS = 512
SIGMOID_STEP_BITS = 13  # raw bits of a residual value (18 fractional) inside a segment


@cache
def sigmoid_table() -> tuple[Ints, Ints]:
    """Value at the start of each segment and the rise to the next, UNIT_FRAC bits."""
    t = np.arange(SIGMOID_SEGMENTS + 1) / 32.0
    knots = np.rint(2.0**UNIT_FRAC / (1.0 + np.exp(-t))).astype(np.int64)
    return knots[:-1], np.diff(knots)


def sigmoid(t: Ints) -> Ints:
    """Sigmoid of residual-format values (24 bits, 18 fractional), UNIT_FRAC bits."""
    t = np.asarray(t, np.int64)
    base, rise = sigmoid_table()
    magnitude = np.abs(t)
    index = np.minimum(magnitude >> SIGMOID_STEP_BITS, SIGMOID_SEGMENTS - 1)
    inside = magnitude & ((1 << SIGMOID_STEP_BITS) - 1)
    y = base[index] + round_shift(rise[index] * inside, SIGMOID_STEP_BITS)
    y = np.where(magnitude >> SIGMOID_STEP_BITS >= SIGMOID_SEGMENTS, 1 << UNIT_FRAC, y)
    return np.where(t < 0, (1 << UNIT_FRAC) - y, y)


# 2**-t: the fraction in 128 segments, linear in between (error < 4e-6), then a shift.
EXP2_SEGMENTS = 128
EXP2_STEP_BITS = 9


@cache
def exp2_table() -> tuple[Ints, Ints]:
    """Value at the start of each segment of 2**-f and the fall to the next."""
    f = np.arange(EXP2_SEGMENTS + 1) / EXP2_SEGMENTS
    knots = np.rint(2.0 ** (UNIT_FRAC - f)).astype(np.int64)
    return knots[:-1], -np.diff(knots)


def exp2_negative(t: Ints) -> Ints:
    """``2**-t`` for ``t >= 0`` with 16 fractional bits, UNIT_FRAC bits."""
    t = np.asarray(t, np.int64)
    base, fall = exp2_table()
    index = (t >> EXP2_STEP_BITS) & (EXP2_SEGMENTS - 1)
    inside = t & ((1 << EXP2_STEP_BITS) - 1)
    y = base[index] - round_shift(fall[index] * inside, EXP2_STEP_BITS)
    whole = np.minimum(t >> 16, 31)
    return round_shift(y, whole)


# Reciprocal (square root): argument normalised so that its top bits index a table.
RSQRT_INDEX_BITS = 8
RECIPROCAL_INDEX_BITS = 7
SCALAR_STEP_BITS = 10


@cache
def rsqrt_table() -> tuple[Ints, Ints]:
    """Knots of 1/sqrt(x), x = i/256 for i from 64, and the fall to the next."""
    i = np.arange(64, 257)
    knots = np.minimum(np.rint(2.0**16 / np.sqrt(i / 256)), 2**17 - 1).astype(np.int64)
    return knots[:-1], -np.diff(knots)


@cache
def reciprocal_table() -> tuple[Ints, Ints]:
    """Knots of 1/x, x = i/256 for i from 128, and the fall to the next."""
    i = np.arange(128, 257)
    knots = np.minimum(np.rint(2.0**16 * 256 / i), 2**17 - 1).astype(np.int64)
    return knots[:-1], -np.diff(knots)


def _normalise(n: int, even: bool) -> tuple[int, int]:
    n = max(n, 1)  # the hardware treats 0 as 1
    shift = SCALAR_WIDTH - n.bit_length()
    if even:
        shift &= ~1
    return n << shift, shift


def _interpolate(table: tuple[Ints, Ints], first: int, normalised: int) -> int:
    base, fall = table
    index = (normalised >> (SCALAR_WIDTH - 8)) - first
    inside = (normalised >> (SCALAR_WIDTH - 8 - SCALAR_STEP_BITS)) & ((1 << SCALAR_STEP_BITS) - 1)
    drop = int(fall[index]) * inside
    return int(base[index]) - ((drop + (1 << (SCALAR_STEP_BITS - 1))) >> SCALAR_STEP_BITS)


def rsqrt(n: int) -> tuple[int, int]:
    """1/sqrt of an integer below 2**SCALAR_WIDTH; 0 counts as 1.

    Returns ``(m, h)`` with ``1/sqrt(n) = m · 2**-(16+h)`` and m of 17 bits.
    """
    normalised, shift = _normalise(int(n), even=True)
    return _interpolate(rsqrt_table(), 64, normalised), (SCALAR_WIDTH - shift) // 2


def reciprocal(n: int) -> tuple[int, int]:
    """1/n of an integer (0 counts as 1): ``(m, e)`` with ``1/n = m · 2**-(16+e)``."""
    normalised, shift = _normalise(int(n), even=False)
    return _interpolate(reciprocal_table(), 128, normalised), SCALAR_WIDTH - shift
