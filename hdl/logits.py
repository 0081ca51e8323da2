"""Logits unit: writes the logits row and the token out, and finds the argmax."""

from __future__ import annotations

from amaranth.hdl import Array, Cat, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden_model.config import COLUMNS, Config
from hdl.layouts import RES, result_stream

LOGITS_PER_BEAT = 4


class Logits(wiring.Component):
    """Queue of logits on their way to the memory, with a running argmax.

    Attributes
    ----------
    y : In(result_stream)
        Results of the LOGITS target.
    start : In
        A run begins: take the addresses.
    row_address, stride, argmax_address : In
        Byte addresses and distance of rows, from the header.
    room, block_issued : Out, In
        Whether another block of 16 columns fits; a block was issued.
    done : Out
        Up for one cycle when row and argmax of a position were handed over.
    write_valid, write_ready, write_address, write_data, write_strobe
        Write requests; the address counts beats of 16 bytes.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        super().__init__(
            {
                "y": In(result_stream(config)),
                "start": In(1),
                "row_address": In(32),
                "stride": In(32),
                "argmax_address": In(32),
                "room": Out(1),
                "block_issued": In(1),
                "done": Out(1),
                "write_valid": Out(1),
                "write_ready": In(1),
                "write_address": Out(28),
                "write_data": Out(128),
                "write_strobe": Out(16),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        v, vocab = self.config.hardware.vector_lanes, self.config.model.vocab
        entry_lanes = max(v, LOGITS_PER_BEAT)
        depth = self.config.hardware.logits_fifo * LOGITS_PER_BEAT // entry_lanes
        entries = Array(Signal(entry_lanes * RES, name=f"entry{i}") for i in range(depth))
        head, tail = Signal(range(depth)), Signal(range(depth))
        level = Signal(range(depth + 1))

        # In: gather results into entries.
        push = Signal()
        halves = entry_lanes // v
        with m.If(self.y.valid):
            if halves == 1:
                m.d.comb += push.eq(1)
                m.d.sync += entries[tail].eq(Cat(self.y.data))
            else:
                low = Signal(v * RES)
                m.d.comb += push.eq(self.y.index[0])
                with m.If(push):
                    m.d.sync += entries[tail].eq(Cat(low, Cat(self.y.data)))
                with m.Else():
                    m.d.sync += low.eq(Cat(self.y.data))
        with m.If(push):
            m.d.sync += tail.eq(tail + 1)

        # Out: a beat of four logits at a time, then the argmax.
        row, argmax_at = Signal(28), Signal(30)
        beats = vocab // LOGITS_PER_BEAT
        beat = Signal(range(beats + 1))
        parts = entry_lanes // LOGITS_PER_BEAT
        part = beat[: parts.bit_length() - 1] if parts > 1 else 0
        value = entries[head].word_select(part, LOGITS_PER_BEAT * RES)
        words = [value[RES * i : RES * i + RES].as_signed() for i in range(LOGITS_PER_BEAT)]
        extended = [Signal(signed(32), name=f"logit{i}") for i in range(LOGITS_PER_BEAT)]
        m.d.comb += [e.eq(w) for e, w in zip(extended, words, strict=True)]
        best = Signal(signed(RES))
        choice = Signal(range(vocab))
        complete = beat == beats
        sent = self.write_valid & self.write_ready
        pop = Signal()
        m.d.comb += pop.eq(sent & ~complete & (part == parts - 1))
        with m.If(pop):
            m.d.sync += head.eq(head + 1)
        m.d.sync += level.eq(level + push - pop)
        with m.If(complete):
            m.d.comb += [
                self.write_valid.eq(1),
                self.write_address.eq(argmax_at >> 2),
                self.write_strobe.eq(0xF << (argmax_at[:2] << 2)),
            ]
            index = Signal(32)
            m.d.comb += [index.eq(choice), self.write_data.eq(index.replicate(4))]
        with m.Else():
            m.d.comb += [
                self.write_valid.eq(level != 0),
                self.write_address.eq(row + beat),
                self.write_data.eq(Cat(extended)),
                self.write_strobe.eq(0xFFFF),
            ]
        with m.If(sent):
            m.d.sync += beat.eq(beat + 1)
            with m.If(complete):
                m.d.comb += self.done.eq(1)
                m.d.sync += [
                    beat.eq(0),
                    row.eq(row + self.stride[4:]),
                    argmax_at.eq(argmax_at + 1),
                ]
        with m.If(self.start):
            m.d.sync += [
                row.eq(self.row_address[4:]),
                argmax_at.eq(self.argmax_address[2:]),
                beat.eq(0),
            ]

        # A block takes its share of the queue when it is issued.
        per_block = COLUMNS // LOGITS_PER_BEAT
        credit = Signal(range(self.config.hardware.logits_fifo + 1))
        taken = Signal.like(credit)
        m.d.comb += [
            credit.eq(self.config.hardware.logits_fifo - taken),
            self.room.eq(credit >= per_block),
        ]
        freed = sent & ~complete
        m.d.sync += taken.eq(taken + Mux(self.block_issued, per_block, 0) - freed)

        # Largest of a beat's lanes, then of the row; the earlier one wins a tie.
        top, top_index = self.y.data[0], self._index(m, 0)
        for lane in range(1, v):
            larger = self.y.data[lane] > top
            top = Mux(larger, self.y.data[lane], top).as_signed()
            top_index = Mux(larger, self._index(m, lane), top_index)
        with m.If(self.y.valid & ((self.y.index == 0) | (top > best))):
            m.d.sync += [best.eq(top), choice.eq(top_index)]
        return m

    def _index(self, m: Module, lane: int) -> Signal:
        v = self.config.hardware.vector_lanes
        index = Signal(range(self.config.model.vocab), name=f"index{lane}")
        m.d.comb += index.eq(self.y.index * v + lane)
        return index
