"""Memory port: one register of requests between the units and the external memory."""

from __future__ import annotations

from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out


class MemoryPort(wiring.Component):
    """Merges writes and reads; a write goes first.

    Attributes
    ----------
    read_valid, read_ready, read_address : In, Out, In
    write_valid, write_ready, write_address, write_data, write_strobe : In, Out, In, In, In
        Addresses count beats of 16 bytes.
    idle : Out
        No request waits.
    req_valid, req_ready, req_write, req_addr, req_wdata, req_wstrb
        The bus; byte addresses.
    """

    def __init__(self) -> None:
        super().__init__(
            {
                "read_valid": In(1),
                "read_ready": Out(1),
                "read_address": In(28),
                "write_valid": In(1),
                "write_ready": Out(1),
                "write_address": In(28),
                "write_data": In(128),
                "write_strobe": In(16),
                "idle": Out(1),
                "req_valid": Out(1),
                "req_ready": In(1),
                "req_write": Out(1),
                "req_addr": Out(36),
                "req_wdata": Out(128),
                "req_wstrb": Out(16),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.d.comb += [
            self.write_ready.eq(~self.req_valid | self.req_ready),
            self.read_ready.eq(self.write_ready & ~self.write_valid),
            self.idle.eq(~self.req_valid),
        ]
        with m.If(self.write_ready):
            m.d.sync += self.req_valid.eq(self.write_valid | self.read_valid)
            with m.If(self.write_valid):
                m.d.sync += [
                    self.req_write.eq(1),
                    self.req_addr.eq(self.write_address << 4),
                    self.req_wdata.eq(self.write_data),
                    self.req_wstrb.eq(self.write_strobe),
                ]
            with m.Elif(self.read_valid):
                m.d.sync += [self.req_write.eq(0), self.req_addr.eq(self.read_address << 4)]
        return m
