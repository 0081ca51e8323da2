"""Fixed-point helpers for Amaranth expressions; the hardware of `golden_model.fixed`."""

from __future__ import annotations

from collections.abc import Sequence

from amaranth.hdl import Const, Mux, Value, signed


def round_shift(value: Value, n: int) -> Value:
    """``value / 2**n`` rounded half up, for a constant ``n``; negative shifts left."""
    if n <= 0:
        return value << -n
    return (value + (1 << (n - 1))) >> n


def round_shift_by(value: Value, n: Value) -> Value:
    """``value / 2**n`` rounded half up, for an unsigned signal ``n``."""
    half = ((Const(1, 1) << n) >> 1)[: max(len(value), 1)]
    return (value + half) >> n


def saturate(value: Value, width: int) -> Value:
    """Clamp a signed value to ``width`` bits."""
    if len(value) <= width:
        return value
    top = value[width - 1 :]
    fits = (top == 0) | top.all()
    limit = Mux(value[-1], Const(-(1 << (width - 1)), signed(width)), Const((1 << (width - 1)) - 1))
    return Mux(fits, value[:width].as_signed(), limit)[:width].as_signed()


def convert(value: Value, shift: int, width: int) -> Value:
    """Drop ``shift`` fractional bits with rounding, then clamp to ``width`` bits."""
    return saturate(round_shift(value, shift), width)


def tree_sum(terms: Sequence[Value]) -> Value:
    """Sum of the terms as a balanced tree of adders."""
    terms = list(terms)
    while len(terms) > 1:
        pairs = [a + b for a, b in zip(terms[0::2], terms[1::2], strict=False)]
        terms = pairs + ([terms[-1]] if len(terms) % 2 else [])
    return terms[0]
