"""Fetch unit: asks the memory for everything a run needs, as far ahead as it may.

It walks the program with a counter of its own. For every stretch of requests it
leaves a job for the receive unit, which meets the answers in the same order. A
matrix that is already on the chip becomes a job without requests.
"""

from __future__ import annotations

from amaranth.hdl import Array, Module, Mux, Signal
from amaranth.lib import data, enum, wiring
from amaranth.lib.wiring import In, Out

from golden_model.image import HEADER_BYTES, align16
from hdl.header import HEADER_BEATS
from hdl.layouts import lanes
from hdl.program import Program, rom

#: Jobs that may wait for their answers.
JOBS = 8


class Job(enum.Enum, shape=3):
    """What a stretch of answers is."""

    HEADER = 0
    DESCRIPTOR = 1
    PARAM = 2
    TOKENS = 3
    EMBEDDING = 4
    MATRIX = 5
    SKIP = 6


#: A job: its kind, the product or parameter it is about, and the chosen expert.
JOB = data.StructLayout({"kind": Job, "index": 8, "expert": 4})


class Fetch(wiring.Component):
    """Read requests of a run.

    Attributes
    ----------
    start : In
        A run begins.
    header_good, header_bad : In
        The header was read and accepted, or refused (the run ends).
    group128 : In
        Group size 128, else 64.
    descriptors, tokens : In
        Byte addresses of the descriptor table and of the token ids.
    seq_len : In
    tensors_known, tensors : In
        Whether the first descriptor was read, and the address it holds (in beats).
    token_group, token_groups : In
        Four token ids, and how many such groups were read (modulo 4).
    chosen, selected : In
        Choice of the router; ``selected`` is up for one cycle when it is made.
    embedding_token : Out
        Token id whose embedding is being fetched.
    job_valid, job_ready, job : Out, In, Out
        Jobs for the receive unit.
    valid, ready, address : Out, In, Out
        Read requests; addresses count beats of 16 bytes.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        model = program.config.model
        super().__init__(
            {
                "start": In(1),
                "header_good": In(1),
                "header_bad": In(1),
                "group128": In(1),
                "descriptors": In(32),
                "tokens": In(32),
                "seq_len": In(16),
                "tensors_known": In(1),
                "tensors": In(28),
                "token_group": In(lanes(32, 4)),
                "token_groups": In(2),
                "chosen": In(lanes(4, model.top_k)),
                "selected": In(1),
                "embedding_token": Out(13),
                "job_valid": Out(1),
                "job_ready": In(1),
                "job": Out(JOB),
                "valid": Out(1),
                "ready": In(1),
                "address": Out(28),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        program, model = self.program, self.program.config.model
        products, params = program.products, program.params

        # Linear stretches.
        at, left = Signal(28), Signal(16)
        # Matrices: running addresses of the block, then of the beat.
        op = Signal(range(len(products) + 1))
        expert = Signal(4)
        shape = self._shapes(m, op)
        q_block, s_block, z_block = Signal(28), Signal(28), Signal(28)
        q_at = Signal(28)
        block, group, beat = Signal(12), Signal(1), Signal(12)

        position = Signal(16)
        param = Signal(range(len(params) + 1))
        groups_asked = Signal(2)
        loaded = Array(Signal(model.n_experts, name=f"loaded{i}") for i in range(model.n_layers))
        loaded_row = Signal(model.n_experts)
        m.d.comb += loaded_row.eq(loaded[shape["layer"]])

        # Choices of the router not yet used.
        choices = Signal(2)
        use_choice = Signal()
        m.d.sync += choices.eq(choices + self.selected - use_choice)
        choice = Signal(4)
        m.d.comb += choice.eq(Array(self.chosen)[shape["rank"]])

        first = Signal()  # the first token's ids and embedding are still to be asked for
        with m.If(self.start):
            m.d.sync += [loaded[i].eq(0) for i in range(model.n_layers)]
            m.d.sync += [position.eq(0), choices.eq(0), groups_asked.eq(0), first.eq(1)]

        def job(kind: Job, index: object = 0, expert: object = 0) -> None:
            m.d.comb += [
                self.job_valid.eq(1),
                self.job.kind.eq(kind),
                self.job.index.eq(index),
                self.job.expert.eq(expert),
            ]

        def linear(address: object, count: object) -> None:
            m.d.sync += [at.eq(address), left.eq(count)]

        p128 = {p.tensor: program.offset(p.tensor, 128) for p in params}
        p64 = {p.tensor: program.offset(p.tensor, 64) for p in params}
        param_at = Mux(
            self.group128,
            rom(m, [p128[p.tensor] for p in params], param, "param128"),
            rom(m, [p64[p.tensor] for p in params], param, "param64"),
        )
        param_beats = rom(m, [p.beats for p in params], param, "param_beats")
        next_position = position + 1
        more = Signal()
        m.d.comb += more.eq(next_position != self.seq_len)
        embedding = EmbeddingAddress(program)

        with m.FSM():
            with m.State("IDLE"), m.If(self.start):
                m.next = "HEADER"
            with m.State("HEADER"):
                job(Job.HEADER)
                linear(0, HEADER_BEATS)
                with m.If(self.job_ready):
                    m.next = "HEADER_READ"
            with m.State("HEADER_READ"):
                self._linear(m, at, left)
                with m.If(self.header_bad):
                    m.next = "IDLE"
                with m.If(self.header_good):
                    m.next = "DESCRIPTOR"
            with m.State("DESCRIPTOR"):
                job(Job.DESCRIPTOR)
                linear(self.descriptors >> 4, 1)
                with m.If(self.job_ready):
                    m.next = "DESCRIPTOR_READ"
            with m.State("DESCRIPTOR_READ"):
                self._linear(m, at, left)
                m.d.sync += param.eq(0)
                with m.If(self.tensors_known):
                    m.next = "PARAM"
            with m.State("PARAM"):
                job(Job.PARAM, index=param)
                linear(self.tensors + param_at, param_beats)
                with m.If(self.job_ready):
                    m.next = "PARAM_READ"
            with m.State("PARAM_READ"):
                self._linear(m, at, left)
                with m.If(left == 0):
                    m.d.sync += param.eq(param + 1)
                    m.next = "PARAM"
                    with m.If(param == len(params) - 1):
                        m.next = "TOKENS"
            with m.State("TOKENS"):  # four ids at a time
                job(Job.TOKENS)
                linear(self.tokens >> 4, 1)
                with m.If(self.job_ready):
                    m.d.sync += groups_asked.eq(groups_asked + 1)
                    m.next = "TOKENS_READ"
            with m.State("TOKENS_READ"):
                self._linear(m, at, left)
                with m.If(left == 0):
                    m.next = "EMBEDDING"
            with m.State("EMBEDDING"):
                row = Mux(first, 0, next_position)
                token = self.token_group[row[:2]]
                with m.If(self.token_groups == groups_asked):
                    job(Job.EMBEDDING)
                    m.d.sync += self.embedding_token.eq(token)
                    linear(self.tensors + embedding.q(token), embedding.beats)
                    with m.If(self.job_ready):
                        m.next = "EMBEDDING_Q"
            with m.State("EMBEDDING_Q"):
                self._linear(m, at, left)
                with m.If(left == 0):
                    linear(self.tensors + embedding.s(self.embedding_token), 1)
                    m.next = "EMBEDDING_S"
            with m.State("EMBEDDING_S"):
                self._linear(m, at, left)
                with m.If(left == 0):
                    linear(self.tensors + embedding.z(self.embedding_token), 1)
                    m.next = "EMBEDDING_Z"
            with m.State("EMBEDDING_Z"):
                self._linear(m, at, left)
                with m.If(left == 0):
                    m.d.sync += first.eq(0)
                    with m.If(~first):
                        m.d.sync += position.eq(next_position)
                    m.next = "NEXT"
            with m.State("NEXT"):  # ids of the token after this one, where they start a group
                m.d.sync += op.eq(0)
                m.next = "PRODUCT"
                with m.If((next_position[:2] == 0) & more):
                    m.next = "TOKENS_AHEAD"
            with m.State("TOKENS_AHEAD"):
                job(Job.TOKENS)
                linear((self.tokens >> 4) + (next_position >> 2), 1)
                with m.If(self.job_ready):
                    m.d.sync += groups_asked.eq(groups_asked + 1)
                    m.next = "TOKENS_AHEAD_READ"
            with m.State("TOKENS_AHEAD_READ"):
                self._linear(m, at, left)
                with m.If(left == 0):
                    m.next = "PRODUCT"
            with m.State("PRODUCT"):
                here = Mux(shape["routed"], choice, 0)[:4]
                on_chip = shape["resident"] & Mux(
                    shape["routed"], loaded_row.bit_select(here, 1), position != 0
                )
                m.d.sync += expert.eq(here)
                with m.If(~shape["routed"] | (choices != 0)):
                    job(Job.MATRIX, index=op, expert=here)
                    with m.If(on_chip):
                        m.d.comb += self.job.kind.eq(Job.SKIP)
                    with m.If(self.job_ready):
                        m.next = "OFFSET"
                        with m.If(on_chip):
                            m.next = "STEP"
            with m.State("OFFSET"):
                start = self.tensors + shape["q"] + expert * shape["stride"]
                m.d.sync += [
                    q_block.eq(start),
                    q_at.eq(start),
                    s_block.eq(start + shape["to_s"]),
                    z_block.eq(start + shape["to_z"]),
                    block.eq(0),
                    group.eq(0),
                    beat.eq(0),
                ]
                m.next = "S0"
            with m.State("S0"):
                m.d.comb += [
                    self.valid.eq(1),
                    self.address.eq(s_block + Mux(group, shape["columns"] << 1, 0)),
                ]
                with m.If(self.ready):
                    m.next = "Z"
                    with m.If(shape["two_s"]):
                        m.next = "S1"
            with m.State("S1"):
                m.d.comb += [
                    self.valid.eq(1),
                    self.address.eq(s_block + Mux(group, shape["columns"] << 1, 0) + 1),
                ]
                with m.If(self.ready):
                    m.next = "Z"
            with m.State("Z"):
                m.d.comb += [
                    self.valid.eq(1),
                    self.address.eq(z_block + Mux(group, shape["columns"], 0)),
                ]
                with m.If(self.ready):
                    m.d.sync += group.eq(group + 1)
                    m.next = "S0"
                    with m.If(group == shape["groups"]):
                        m.d.sync += group.eq(0)
                        m.next = "Q"
            with m.State("Q"):
                m.d.comb += [self.valid.eq(1), self.address.eq(q_at)]
                with m.If(self.ready):
                    m.d.sync += [q_at.eq(q_at + shape["columns"]), beat.eq(beat + 1)]
                    with m.If(beat == shape["beats"]):
                        m.d.sync += [
                            beat.eq(0),
                            block.eq(block + 1),
                            q_at.eq(q_block + 1),
                            q_block.eq(q_block + 1),
                            s_block.eq(s_block + 2),
                            z_block.eq(z_block + 1),
                        ]
                        m.next = "S0"
                        with m.If(block == shape["blocks"]):
                            m.next = "STEP"
            with m.State("STEP"):
                with m.If(shape["last_of_expert"]):
                    for i in range(model.n_layers):
                        with m.If(shape["layer"] == i):
                            m.d.sync += loaded[i].bit_select(expert, 1).eq(1)
                m.d.comb += use_choice.eq(shape["last_of_layer"])
                m.d.sync += op.eq(op + 1)
                m.next = "PRODUCT"
                with m.If(op == len(products) - 1):
                    m.next = "IDLE"
                    with m.If(more):
                        m.next = "EMBEDDING"
        return m

    def _linear(self, m: Module, at: Signal, left: Signal) -> None:
        """Requests of a linear stretch; the state machine goes on when none is left."""
        with m.If(left != 0):
            m.d.comb += [self.valid.eq(1), self.address.eq(at)]
            with m.If(self.ready):
                m.d.sync += [at.eq(at + 1), left.eq(left - 1)]

    def _shapes(self, m: Module, op: Signal) -> dict[str, Signal]:
        """Tables of the products, looked up at ``op``."""
        program, model = self.program, self.program.config.model
        products = program.products

        def table(name: str, values: list[int]) -> Signal:
            return rom(m, values, op, f"product_{name}")

        def by_group(name: str, size_64: list[int], size_128: list[int]) -> Signal:
            out = Signal(max(max(size_64 + size_128).bit_length(), 1), name=name)
            pair = table(f"{name}_64", size_64), table(f"{name}_128", size_128)
            m.d.comb += out.eq(Mux(self.group128, pair[1], pair[0]))
            return out

        columns = [max(op.fan_out // 16, 1) for op in products]
        to_s = [align16(op.fan_in * op.fan_out // 2) // 16 for op in products]

        def to_z(size: int) -> list[int]:
            groups = [model.groups(op.fan_in, size) for op in products]
            return [
                s + align16(2 * g * op.fan_out) // 16
                for s, g, op in zip(to_s, groups, products, strict=True)
            ]

        def offsets(size: int) -> list[int]:
            return [program.offset(f"{op.tensor}.q", size) for op in products]

        ranks = [op.rank if op.rank is not None else 0 for op in products]
        last = [i for i, op in enumerate(products) if op.rank == model.top_k - 1]
        last_of_layer = {
            max(i for i in last if products[i].layer == li) for li in range(model.n_layers)
        }
        return {
            "q": by_group("q", offsets(64), offsets(128)),
            "to_s": table("to_s", to_s),
            "to_z": by_group("to_z", to_z(64), to_z(128)),
            "groups": by_group(
                "groups", *([model.groups(op.fan_in, g) - 1 for op in products] for g in (64, 128))
            ),
            "stride": by_group(
                "stride", *([program.expert_stride(g)] * len(products) for g in (64, 128))
            ),
            "columns": table("columns", columns),
            "two_s": table("two_s", [int(op.fan_out >= 16) for op in products]),
            "beats": table(
                "beats",
                [max(op.fan_in // 2 * min(op.fan_out, 16) // 16, 1) - 1 for op in products],
            ),
            "blocks": table("blocks", [op.blocks - 1 for op in products]),
            "layer": table("layer", [op.layer for op in products]),
            "rank": table("rank", ranks),
            "routed": table("routed", [int(op.rank is not None) for op in products]),
            "resident": table("resident", [int(op.resident) for op in products]),
            "last_of_expert": table("last_of_expert", [int(op.last_of_expert) for op in products]),
            "last_of_layer": table(
                "last_of_layer", [int(i in last_of_layer) for i in range(len(products))]
            ),
        }


class EmbeddingAddress:
    """Beats from the first tensor to the parts of a token's embedding."""

    def __init__(self, program: Program) -> None:
        model = program.config.model
        self.row_bytes = model.d_model // 2
        self.beats = max(self.row_bytes // 16, 1)
        layout = program.layouts[64].address_of  # one group per row, whatever its size
        self._s = (layout["emb.s"] - layout["emb.q"]) // 16
        self._z = (layout["emb.z"] - layout["emb.q"]) // 16

    def q(self, token: object) -> object:
        """First beat of the packed weights."""
        return (token * self.row_bytes) >> 4  # type: ignore[operator]

    def s(self, token: object) -> object:
        """Beat that holds the scale."""
        return (token >> 3) + self._s  # type: ignore[operator]

    def z(self, token: object) -> object:
        """Beat that holds the zero point."""
        return (token >> 4) + self._z  # type: ignore[operator]


assert HEADER_BYTES >= 16 * HEADER_BEATS
