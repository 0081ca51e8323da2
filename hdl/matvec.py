"""Matrix-vector unit with fused dequantisation.

Every cycle ``rows`` activations meet ``rows`` × 16 int4 weights in sixteen adder
trees, one per column. A finished group of a column becomes (Σx·q − z·Σx)·s, the
groups of a column are added and rounded once, and results leave ``vector_lanes`` a
cycle in column order, so that the next unit works behind it.

Stages: S0 issue, S1 products and trees, S2 accumulate, S3 hold, S4 zero point,
S5 scale, S6 add groups and round.
"""

from __future__ import annotations

from amaranth.hdl import Array, Module, Mux, Signal, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from golden_model.config import COLUMNS, Config
from hdl.fixed import convert, tree_sum
from hdl.layouts import RES, TAG, lanes, result_stream

#: Bits of one word of scales and zero points: 16 × (int16 + uint8).
SCALE_WORD = COLUMNS * 24


def matvec_command(store_address: int, scale_address: int) -> data.StructLayout:
    """One matrix-vector product; the arguments are address widths.

    ``blocks`` is the number of 16-column blocks less one, ``chunks`` that of
    ``rows``-row chunks per group less one, ``groups`` that of groups less one, ``beats``
    that of result beats per block less one. ``slot`` is the first group of the input
    in the activation buffer; ``join`` adds two groups' sums (a group of 128).
    """
    return data.StructLayout(
        {
            "store": store_address,
            "scales": scale_address,
            "blocks": 12,
            "chunks": 6,
            "groups": 1,
            "beats": 3,
            "slot": 5,
            "join": 1,
            "streamed": 1,
            "throttled": 1,
            "tag": TAG,
        }
    )


class MatVec(wiring.Component):
    """Multiplies an activation vector with a quantised matrix.

    Parameters
    ----------
    config : Config
    store_address, scale_address : int
        Address widths of the weight store and of its memory of scales.

    Attributes
    ----------
    valid, ready, command : In, Out, In
        A product to do; accepted products follow each other without a gap.
    chunk, x : Out, In
        Chunk of the activation buffer read at S0, and its values in the same cycle.
    group, total, total_next : Out, In, In
        Group whose sum is read, its sum, and that of the following group.
    store_re, store_address, store_data : Out, Out, In
        Weight store read port: ``rows`` × 16 int4, row pairs as in the image.
    word_valid, word_ready, word : In, Out, In
        The same words of a streamed matrix.
    scale_re, scale_address, scale_data : Out, Out, In
        Read port of the scales.
    room : In
        Whether the logits unit takes another block (16 columns) of a throttled product.
    block_issued : Out
        A block of a throttled product was issued.
    running : Out
        The input of an accepted product is still being read.
    scales_used : Out
        The last scales of a block of a streamed matrix are read in this cycle.
    y : Out(result_stream)
    """

    def __init__(self, config: Config, store_address: int, scale_address: int) -> None:
        self.config = config
        hw = config.hardware
        act = hw.formats.activation.width
        self.command_layout = matvec_command(store_address, scale_address)
        word = hw.rows * COLUMNS * 4
        super().__init__(
            {
                "valid": In(1),
                "ready": Out(1),
                "command": In(self.command_layout),
                "chunk": Out(10),
                "x": In(lanes(signed(act), hw.rows)),
                "group": Out(5),
                "total": In(signed(act + 6)),
                "total_next": In(signed(act + 6)),
                "store_re": Out(1),
                "store_address": Out(store_address),
                "store_data": In(word),
                "word_valid": In(1),
                "word_ready": Out(1),
                "word": In(word),
                "scale_re": Out(1),
                "scale_address": Out(scale_address),
                "scale_data": In(SCALE_WORD),
                "room": In(1),
                "block_issued": Out(1),
                "running": Out(1),
                "scales_used": Out(1),
                "y": Out(result_stream(config)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        hw = self.config.hardware
        act, lanes_out = hw.formats.activation.width, hw.vector_lanes
        max_beats = COLUMNS // lanes_out
        has_store = bool(hw.resident)
        per_group = 64 // hw.rows

        # What a group carries from its last chunk to the result.
        meta = data.StructLayout(
            {
                "scales": len(self.scale_address),
                "group": 5,
                "join": 1,
                "beats": 3,
                "first_group": 1,
                "last_group": 1,
                "first_block": 1,
                "last_block": 1,
                "streamed": 1,
                "tag": TAG,
            }
        )

        # S0: one chunk of one group of one block a cycle.
        cmd = Signal(self.command_layout)
        active = Signal()
        block, group, chunk = Signal(12), Signal(1), Signal(6)
        parity = Signal()  # streamed matrices alternate between two sets of scales
        store_at, scale_at = Signal.like(cmd.store), Signal.like(cmd.scales)
        draining = Signal(range(max_beats + 1))
        first_chunk, last_chunk = chunk == 0, chunk == cmd.chunks
        last_group, last_block = group == cmd.groups, block == cmd.blocks
        block_start = first_chunk & (group == 0)
        go = Signal()
        m.d.comb += go.eq(
            active
            & (~cmd.streamed | self.word_valid)
            & ~(last_chunk & (draining != 0))
            & ~(cmd.throttled & block_start & ~self.room)
        )
        done = go & last_chunk & last_group & last_block
        m.d.comb += [
            self.ready.eq(~active | done),
            self.word_ready.eq(go & cmd.streamed),
            self.store_re.eq(go & ~cmd.streamed),
            self.store_address.eq(store_at),
            self.block_issued.eq(go & cmd.throttled & block_start),
            self.chunk.eq(cmd.slot * per_group + group * (cmd.chunks + 1) + chunk),
        ]
        with m.If(draining != 0):
            m.d.sync += draining.eq(draining - 1)
        with m.If(go):
            m.d.sync += [store_at.eq(store_at + 1), chunk.eq(chunk + 1)]
            with m.If(last_chunk):
                m.d.sync += [
                    chunk.eq(0),
                    group.eq(group + 1),
                    scale_at.eq(scale_at + 1),
                    draining.eq(cmd.beats),
                ]
                with m.If(last_group):
                    m.d.sync += [group.eq(0), block.eq(block + 1)]
                    with m.If(cmd.streamed):
                        m.d.sync += [
                            parity.eq(~parity),
                            scale_at.eq(cmd.scales + Mux(parity, 0, 2)),
                        ]
            with m.If(done):
                m.d.sync += active.eq(0)
        with m.If(self.valid & self.ready):
            start = parity ^ (done & cmd.streamed)
            m.d.sync += [
                active.eq(1),
                cmd.eq(self.command),
                block.eq(0),
                group.eq(0),
                chunk.eq(0),
                store_at.eq(self.command.store),
                scale_at.eq(self.command.scales + Mux(self.command.streamed & start, 2, 0)),
            ]

        # S1: products, summed column by column.
        valid1, first1, last1 = Signal(), Signal(), Signal()
        meta1 = Signal(meta)
        x1 = Signal.like(self.x)
        word1 = Signal(len(self.word))
        streamed1 = Signal()
        m.d.sync += [valid1.eq(go), first1.eq(first_chunk), last1.eq(go & last_chunk)]
        with m.If(go):
            m.d.sync += [
                x1.eq(self.x),
                streamed1.eq(cmd.streamed),
                meta1.scales.eq(scale_at),
                meta1.group.eq(cmd.slot + group),
                meta1.join.eq(cmd.join),
                meta1.beats.eq(cmd.beats),
                meta1.first_group.eq(group == 0),
                meta1.last_group.eq(last_group),
                meta1.first_block.eq(block == 0),
                meta1.last_block.eq(last_block),
                meta1.streamed.eq(cmd.streamed),
                meta1.tag.eq(cmd.tag),
            ]
            with m.If(cmd.streamed):
                m.d.sync += word1.eq(self.word)
        weights = Signal(len(self.word))
        if has_store and self.config.hardware.resident != ("kda", "mla", "moe", "head"):
            m.d.comb += weights.eq(Mux(streamed1, word1, self.store_data))
        else:
            m.d.comb += weights.eq(self.store_data if has_store else word1)
        log_rows = hw.rows.bit_length() - 1
        dot_width = act + 4 + log_rows
        dots = [Signal(signed(dot_width), name=f"dot{c}") for c in range(COLUMNS)]
        for c, dot in enumerate(dots):
            products = []
            for r in range(hw.rows):
                nibble = (r // 2) * COLUMNS * 2 + 2 * c + r % 2
                q = weights[4 * nibble : 4 * nibble + 4]
                products.append(x1[r] * q)
            with m.If(valid1):
                m.d.sync += dot.eq(tree_sum(products))

        # S2: accumulate the chunks of a group.
        valid2, first2, last2 = Signal(), Signal(), Signal()
        meta2 = Signal(meta)
        m.d.sync += [valid2.eq(valid1), first2.eq(first1), last2.eq(last1)]
        with m.If(last1):
            m.d.sync += meta2.eq(meta1)
        acc_width = act + 4 + 7
        held = [Signal(signed(acc_width), name=f"held{c}") for c in range(COLUMNS)]
        for c, dot in enumerate(dots):
            acc = Signal(signed(acc_width), name=f"acc{c}")
            total = Signal(signed(acc_width), name=f"sum{c}")
            m.d.comb += total.eq(Mux(first2, 0, acc) + dot)
            with m.If(valid2):
                m.d.sync += acc.eq(total)
            with m.If(last2):
                m.d.sync += held[c].eq(total)
        m.d.comb += [
            self.running.eq(active),
            self.scale_re.eq(last2),
            self.scales_used.eq(last2 & meta2.last_group & meta2.streamed),
            self.scale_address.eq(meta2.scales),
            self.group.eq(meta2.group),
        ]

        # S3: a finished group is held while its columns leave.
        meta3 = Signal(meta)
        valid3 = Signal()
        beat3 = Signal(3)
        total3 = Signal(signed(act + 7))
        with m.If(last2):
            m.d.sync += [
                meta3.eq(meta2),
                valid3.eq(1),
                beat3.eq(0),
                total3.eq(Mux(meta2.join, self.total + self.total_next, self.total)),
            ]
        with m.Elif(valid3):
            m.d.sync += beat3.eq(beat3 + 1)
            with m.If(beat3 == meta3.beats):
                m.d.sync += valid3.eq(0)
        scales = [self.scale_data[16 * c : 16 * c + 16].as_signed() for c in range(COLUMNS)]
        zeros = [self.scale_data[256 + 8 * c : 264 + 8 * c] for c in range(COLUMNS)]

        # S4 to S6 work on `vector_lanes` columns a cycle.
        valid4, valid5 = Signal(), Signal()
        meta4, meta5 = Signal(meta), Signal(meta)
        beat4, beat5 = Signal(3), Signal(3)
        m.d.sync += [valid4.eq(valid3), meta4.eq(meta3), beat4.eq(beat3)]
        m.d.sync += [valid5.eq(valid4), meta5.eq(meta4), beat5.eq(beat4)]
        shift = hw.formats.activation.frac + 12 - 18
        y = Signal(result_stream(self.config))
        index = Signal(12)
        final = Signal()
        m.d.comb += final.eq(valid5 & meta5.last_group)
        for lane in range(lanes_out):
            columns = range(lane, COLUMNS, lanes_out)
            pick = beat3[: max(max_beats - 1, 1).bit_length()]
            z = Array([zeros[c] for c in columns])[pick]
            s = Array([scales[c] for c in columns])[pick]
            h = Array([held[c] for c in columns])[pick]
            difference = Signal(signed(acc_width + 5), name=f"difference{lane}")
            scale = Signal(signed(16), name=f"scale{lane}")
            m.d.sync += [difference.eq(h - z * total3), scale.eq(s)]
            product = Signal(signed(acc_width + 5 + 16), name=f"product{lane}")
            m.d.sync += product.eq(difference * scale)
            total = product
            if self._two_groups:
                parts = Array(
                    Signal(signed(len(product) + 1), name=f"part{lane}_{b}")
                    for b in range(max_beats)
                )
                part = parts[beat5[: len(pick)]]
                total = Mux(meta5.first_group, 0, part) + product
                with m.If(valid5):
                    m.d.sync += part.eq(total)
            m.d.sync += y.data[lane].eq(convert(total, shift, RES))
        first = meta5.first_block & (beat5 == 0)
        now = Mux(first, 0, index)
        m.d.sync += y.valid.eq(final)
        with m.If(final):
            m.d.sync += [
                index.eq(now + 1),
                y.index.eq(now),
                y.last.eq(meta5.last_block & (beat5 == meta5.beats)),
                y.tag.eq(meta5.tag),
            ]
        m.d.comb += self.y.eq(y)
        return m

    @property
    def _two_groups(self) -> bool:
        m = self.config.model
        fan_ins = (m.d_model, m.kda_width, m.kda_dim, m.mla_dc, m.n_heads * m.mla_dv, m.d_ff)
        return max(fan_ins) > 64
