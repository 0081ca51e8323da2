"""The one memory of the chip, and the memory of parameters built on it."""

from __future__ import annotations

from amaranth.hdl import Cat, ClockSignal, Elaboratable, Instance, Module, Mux, Signal, signed
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

from hdl.layouts import lanes

#: Module names in the generated Verilog; the second one is never read and written at once.
TWO_PORT, SINGLE_PORT = "delta45_memory", "delta45_memory_1rw"


class VerilogPlatform:
    """Passed to ``elaborate`` when memories are to be instances of the memory modules.

    It collects the memories met on the way in ``memories``.
    """

    def __init__(self) -> None:
        self.memories: list[Memory] = []


class Memory(wiring.Component):
    """A memory with one write port and one synchronous read port.

    Reading a word while it is written returns the old value; ``rdata`` keeps its
    value while ``re`` is low. Contents are undefined until written.

    Parameters
    ----------
    depth, width : int
        Words and bits per word.
    single_port : bool
        Promise that no cycle both reads and writes, so that a single-port macro serves.

    Attributes
    ----------
    we, waddr, wdata, wstrb : In
        Write port; bit i of ``wstrb`` writes bits 8i+7:8i.
    re, raddr : In
    rdata : Out
    """

    def __init__(self, depth: int, width: int, *, single_port: bool = False) -> None:
        if depth < 1 or width < 1:
            raise ValueError(f"a memory of {depth} words of {width} bits is impossible")
        self.depth, self.width, self.single_port = max(depth, 2), width, single_port
        address = (self.depth - 1).bit_length()
        super().__init__(
            {
                "we": In(1),
                "waddr": In(address),
                "wdata": In(width),
                "wstrb": In(-(-width // 8), init=-1),
                "re": In(1, init=1),
                "raddr": In(address),
                "rdata": Out(width),
            }
        )

    @property
    def bits(self) -> int:
        """Capacity."""
        return self.depth * self.width

    def elaborate(self, platform: object) -> Elaboratable:
        if isinstance(platform, VerilogPlatform):
            platform.memories.append(self)
            m = Module()
            m.submodules.cells = Instance(
                SINGLE_PORT if self.single_port else TWO_PORT,
                p_DEPTH=self.depth,
                p_WIDTH=self.width,
                i_clk=ClockSignal(),
                i_we=self.we,
                i_waddr=self.waddr,
                i_wdata=self.wdata,
                i_wstrb=self.wstrb,
                i_re=self.re,
                i_raddr=self.raddr,
                o_rdata=self.rdata,
            )
            return m
        m = Module()
        padded = 8 * len(self.wstrb)
        m.submodules.cells = cells = memory.Memory(shape=padded, depth=self.depth, init=[])
        write, read = cells.write_port(granularity=8), cells.read_port()
        m.d.comb += [
            write.addr.eq(self.waddr),
            write.data.eq(self.wdata),
            write.en.eq(Mux(self.we, self.wstrb, 0)),
            read.addr.eq(self.raddr),
            read.en.eq(self.re),
            self.rdata.eq(read.data),
        ]
        return m


class ParamMemory(wiring.Component):
    """int16 parameters, written 8 at a time and read ``vector_lanes`` at a time.

    Parameters
    ----------
    beats : int
        Capacity in beats of 8 values.
    vector_lanes : int
        Values per read; at most 8.

    Attributes
    ----------
    we, waddr, wdata : In
        One beat of 128 bits.
    raddr : In
        Address in units of ``vector_lanes`` values.
    data : Out
        The values, one cycle later.
    """

    def __init__(self, beats: int, vector_lanes: int) -> None:
        self.beats, self.lanes = beats, vector_lanes
        self.memory = Memory(beats, 128, single_port=True)
        super().__init__(
            {
                "we": In(1),
                "waddr": In(len(self.memory.waddr)),
                "wdata": In(128),
                "raddr": In(len(self.memory.raddr) + (8 // vector_lanes).bit_length() - 1),
                "data": Out(lanes(signed(16), vector_lanes)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.memory = mem = self.memory
        split = (8 // self.lanes).bit_length() - 1
        part = Signal(max(split, 1))
        m.d.sync += part.eq(self.raddr[:split] if split else 0)
        m.d.comb += [
            mem.we.eq(self.we),
            mem.waddr.eq(self.waddr),
            mem.wdata.eq(self.wdata),
            mem.re.eq(~self.we),
            mem.raddr.eq(self.raddr[split:]),
            Cat(self.data).eq(mem.rdata.word_select(part, 16 * self.lanes)),
        ]
        return m


_MODEL = """\
module {name} #(
    parameter DEPTH = 2,
    parameter WIDTH = 8
) (
    input  wire                      clk,
    input  wire                      we,
    input  wire [$clog2(DEPTH)-1:0]  waddr,
    input  wire [WIDTH-1:0]          wdata,
    input  wire [(WIDTH+7)/8-1:0]    wstrb,
    input  wire                      re,
    input  wire [$clog2(DEPTH)-1:0]  raddr,
    output reg  [WIDTH-1:0]          rdata
);
    localparam BYTES = (WIDTH + 7) / 8;
    reg [WIDTH-1:0] cells [0:DEPTH-1];
    integer i;
    always @(posedge clk) begin
        if (re) rdata <= cells[raddr];
        if (we)
            for (i = 0; i < WIDTH; i = i + 1)
                if (wstrb[i/8]) cells[waddr][i] <= wdata[i];
    end
{check}endmodule
"""
_WHOLE_MODEL_CHECK = """\
`ifndef SYNTHESIS
    // The promise that lets a single-port macro serve.
    always @(posedge clk)
        if (we && re) begin
            $display("%m: read and written in the same cycle");
            $stop;
        end
`endif
"""

#: Verilog of the simulation models of the memory modules.
MEMORY_MODELS = (
    "// Simulation models of the memory modules; a macro or a black box takes their place.\n"
    "// One write port with a strobe per byte, one synchronous read port; reading a word\n"
    "// while it is written returns the old value.\n\n"
    + _MODEL.format(name=TWO_PORT, check="")
    + "\n"
    + _MODEL.format(name=SINGLE_PORT, check=_WHOLE_MODEL_CHECK)
)
