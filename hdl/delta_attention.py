"""Delta-attention unit: the recurrent state of every KDA layer and its update.

One read pass over the state yields k·S' and q·S' together (S' the decayed state);
with u = v − k·S' the output is q·S' + beta·(q·k)·u, so that the write-back of
S' + beta·k⊗u runs behind, while the rest of the layer computes. `state_lanes`
value columns are worked on at a time, one key row a cycle.
"""

from __future__ import annotations

from amaranth.hdl import Array, Cat, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden_model.config import Config
from golden_model.fixed import UNIT_FRAC
from golden_model.integer import L2_EPS
from hdl.fixed import round_shift, round_shift_by, saturate, tree_sum
from hdl.layouts import RES, RES_FRAC, ScalarPort, Target, result_stream, vector_stream
from hdl.memory import Memory


class DeltaAttention(wiring.Component):
    """Gated delta rule over all heads of a layer, one token at a time.

    Attributes
    ----------
    y : In(result_stream)
        q, k, v (residual format), beta and alpha (UNIT_FRAC fractional bits), told
        apart by ``tag.target``; ``tag.ordinal`` is the layer's number among the KDA
        layers. The unit starts when the last of the five has come.
    ready : Out
        Whether inputs of a further token may come.
    first_token : In
        At position 0 the state counts as zero.
    scalar : Out(ScalarPort)
        Reciprocal square root.
    start_norm, norm_ready, head, ordinal : Out, In, Out, Out
        Handshake for a head's output; it follows on ``o`` at once.
    o : Out(vector_stream)
        sqrt(dh) times the output of a head, residual format.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        super().__init__(
            {
                "y": In(result_stream(config)),
                "ready": Out(1),
                "first_token": In(1),
                "scalar": Out(ScalarPort()),
                "start_norm": Out(1),
                "norm_ready": In(1),
                "head": Out(3),
                "ordinal": Out(4),
                "o": Out(vector_stream(config)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        model, hw = self.config.model, self.config.hardware
        v, lanes, dh, heads = hw.vector_lanes, hw.state_lanes, model.kda_dim, model.kda_heads
        key, state = hw.formats.key, hw.formats.state
        layers = model.layers.count("L")
        parts = dh // lanes  # column words of a state row
        words = heads * dh // v
        log_dh, log_parts = dh.bit_length() - 1, parts.bit_length() - 1
        log_v = v.bit_length() - 1

        m.submodules.state = cells = Memory(layers * heads * parts * dh, lanes * state.width)
        vectors = {n: Memory(words, v * RES, single_port=True) for n in ("q", "k", "alpha")}
        m.submodules += vectors.values()
        m.submodules.values = values = Memory(heads * parts, lanes * RES, single_port=True)
        m.submodules.updates = updates = Memory(heads * parts, lanes * RES)
        roots = self._inputs(m, vectors, values)
        beta = Array(Signal(17, name=f"beta{i}") for i in range(heads))
        for lane in range(min(v, heads)):
            with m.If(self.y.valid & (self.y.tag.target == Target.KDA_BETA)):
                for i in range(lane, heads, v):
                    with m.If(self.y.index == i // v):
                        m.d.sync += beta[i].eq(self.y.data[lane])

        # Which inputs have come.
        needed = (
            Target.KDA_Q, Target.KDA_K, Target.KDA_V, Target.KDA_BETA, Target.KDA_ALPHA,
        )  # fmt: skip
        seen = Signal(len(needed))
        for i, target in enumerate(needed):
            with m.If(self.y.valid & self.y.last & (self.y.tag.target == target)):
                m.d.sync += seen[i].eq(1)
        with m.If(self.y.valid & (self.y.tag.target == Target.KDA_ALPHA)):
            m.d.sync += self.ordinal.eq(self.y.tag.ordinal)

        # Walk: heads, column words, key rows; first reading, then writing back.
        position = Signal(range(heads * parts * dh))
        row = position[:log_dh]
        part = position[log_dh : log_dh + log_parts] if log_parts else 0
        head = Signal(3)
        m.d.comb += head.eq(position >> (log_dh + log_parts))
        last_row = row == dh - 1
        last = position == heads * parts * dh - 1
        walking, writing, held = Signal(), Signal(), Signal()
        go = Signal()
        # The last row of a column word waits until the one before has left.
        leaving = Signal()
        m.d.comb += go.eq(walking & ~(~writing & last_row & leaving))
        with m.If(go):
            m.d.sync += position.eq(position + 1)
        drain = Signal(3)
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += self.ready.eq(~seen.all())
                with m.If(seen.all() & roots.all_known):
                    m.d.sync += position.eq(0)
                    m.next = "READ"
            with m.State("READ"):
                m.d.comb += walking.eq(1)
                with m.If(go & last):
                    m.d.sync += drain.eq(0)
                    m.next = "SETTLE"
            with m.State("SETTLE"):  # the last u is on its way into its memory
                m.d.sync += [drain.eq(drain + 1), position.eq(0)]
                with m.If(drain == 5):
                    m.next = "WRITE"
            with m.State("WRITE"):
                m.d.comb += [walking.eq(1), writing.eq(1)]
                with m.If(go & last):
                    m.d.sync += drain.eq(0)
                    m.next = "FLUSH"
            with m.State("FLUSH"):  # the last rows are on their way into the state
                m.d.sync += drain.eq(drain + 1)
                with m.If(drain == 5):
                    m.d.sync += seen.eq(0)
                    m.next = "IDLE"
        m.d.comb += roots.clear.eq(seen == 0)

        # Stage 0: addresses.
        address = Signal(range(cells.depth))
        m.d.comb += address.eq(self.ordinal * (heads * parts * dh) + position)
        element = Signal(range(heads * dh))
        m.d.comb += element.eq((head << log_dh) + row)
        m.d.comb += [cells.raddr.eq(address), cells.re.eq(go)]
        for mem in vectors.values():
            m.d.comb += [mem.raddr.eq(element >> log_v), mem.re.eq(go)]
        value_word = (head << log_parts) + part
        m.d.comb += [
            values.raddr.eq(value_word),
            values.re.eq(go & ~writing),
            updates.raddr.eq(value_word),
            updates.re.eq(go & writing),
        ]

        def delayed(signal: Signal | object, count: int, name: str) -> list:
            """The signal and its copies 1 to ``count`` cycles later."""
            chain = [signal]
            for i in range(count):
                copy = Signal.like(signal, name=f"{name}{i + 1}")  # type: ignore[arg-type]
                m.d.sync += copy.eq(chain[-1])
                chain.append(copy)
            return chain

        here = Signal()
        m.d.comb += here.eq(go & ~writing)
        back = Signal()
        m.d.comb += back.eq(go & writing)
        at_first, at_end, at_part0 = Signal(), Signal(), Signal()
        m.d.comb += [at_first.eq(row == 0), at_end.eq(here & last_row)]
        m.d.comb += at_part0.eq(part == 0)
        valid, store = delayed(here, 3, "read"), delayed(back, 3, "write")
        first, end = delayed(at_first, 3, "first"), delayed(at_end, 4, "end")
        part0, heads_at = delayed(at_part0, 3, "part0_"), delayed(head, 4, "head_at")
        targets = delayed(address, 4, "address")
        places = delayed(element[:log_v], 1, "place")
        words_at = delayed(Signal.like(values.raddr), 4, "value_word")
        m.d.comb += words_at[0].eq(value_word)

        m.d.comb += leaving.eq(held | Cat(end[1:]).any())

        # Stage 1: normalise the key and the query of this row.
        def scalar_of(name: str) -> object:
            return vectors[name].rdata.word_select(places[1], RES).as_signed()

        q2, k2 = Signal(signed(key.width)), Signal(signed(key.width))
        alpha2 = Signal(17)
        for name, out in (("q", q2), ("k", k2)):
            mantissa, exponent = roots.of[name]
            shift = exponent[heads_at[1]] + (16 - key.frac)
            scaled = round_shift_by(scalar_of(name) * mantissa[heads_at[1]], shift[:6])
            m.d.sync += out.eq(saturate(scaled, key.width))
        m.d.sync += alpha2.eq(scalar_of("alpha"))
        state2 = Signal(len(cells.rdata))
        m.d.sync += state2.eq(Mux(self.first_token, 0, cells.rdata))

        # Stage 2: decay. Stage 3: multiply with the key (or the update) and the query.
        write3 = Signal(signed(key.width + 1))
        q3, k3 = Signal.like(q2), Signal.like(k2)
        m.d.sync += [q3.eq(q2), k3.eq(k2)]
        m.d.sync += write3.eq(round_shift(k2 * beta[heads_at[2]], UNIT_FRAC))
        update_word = delayed(updates.rdata, 2, "update")
        fresh = []
        acc_width = key.width + state.width + log_dh
        read_shift = key.frac + state.frac - RES_FRAC
        totals = []
        for lane in range(lanes):
            s = state2[state.width * lane : state.width * (lane + 1)].as_signed()
            decayed = Signal(signed(state.width), name=f"decayed{lane}")
            m.d.sync += decayed.eq(round_shift(s * alpha2, UNIT_FRAC))
            u = update_word[2][RES * lane : RES * lane + RES].as_signed()
            left = Mux(store[3], write3, k3).as_signed()
            right = Mux(store[3], u, decayed).as_signed()
            product = Signal(signed(key.width + 1 + RES), name=f"product{lane}")
            m.d.comb += product.eq(left * right)
            pair = []
            for name, term in (("k", product), ("q", q3 * decayed)):
                acc = Signal(signed(acc_width), name=f"acc_{name}{lane}")
                total = Signal(signed(acc_width), name=f"total_{name}{lane}")
                m.d.comb += total.eq(Mux(first[3], 0, acc) + term)
                with m.If(valid[3]):
                    m.d.sync += acc.eq(total)
                pair.append(acc)
            totals.append(pair)
            new = decayed + round_shift(product, key.frac + RES_FRAC - state.frac)
            fresh.append(saturate(new, state.width))
        m.d.comb += [
            cells.we.eq(store[3]),
            cells.waddr.eq(targets[3]),
            cells.wdata.eq(Cat(fresh)),
        ]
        qk = Signal(signed(2 * key.width + log_dh))
        qk_total = Signal.like(qk)
        m.d.comb += qk_total.eq(Mux(first[3], 0, qk) + q3 * k3)
        with m.If(valid[3] & part0[3]):
            m.d.sync += qk.eq(qk_total)

        # Stage 4: u, and the parts of the output, held until the norm takes them.
        value_data = delayed(values.rdata, 3, "value")
        strength = Signal(signed(19))
        held_u = Signal(lanes * RES)
        held_q = [Signal(signed(acc_width - read_shift + 1), name=f"held{i}") for i in range(lanes)]
        held_word = Signal.like(values.raddr)
        us = []
        for lane in range(lanes):
            value = value_data[3][RES * lane : RES * lane + RES].as_signed()
            us.append(saturate(value - round_shift(totals[lane][0], read_shift), RES))
        with m.If(end[4]):
            rounded = round_shift(qk, 2 * key.frac - UNIT_FRAC)
            m.d.sync += [
                held.eq(1),
                held_u.eq(Cat(us)),
                held_word.eq(words_at[4]),
                strength.eq(round_shift(rounded * beta[heads_at[4]], UNIT_FRAC)),
            ]
            m.d.sync += [
                h.eq(round_shift(t[1], read_shift)) for h, t in zip(held_q, totals, strict=True)
            ]
        m.d.comb += [
            updates.we.eq(end[4]),
            updates.waddr.eq(words_at[4]),
            updates.wdata.eq(Cat(us)),
        ]

        # Send the held columns, `vector_lanes` a cycle; a head starts a job of the norm.
        beat = Signal(range(max(lanes // v, 2)))
        started = Signal()
        starts_head = held_word[:log_parts] == 0 if log_parts else 1
        ends_head = held_word[:log_parts] == parts - 1 if log_parts else 1
        sending = held & started
        m.d.comb += [
            self.start_norm.eq(held & ~started & starts_head),
            self.head.eq(held_word >> log_parts),
            self.o.valid.eq(sending),
            self.o.last.eq(sending & ends_head & (beat == lanes // v - 1)),
        ]
        with m.If(held & ~started & (self.norm_ready | ~starts_head)):
            m.d.sync += [started.eq(1), beat.eq(0)]
        with m.If(sending):
            m.d.sync += beat.eq(beat + 1)
            with m.If(beat == lanes // v - 1):
                m.d.sync += [held.eq(0), started.eq(0)]
        for i in range(v):
            u = held_u.word_select(beat, v * RES)[RES * i : RES * i + RES].as_signed()
            q = Array(held_q[b * v + i] for b in range(lanes // v))[beat]
            m.d.comb += self.o.data[i].eq(saturate(q + round_shift(strength * u, UNIT_FRAC), RES))
        return m

    def _inputs(self, m: Module, vectors: dict[str, Memory], values: Memory) -> _Roots:
        """Store q, k, v and alpha as they come; ask for 1/|q| and 1/|k| head by head."""
        model, hw = self.config.model, self.config.hardware
        v, lanes = hw.vector_lanes, hw.state_lanes
        y = self.y
        targets = {"q": Target.KDA_Q, "k": Target.KDA_K, "alpha": Target.KDA_ALPHA}
        for name, memory in vectors.items():
            m.d.comb += [
                memory.we.eq(y.valid & (y.tag.target == targets[name])),
                memory.waddr.eq(y.index),
                memory.wdata.eq(Cat(y.data)),
            ]
        per_word = lanes // v
        place = y.index % per_word
        m.d.comb += [
            values.we.eq(y.valid & (y.tag.target == Target.KDA_V)),
            values.waddr.eq(y.index // per_word),
            values.wdata.eq(Cat(y.data).replicate(per_word)),
            values.wstrb.eq(Cat(place == i // (3 * v) for i in range(3 * lanes))),
        ]
        is_q, is_k = y.tag.target == Target.KDA_Q, y.tag.target == Target.KDA_K
        beats = model.kda_dim // v
        square = Signal(56)
        valid1, first1, last1 = Signal(), Signal(), Signal()
        m.d.sync += [
            square.eq(tree_sum([x * x for x in y.data])),
            valid1.eq(y.valid & (is_q | is_k)),
            first1.eq(y.index % beats == 0),
            last1.eq(y.index % beats == beats - 1),
        ]
        total = Signal(56)
        asked, known = Signal(range(2 * 8 + 1)), Signal(range(2 * 8 + 1))
        summed = Signal()
        with m.If(valid1):
            m.d.sync += total.eq(Mux(first1, 0, total) + square)
        m.d.sync += summed.eq(valid1 & last1)
        # Sums wait in a queue of their own, as the scalar unit may be taken.
        count = 2 * model.kda_heads
        queue = Array(Signal(56, name=f"sum{i}") for i in range(count))
        filled = Signal(range(count + 1))
        with m.If(summed):
            m.d.sync += [queue[filled].eq(total), filled.eq(filled + 1)]
        m.d.comb += [
            self.scalar.valid.eq(asked < filled),
            self.scalar.arg.eq(queue[asked] + L2_EPS),
        ]
        with m.If(self.scalar.valid & self.scalar.ready):
            m.d.sync += asked.eq(asked + 1)
        mantissas = [Signal(17, name=f"mantissa{i}") for i in range(count)]
        exponents = [Signal(6, name=f"exponent{i}") for i in range(count)]
        with m.If(self.scalar.done):
            for i in range(count):
                with m.If(known == i):
                    m.d.sync += [
                        mantissas[i].eq(self.scalar.mantissa),
                        exponents[i].eq(self.scalar.exponent),
                    ]
            m.d.sync += known.eq(known + 1)
        roots = _Roots(known == count, mantissas, exponents)
        with m.If(roots.clear & ~valid1 & ~summed & (filled == count) & (known == count)):
            m.d.sync += [asked.eq(0), known.eq(0), filled.eq(0)]
        return roots


class _Roots:
    """Reciprocal norms of the queries (asked for first) and the keys of every head."""

    def __init__(self, all_known: object, mantissas: list[Signal], exponents: list[Signal]) -> None:
        heads = len(mantissas) // 2
        self.all_known = all_known
        self.clear = Signal(name="clear_roots")
        self.of = {
            "q": (Array(mantissas[:heads]), Array(exponents[:heads])),
            "k": (Array(mantissas[heads:]), Array(exponents[heads:])),
        }
