"""Expert router: picks the best experts of a token and weighs them.

Usable alone: feed the sigmoid scores of the experts, read the choice and the
weights. Selection bias only biases the choice; ties go to the lowest index.
"""

from __future__ import annotations

from amaranth.hdl import Array, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden_model.config import Config
from golden_model.fixed import EXPERT_SCALE, EXPERT_SCALE_FRAC, UNIT_FRAC
from hdl.fixed import round_shift, round_shift_by
from hdl.layouts import PARAM_WRITE, ParamUnit, ScalarPort, lanes, result_stream
from hdl.memory import Memory


class Router(wiring.Component):
    """Top-k of sigmoid(score) + bias, one expert a cycle, then the weights.

    Attributes
    ----------
    y : In(result_stream)
        Sigmoids of the experts (UNIT_FRAC fractional bits); ``tag.ordinal`` is the layer.
    ready : Out
        Whether the scores of a further token may come.
    chosen : Out
        Indices of the chosen experts, best first; valid from ``selected`` on.
    selected : Out
        Up for one cycle when the choice is made.
    weights : Out
        Their weights s/Σs·2.828, UNIT_FRAC fractional bits.
    weighted : Out
        Whether the weights belong to the last choice.
    params : In(PARAM_WRITE)
        Selection biases, one or two beats of 8 per layer.
    scalar : Out(ScalarPort)
        Reciprocal.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        model = config.model
        super().__init__(
            {
                "y": In(result_stream(config)),
                "ready": Out(1),
                "chosen": Out(lanes(4, model.top_k)),
                "selected": Out(1),
                "weights": Out(lanes(18, model.top_k)),
                "weighted": Out(1),
                "params": In(PARAM_WRITE),
                "scalar": Out(ScalarPort()),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        model, v = self.config.model, self.config.hardware.vector_lanes
        experts, top_k = model.n_experts, model.top_k
        beats = -(-experts // 8)
        m.submodules.bias = bias = Memory(model.n_layers * beats, 128, single_port=True)
        m.d.comb += [
            bias.we.eq(self.params.valid & (self.params.unit == ParamUnit.ROUTER_BIAS)),
            bias.waddr.eq(self.params.address),
            bias.wdata.eq(self.params.data),
            bias.re.eq(~bias.we),
        ]
        scores = Array(Signal(17, name=f"score{i}") for i in range(experts))
        layer = Signal(4)
        index = Signal(range(experts))
        with m.If(self.y.valid):
            m.d.sync += layer.eq(self.y.tag.ordinal)
            for w in range(experts // v):
                with m.If(self.y.index == w):
                    m.d.sync += [scores[w * v + i].eq(self.y.data[i]) for i in range(v)]

        # Insert expert after expert into a sorted list; an equal one stays behind.
        total = Signal(17 + top_k.bit_length())
        step = Signal(range(top_k + 1))
        mantissa, exponent = Signal(17), Signal(6)
        inserting, index1 = Signal(), Signal.like(index)
        best = [Signal(signed(20), name=f"best{r}") for r in range(top_k)]
        best_score = Array(Signal(17, name=f"best_score{r}") for r in range(top_k))
        taken = Signal(top_k)
        m.d.comb += bias.raddr.eq(layer * beats + (index >> 3))
        m.d.sync += index1.eq(index)
        score = scores[index1]
        biased = Signal(signed(20))
        entry = bias.rdata.word_select(index1[:3], 16).as_signed()
        m.d.comb += biased.eq(score + (entry << (UNIT_FRAC - 11)))
        ahead = [taken[r] & (best[r] >= biased) for r in range(top_k)]
        with m.If(inserting):
            for r in range(top_k):
                with m.If(~ahead[r]):
                    if r == 0:
                        values = (biased, score, index1, 1)
                    else:
                        values = (
                            Mux(ahead[r - 1], biased, best[r - 1]),
                            Mux(ahead[r - 1], score, best_score[r - 1]),
                            Mux(ahead[r - 1], index1, self.chosen[r - 1]),
                            Mux(ahead[r - 1], 1, taken[r - 1]),
                        )
                    m.d.sync += [
                        best[r].eq(values[0]),
                        best_score[r].eq(values[1]),
                        self.chosen[r].eq(values[2]),
                        taken[r].eq(values[3]),
                    ]
        share = round_shift_by(best_score[step] * mantissa, exponent)
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += self.ready.eq(1)
                m.d.sync += index.eq(0)
                with m.If(self.y.valid & self.y.last):
                    m.d.sync += [self.weighted.eq(0), taken.eq(0)]
                    m.next = "READ"
            with m.State("READ"):
                m.d.sync += index.eq(index + 1)
                m.next = "INSERT"
            with m.State("INSERT"):
                m.d.comb += inserting.eq(1)
                m.d.sync += [index.eq(index + 1), step.eq(0), total.eq(0)]
                with m.If(index1 == experts - 1):
                    m.next = "TOTAL"
            with m.State("TOTAL"):
                m.d.comb += self.selected.eq(step == 0)
                m.d.sync += [total.eq(total + best_score[step]), step.eq(step + 1)]
                with m.If(step == top_k - 1):
                    m.next = "ASK"
            with m.State("ASK"):
                m.d.comb += self.scalar.valid.eq(1)
                m.d.sync += step.eq(0)
                with m.If(self.scalar.ready):
                    m.next = "WAIT"
            with m.State("WAIT"):
                m.d.sync += [mantissa.eq(self.scalar.mantissa), exponent.eq(self.scalar.exponent)]
                with m.If(self.scalar.done):
                    m.next = "WEIGH"
            with m.State("WEIGH"):
                for r in range(top_k):
                    with m.If(step == r):
                        scaled = round_shift(share[:18] * EXPERT_SCALE, EXPERT_SCALE_FRAC)
                        m.d.sync += self.weights[r].eq(scaled)
                m.d.sync += step.eq(step + 1)
                with m.If(step == top_k - 1):
                    m.d.sync += self.weighted.eq(1)
                    m.next = "IDLE"
        m.d.comb += self.scalar.arg.eq(total)
        return m
