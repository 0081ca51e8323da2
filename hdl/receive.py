"""Receive unit: takes the memory's answers apart, job by job.

Jobs come from the fetch unit in the order of its requests. Parameters go to the
units that use them, weights into the weight store or straight to the
matrix-vector unit, and an embedding to the residual memory.
"""

from __future__ import annotations

from amaranth.hdl import Array, Cat, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from golden_model.config import COLUMNS
from hdl.embedding import Embedding
from hdl.fetch import JOB, JOBS, Job
from hdl.header import HEADER_BEATS, Header
from hdl.layouts import PARAM_WRITE, ParamUnit, lanes, vector_stream
from hdl.program import Program, rom


class JobQueue(wiring.Component):
    """First-in first-out queue of jobs, in flip-flops.

    Attributes
    ----------
    push, push_ready, push_data : In, Out, In
    pop, pop_valid, pop_data : In, Out, Out
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        super().__init__(
            {
                "push": In(1),
                "push_ready": Out(1),
                "push_data": In(JOB),
                "pop": In(1),
                "pop_valid": Out(1),
                "pop_data": Out(JOB),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        width = JOB.size
        entries = Array(Signal(width, name=f"job{i}") for i in range(self.depth))
        head, tail = Signal(range(self.depth)), Signal(range(self.depth))
        level = Signal(range(self.depth + 1))
        push, pop = self.push & self.push_ready, self.pop & self.pop_valid
        m.d.comb += [
            self.push_ready.eq(level != self.depth),
            self.pop_valid.eq(level != 0),
            self.pop_data.as_value().eq(entries[head]),
        ]
        with m.If(push):
            m.d.sync += [entries[tail].eq(self.push_data), tail.eq(tail + 1)]
        with m.If(pop):
            m.d.sync += head.eq(head + 1)
        m.d.sync += level.eq(level + push - pop)
        return m


class Receive(wiring.Component):
    """Answers of the memory, on their way to where they belong.

    Attributes
    ----------
    job_valid, job_ready, job : In, Out, In
        Jobs of the fetch unit.
    rsp_valid, rsp_ready, rsp_data : In, Out, In
        The memory's answers.
    header : Header
        What the header said (a submodule; see there).
    start : In
        A run begins.
    header_good, header_bad : Out
        The header was read and accepted, or refused.
    tensors_known, tensors : Out
        Whether the first descriptor was read, and the address it holds (in beats).
    params : Out(PARAM_WRITE)
    token_group, token_groups : Out
        Four token ids, and how many such groups were read (modulo 4).
    embedding_token, embedding_room, embedding : In, In, Out
        Token being fetched, whether its row may leave, and the row.
    we, bank, waddr, wdata, store_busy : Out, Out, Out, Out, In
        Writes of the weight store; none while it is busy.
    scale_we, scale_waddr, scale_wdata, scale_wstrb, scale_busy : Out ..., In
        Likewise for the scales.
    word_valid, word_ready, word : Out, In, Out
        Words of a streamed matrix.
    scales_used : In
        The last scales of a block of a streamed matrix were read.
    loaded : Out
        Up for one cycle when a further resident product is on the chip.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        config = self.config = program.config
        self.header = Header(config)
        self.store_bits = max((max(program.store_words, 2) - 1).bit_length(), 1)
        self.scale_bits = (program.scale_words - 1).bit_length()
        rows = config.hardware.rows
        super().__init__(
            {
                "job_valid": In(1),
                "job_ready": Out(1),
                "job": In(JOB),
                "rsp_valid": In(1),
                "rsp_ready": Out(1),
                "rsp_data": In(128),
                "start": In(1),
                "header_good": Out(1),
                "header_bad": Out(1),
                "tensors_known": Out(1),
                "tensors": Out(28),
                "params": Out(PARAM_WRITE),
                "token_group": Out(lanes(32, 4)),
                "token_groups": Out(2),
                "embedding_token": In(13),
                "embedding_room": In(1),
                "embedding": Out(vector_stream(config)),
                "we": Out(1),
                "bank": Out(range(max(rows // 2, 2))),
                "waddr": Out(self.store_bits),
                "wdata": Out(128),
                "store_busy": In(1),
                "scale_we": Out(1),
                "scale_waddr": Out(self.scale_bits),
                "scale_wdata": Out(128),
                "scale_wstrb": Out(3),
                "scale_busy": In(1),
                "word_valid": Out(1),
                "word_ready": In(1),
                "word": Out(rows * COLUMNS * 4),
                "scales_used": In(1),
                "loaded": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        config = self.config
        m.submodules.header = header = self.header
        m.submodules.queue = queue = JobQueue(JOBS)
        m.submodules.embed = embed = Embedding(config)
        m.d.comb += [
            queue.push.eq(self.job_valid),
            queue.push_data.eq(self.job),
            self.job_ready.eq(queue.push_ready),
            header.start.eq(self.start),
            header.data.eq(self.rsp_data),
            embed.token.eq(self.embedding_token),
            embed.data.eq(self.rsp_data),
            embed.room.eq(self.embedding_room),
            self.embedding.eq(embed.out),
        ]
        job = Signal(JOB)
        count = Signal(16)
        shape = self._shapes(m, job.index)
        take = Signal()
        matrix_go, matrix_done = Signal(), Signal()
        m.d.comb += take.eq(self.rsp_valid & self.rsp_ready)
        with m.If(self.start):
            m.d.sync += [self.tensors_known.eq(0), self.token_groups.eq(0)]
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += queue.pop.eq(1)
                m.d.sync += [job.eq(queue.pop_data), count.eq(0)]
                with m.If(queue.pop_valid), m.Switch(queue.pop_data.kind):
                    with m.Case(Job.HEADER):
                        m.next = "HEADER"
                    with m.Case(Job.DESCRIPTOR):
                        m.next = "DESCRIPTOR"
                    with m.Case(Job.PARAM):
                        m.next = "PARAM"
                    with m.Case(Job.TOKENS):
                        m.next = "TOKENS"
                    with m.Case(Job.EMBEDDING):
                        m.next = "EMBEDDING_Q"
                    with m.Case(Job.MATRIX):
                        m.next = "MATRIX"
                    with m.Case(Job.SKIP):
                        m.d.comb += self.loaded.eq(1)
            with m.State("HEADER"):
                m.d.comb += [self.rsp_ready.eq(1), header.valid.eq(take), header.beat.eq(count)]
                with m.If(take):
                    m.d.sync += count.eq(count + 1)
                    with m.If(count == HEADER_BEATS - 1):
                        m.next = "VERDICT"
            with m.State("VERDICT"):
                m.d.comb += [self.header_good.eq(~header.bad), self.header_bad.eq(header.bad)]
                m.next = "IDLE"
            with m.State("DESCRIPTOR"):
                m.d.comb += self.rsp_ready.eq(1)
                with m.If(take):
                    m.d.sync += [
                        self.tensors.eq(self.rsp_data.word_select(1, 32) >> 4),
                        self.tensors_known.eq(1),
                    ]
                    m.next = "IDLE"
            with m.State("PARAM"):
                m.d.comb += [self.rsp_ready.eq(1), self.params.valid.eq(take)]
                with m.If(take):
                    m.d.sync += count.eq(count + 1)
                    with m.If(count == shape["param_beats"] - 1):
                        m.next = "IDLE"
            with m.State("TOKENS"):
                m.d.comb += self.rsp_ready.eq(1)
                with m.If(take):
                    m.d.sync += [
                        self.token_group.as_value().eq(self.rsp_data),
                        self.token_groups.eq(self.token_groups + 1),
                    ]
                    m.next = "IDLE"
            with m.State("EMBEDDING_Q"):
                m.d.comb += [self.rsp_ready.eq(1), embed.q_valid.eq(take)]
                with m.If(take):
                    m.d.sync += count.eq(count + 1)
                    with m.If(count == max(config.model.d_model // 32, 1) - 1):
                        m.next = "EMBEDDING_S"
            with m.State("EMBEDDING_S"):
                m.d.comb += [self.rsp_ready.eq(1), embed.s_valid.eq(take)]
                with m.If(take):
                    m.next = "EMBEDDING_Z"
            with m.State("EMBEDDING_Z"):
                m.d.comb += [self.rsp_ready.eq(1), embed.z_valid.eq(take)]
                with m.If(take):
                    m.next = "EMBEDDING_OUT"
            with m.State("EMBEDDING_OUT"), m.If(embed.done):
                m.next = "IDLE"
            with m.State("MATRIX"):
                m.d.comb += matrix_go.eq(1)
                with m.If(matrix_done):
                    m.next = "IDLE"
        self._matrix(m, job, shape, take, matrix_go, matrix_done)
        m.d.comb += [
            self.params.unit.eq(shape["param_unit"]),
            self.params.address.eq(shape["param_address"] + count),
            self.params.data.eq(self.rsp_data),
        ]
        return m

    def _matrix(
        self,
        m: Module,
        job: data.View,
        shape: dict[str, Signal],
        take: Signal,
        go: Signal,
        done: Signal,
    ) -> None:
        """States of a matrix: per block scales and zero points, then the weights."""
        hw = self.config.hardware
        banks = hw.rows // 2
        has_narrow = any(op.fan_out < COLUMNS for op in self.program.products)
        all_resident = all(op.resident for op in self.program.products)
        any_resident = any(op.resident for op in self.program.products)
        resident = shape["resident"]
        block, group = Signal(12), Signal(1)
        pair = Signal(7)  # row pair of the block
        store_at, scale_at = Signal(self.store_bits), Signal(self.scale_bits)
        bank = Signal(range(max(banks, 2)))
        parity = Signal()
        sets = Signal(2)  # sets of streamed scales that were loaded and not yet read
        opened = Signal()
        m.d.sync += sets.eq(sets + opened - self.scales_used)
        with m.If(self.start):
            m.d.sync += [parity.eq(0), sets.eq(0)]

        def scale_beat(strobe: int) -> None:
            m.d.comb += [
                self.rsp_ready.eq(~self.scale_busy),
                self.scale_we.eq(take),
                self.scale_wstrb.eq(strobe),
            ]

        # Row pairs: a beat of a narrow matrix holds several.
        sub = Signal(4)
        subs = shape["subs"]
        pair_data = Signal(128)
        step = Signal()  # a row pair is used up
        last_pair = pair == shape["pairs"]
        m.d.comb += pair_data.eq(self.rsp_data)
        if has_narrow:
            shift = Signal(4)
            m.d.comb += shift.eq(sub << shape["log_fan_out"])
            m.d.comb += pair_data[:64].eq((self.rsp_data >> (shift << 3))[:64])
        full = bank == banks - 1 if banks > 1 else 1
        earlier = [Signal(128, name=f"pair{i}") for i in range(banks - 1)]
        m.d.comb += self.word.eq(Cat(*earlier, pair_data))
        with m.FSM(name="matrix"):
            with m.State("IDLE"):
                m.d.sync += [
                    block.eq(0),
                    group.eq(0),
                    pair.eq(0),
                    bank.eq(0),
                    store_at.eq(shape["store"] + job.expert * self.program.expert_words),
                    scale_at.eq(shape["scales"] + job.expert * self.program.expert_scales),
                ]
                with m.If(~shape["routed"]):
                    m.d.sync += [store_at.eq(shape["store"]), scale_at.eq(shape["scales"])]
                with m.If(~resident):
                    m.d.sync += scale_at.eq(Mux(parity, 2, 0))
                with m.If(go):
                    m.next = "S0"
                    with m.If(~resident):
                        m.next = "OPEN"
            with m.State("OPEN"):  # a set of scales for a block of a streamed matrix
                with m.If(sets != 2):
                    m.d.comb += opened.eq(1)
                    m.next = "S0"
            with m.State("S0"):
                scale_beat(0b001)
                with m.If(take):
                    m.next = "Z"
                    with m.If(shape["two_s"]):
                        m.next = "S1"
            with m.State("S1"):
                scale_beat(0b010)
                with m.If(take):
                    m.next = "Z"
            with m.State("Z"):
                scale_beat(0b100)
                with m.If(take):
                    m.d.sync += [group.eq(group + 1), scale_at.eq(scale_at + 1)]
                    m.next = "S0"
                    with m.If(group == shape["groups"]):
                        m.d.sync += group.eq(0)
                        m.next = "Q"
            with m.State("Q"):
                if all_resident:
                    m.d.comb += step.eq(self.rsp_valid & ~self.store_busy)
                else:
                    m.d.comb += self.word_valid.eq(self.rsp_valid & full & ~resident)
                    streamed = self.rsp_valid & (~full | self.word_ready)
                    if any_resident:
                        m.d.comb += step.eq(
                            Mux(resident, self.rsp_valid & ~self.store_busy, streamed)
                        )
                    else:
                        m.d.comb += step.eq(streamed)
                m.d.comb += [
                    self.we.eq(step & resident),
                    self.rsp_ready.eq(step & ((sub == subs) | last_pair)),
                ]
                with m.If(step):
                    m.d.sync += [pair.eq(pair + 1), sub.eq(sub + 1), bank.eq(bank + 1)]
                    for i, kept in enumerate(earlier):
                        with m.If(bank == i):
                            m.d.sync += kept.eq(pair_data)
                    with m.If(full):
                        m.d.sync += [store_at.eq(store_at + 1), bank.eq(0)]
                    with m.If((sub == subs) | last_pair):
                        m.d.sync += sub.eq(0)
                    with m.If(last_pair):
                        m.d.sync += [pair.eq(0), block.eq(block + 1), parity.eq(parity ^ ~resident)]
                        m.next = "S0"
                        with m.If(~resident):
                            m.d.sync += scale_at.eq(Mux(parity, 0, 2))
                            m.next = "OPEN"
                        with m.If(block == shape["blocks"]):
                            m.d.comb += [self.loaded.eq(resident), done.eq(1)]
                            m.next = "IDLE"
        m.d.comb += [
            self.bank.eq(bank),
            self.waddr.eq(store_at),
            self.wdata.eq(pair_data),
            self.scale_waddr.eq(scale_at),
            self.scale_wdata.eq(self.rsp_data),
        ]

    def _shapes(self, m: Module, index: Signal) -> dict[str, Signal]:
        """Tables of products and parameters, looked up at a job's index."""
        program, model = self.program, self.config.model
        products, params = program.products, program.params

        def table(name: str, values: list[int]) -> Signal:
            return rom(m, values, index, f"receive_{name}")

        units = table("param_unit", [p.unit.value for p in params])
        unit = Signal(ParamUnit)
        m.d.comb += unit.eq(units)
        groups = [table(f"groups_{g}", [model.groups(op.fan_in, g) - 1 for op in products])
                  for g in (64, 128)]  # fmt: skip
        group = Signal(1)
        m.d.comb += group.eq(Mux(self.header.group128, groups[1], groups[0]))
        return {
            "param_unit": unit,
            "param_address": table("param_address", [p.address for p in params]),
            "param_beats": table("param_beats", [p.beats for p in params]),
            "groups": group,
            "resident": table("resident", [int(op.resident) for op in products]),
            "routed": table("routed", [int(op.rank is not None) for op in products]),
            "store": table("store", [op.store for op in products]),
            "scales": table("scales", [op.scales for op in products]),
            "two_s": table("two_s", [int(op.fan_out >= COLUMNS) for op in products]),
            "blocks": table("blocks", [op.blocks - 1 for op in products]),
            "pairs": table("pairs", [op.fan_in // 2 - 1 for op in products]),
            "subs": table("subs", [max(COLUMNS // op.fan_out, 1) - 1 for op in products]),
            "log_fan_out": table(
                "log_fan_out", [min(op.fan_out, COLUMNS).bit_length() - 1 for op in products]
            ),
        }
