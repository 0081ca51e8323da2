"""Activation buffer: the vectors that matrices are multiplied with."""

from __future__ import annotations

from dataclasses import dataclass

from amaranth.hdl import Array, Cat, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden_model.config import Config
from hdl.fixed import tree_sum
from hdl.layouts import lanes, slot_write

#: Elements of a quantisation group; a slot starts on a group of its own.
GROUP = 64


@dataclass(frozen=True)
class Slot:
    """One vector of the buffer: its first group and its length in elements."""

    group: int
    length: int


def slots(config: Config) -> dict[str, Slot]:
    """Every vector that is the input of a matrix.

    ``h`` is the normed layer input, ``f`` and ``g`` the low-rank decay and gate,
    ``c`` the latent, ``o`` the attention result, ``act{r}`` the hidden vector of the
    shared (0) or the r-th chosen expert.
    """
    m = config.model
    lengths = {
        "h": m.d_model,
        "f": m.kda_dim,
        "g": m.kda_dim,
        "c": m.mla_dc,
        "o": max(m.kda_width, m.n_heads * m.mla_dv),
    }
    lengths |= {f"act{r}": m.d_ff for r in range(m.top_k + 1)}
    found, group = {}, 0
    for name, length in lengths.items():
        found[name] = Slot(group, length)
        group += -(-length // GROUP)
    return found


class ActivationBuffer(wiring.Component):
    """Registers for every input vector, with the sum of each 64-element group.

    Attributes
    ----------
    write : In(slot_write)
        ``vector_lanes`` activations; ``address`` counts in that unit, 64/lanes per group.
    chunk : In
        ``rows`` activations to read, 64/rows chunks per group.
    data : Out
        Them, in the same cycle.
    group, total : In, Out
        A group and the sum of its elements, in the same cycle.
    total_next : Out
        The sum of the group after it.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        act = config.hardware.formats.activation.width
        self.groups = sum(-(-s.length // GROUP) for s in slots(config).values())
        super().__init__(
            {
                "write": In(slot_write(config)),
                "chunk": In(10),
                "data": Out(lanes(signed(act), config.hardware.rows)),
                "group": In(range(self.groups + 1)),
                "total": Out(signed(act + 6)),
                "total_next": Out(signed(act + 6)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        hw = self.config.hardware
        v, rows, act = hw.vector_lanes, hw.rows, hw.formats.activation.width
        per_write, per_read = GROUP // v, GROUP // rows
        cells = {}
        for slot in slots(self.config).values():
            for i in range(0, slot.length, v):
                word = Signal(v * act, name=f"cells_{slot.group * GROUP + i}")
                address = slot.group * per_write + i // v
                cells[slot.group * GROUP + i] = word
                with m.If(self.write.valid & (self.write.address == address)):
                    m.d.sync += word.eq(Cat(self.write.data))

        def element(i: int) -> Signal:
            word = cells.get(i - i % v)
            assert word is not None
            return word[(i % v) * act : (i % v + 1) * act]

        with m.Switch(self.chunk):
            for slot in slots(self.config).values():
                for i in range(0, slot.length, rows):
                    with m.Case(slot.group * per_read + i // rows):
                        start = slot.group * GROUP + i
                        m.d.comb += Cat(self.data).eq(Cat(element(start + j) for j in range(rows)))
            with m.Default():
                m.d.comb += Cat(self.data).eq(Cat(element(j) for j in range(rows)))

        totals = Array(Signal(signed(act + 6), name=f"total{g}") for g in range(self.groups + 1))
        group = self.write.address // per_write
        first = self.write.address % per_write == 0
        with m.If(self.write.valid):
            before = Mux(first, 0, totals[group])
            m.d.sync += totals[group].eq(before + tree_sum(list(self.write.data)))
        m.d.comb += [
            self.total.eq(totals[self.group]),
            self.total_next.eq(totals[self.group + 1]),
        ]
        return m
