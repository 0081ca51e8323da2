"""Reciprocals and reciprocal square roots, shared by every unit that normalises."""

from __future__ import annotations

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In

from golden_model.fixed import SCALAR_WIDTH
from hdl.functions import reciprocal_mantissa
from hdl.layouts import ScalarPort


class ScalarUnit(wiring.Component):
    """Answers one request a cycle, two cycles later; low-numbered ports go first.

    Parameters
    ----------
    square_root : list of bool
        One entry per port: whether it asks for 1/sqrt(n) instead of 1/n.

    Attributes
    ----------
    ports : In(ScalarPort), one per entry
        With ``(mantissa, exponent)`` as in :func:`golden_model.fixed.rsqrt` and
        :func:`~golden_model.fixed.reciprocal`.
    """

    def __init__(self, square_root: list[bool]) -> None:
        self.square_root = square_root
        super().__init__({"ports": In(ScalarPort()).array(len(square_root))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        count = len(self.square_root)
        arg = Signal(SCALAR_WIDTH)
        grant, root = Signal(count), Signal()
        taken: list[Signal] = []
        for i, port in enumerate(self.ports):
            free = ~Cat(taken).any() if taken else 1
            m.d.comb += [port.ready.eq(free), grant[i].eq(port.valid & free)]
            taken.append(port.valid)
        for i, port in reversed(list(enumerate(self.ports))):
            with m.If(port.valid):
                m.d.comb += [arg.eq(port.arg), root.eq(int(self.square_root[i]))]

        # Stage 1: normalise, one step of halving the unknown shift after the other.
        shift = Signal(6)
        value = arg | (arg == 0)
        for bit in reversed(range(6)):
            step = 1 << bit
            empty = Signal(name=f"empty{step}")
            fits = ~value[SCALAR_WIDTH - step :].any() if step < SCALAR_WIDTH else 0
            m.d.comb += empty.eq(fits & ~(root if bit == 0 else 0))
            shifted = Signal(SCALAR_WIDTH, name=f"normalised{step}")
            m.d.comb += [shifted.eq(Mux(empty, value << step, value)), shift[bit].eq(empty)]
            value = shifted
        grant1, root1 = Signal(count), Signal()
        normalised, exponent = Signal(SCALAR_WIDTH), Signal(6)
        m.d.sync += [grant1.eq(grant), root1.eq(root), normalised.eq(value)]
        m.d.sync += exponent.eq(Mux(root, (SCALAR_WIDTH - shift) >> 1, SCALAR_WIDTH - shift))

        # Stage 2: table and interpolation.
        grant2, mantissa2, exponent2 = Signal(count), Signal(17), Signal(6)
        m.d.sync += [grant2.eq(grant1), exponent2.eq(exponent)]
        m.d.sync += mantissa2.eq(reciprocal_mantissa(m, normalised, root1))
        for i, port in enumerate(self.ports):
            m.d.comb += [
                port.done.eq(grant2[i]),
                port.mantissa.eq(mantissa2),
                port.exponent.eq(exponent2),
            ]
        return m
