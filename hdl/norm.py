"""RMSNorm unit: collects a vector, then writes it normed into the activation buffer."""

from __future__ import annotations

from amaranth.hdl import Cat, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden_model.config import Config
from golden_model.fixed import UNIT_FRAC
from golden_model.integer import NORMALISED, RMS_EPS
from hdl.fixed import convert, round_shift, round_shift_by, saturate, tree_sum
from hdl.layouts import (
    PARAM_WRITE,
    RES,
    ParamUnit,
    ScalarPort,
    lanes,
    norm_job,
    slot_write,
    vector_stream,
)
from hdl.memory import Memory, ParamMemory


class Norm(wiring.Component):
    """x / sqrt(mean(x²) + eps) · (1 + w), times a gate where the job says so.

    Parameters
    ----------
    config : Config
    weight_beats : int
        Capacity for norm weights, in beats of 8.

    Attributes
    ----------
    start, ready, job : In, Out, In
        A job; accepted only while idle, and while the gate is complete if it is gated.
    x : In(vector_stream)
        The job's vector, in residual format; starts after the job was accepted.
    gate : In(vector_stream)
        Gates of all heads of a delta-attention layer, UNIT_FRAC fractional bits.
    gate_ready : Out
        Whether a new gate may come: the one before was used up.
    hold : In
        The place of the result is still being read: do not write yet.
    params : In(PARAM_WRITE)
    scalar : Out(ScalarPort)
        Reciprocal square root.
    write : Out(slot_write)
    """

    def __init__(self, config: Config, weight_beats: int) -> None:
        self.config = config
        self.weight_beats = weight_beats
        super().__init__(
            {
                "start": In(1),
                "ready": Out(1),
                "job": In(norm_job()),
                "x": In(vector_stream(config)),
                "gate": In(vector_stream(config)),
                "gate_ready": Out(1),
                "hold": In(1),
                "params": In(PARAM_WRITE),
                "scalar": Out(ScalarPort()),
                "write": Out(slot_write(config)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        model, hw = self.config.model, self.config.hardware
        v, act = hw.vector_lanes, hw.formats.activation
        longest = max(model.d_model, model.mla_dc, model.kda_dim)
        m.submodules.buffer = buffer = Memory(longest // v, v * RES, single_port=True)
        m.submodules.weights = weights = ParamMemory(self.weight_beats, v)
        gate_words = model.kda_width // v
        m.submodules.gates = gates = Memory(gate_words, v * 24, single_port=True)

        job = Signal(norm_job())
        word = Signal(range(longest // v + 1))
        total = Signal(56)
        mantissa, exponent = Signal(17), Signal(6)
        issue = Signal()

        # Gates wait here until the head they belong to is normed.
        gate_word = Signal(range(gate_words))
        gate_full = Signal()
        m.d.comb += [
            self.gate_ready.eq(~gate_full),
            gates.we.eq(self.gate.valid),
            gates.waddr.eq(gate_word),
            gates.wdata.eq(Cat(self.gate.data)),
            gates.re.eq(~gates.we),
            gates.raddr.eq(job.gate + word),
        ]
        with m.If(self.gate.valid):
            m.d.sync += gate_word.eq(gate_word + 1)
            with m.If(self.gate.last):
                m.d.sync += [gate_full.eq(1), gate_word.eq(0)]

        m.d.comb += [
            weights.we.eq(self.params.valid & (self.params.unit == ParamUnit.NORM_WEIGHT)),
            weights.waddr.eq(self.params.address),
            weights.wdata.eq(self.params.data),
            weights.raddr.eq(job.weight + word),
            buffer.waddr.eq(word),
            buffer.raddr.eq(word),
            buffer.wdata.eq(Cat(self.x.data)),
            buffer.re.eq(issue),
        ]
        squares = Signal(56)
        square_valid, square_last = Signal(), Signal()
        m.d.sync += [square_valid.eq(self.x.valid), square_last.eq(self.x.valid & self.x.last)]
        m.d.sync += squares.eq(tree_sum([x * x for x in self.x.data]))
        with m.If(square_valid):
            m.d.sync += total.eq(total + squares)
        mean = total >> job.log_length
        eps = Mux(job.scaled_eps, RMS_EPS * model.kda_dim, RMS_EPS)
        m.d.comb += self.scalar.arg.eq(mean + eps)
        finishing = Signal()
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += self.ready.eq(~self.job.gated | gate_full)
                with m.If(self.start & self.ready):
                    m.d.sync += [job.eq(self.job), word.eq(0), total.eq(0)]
                    m.next = "COLLECT"
            with m.State("COLLECT"):
                m.d.comb += buffer.we.eq(self.x.valid)
                with m.If(self.x.valid):
                    m.d.sync += word.eq(word + 1)
                with m.If(square_last):
                    m.d.sync += word.eq(0)
                    m.next = "ASK"
            with m.State("ASK"):
                m.d.comb += self.scalar.valid.eq(1)
                with m.If(self.scalar.ready):
                    m.next = "WAIT"
            with m.State("WAIT"), m.If(self.scalar.done):
                m.d.sync += [
                    mantissa.eq(self.scalar.mantissa),
                    exponent.eq(self.scalar.exponent),
                ]
                m.next = "EMIT"
            with m.State("EMIT"):
                m.d.comb += issue.eq(~self.hold)
                with m.If(issue):
                    m.d.sync += word.eq(word + 1)
                    with m.If(word == (1 << job.log_words) - 1):
                        m.next = "DRAIN"
            with m.State("DRAIN"), m.If(finishing):
                m.next = "IDLE"

        # Three stages behind the reads: 1/rms, weight, gate.
        slot = Signal(10)
        stage = [Signal(name=f"emit{i}") for i in range(1, 4)]
        m.d.sync += [b.eq(a) for a, b in zip([issue, *stage], stage, strict=False)]
        final = [Signal(name=f"final{i}") for i in range(1, 4)]
        is_final = issue & (word == (1 << job.log_words) - 1)
        m.d.sync += [b.eq(a) for a, b in zip([is_final, *final], final, strict=False)]
        weight2 = Signal(lanes(signed(16), v))
        gate2, gate3 = Signal(v * 24), Signal(v * 24)
        m.d.sync += [weight2.eq(weights.data), gate2.eq(gates.rdata), gate3.eq(gate2)]
        write = Signal(slot_write(self.config))
        for lane in range(v):
            x = buffer.rdata[RES * lane : RES * lane + RES].as_signed()
            t = Signal(signed(NORMALISED.width), name=f"t{lane}")
            m.d.sync += t.eq(saturate(round_shift_by(x * mantissa, exponent), NORMALISED.width))
            weighted = Signal(signed(NORMALISED.width), name=f"weighted{lane}")
            factor = Signal(signed(18), name=f"factor{lane}")
            m.d.comb += factor.eq(weight2[lane] + (1 << 13))
            m.d.sync += weighted.eq(saturate(round_shift(t * factor, 13), NORMALISED.width))
            gate = Mux(job.gated, gate3[24 * lane : 24 * lane + 17], 1 << UNIT_FRAC)
            shift = NORMALISED.frac + UNIT_FRAC - act.frac
            m.d.sync += write.data[lane].eq(convert(weighted * gate, shift, act.width))
        m.d.sync += write.valid.eq(stage[2])
        m.d.sync += write.last.eq(final[2])
        with m.If(stage[2]):
            m.d.sync += [write.address.eq(slot), slot.eq(slot + 1)]
        with m.If(self.start & self.ready):
            m.d.sync += slot.eq(self.job.slot)
        m.d.sync += write.mark.eq(job.mark)
        m.d.comb += [self.write.eq(write), finishing.eq(final[2])]
        last_gate = job.gate + (1 << job.log_words) == gate_words
        with m.If(final[2] & job.gated & last_gate):
            m.d.sync += gate_full.eq(0)
        return m
