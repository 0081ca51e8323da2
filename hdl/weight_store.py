"""Weight store: int4 weights by row pairs, and the scales of every group."""

from __future__ import annotations

from amaranth.hdl import Cat, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden_model.config import Config
from hdl.matvec import SCALE_WORD
from hdl.memory import Memory


class WeightStore(wiring.Component):
    """Banks of 128 bits, one per row pair of a chunk, and a memory of scales.

    A read and a write of the same kind never meet: the receive unit waits.

    Attributes
    ----------
    we, bank, waddr, wdata : In
        Write one row pair × 16 columns.
    re, raddr, rdata : In, In, Out
        Read a chunk: ``rows`` × 16 weights.
    scale_we, scale_waddr, scale_wdata, scale_wstrb : In
        Write a beat of scales or zero points: ``scale_wstrb`` is one bit per beat.
    scale_re, scale_raddr, scale_rdata : In, In, Out
    """

    def __init__(self, config: Config, words: int, scale_words: int) -> None:
        self.banks = config.hardware.rows // 2
        self.words, self.scale_words = words, scale_words
        address = max((max(words, 2) - 1).bit_length(), 1)
        scale_address = (scale_words - 1).bit_length()
        super().__init__(
            {
                "we": In(1),
                "bank": In(range(max(self.banks, 2))),
                "waddr": In(address),
                "wdata": In(128),
                "re": In(1),
                "raddr": In(address),
                "rdata": Out(128 * self.banks),
                "scale_we": In(1),
                "scale_waddr": In(scale_address),
                "scale_wdata": In(128),
                "scale_wstrb": In(3),
                "scale_re": In(1),
                "scale_raddr": In(scale_address),
                "scale_rdata": Out(SCALE_WORD),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        if self.words:
            data = []
            for i in range(self.banks):
                bank = Memory(self.words, 128, single_port=True)
                m.submodules[f"bank{i}"] = bank
                m.d.comb += [
                    bank.we.eq(self.we & (self.bank == i)),
                    bank.waddr.eq(self.waddr),
                    bank.wdata.eq(self.wdata),
                    bank.re.eq(self.re),
                    bank.raddr.eq(self.raddr),
                ]
                data.append(bank.rdata)
            m.d.comb += self.rdata.eq(Cat(data))
        m.submodules.scales = scales = Memory(self.scale_words, SCALE_WORD, single_port=True)
        m.d.comb += [
            scales.we.eq(self.scale_we),
            scales.waddr.eq(self.scale_waddr),
            scales.wdata.eq(self.scale_wdata.replicate(3)),
            scales.wstrb.eq(Cat(self.scale_wstrb[i // 16] for i in range(48))),
            scales.re.eq(self.scale_re),
            scales.raddr.eq(self.scale_raddr),
            self.scale_rdata.eq(scales.rdata),
        ]
        return m
