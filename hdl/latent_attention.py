"""Latent-attention unit: the cache of every MLA layer and softmax over it.

Per head one pass over the cached keys gives scores (in the log2 domain) and their
maximum, one over the values the weighted sum; the sum is scaled by one reciprocal.
"""

from __future__ import annotations

from amaranth.hdl import Array, Cat, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden_model.config import Config
from golden_model.integer import (
    ATTENTION_DOT_FRAC,
    ATTENTION_SCALE_FRAC,
    CONTEXT_DROP,
    attention_scale,
)
from hdl.fixed import convert, round_shift, round_shift_by, saturate, tree_sum
from hdl.functions import exp2_negative
from hdl.layouts import RES_FRAC, ScalarPort, Target, result_stream, slot_write
from hdl.memory import Memory

#: Bits of a score: |q·k|·log2(e)/sqrt(dk+dr) with 16 fractional bits.
SCORE_WIDTH = 30


class LatentAttention(wiring.Component):
    """Softmax attention of all heads of a layer over the positions so far.

    Parameters
    ----------
    config : Config
    slot : int
        First word of the activation buffer for the result.
    mark : int
        Scoreboard bit cleared with the last element.

    Attributes
    ----------
    y : In(result_stream)
        Queries, keys and values, told apart by ``tag.target``; ``tag.ordinal`` is the
        layer's number among the MLA layers. The unit starts when all five have come.
    ready : Out
        Whether inputs of a further token may come.
    position : In
        Position of the token.
    scalar : Out(ScalarPort)
        Reciprocal.
    write : Out(slot_write)
    """

    def __init__(self, config: Config, slot: int, mark: int) -> None:
        self.config, self.slot, self.mark = config, slot, mark
        super().__init__(
            {
                "y": In(result_stream(config)),
                "ready": Out(1),
                "position": In(range(config.model.max_seq)),
                "scalar": Out(ScalarPort()),
                "write": Out(slot_write(config)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        model, hw = self.config.model, self.config.hardware
        v, act, cache = hw.vector_lanes, hw.formats.activation, hw.formats.cache
        heads, split, positions = model.n_heads, hw.attention_split, model.max_seq
        layers = model.layers.count("F")
        dk, dr, dv = model.mla_dk // split, model.mla_dr // split, model.mla_dv // split

        # Memories hold words of 1/split of a head's vector.
        sizes = {
            "qc": (heads * split, dk, act),
            "qr": (heads * split, dr, act),
            "kc": (layers * positions * heads * split, dk, cache),
            "kr": (layers * positions * split, dr, cache),
            "v": (layers * positions * heads * split, dv, cache),
        }
        targets = {
            "qc": Target.MLA_QC,
            "qr": Target.MLA_QR,
            "kc": Target.MLA_KC,
            "kr": Target.MLA_KR,
            "v": Target.MLA_V,
        }
        ordinal = Signal(4)
        current = Signal(4)
        m.d.comb += current.eq(self.y.tag.ordinal)
        mems: dict[str, Memory] = {}
        seen = Signal(len(sizes))
        for i, (name, (depth, size, fmt)) in enumerate(sizes.items()):
            box = -(-fmt.width // 8) * 8  # whole bytes, so that strobes can tell elements apart
            mem = Memory(depth, size * box, single_port=True)
            m.submodules[name] = mems[name] = mem
            valid = self.y.valid & (self.y.tag.target == targets[name])
            per_word = size // v
            place, word = self.y.index % per_word, self.y.index // per_word
            if name in ("kc", "v"):
                base = (current * positions + self.position) * (heads * split)
            elif name == "kr":
                base = (current * positions + self.position) * split
            else:
                base = 0
            boxed = []
            for lane in range(v):
                element = convert(self.y.data[lane], RES_FRAC - fmt.frac, fmt.width)
                padded = Signal(signed(box), name=f"{name}{lane}")
                m.d.comb += padded.eq(element)
                boxed.append(padded)
            strobes = size * box // 8
            m.d.comb += [
                mem.we.eq(valid),
                mem.waddr.eq(base + word),
                mem.wdata.eq(Cat(boxed).replicate(per_word)),
                mem.wstrb.eq(Cat(place == j // (strobes // per_word) for j in range(strobes))),
            ]
            with m.If(valid & self.y.last):
                m.d.sync += [seen[i].eq(1), ordinal.eq(current)]

        def elements(name: str) -> list:
            _, size, fmt = sizes[name]
            box = -(-fmt.width // 8) * 8
            data = mems[name].rdata
            return [data[box * i : box * i + fmt.width].as_signed() for i in range(size)]

        # Walk: parts of a position's word, positions, then the next pass or head.
        head = Signal(3)
        at, part = Signal(range(positions)), Signal(range(max(split, 2)))
        scoring, summing = Signal(), Signal()
        walking = Signal()
        m.d.comb += walking.eq(scoring | summing)
        last_part = part == split - 1
        last = last_part & (at == self.position)
        with m.If(walking):
            m.d.sync += part.eq(part + 1)
            with m.If(last_part):
                m.d.sync += [part.eq(0), at.eq(at + 1)]
            with m.If(last):
                m.d.sync += at.eq(0)
        drain = Signal(3)
        mantissa, exponent = Signal(17), Signal(6)
        out_word = Signal(range(model.mla_dv // v + 1))
        emit = Signal()
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += self.ready.eq(~seen.all())
                m.d.sync += [head.eq(0), at.eq(0), part.eq(0)]
                with m.If(seen.all()):
                    m.next = "SCORE"
            with m.State("SCORE"):
                m.d.comb += scoring.eq(1)
                m.d.sync += drain.eq(0)
                with m.If(last):
                    m.next = "SETTLE"
            with m.State("SETTLE"):  # the last score is on its way to its memory
                m.d.sync += drain.eq(drain + 1)
                with m.If(drain == 2):
                    m.next = "SUM"
            with m.State("SUM"):
                m.d.comb += summing.eq(1)
                m.d.sync += drain.eq(0)
                with m.If(last):
                    m.next = "COLLECT"
            with m.State("COLLECT"):  # the last product is on its way to the sums
                m.d.sync += drain.eq(drain + 1)
                with m.If(drain == 1):
                    m.next = "ASK"
            with m.State("ASK"):
                m.d.comb += self.scalar.valid.eq(1)
                with m.If(self.scalar.ready):
                    m.next = "WAIT"
            with m.State("WAIT"):
                m.d.sync += out_word.eq(0)
                with m.If(self.scalar.done):
                    m.d.sync += [
                        mantissa.eq(self.scalar.mantissa),
                        exponent.eq(self.scalar.exponent),
                    ]
                    m.next = "EMIT"
            with m.State("EMIT"):
                m.d.comb += emit.eq(1)
                m.d.sync += out_word.eq(out_word + 1)
                with m.If(out_word == model.mla_dv // v - 1):
                    m.d.sync += head.eq(head + 1)
                    m.next = "SCORE"
                    with m.If(head == heads - 1):
                        m.d.sync += seen.eq(0)
                        m.next = "IDLE"

        # Stage 0: addresses. The value word is read a cycle after the score.
        base = ordinal * positions + at
        key_word = (base * heads + head) * split + part
        value_word, value_re = Signal.like(mems["v"].raddr), Signal()
        m.d.sync += [value_word.eq(key_word), value_re.eq(summing)]
        m.d.comb += [
            mems["kc"].raddr.eq(key_word),
            mems["kc"].re.eq(scoring),
            mems["kr"].raddr.eq(base * split + part),
            mems["kr"].re.eq(scoring),
            mems["qc"].raddr.eq(head * split + part),
            mems["qc"].re.eq(scoring),
            mems["qr"].raddr.eq(head * split + part),
            mems["qr"].re.eq(scoring),
            mems["v"].raddr.eq(value_word),
            mems["v"].re.eq(value_re),
        ]

        def pipe(signal: object, count: int, name: str) -> Signal:
            for i in range(count):
                copy = Signal.like(signal, name=f"{name}{i + 1}")  # type: ignore[arg-type]
                m.d.sync += copy.eq(signal)  # type: ignore[arg-type]
                signal = copy
            return signal  # type: ignore[return-value]

        # Score pass. Stage 1: products; stage 2: add parts; stage 3: scale.
        first_part, end_part = Signal(), Signal()
        m.d.comb += [first_part.eq(part == 0), end_part.eq(last_part & scoring)]
        queries = elements("qc") + elements("qr")
        keys = elements("kc") + elements("kr")
        dot_width = act.width + cache.width + (dk + dr - 1).bit_length() + split.bit_length()
        dot, whole = Signal(signed(dot_width)), Signal(signed(dot_width))
        m.d.sync += dot.eq(tree_sum([q * k for q, k in zip(queries, keys, strict=True)]))
        first2, end2 = pipe(first_part, 2, "first_part"), pipe(end_part, 2, "end_part")
        valid2 = pipe(scoring, 2, "scoring")
        with m.If(valid2):
            m.d.sync += whole.eq(Mux(first2, 0, whole) + dot)
        end3, at3 = pipe(end2, 1, "end_dot"), pipe(at, 3, "score_at")
        rounded = round_shift(whole, act.frac + cache.frac - ATTENTION_DOT_FRAC)
        scale = attention_scale(model.mla_dk + model.mla_dr)
        score = Signal(signed(SCORE_WIDTH))
        score_shift = ATTENTION_DOT_FRAC + ATTENTION_SCALE_FRAC - 16
        m.d.comb += score.eq(round_shift(rounded * scale, score_shift))
        m.submodules.scores = scores = Memory(positions, SCORE_WIDTH, single_port=True)
        best = Signal(signed(SCORE_WIDTH))
        m.d.comb += [
            scores.we.eq(end3),
            scores.waddr.eq(at3),
            scores.wdata.eq(score),
            scores.re.eq(summing),
            scores.raddr.eq(at),
        ]
        with m.If(end3 & ((at3 == 0) | (score > best))):
            m.d.sync += best.eq(score)

        # Value pass. Stage 1: exp2; stage 2: products, into sums per part.
        p2 = Signal(17)
        below = Signal(SCORE_WIDTH)
        m.d.comb += below.eq(best - scores.rdata.as_signed())
        m.d.sync += p2.eq(exp2_negative(m, below))
        part2, sum2 = pipe(part, 2, "sum_part"), pipe(summing, 2, "summing")
        fresh = Signal()
        m.d.comb += fresh.eq(at == 0)
        fresh2 = pipe(fresh, 2, "fresh")
        log_positions = (positions - 1).bit_length()
        mass = Signal(17 + log_positions)
        with m.If(sum2 & (part2 == 0)):
            m.d.sync += mass.eq(Mux(fresh2, 0, mass) + p2)
        m.d.comb += self.scalar.arg.eq(mass)
        sum_width = 17 + cache.width + log_positions
        sums = [Signal(signed(sum_width), name=f"sum{i}") for i in range(model.mla_dv)]
        for i, value in enumerate(elements("v")):
            product = Signal(signed(17 + cache.width), name=f"product{i}")
            m.d.comb += product.eq(value * p2)
            for a in range(split):
                total = sums[a * dv + i]
                with m.If(sum2 & (part2 == a)):
                    m.d.sync += total.eq(Mux(fresh2, 0, total) + product)

        # Result: the sums times the reciprocal of their mass.
        write = Signal(slot_write(self.config))
        drop = cache.frac - CONTEXT_DROP + 16 - act.frac
        for lane in range(v):
            column = Array(sums[w * v + lane] for w in range(model.mla_dv // v))[out_word]
            total = round_shift(column, CONTEXT_DROP)
            scaled = round_shift_by(total * mantissa, (exponent + drop)[:6])
            m.d.sync += write.data[lane].eq(saturate(scaled, act.width))
        m.d.sync += [
            write.valid.eq(emit),
            write.address.eq(self.slot + head * (model.mla_dv // v) + out_word),
            write.last.eq(emit & (head == heads - 1) & (out_word == model.mla_dv // v - 1)),
            write.mark.eq(self.mark),
        ]
        m.d.comb += self.write.eq(write)
        return m
