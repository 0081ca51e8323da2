"""Simulation of the chip: cocotb on Verilator, against the golden model."""
