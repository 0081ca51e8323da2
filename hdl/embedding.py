"""Embedding unit: dequantises one embedding row on its way to the residual memory."""

from __future__ import annotations

from amaranth.hdl import Module, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden_model.config import Config
from golden_model.integer import RES_FRAC, WEIGHT_FRAC
from hdl.fixed import saturate
from hdl.layouts import RES, vector_stream


class Embedding(wiring.Component):
    """(q − z)·s·2⁻¹² of one row of ``emb``.

    Attributes
    ----------
    token : In
        Whose row it is; its low bits tell where row, scale and zero point lie.
    q_valid, s_valid, z_valid, data : In
        A beat that holds (a part of) the row, its scale, or its zero point. The
        zero point comes last.
    room : In
        Whether the row may leave.
    done : Out
        Up with the last values.
    out : Out(vector_stream)
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        super().__init__(
            {
                "token": In(13),
                "q_valid": In(1),
                "s_valid": In(1),
                "z_valid": In(1),
                "data": In(128),
                "room": In(1),
                "done": Out(1),
                "out": Out(vector_stream(config)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        model, v = self.config.model, self.config.hardware.vector_lanes
        row_bits = 4 * model.d_model
        q = Signal(row_bits)
        s, z = Signal(signed(16)), Signal(8)
        with m.If(self.q_valid):
            if row_bits > 128:
                m.d.sync += q.eq(q[128:] | (self.data << (row_bits - 128)))
            else:
                rows = 128 // row_bits
                place = self.token[: rows.bit_length() - 1] if rows > 1 else 0
                m.d.sync += q.eq(self.data.word_select(place, row_bits))
        with m.If(self.s_valid):
            m.d.sync += s.eq(self.data.word_select(self.token[:3], 16))
        full = Signal()
        beats = model.d_model // v
        beat = Signal(range(beats))
        with m.If(self.z_valid):
            m.d.sync += [z.eq(self.data.word_select(self.token[:4], 8)), full.eq(1), beat.eq(0)]
        sending = Signal()
        m.d.comb += [
            sending.eq(full & self.room),
            self.out.valid.eq(sending),
            self.out.last.eq(beat == beats - 1),
            self.done.eq(sending & self.out.last),
        ]
        with m.If(sending):
            m.d.sync += [beat.eq(beat + 1), q.eq(q >> (4 * v))]
            with m.If(self.out.last):
                m.d.sync += full.eq(0)
        for lane in range(v):
            difference = Signal(signed(9), name=f"difference{lane}")
            m.d.comb += difference.eq(q[4 * lane : 4 * lane + 4] - z)
            value = (difference * s) << (RES_FRAC - WEIGHT_FRAC)
            m.d.comb += self.out.data[lane].eq(saturate(value, RES))
        return m
