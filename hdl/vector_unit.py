"""Vector unit: what happens to matrix-vector results, lane by lane, as they stream by.

Convolution over the last four positions with SiLU (q, k, v of delta attention), the
decay alpha, sigmoids, and the product silu(gate) ⊙ up of the experts. Results leave
four cycles after they enter, in order.
"""

from __future__ import annotations

from amaranth.hdl import Array, Cat, Module, Mux, Signal, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from golden_model.config import Config
from golden_model.fixed import DECAY, DECAY_FRAC, UNIT_FRAC
from hdl.fixed import convert, round_shift, tree_sum
from hdl.functions import exp2_negative, sigmoid
from hdl.layouts import (
    PARAM_WRITE,
    RES,
    RES_FRAC,
    Function,
    ParamUnit,
    Target,
    lanes,
    result_stream,
)
from hdl.memory import Memory, ParamMemory

TAPS = 4
#: A word of convolution kernels holds `vector_lanes` channels of four int16.
CHANNEL_BITS = 16 * TAPS


class VectorUnit(wiring.Component):
    """Applies the function that a result's tag names.

    Attributes
    ----------
    y : In(result_stream)
        Results of the matrix-vector unit.
    first_token : In
        At position 0 the convolution's history counts as zero.
    params : In(PARAM_WRITE)
        Convolution kernels, decay biases and decay rates.
    out : Out(result_stream)
        Sigmoids and decays as integers with UNIT_FRAC fractional bits, all else in
        residual format. GATE results are kept for the UP results that follow and do
        not leave.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        stream = result_stream(config)
        super().__init__(
            {
                "y": In(stream),
                "first_token": In(1),
                "params": In(PARAM_WRITE),
                "out": Out(stream),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        model, hw = self.config.model, self.config.hardware
        v, act = hw.vector_lanes, hw.formats.activation
        layers = model.layers.count("L")
        words = model.kda_width // v  # words of one vector of P channels
        log_words = words.bit_length() - 1
        history_shape = data.ArrayLayout(data.ArrayLayout(signed(act.width), TAPS - 1), v)
        history = Memory(3 * layers * words, v * (TAPS - 1) * act.width)
        kernels = Memory(3 * layers * words, v * CHANNEL_BITS, single_port=True)
        bias = ParamMemory(layers * max(model.kda_width // 8, 1), v)
        rates = Memory(layers, 128, single_port=True)
        m.submodules.history, m.submodules.kernels = history, kernels
        m.submodules.bias, m.submodules.rates = bias, rates

        # Parameters arrive in beats of two channels, or of eight values.
        params = self.params
        per_word = v // 2
        part = params.address % per_word
        strobe = Cat(part == i // 16 for i in range(16 * per_word))
        load = {u: params.valid & (params.unit == u) for u in ParamUnit}
        m.d.comb += [
            kernels.we.eq(load[ParamUnit.KERNEL]),
            kernels.waddr.eq(params.address // per_word),
            kernels.wdata.eq(params.data.replicate(per_word)),
            kernels.wstrb.eq(strobe),
            kernels.re.eq(~kernels.we),
            bias.we.eq(load[ParamUnit.DECAY_BIAS]),
            bias.waddr.eq(params.address),
            bias.wdata.eq(params.data),
            rates.we.eq(load[ParamUnit.DECAY_RATE]),
            rates.waddr.eq(params.address),
            rates.wdata.eq(params.data),
            rates.re.eq(~rates.we),
        ]

        # Stage 0: read what the function needs.
        tag = self.y.tag
        channel = Signal(range(3 * layers * words))
        which = Signal(2)
        m.d.comb += which.eq(tag.target.as_value() - Target.KDA_Q.value)
        m.d.comb += channel.eq(((tag.ordinal * 3 + which) << log_words) + self.y.index)
        m.d.comb += [
            history.raddr.eq(channel),
            kernels.raddr.eq(channel),
            bias.raddr.eq((tag.ordinal << log_words) + self.y.index),
            rates.raddr.eq(tag.ordinal),
        ]

        # Stage 1: the argument of the nonlinear function.
        s1 = Signal.like(self.y)
        channel1 = Signal.like(channel)
        m.d.sync += [s1.eq(self.y), channel1.eq(channel)]
        past = data.View(history_shape, history.rdata)
        taps = data.View(data.ArrayLayout(data.ArrayLayout(signed(16), TAPS), v), kernels.rdata)
        head = Signal(3)
        m.d.comb += head.eq(s1.index >> ((model.kda_dim // v).bit_length() - 1))
        rate = rates.rdata.word_select(head, 16)
        is_conv = s1.tag.function == Function.CONVOLUTION
        s2 = Signal.like(self.y)
        m.d.sync += s2.eq(s1)
        shifted = data.View(history_shape, history.wdata)
        m.d.comb += [history.we.eq(s1.valid & is_conv), history.waddr.eq(channel1)]
        for lane in range(v):
            y = s1.data[lane]
            present = Signal(signed(act.width), name=f"present{lane}")
            m.d.comb += present.eq(convert(y, RES_FRAC - act.frac, act.width))
            window = [
                Mux(self.first_token, 0, past[lane][j]).as_signed() for j in range(TAPS - 1)
            ] + [present]
            m.d.comb += [shifted[lane][j].eq(window[j + 1]) for j in range(TAPS - 1)]
            total = tree_sum([window[j] * taps[lane][j] for j in range(TAPS)])
            conv = convert(total, act.frac + 11 - RES_FRAC, RES)
            shaped = Signal(signed(RES + 1), name=f"shaped{lane}")
            m.d.comb += shaped.eq(y + (bias.data[lane] << (RES_FRAC - 11)))
            decay = convert(shaped * rate, 8, RES)
            with m.Switch(s1.tag.function):
                with m.Case(Function.CONVOLUTION):
                    m.d.sync += s2.data[lane].eq(conv)
                with m.Case(Function.DECAY):
                    m.d.sync += s2.data[lane].eq(decay)

        # Stage 2: its sigmoid. Stage 3: the result.
        s3, s4 = Signal.like(self.y), Signal.like(self.y)
        m.d.sync += [s3.eq(s2), s4.eq(s3)]
        is_gate = s3.tag.function == Function.GATE
        with m.If(is_gate):
            m.d.sync += s4.valid.eq(0)
        gates = Array(Signal(v * act.width, name=f"gate{i}") for i in range(model.d_ff // v))
        gate_index = s3.index[: max((model.d_ff // v).bit_length() - 1, 1)]
        stored = Signal(lanes(signed(act.width), v))
        m.d.comb += stored.as_value().eq(gates[gate_index])
        kept = Signal(lanes(signed(act.width), v))
        with m.If(s3.valid & is_gate):
            m.d.sync += gates[gate_index].eq(kept)
        for lane in range(v):
            s = Signal(17, name=f"sigmoid{lane}")
            m.d.sync += s.eq(sigmoid(m, s2.data[lane]))
            t = s3.data[lane]
            silu = Signal(signed(RES), name=f"silu{lane}")
            m.d.comb += silu.eq(round_shift(t * s, UNIT_FRAC))
            m.d.comb += kept[lane].eq(convert(silu, RES_FRAC - act.frac, act.width))
            exponent = Signal(20, name=f"exponent{lane}")
            m.d.comb += exponent.eq(round_shift(s * DECAY, DECAY_FRAC))
            up = convert(stored[lane] * t, RES_FRAC, act.width)
            with m.Switch(s3.tag.function):
                with m.Case(Function.SIGMOID):
                    m.d.sync += s4.data[lane].eq(s)
                with m.Case(Function.CONVOLUTION):
                    m.d.sync += s4.data[lane].eq(silu)
                with m.Case(Function.DECAY):
                    m.d.sync += s4.data[lane].eq(exp2_negative(m, exponent))
                with m.Case(Function.UP):
                    m.d.sync += s4.data[lane].eq(up << (RES_FRAC - act.frac))
        m.d.comb += self.out.eq(s4)
        return m
