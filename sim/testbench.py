"""cocotb test that drives one run of an image; :mod:`sim.run` starts it.

What to do comes from the environment: ``DELTA45_RUN`` names a JSON file with the
settings of :class:`sim.run.Settings`, ``DELTA45_RESULT`` the JSON file to write.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, First, RisingEdge


@cocotb.test()
async def run_image(dut) -> None:
    """Reset, run to DONE, dump the memory."""
    settings = json.loads(Path(os.environ["DELTA45_RUN"]).read_text())
    Clock(dut.clk, 10, "ns", impl="gpi").start()
    dut.rst_n.value = 0
    dut.load.value = 1
    dut.dump.value = 0
    dut.run.value = 0
    for name in ("latency", "jitter", "refuse", "stall", "out_first", "out_last"):
        getattr(dut, name).value = settings[name]
    await ClockCycles(dut.clk, 5)

    async def reset() -> None:
        dut.rst_n.value = 0
        dut.load.value = 1
        await ClockCycles(dut.clk, 3)
        dut.load.value = 0
        dut.rst_n.value = 1
        await ClockCycles(dut.clk, 2)

    async def command() -> None:
        dut.run.value = 1
        await ClockCycles(dut.clk, 1)
        dut.run.value = 0

    await reset()
    if settings["reset_after"]:
        await command()
        await ClockCycles(dut.clk, settings["reset_after"])
        await reset()
    for _ in range(settings["repeat"]):
        await command()
        await ClockCycles(dut.clk, 2)
        if not dut.done.value:
            limit = ClockCycles(dut.clk, settings["max_cycles"])
            await First(RisingEdge(dut.done), limit)
        await ClockCycles(dut.clk, 2)
    dut.dump.value = 1
    await ClockCycles(dut.clk, 2)
    names = ("done", "cycles", "read_beats", "write_beats", "last_write", "answer", "violation")
    result = {name: int(getattr(dut, name).value) for name in names}
    Path(os.environ["DELTA45_RESULT"]).write_text(json.dumps(result))
    assert result["violation"] == 0, f"bus rule {result['violation']} broken"
    assert result["done"], f"no DONE within {settings['max_cycles']} cycles"
