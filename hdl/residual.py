"""Residual mixer: holds the prefix and the block snapshots, adds and mixes them.

The snapshots of a token and the running prefix are rows of one memory, oldest
first and the prefix last. Opening a block costs nothing: the prefix row becomes the
snapshot and the next attention result starts a new row.
"""

from __future__ import annotations

from amaranth.hdl import Array, Cat, Module, Mux, Signal, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from golden_model.config import Config
from golden_model.fixed import LOG2E, LOG2E_FRAC, UNIT_FRAC
from golden_model.integer import MIX_COEFFICIENT_FRAC, MIX_DOT_FRAC, RMS_EPS, SCORE
from hdl.fixed import convert, round_shift, round_shift_by, saturate, tree_sum
from hdl.functions import exp2_negative
from hdl.layouts import (
    PARAM_WRITE,
    RES,
    RES_FRAC,
    ParamUnit,
    ScalarPort,
    lanes,
    result_stream,
    vector_stream,
)
from hdl.memory import Memory, ParamMemory


def mix_job() -> data.StructLayout:
    """A mix: ``count`` candidates less one, and the first word of its parameters."""
    return data.StructLayout({"count": 4, "params": 10})


class Residual(wiring.Component):
    """Prefix and snapshots of the token being decoded.

    Parameters
    ----------
    config : Config
    param_beats : int
        Capacity for each of the mixers' norm weights and projections, in beats of 8.

    Attributes
    ----------
    embedding : In(vector_stream)
        Embedding of the next token; becomes row 0.
    y : In(result_stream)
        Results for the RESIDUAL target: ``tag.base`` is the first word of the prefix.
    weights : In
        Weights of the chosen experts, UNIT_FRAC fractional bits.
    start, ready, job : In, Out, In
        A mix of rows 0 to ``job.count``; with one candidate it passes through.
    x : Out(vector_stream)
        The mixed vector.
    last_added, last_mark : Out
        The last element of a result with a mark was added.
    params : In(PARAM_WRITE)
    root, reciprocal : Out(ScalarPort)
    """

    def __init__(self, config: Config, param_beats: int) -> None:
        self.config = config
        self.param_beats = param_beats
        super().__init__(
            {
                "embedding": In(vector_stream(config)),
                "y": In(result_stream(config)),
                "weights": In(lanes(18, config.model.top_k)),
                "start": In(1),
                "ready": Out(1),
                "job": In(mix_job()),
                "x": Out(vector_stream(config)),
                "last_added": Out(1),
                "last_mark": Out(4),
                "params": In(PARAM_WRITE),
                "root": Out(ScalarPort()),
                "reciprocal": Out(ScalarPort()),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        model, v = self.config.model, self.config.hardware.vector_lanes
        words = model.d_model // v
        log_words = words.bit_length() - 1
        rows = model.max_candidates
        m.submodules.rows = memory = Memory(rows * words, v * RES)
        m.submodules.weight = weight = ParamMemory(self.param_beats, v)
        m.submodules.proj = proj = ParamMemory(self.param_beats, v)
        for mem, unit in ((weight, ParamUnit.MIX_WEIGHT), (proj, ParamUnit.MIX_PROJ)):
            m.d.comb += [
                mem.we.eq(self.params.valid & (self.params.unit == unit)),
                mem.waddr.eq(self.params.address),
                mem.wdata.eq(self.params.data),
            ]
        word = Signal(range(words))
        candidate = Signal(range(rows))
        job = Signal(mix_job())
        reading = Signal()
        m.d.comb += [
            weight.raddr.eq(job.params + word),
            proj.raddr.eq(job.params + word),
        ]
        self._add(m, memory, words, reading, (candidate << log_words) + word)

        # A pass reads word by word, all candidates of a word in turn.
        last_candidate = candidate == job.count
        last_word = word == words - 1
        with m.If(reading):
            m.d.sync += candidate.eq(candidate + 1)
            with m.If(last_candidate):
                m.d.sync += [candidate.eq(0), word.eq(word + 1)]
        pass_done = reading & last_candidate & last_word

        scoring, mixing = Signal(), Signal()
        single = job.count == 0
        dots, norms, scores_done = self._score(
            m, memory, weight.data, proj.data, candidate, reading & scoring, pass_done
        )
        shares, shares_done = self._softmax(m, job.count, dots, norms, scores_done)
        drained = Signal()
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += self.ready.eq(1)
                m.d.sync += [word.eq(0), candidate.eq(0)]
                with m.If(self.start):
                    m.d.sync += job.eq(self.job)
                    with m.If(self.job.count == 0):
                        m.next = "MIX"
                    with m.Else():
                        m.next = "SCORE"
            with m.State("SCORE"):
                m.d.comb += [reading.eq(1), scoring.eq(1)]
                with m.If(pass_done):
                    m.next = "SHARES"
            with m.State("SHARES"), m.If(shares_done):
                m.next = "MIX"
            with m.State("MIX"):
                m.d.comb += [reading.eq(1), mixing.eq(1)]
                with m.If(pass_done):
                    m.next = "DRAIN"
            with m.State("DRAIN"), m.If(drained):
                m.next = "IDLE"

        # Weighted sum of the candidates of a word.
        valid1, first1, end1, last1 = (Signal(name=f"{n}1") for n in ("mv", "mf", "me", "ml"))
        candidate1 = Signal.like(candidate)
        m.d.sync += [
            valid1.eq(mixing & reading),
            first1.eq(candidate == 0),
            end1.eq(mixing & reading & last_candidate),
            last1.eq(mixing & pass_done),
            candidate1.eq(candidate),
        ]
        share = Mux(single, 1 << UNIT_FRAC, Array(shares)[candidate1])
        for lane in range(v):
            value = memory.rdata[RES * lane : RES * lane + RES].as_signed()
            acc = Signal(signed(RES + 17 + 3), name=f"mixed{lane}")
            total = Signal.like(acc, name=f"mixing{lane}")
            m.d.comb += total.eq(Mux(first1, 0, acc) + value * share)
            with m.If(valid1):
                m.d.sync += acc.eq(total)
            m.d.sync += self.x.data[lane].eq(convert(total, UNIT_FRAC, RES))
        m.d.sync += [self.x.valid.eq(end1), self.x.last.eq(last1)]
        m.d.comb += drained.eq(last1)
        return m

    def _add(
        self, m: Module, memory: Memory, words: int, reading: Signal, read_address: Signal
    ) -> None:
        """Embedding and results into the memory: read, add in the next cycle, write."""
        v = self.config.hardware.vector_lanes
        y1 = Signal.like(self.y)
        m.d.sync += y1.eq(self.y)
        address = Signal(range(memory.depth))
        address1 = Signal.like(address)
        m.d.comb += address.eq(self.y.tag.base + self.y.index)
        m.d.sync += address1.eq(address)
        m.d.comb += [
            memory.raddr.eq(Mux(reading, read_address, address)),
            memory.re.eq(reading | self.y.valid),
        ]
        chosen = Array([1 << UNIT_FRAC, *self.weights])[y1.tag.weight]
        factor = Signal(18)
        m.d.comb += factor.eq(chosen)
        sums = []
        for lane in range(v):
            old = memory.rdata[RES * lane : RES * lane + RES].as_signed()
            scaled = round_shift(y1.data[lane] * factor, UNIT_FRAC)
            sums.append(saturate(Mux(y1.tag.set, 0, old).as_signed() + scaled, RES))
        row = Signal(range(words))
        with m.If(self.embedding.valid):
            m.d.sync += row.eq(row + 1)
            m.d.comb += [
                memory.we.eq(1),
                memory.waddr.eq(row),
                memory.wdata.eq(Cat(self.embedding.data)),
            ]
            with m.If(self.embedding.last):
                m.d.sync += row.eq(0)
        with m.Else():
            m.d.comb += [
                memory.we.eq(y1.valid),
                memory.waddr.eq(address1),
                memory.wdata.eq(Cat(sums)),
            ]
        m.d.comb += [
            self.last_added.eq(y1.valid & y1.last),
            self.last_mark.eq(y1.tag.mark),
        ]

    def _score(
        self,
        m: Module,
        memory: Memory,
        weight: data.View,
        proj: data.View,
        candidate: Signal,
        valid: Signal,
        pass_done: Signal,
    ) -> tuple[list[Signal], list[Signal], Signal]:
        """Dot products and sums of squares of every candidate; done after the last."""
        v = self.config.hardware.vector_lanes
        rows = self.config.model.max_candidates
        valid1, valid2, valid3 = (Signal(name=f"score_valid{i}") for i in (1, 2, 3))
        done1, done2, done3, done4 = (Signal(name=f"score_done{i}") for i in (1, 2, 3, 4))
        c1, c2, c3 = (Signal.like(candidate, name=f"candidate{i}") for i in (1, 2, 3))
        m.d.sync += [valid1.eq(valid), valid2.eq(valid1), valid3.eq(valid2)]
        m.d.sync += [c1.eq(candidate), c2.eq(c1), c3.eq(c2)]
        m.d.sync += [done1.eq(valid & pass_done), done2.eq(done1), done3.eq(done2)]
        m.d.sync += done4.eq(done3)
        coefficients, values = [], []
        for lane in range(v):
            factor = Signal(signed(18), name=f"factor{lane}")
            m.d.comb += factor.eq(weight[lane] + (1 << 13))
            coefficient = Signal(signed(26), name=f"coefficient{lane}")
            value = Signal(signed(RES), name=f"value{lane}")
            m.d.sync += [
                coefficient.eq(round_shift(factor * proj[lane], 24 - MIX_COEFFICIENT_FRAC)),
                value.eq(memory.rdata[RES * lane : RES * lane + RES]),
            ]
            coefficients.append(coefficient)
            values.append(value)
        log_d = self.config.model.d_model.bit_length() - 1
        product, square = Signal(signed(RES + 26 + 3)), Signal(2 * RES + 3)
        m.d.sync += [
            product.eq(tree_sum([a * b for a, b in zip(values, coefficients, strict=True)])),
            square.eq(tree_sum([a * a for a in values])),
        ]
        dots = [Signal(signed(RES + 26 + log_d), name=f"dot{i}") for i in range(rows)]
        norms = [Signal(2 * RES + log_d, name=f"norm{i}") for i in range(rows)]
        for i in range(rows):
            with m.If(self.start & self.ready):
                m.d.sync += [dots[i].eq(0), norms[i].eq(0)]
            with m.Elif(valid3 & (c3 == i)):
                m.d.sync += [dots[i].eq(dots[i] + product), norms[i].eq(norms[i] + square)]
        return dots, norms, done4

    def _softmax(
        self, m: Module, count: Signal, dots: list[Signal], norms: list[Signal], go: Signal
    ) -> tuple[list[Signal], Signal]:
        """Probabilities of the candidates, one candidate a cycle in each step."""
        rows = len(dots)
        log_d = self.config.model.d_model.bit_length() - 1
        shares = [Signal(17, name=f"share{i}") for i in range(rows)]
        scores = Array(Signal(signed(SCORE.width), name=f"score{i}") for i in range(rows))
        weights = Array(Signal(17, name=f"exp{i}") for i in range(rows))
        ask, answer = Signal(range(rows + 1)), Signal(range(rows + 1))
        best = Signal(signed(SCORE.width))
        total = Signal(17 + 4)
        mantissa, exponent = Signal(17), Signal(6)
        done = Signal()
        root, reciprocal = self.root, self.reciprocal
        m.d.comb += [
            root.arg.eq((Array(norms)[ask] >> log_d) + RMS_EPS),
            reciprocal.arg.eq(total),
        ]
        rounded = round_shift(Array(dots)[answer], RES_FRAC + MIX_COEFFICIENT_FRAC - MIX_DOT_FRAC)
        dot, mantissa1, exponent1 = Signal(signed(40)), Signal(17), Signal(6)
        have = Signal()
        index = Signal.like(answer)
        score = Signal(signed(SCORE.width))
        shift = MIX_DOT_FRAC + 16 - RES_FRAC - SCORE.frac
        m.d.sync += [have.eq(root.done), index.eq(answer), dot.eq(rounded)]
        m.d.sync += [mantissa1.eq(root.mantissa), exponent1.eq(root.exponent)]
        scaled = round_shift_by(dot * mantissa1, (exponent1 + shift)[:6])
        m.d.comb += score.eq(saturate(scaled, SCORE.width))
        with m.If(root.done):
            m.d.sync += answer.eq(answer + 1)
        with m.If(have):
            m.d.sync += scores[index].eq(score)
            with m.If((index == 0) | (score > best)):
                m.d.sync += best.eq(score)
        step = Signal(range(rows + 1))
        below = Signal(SCORE.width + 1)
        m.d.comb += below.eq(best - scores[step])
        e = exp2_negative(m, round_shift(below * LOG2E, LOG2E_FRAC))
        share = Signal(17)
        m.d.comb += share.eq(round_shift_by(weights[step] * mantissa, exponent))
        with m.FSM():
            with m.State("IDLE"):
                m.d.sync += [ask.eq(0), answer.eq(0), step.eq(0), total.eq(0)]
                with m.If(go):
                    m.next = "NORMS"
            with m.State("NORMS"):
                m.d.comb += root.valid.eq(ask <= count)
                with m.If(root.valid & root.ready):
                    m.d.sync += ask.eq(ask + 1)
                with m.If(have & (index == count)):
                    m.next = "EXP"
            with m.State("EXP"):
                m.d.sync += [weights[step].eq(e), total.eq(total + e), step.eq(step + 1)]
                with m.If(step == count):
                    m.next = "ASK"
            with m.State("ASK"):
                m.d.comb += reciprocal.valid.eq(1)
                m.d.sync += step.eq(0)
                with m.If(reciprocal.ready):
                    m.next = "WAIT"
            with m.State("WAIT"):
                m.d.sync += [
                    mantissa.eq(reciprocal.mantissa),
                    exponent.eq(reciprocal.exponent),
                ]
                with m.If(reciprocal.done):
                    m.next = "SHARE"
            with m.State("SHARE"):
                for i in range(rows):
                    with m.If(step == i):
                        m.d.sync += shares[i].eq(share)
                m.d.sync += step.eq(step + 1)
                with m.If(step == count):
                    m.d.comb += done.eq(1)
                    m.next = "IDLE"
        return shares, done
