"""The chip: its units and the wires between them."""

from __future__ import annotations

from amaranth.hdl import ClockDomain, ClockSignal, Module, Mux, ResetSignal, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden_model.config import Config
from golden_model.image import STATUS_BAD, STATUS_DONE
from hdl.activations import ActivationBuffer
from hdl.delta_attention import DeltaAttention
from hdl.fetch import Fetch
from hdl.fixed import convert
from hdl.latent_attention import LatentAttention
from hdl.layouts import RES_FRAC, ParamUnit, Target, result_stream
from hdl.logits import Logits
from hdl.matvec import MatVec
from hdl.memory_port import MemoryPort
from hdl.norm import Norm
from hdl.program import MARK, Program, log2
from hdl.receive import Receive
from hdl.residual import Residual
from hdl.router import Router
from hdl.scalar import ScalarUnit
from hdl.sequencer import Sequencer, clears
from hdl.vector_unit import VectorUnit
from hdl.weight_store import WeightStore

#: The host's command to run, and the chip's answer.
RUN, DONE = 0x00000001, 0x0000D0DE


class Top(wiring.Component):
    """A decoder for one network shape; ports as the bus specification names them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.program = Program(config)
        super().__init__(
            {
                "clk": In(1),
                "rst_n": In(1),
                "cmd_valid": In(1),
                "cmd_ready": Out(1),
                "cmd_data": In(32),
                "rsp_valid": Out(1),
                "rsp_ready": In(1),
                "rsp_data": Out(32),
                "mem_req_valid": Out(1),
                "mem_req_ready": In(1),
                "mem_req_write": Out(1),
                "mem_req_addr": Out(36),
                "mem_req_wdata": Out(128),
                "mem_req_wstrb": Out(16),
                "mem_rsp_valid": In(1),
                "mem_rsp_ready": Out(1),
                "mem_rsp_rdata": In(128),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.domains.sync = ClockDomain()
        m.d.comb += [ClockSignal().eq(self.clk), ResetSignal().eq(~self.rst_n)]
        config, program = self.config, self.program
        receive = Receive(program)
        store = WeightStore(config, program.store_words, program.scale_words)
        mixer_beats = program.param_beats(ParamUnit.MIX_WEIGHT)
        m.submodules.fetch = self.fetch = fetch = Fetch(program)
        m.submodules.receive = receive
        m.submodules.sequencer = self.sequencer = sequencer = Sequencer(program)
        m.submodules.port = port = MemoryPort()
        m.submodules.store = store
        m.submodules.activations = activations = ActivationBuffer(config)
        m.submodules.matvec = matvec = MatVec(config, receive.store_bits, receive.scale_bits)
        m.submodules.vector_unit = vector = VectorUnit(config)
        m.submodules.norm = norm = Norm(config, program.param_beats(ParamUnit.NORM_WEIGHT))
        m.submodules.residual = residual = Residual(config, mixer_beats)
        m.submodules.delta = delta = DeltaAttention(config)
        m.submodules.latent = latent = LatentAttention(config, program.slot_word("o"), MARK["o"])
        m.submodules.router = router = Router(config)
        m.submodules.logits = logits = Logits(config)
        scalar_ports = [
            (residual.root, True),
            (residual.reciprocal, False),
            (norm.scalar, True),
            (delta.scalar, True),
            (latent.scalar, False),
            (router.scalar, False),
        ]
        m.submodules.scalar = scalar = ScalarUnit([root for _, root in scalar_ports])
        for i, (unit_port, _) in enumerate(scalar_ports):
            wiring.connect(m, unit_port, scalar.ports[i])

        start = self._control(m, receive, sequencer, port, logits)
        header = receive.header
        m.d.comb += [
            # Fetch
            fetch.start.eq(start),
            fetch.header_good.eq(receive.header_good),
            fetch.header_bad.eq(receive.header_bad),
            fetch.group128.eq(header.group128),
            fetch.descriptors.eq(header.descriptors),
            fetch.tokens.eq(header.tokens),
            fetch.seq_len.eq(header.seq_len),
            fetch.tensors_known.eq(receive.tensors_known),
            fetch.tensors.eq(receive.tensors),
            fetch.token_group.eq(receive.token_group),
            fetch.token_groups.eq(receive.token_groups),
            fetch.chosen.eq(router.chosen),
            fetch.selected.eq(router.selected),
            fetch.job_ready.eq(receive.job_ready),
            port.read_valid.eq(fetch.valid),
            fetch.ready.eq(port.read_ready),
            port.read_address.eq(fetch.address),
            # Receive
            receive.start.eq(start),
            receive.job_valid.eq(fetch.job_valid),
            receive.job.eq(fetch.job),
            receive.rsp_valid.eq(self.mem_rsp_valid),
            self.mem_rsp_ready.eq(receive.rsp_ready),
            receive.rsp_data.eq(self.mem_rsp_rdata),
            receive.embedding_token.eq(fetch.embedding_token),
            receive.embedding_room.eq(sequencer.embedding_room),
            receive.store_busy.eq(matvec.store_re),
            receive.scale_busy.eq(matvec.scale_re),
            receive.word_ready.eq(matvec.word_ready),
            receive.scales_used.eq(matvec.scales_used),
            # Weight store
            store.we.eq(receive.we),
            store.bank.eq(receive.bank),
            store.waddr.eq(receive.waddr),
            store.wdata.eq(receive.wdata),
            store.re.eq(matvec.store_re),
            store.raddr.eq(matvec.store_address),
            store.scale_we.eq(receive.scale_we),
            store.scale_waddr.eq(receive.scale_waddr),
            store.scale_wdata.eq(receive.scale_wdata),
            store.scale_wstrb.eq(receive.scale_wstrb),
            store.scale_re.eq(matvec.scale_re),
            store.scale_raddr.eq(matvec.scale_address),
            # Bus
            self.mem_req_valid.eq(port.req_valid),
            port.req_ready.eq(self.mem_req_ready),
            self.mem_req_write.eq(port.req_write),
            self.mem_req_addr.eq(port.req_addr),
            self.mem_req_wdata.eq(port.req_wdata),
            self.mem_req_wstrb.eq(port.req_wstrb),
        ]
        for unit in (vector, norm, residual, router):
            m.d.comb += unit.params.eq(receive.params)
        m.d.comb += [
            # Matrix-vector unit
            matvec.valid.eq(sequencer.product_valid),
            matvec.command.eq(sequencer.product),
            activations.chunk.eq(matvec.chunk),
            matvec.x.eq(activations.data),
            activations.group.eq(matvec.group),
            matvec.total.eq(activations.total),
            matvec.total_next.eq(activations.total_next),
            matvec.store_data.eq(store.rdata),
            matvec.word_valid.eq(receive.word_valid),
            matvec.word.eq(receive.word),
            matvec.scale_data.eq(store.scale_rdata),
            matvec.room.eq(logits.room),
            logits.block_issued.eq(matvec.block_issued),
            vector.y.eq(matvec.y),
        ]
        self._results(m, vector.out, {
            Target.RESIDUAL: residual.y,
            Target.LOGITS: logits.y,
            Target.ROUTER: router.y,
        })  # fmt: skip
        first_token = sequencer.position == 0
        m.d.comb += [
            delta.y.eq(vector.out),
            latent.y.eq(vector.out),
            vector.first_token.eq(first_token),
            delta.first_token.eq(first_token),
            latent.position.eq(sequencer.position),
            residual.weights.eq(router.weights),
            residual.embedding.eq(receive.embedding),
        ]
        self._norm(m, norm, sequencer, delta, residual, vector.out)
        written = self._slots(m, activations, norm, latent, vector.out)

        # Sequencer
        marks = clears(*written, (residual.last_added, residual.last_mark))
        cleared: Value = marks[0]
        for bits in marks[1:]:
            cleared = cleared | bits
        m.d.comb += [
            sequencer.start.eq(receive.header_good),
            sequencer.seq_len.eq(header.seq_len),
            sequencer.group128.eq(header.group128),
            sequencer.embedded.eq(receive.embedding.valid & receive.embedding.last),
            sequencer.loaded.eq(receive.loaded),
            sequencer.product_ready.eq(matvec.ready),
            sequencer.product_running.eq(matvec.running),
            residual.start.eq(sequencer.mix_valid),
            sequencer.mix_ready.eq(residual.ready),
            residual.job.eq(sequencer.mix),
            sequencer.delta_ready.eq(delta.ready),
            sequencer.latent_ready.eq(latent.ready),
            sequencer.router_ready.eq(router.ready),
            sequencer.gate_ready.eq(norm.gate_ready),
            sequencer.chosen.eq(router.chosen),
            sequencer.weighted.eq(router.weighted),
            sequencer.logits_done.eq(logits.done),
            sequencer.cleared.eq(cleared),
        ]
        return m

    def _control(
        self, m: Module, receive: Receive, sequencer: Sequencer, port: MemoryPort, logits: Logits
    ) -> Signal:
        """Command, status word and answer of a run; the returned signal starts it."""
        header = receive.header
        start = Signal()
        status = Signal(32)
        writing = Signal()
        with m.FSM(name="run"):
            with m.State("IDLE"):
                m.d.comb += self.cmd_ready.eq(1)
                with m.If(self.cmd_valid & (self.cmd_data == RUN)):
                    m.d.comb += start.eq(1)
                    m.next = "BUSY"
            with m.State("BUSY"):
                with m.If(receive.header_bad):
                    m.d.sync += status.eq(STATUS_BAD | header.bad_word)
                    m.next = "STATUS"
                with m.If(sequencer.finished):
                    m.d.sync += status.eq(STATUS_DONE)
                    m.next = "STATUS"
            with m.State("STATUS"):
                m.d.comb += writing.eq(1)
                with m.If(port.write_ready):
                    m.next = "FLUSH"
            with m.State("FLUSH"), m.If(port.idle):
                m.next = "DONE"
            with m.State("DONE"):
                m.d.comb += [self.rsp_valid.eq(1), self.rsp_data.eq(DONE)]
                with m.If(self.rsp_ready):
                    m.next = "IDLE"
        m.d.comb += [
            logits.start.eq(receive.header_good),
            logits.row_address.eq(header.logits),
            logits.stride.eq(header.stride),
            logits.argmax_address.eq(header.argmax),
            port.write_valid.eq(logits.write_valid | writing),
            logits.write_ready.eq(port.write_ready & ~writing),
            port.write_address.eq(Mux(writing, header.status >> 4, logits.write_address)),
            port.write_data.eq(Mux(writing, status, logits.write_data)),
            port.write_strobe.eq(Mux(writing, 0xF, logits.write_strobe)),
        ]
        return start

    def _results(self, m: Module, out: Value, targets: dict[Target, Value]) -> None:
        """Results go to the unit that their tag names."""
        for target, stream in targets.items():
            m.d.comb += [
                stream.eq(out),  # type: ignore[attr-defined]
                stream.valid.eq(out.valid & (out.tag.target == target)),  # type: ignore[attr-defined]
            ]

    def _norm(
        self,
        m: Module,
        norm: Norm,
        sequencer: Sequencer,
        delta: DeltaAttention,
        residual: Residual,
        out: Value,
    ) -> None:
        """Jobs and vectors of the norm unit: mixes, the latent, heads of delta attention."""
        program, model = self.program, self.config.model
        words = model.kda_dim // self.config.hardware.vector_lanes
        weights = Signal(10)
        kda_layers = [i for i, kind in enumerate(model.layers) if kind == "L"]
        with m.Switch(delta.ordinal):
            for ordinal, layer in enumerate(kda_layers):
                with m.Case(ordinal):
                    m.d.comb += weights.eq(program.norm_word(f"L{layer}.kda.onorm.w"))
        with m.If(delta.start_norm):
            m.d.comb += [
                norm.start.eq(1),
                norm.job.log_words.eq(log2(words)),
                norm.job.log_length.eq(log2(model.kda_dim)),
                norm.job.weight.eq(weights),
                norm.job.scaled_eps.eq(1),
                norm.job.gated.eq(1),
                norm.job.gate.eq(delta.head * words),
                norm.job.slot.eq(program.slot_word("o") + delta.head * words),
                norm.job.mark.eq(Mux(delta.head == model.kda_heads - 1, MARK["o"], 0)),
                delta.norm_ready.eq(norm.ready),
            ]
        with m.Else():
            m.d.comb += [
                norm.start.eq(sequencer.norm_valid),
                norm.job.eq(sequencer.norm),
                sequencer.norm_ready.eq(norm.ready),
            ]
        latent = out.valid & (out.tag.target == Target.NORM)  # type: ignore[attr-defined]
        gate = out.valid & (out.tag.target == Target.NORM_GATE)  # type: ignore[attr-defined]
        m.d.comb += [
            norm.hold.eq(sequencer.hold_norm),
            norm.gate.valid.eq(gate),
            norm.gate.last.eq(out.last),  # type: ignore[attr-defined]
            norm.gate.data.eq(out.data),  # type: ignore[attr-defined]
            norm.x.eq(residual.x),
        ]
        with m.If(delta.o.valid):
            m.d.comb += norm.x.eq(delta.o)
        with m.Elif(latent):
            m.d.comb += [
                norm.x.valid.eq(1),
                norm.x.last.eq(out.last),  # type: ignore[attr-defined]
                norm.x.data.eq(out.data),  # type: ignore[attr-defined]
            ]

    def _slots(
        self,
        m: Module,
        activations: ActivationBuffer,
        norm: Norm,
        latent: LatentAttention,
        out: Value,
    ) -> list[tuple[Value, Value]]:
        """Writes of the activation buffer; the program never makes two meet."""
        act = self.config.hardware.formats.activation
        write = activations.write
        result = Signal(result_stream(self.config))
        to_slot = Signal()
        m.d.comb += [result.eq(out), to_slot.eq(result.valid & (result.tag.target == Target.SLOT))]
        with m.If(to_slot):
            m.d.comb += [
                write.valid.eq(1),
                write.address.eq(result.tag.base + result.index),
            ]
            m.d.comb += [
                write.data[i].eq(convert(y, RES_FRAC - act.frac, act.width))
                for i, y in enumerate(result.data)
            ]
        with m.Elif(latent.write.valid):
            m.d.comb += write.eq(latent.write)
        with m.Else():
            m.d.comb += write.eq(norm.write)
        return [
            (to_slot & result.last, result.tag.mark),
            (latent.write.valid & latent.write.last, latent.write.mark),
            (norm.write.valid & norm.write.last, norm.write.mark),
        ]
