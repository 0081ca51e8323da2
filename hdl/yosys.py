"""Yosys (the ``pyosys`` package) as a child process, so that its output stays apart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_CHILD = """
import sys
from pyosys import libyosys as yosys
design = yosys.Design()
for command in sys.stdin.read().splitlines():
    yosys.run_pass(command, design)
"""


class YosysError(RuntimeError):
    """A pass failed or Yosys is missing; holds the end of its output."""


def run_yosys(commands: Sequence[str], log: Path | None = None) -> str:
    """Run passes on a design of their own.

    Parameters
    ----------
    commands : sequence of str
        Yosys commands in order.
    log : Path, optional
        Where to keep the output.

    Returns
    -------
    str
        What Yosys printed.

    Raises
    ------
    YosysError
        A command failed.
    """
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input="\n".join(commands),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(done.stdout)
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-5:])
        if "No module named 'pyosys'" in tail:
            tail = "the Python package pyosys is missing; run make setup"
        raise YosysError(f"Yosys stopped: {tail}")
    return done.stdout
