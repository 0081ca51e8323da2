"""Plain Verilog of the chip, with the memory modules apart from the design."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from amaranth.back import rtlil

from golden_model.config import Config
from golden_model.files import write_atomically
from hdl.memory import MEMORY_MODELS, Memory, VerilogPlatform
from hdl.top import Top
from hdl.yosys import run_yosys

#: Passes from Amaranth's RTLIL to readable Verilog. Initial values go: the reset is
#: the only initialisation to rely on.
_PASSES = (
    "proc_prune",
    "proc_clean",
    "setattr -unset init w:*",
    "delete w:$verilog_initial_trigger",
)


@dataclass(frozen=True)
class Exported:
    """Files of an exported design and the memories that it instantiates."""

    design: Path
    models: Path
    file_list: Path
    memories: tuple[Memory, ...]


def to_rtlil(config: Config, top: str = "delta45_top") -> tuple[str, tuple[Memory, ...]]:
    """RTLIL text of the chip, and its memories."""
    platform = VerilogPlatform()
    text = rtlil.convert(Top(config), name=top, platform=platform)
    return text, tuple(platform.memories)


def write_verilog(config: Config, folder: Path, top: str = "delta45_top") -> Exported:
    """Write ``{top}.v``, ``memories.v`` and the file list ``{top}.f`` into a folder."""
    text, memories = to_rtlil(config, top)
    folder.mkdir(parents=True, exist_ok=True)
    exported = Exported(folder / f"{top}.v", folder / "memories.v", folder / f"{top}.f", memories)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source, result = Path(scratch) / "top.il", Path(scratch) / "top.v"
        source.write_text(text)
        final = f"write_verilog -norename -noattr {result}"
        run_yosys([f"read_rtlil {source}", *_PASSES, final])
        write_atomically(exported.design, result.read_text())
    write_atomically(exported.models, MEMORY_MODELS)
    write_atomically(exported.file_list, f"{exported.design.name}\n{exported.models.name}\n")
    return exported
