"""The chip in Amaranth: one module per block; `hdl.top` wires them together."""
