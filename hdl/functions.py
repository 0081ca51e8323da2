"""Nonlinear functions as combinational expressions, from the integer model's tables."""

from __future__ import annotations

from amaranth.hdl import Array, Const, Module, Mux, Signal, Value

from golden_model import fixed
from hdl.fixed import round_shift, round_shift_by


def _lookup(m: Module, table: fixed.Ints, index: Value) -> Value:
    """Value of a constant table at an index; plain logic."""
    width = max(int(table.max()).bit_length(), 1)
    out = Signal(width)
    m.d.comb += out.eq(Array([Const(int(v), width) for v in table])[index])
    return out


def sigmoid(m: Module, t: Value) -> Value:
    """Sigmoid of a residual-format value: unsigned, UNIT_FRAC fractional bits."""
    base, rise = fixed.sigmoid_table()
    step = fixed.SIGMOID_STEP_BITS
    magnitude = Signal(24)
    m.d.comb += magnitude.eq(Mux(t < 0, -t, t))
    index = magnitude[step : step + 9]
    inside = magnitude[:step]
    y = Signal(17)
    one = 1 << fixed.UNIT_FRAC
    inner = _lookup(m, base, index) + round_shift(_lookup(m, rise, index) * inside, step)
    m.d.comb += y.eq(Mux(magnitude[step + 9 :].any(), one, inner))
    out = Signal(17)
    m.d.comb += out.eq(Mux(t < 0, one - y, y))
    return out


def exp2_negative(m: Module, t: Value) -> Value:
    """``2**-t`` of an unsigned value with 16 fractional bits: unsigned, UNIT_FRAC bits."""
    base, fall = fixed.exp2_table()
    step = fixed.EXP2_STEP_BITS
    index, inside = t[step:16], t[:step]
    y = Signal(17)
    m.d.comb += y.eq(_lookup(m, base, index) - round_shift(_lookup(m, fall, index) * inside, step))
    whole = Signal(5)
    above = t[16:]
    m.d.comb += whole.eq(Mux(above >= 31, 31, above))
    out = Signal(17)
    m.d.comb += out.eq(round_shift_by(y, whole))
    return out


def reciprocal_mantissa(m: Module, normalised: Value, square_root: Value) -> Value:
    """Mantissa of 1/x, or 1/sqrt(x) where ``square_root``, of a normalised argument."""
    width, step = fixed.SCALAR_WIDTH, fixed.SCALAR_STEP_BITS
    index = normalised[width - 8 :]
    inside = normalised[width - 8 - step : width - 8]
    mantissas = []
    for (base, fall), first in ((fixed.reciprocal_table(), 128), (fixed.rsqrt_table(), 64)):
        offset = Signal(8)
        m.d.comb += offset.eq(index - first)
        drop = round_shift(_lookup(m, fall, offset) * inside, step)
        mantissas.append(_lookup(m, base, offset) - drop)
    out = Signal(17)
    m.d.comb += out.eq(Mux(square_root, mantissas[1], mantissas[0]))
    return out
