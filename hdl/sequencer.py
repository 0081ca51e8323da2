"""Sequencer: starts every step of a token, in order, as soon as its inputs are there.

A scoreboard holds one bit per vector that is still being computed; a step that
needs it waits. Nothing is timed by counting cycles.
"""

from __future__ import annotations

from amaranth.hdl import Array, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden_model.config import COLUMNS
from hdl.activations import slots
from hdl.layouts import Function, Target, lanes, norm_job
from hdl.matvec import matvec_command
from hdl.program import MARK, MARKS, MatVecOp, MixOp, Program, log2, rom
from hdl.residual import mix_job

EMBED, MIX, PRODUCT = range(3)


class Sequencer(wiring.Component):
    """Issues the program of a token, position after position.

    Attributes
    ----------
    start, seq_len, group128 : In
        A run begins (the header is known).
    finished : Out
        Up for one cycle when the last logits and token were handed over.
    position : Out
    embedded, embedding_room : In, Out
        The next token's embedding has arrived; whether it may.
    loaded : In
        A further resident product is on the chip.
    product_valid, product_ready, product : Out, In, Out
        Commands of the matrix-vector unit.
    mix_valid, mix_ready, mix : Out, In, Out
        Jobs of the residual mixer.
    norm_valid, norm_ready, norm : Out, In, Out
        Jobs of the norm unit.
    product_running : In
        The matrix-vector unit still reads its input.
    hold_norm : Out
        The norm must not write yet.
    delta_ready, latent_ready, router_ready, gate_ready : In
        Units that can take results.
    chosen, weighted : In
        The router's choice, and whether its weights are known.
    logits_done : In
        Logits and token of a position were handed over.
    cleared : In
        Scoreboard bits whose vector was completed in this cycle.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        config = self.config = program.config
        store = max((max(program.store_words, 2) - 1).bit_length(), 1)
        scales = (program.scale_words - 1).bit_length()
        self.command_layout = matvec_command(store, scales)
        super().__init__(
            {
                "start": In(1),
                "seq_len": In(16),
                "group128": In(1),
                "finished": Out(1),
                "position": Out(range(config.model.max_seq)),
                "embedded": In(1),
                "embedding_room": Out(1),
                "loaded": In(1),
                "product_valid": Out(1),
                "product_ready": In(1),
                "product": Out(self.command_layout),
                "mix_valid": Out(1),
                "mix_ready": In(1),
                "mix": Out(mix_job()),
                "norm_valid": Out(1),
                "norm_ready": In(1),
                "norm": Out(norm_job()),
                "product_running": In(1),
                "hold_norm": Out(1),
                "delta_ready": In(1),
                "latent_ready": In(1),
                "router_ready": In(1),
                "gate_ready": In(1),
                "chosen": In(lanes(4, config.model.top_k)),
                "weighted": In(1),
                "logits_done": In(1),
                "cleared": In(len(MARKS)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        steps = self.program.steps
        step = Signal(range(len(steps)))
        running = Signal()
        pending = Signal(len(MARKS))
        available = Signal(8)
        have_embedding = Signal()
        logits_busy = Signal()
        fields = self._fields(m, step)
        product = fields["kind"] == PRODUCT
        mixing = fields["kind"] == MIX

        # Conditions of a product.
        resident = fields["resident"]
        mark = Signal(range(len(MARKS)))
        m.d.comb += mark.eq(fields["mark"])
        is_norm = fields["target"] == Target.NORM.value
        is_logits = fields["target"] == Target.LOGITS.value
        weights_there = ~resident | (available != 0)
        input_there = ~pending.bit_select(fields["slot_mark"], 1)
        target_ready = Signal()
        m.d.comb += target_ready.eq(1)
        with m.Switch(fields["target"]):
            with m.Case(*(t.value for t in Target if t.name.startswith("KDA"))):
                m.d.comb += target_ready.eq(self.delta_ready)
            with m.Case(*(t.value for t in Target if t.name.startswith("MLA"))):
                m.d.comb += target_ready.eq(self.latent_ready)
            with m.Case(Target.ROUTER.value):
                m.d.comb += target_ready.eq(self.router_ready)
            with m.Case(Target.NORM_GATE.value):
                m.d.comb += target_ready.eq(self.gate_ready)
            with m.Case(Target.NORM.value):
                m.d.comb += target_ready.eq(self.norm_ready)
            with m.Case(Target.LOGITS.value):
                m.d.comb += target_ready.eq(~logits_busy)
        may = Signal()
        m.d.comb += may.eq(
            weights_there
            & input_there
            & target_ready
            & ~pending.bit_select(mark, 1)
            & (~fields["weighs"] | self.weighted)
        )
        issue_product, issue_mix, issue_embed = Signal(), Signal(), Signal()
        mix_may = Signal()
        h, prefix = MARK["h"], MARK["prefix"]
        m.d.comb += [
            self.product_valid.eq(running & product & may),
            issue_product.eq(self.product_valid & self.product_ready),
            mix_may.eq(running & mixing & ~pending[prefix] & ~pending[h] & self.norm_ready),
            issue_mix.eq(mix_may & self.mix_ready),
            self.mix_valid.eq(issue_mix),
            self.norm_valid.eq(issue_mix | (issue_product & is_norm)),
            issue_embed.eq(
                running
                & (fields["kind"] == EMBED)
                & have_embedding
                & self.delta_ready
                & self.latent_ready
            ),
            self.hold_norm.eq(self.product_running & (self._mixed(m, issue_mix))),
        ]

        # Bookkeeping.
        used = issue_product & resident
        m.d.sync += available.eq(available + self.loaded - used)
        set_bits = Signal(len(MARKS))
        with m.If(issue_product):
            m.d.comb += set_bits.eq(1 << mark)
        with m.If(issue_mix):
            m.d.comb += set_bits.eq(1 << h)
        m.d.sync += pending.eq(((pending & ~self.cleared) | set_bits) & ~1)
        with m.If(self.embedded):
            m.d.sync += [have_embedding.eq(1), self.embedding_room.eq(0)]
        with m.If(issue_product & is_logits):
            m.d.sync += [logits_busy.eq(1), self.embedding_room.eq(1)]
        with m.If(self.logits_done):
            m.d.sync += logits_busy.eq(0)
        first = Signal()
        with m.If(issue_embed):
            m.d.sync += have_embedding.eq(0)
            m.d.sync += first.eq(0)
            with m.If(~first):
                m.d.sync += self.position.eq(self.position + 1)
        ending = Signal()
        with m.If(issue_embed | issue_mix | issue_product):
            m.d.sync += step.eq(step + 1)
            with m.If(step == len(steps) - 1):
                m.d.sync += step.eq(0)
                with m.If(self.position == self.seq_len - 1):
                    m.d.sync += [running.eq(0), ending.eq(1)]
        m.d.comb += self.finished.eq(ending & self.logits_done)
        with m.If(self.finished):
            m.d.sync += ending.eq(0)
        with m.If(self.start):
            m.d.sync += [
                running.eq(1),
                ending.eq(0),
                step.eq(0),
                first.eq(1),
                self.position.eq(0),
                self.embedding_room.eq(1),
                have_embedding.eq(0),
                available.eq(0),
                pending.eq(0),
                logits_busy.eq(0),
            ]
        self._commands(m, fields, product)
        return m

    def _mixed(self, m: Module, issue_mix: Signal) -> Signal:
        """Whether the norm unit's present job is that of a mix (it writes slot h)."""
        mixed = Signal()
        with m.If(self.norm_valid & self.norm_ready):
            m.d.sync += mixed.eq(issue_mix)
        return mixed

    def _commands(self, m: Module, fields: dict[str, Value], product: Value) -> None:
        config, program = self.config, self.program
        expert = Array(self.chosen)[fields["rank"]]
        store, scales = fields["store"], fields["scales"]
        command = self.product
        streamed = ~fields["resident"]
        m.d.comb += [
            command.store.eq(store + Mux(fields["routed"], expert * program.expert_words, 0)),
            command.scales.eq(
                Mux(
                    streamed,
                    0,
                    scales + Mux(fields["routed"], expert * program.expert_scales, 0),
                )
            ),
            command.blocks.eq(fields["blocks"]),
            command.chunks.eq(Mux(self.group128, fields["chunks128"], fields["chunks64"])),
            command.groups.eq(Mux(self.group128, 0, fields["groups64"])),
            command.beats.eq(fields["beats"]),
            command.slot.eq(fields["slot"]),
            command.join.eq(self.group128 & fields["groups64"]),
            command.streamed.eq(streamed),
            command.throttled.eq(fields["target"] == Target.LOGITS.value),
        ]
        tag = command.tag
        for name in ("function", "target", "ordinal", "base", "set", "weight", "mark"):
            value = getattr(tag, name)
            raw = value.as_value() if hasattr(value, "as_value") else value
            m.d.comb += raw.eq(fields[name])
        model, v = config.model, config.hardware.vector_lanes
        job = self.norm
        h_words, c_words = model.d_model // v, model.mla_dc // v
        m.d.comb += [
            self.mix.count.eq(fields["count"]),
            self.mix.params.eq(fields["mix_params"]),
            job.log_words.eq(Mux(product, log2(c_words), log2(h_words))),
            job.log_length.eq(Mux(product, log2(model.mla_dc), log2(model.d_model))),
            job.weight.eq(Mux(product, fields["base"], fields["norm_weight"])),
            job.slot.eq(Mux(product, program.slot_word("c"), program.slot_word("h"))),
            job.mark.eq(Mux(product, MARK["c"], MARK["h"])),
        ]

    def _fields(self, m: Module, step: Signal) -> dict[str, Value]:
        """Tables of the steps, looked up at ``step``."""
        config, program = self.config, self.program
        model, rows, v = config.model, config.hardware.rows, config.hardware.vector_lanes
        blank = MatVecOp("", 16, 16, "h", Function.IDENTITY, Target.SLOT, "")
        products, mixes = [], []
        for entry in program.steps:
            products.append(program.products[entry] if isinstance(entry, int) else blank)
            mixes.append(entry if isinstance(entry, MixOp) else MixOp(1, 0, 0))
        kinds = [
            PRODUCT if isinstance(e, int) else MIX if isinstance(e, MixOp) else EMBED
            for e in program.steps
        ]
        places = slots(config)

        def chunks(op: MatVecOp, size: int) -> int:
            return min(op.fan_in, size) // rows - 1

        columns = {
            "kind": kinds,
            "count": [x.count - 1 for x in mixes],
            "mix_params": [x.params for x in mixes],
            "norm_weight": [x.weight for x in mixes],
            "resident": [int(op.resident) for op in products],
            "routed": [int(op.rank is not None) for op in products],
            "rank": [op.rank or 0 for op in products],
            "store": [op.store for op in products],
            "scales": [op.scales for op in products],
            "blocks": [op.blocks - 1 for op in products],
            "chunks64": [chunks(op, 64) for op in products],
            "chunks128": [chunks(op, 128) for op in products],
            "groups64": [model.groups(op.fan_in, 64) - 1 for op in products],
            "beats": [max(min(op.fan_out, COLUMNS) // v, 1) - 1 for op in products],
            "slot": [places[op.slot].group for op in products],
            "slot_mark": [MARK[op.slot] for op in products],
            "function": [op.function.value for op in products],
            "target": [op.target.value for op in products],
            "ordinal": [op.ordinal for op in products],
            "base": [op.base for op in products],
            "set": [int(op.set) for op in products],
            "weight": [op.weight for op in products],
            "weighs": [int(op.weight != 0) for op in products],
            "mark": [MARK[op.mark] for op in products],
        }
        return {name: rom(m, values, step, f"step_{name}") for name, values in columns.items()}


def clears(*sources: tuple[Value, Value]) -> list[Value]:
    """Scoreboard bits cleared by (complete, mark) pairs."""
    return [Mux(complete, 1 << mark, 0) for complete, mark in sources]
