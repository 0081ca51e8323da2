"""The ``delta45`` command."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from golden_model.config import Config, ConfigError, load_config
from golden_model.image import Image, ImageError, load_image, synthetic_image

#: Seed of the published vectors, and of every run that names none.
SEED = 20260706
_ROOT = Path(__file__).resolve().parent.parent


class ConfigFile(click.ParamType):
    """Path of a YAML file, or the name of one in ``configs/``."""

    name = "config"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Load and check the configuration."""
        if isinstance(value, Config):
            return value
        path = Path(value)
        shipped = _ROOT / "configs" / f"{value}.yaml"
        if not path.suffix and not path.is_file():
            if not shipped.is_file():
                names = ", ".join(sorted(p.stem for p in shipped.parent.glob("*.yaml")))
                self.fail(f"no configuration is called {value!r} (shipped: {names})", param, ctx)
            path = shipped
        return load_config(path)


def _config_option(command: Callable) -> Callable:
    return click.option(
        "-c",
        "--config",
        type=ConfigFile(),
        default="nano",
        show_default=True,
        help="YAML file, or the name of one in configs/.",
    )(command)


def _plain_errors(command: Callable) -> Callable:
    """Errors of a user's making end in one sentence, not in a traceback."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        from hdl.yosys import YosysError
        from sim.run import SimulationError

        try:
            return command(*args, **kwargs)
        except (ConfigError, ImageError, SimulationError, YosysError) as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            name = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(f"{name}{error.strerror or error}") from error

    return wrapper


class _Group(click.Group):
    """Turns errors raised while arguments are read into one sentence too."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="delta45")
def main() -> None:
    """Turn one YAML file into a decoder chip, prove it and lay it out."""


@main.command()
@_config_option
@click.option("--seed", default=SEED, show_default=True, help="Seed of weights and prompt.")
@click.option("--tokens", type=click.IntRange(1), help="One run of so many tokens.")
@click.option("--image", type=click.Path(path_type=Path), help="Run this image instead.")
@click.option("--latency", default=24, show_default=True, help="Least memory latency in cycles.")
@click.option("--jitter", type=int, help="Up to so many cycles more [12; short runs 24].")
@click.option("--refuse", type=int, help="Refused requests, per mille [0; short runs 50].")
@click.option("--stall", default=0, show_default=True, help="Stalled answers, per mille.")
@click.option("--random-reset", is_flag=True, help="Flip-flops start with random contents.")
@click.option("--waves", is_flag=True, help="Leave an FST file of each run.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Default: build/sim/CONFIG.")
@_plain_errors
def sim(
    config: Config,
    seed: int,
    tokens: int | None,
    image: Path | None,
    latency: int,
    jitter: int | None,
    refuse: int | None,
    stall: int,
    random_reset: bool,
    waves: bool,
    out: Path | None,
) -> None:
    """Simulate the chip and compare every bit with the golden model."""
    from sim.phases import phases
    from sim.report import Run, draw_phases, metrics, table, write_metrics
    from sim.run import Settings, Simulator
    from sim.verify import compare, expect

    images = _images(config, seed, tokens, image)
    folder = out or Path("build/sim") / config.name
    simulator = Simulator(config, folder, random_reset=random_reset, waves=waves)
    runs = []
    click.echo(f"{config.name}: building the simulator (kept in {folder})")
    simulator.build()
    for number, item in enumerate(images):
        length = len(item.tokens)
        click.echo(f"{config.name}: running {length} tokens")
        # The bus specification asks more patience of the short runs.
        short = number > 0
        settings = Settings(
            latency=latency,
            jitter=jitter if jitter is not None else 24 if short else 12,
            refuse=refuse if refuse is not None else 50 if short else 0,
            stall=stall,
            seed=seed & 0x7FFFFFFF,
            waves=waves,
        )
        result = simulator.run(item, settings, f"run{number}")
        expected = expect(config, item)
        runs.append(Run(compare(item, expected, result), expected))
    click.echo()
    click.echo(table(config, runs))
    click.echo()
    write_metrics(folder / "metrics.json", metrics(config, runs))
    first = runs[0].comparison
    steps = phases(config, first.result.profile.tolist(), first.seq_len)
    draw_phases(config, steps, first.seq_len, folder / "phases.svg")
    click.echo(f"written: {folder / 'metrics.json'}, {folder / 'phases.svg'}")
    if waves:
        names = ", ".join(str(folder / f"run{i}" / "dump.fst") for i in range(len(runs)))
        click.echo(f"waves: {names}")
    faults = [f"{r.comparison.seq_len} tokens: {f}" for r in runs for f in r.comparison.faults]
    if faults:
        raise click.ClickException("the chip differs from the golden model: " + "; ".join(faults))
    if not all(r.comparison.verdict.must for r in runs):
        raise click.ClickException("bit-exact, but too far from the float reference")


def _images(config: Config, seed: int, tokens: int | None, path: Path | None) -> list[Image]:
    if path is not None:
        return [load_image(path, config.model)]
    if tokens is not None:
        return [_synthetic(config, seed, 0, tokens)]
    return [_synthetic(config, seed, i, n) for i, n in enumerate(config.model.seq_lens)]


def _synthetic(config: Config, seed: int, prompt: int, length: int) -> Image:
    if length > config.model.max_seq:
        raise ConfigError(f"{length} tokens, {config.name} decodes at most {config.model.max_seq}")
    return synthetic_image(config.model, seed, prompt, length)


@main.command()
@_config_option
@click.option("--seed", default=SEED, show_default=True, help="Seed of weights and prompt.")
@click.option("--tokens", type=click.IntRange(1), help="Length; default: the first of seq_lens.")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="File to write.")
@_plain_errors
def image(config: Config, seed: int, tokens: int | None, out: Path) -> None:
    """Write a memory image of synthetic weights and a prompt."""
    from golden_model.files import write_atomically

    built = _synthetic(config, seed, 0, tokens or config.model.seq_lens[0])
    write_atomically(out, built.data.tobytes())
    click.echo(f"written: {out}, {built.data.size:,} bytes, {len(built.tokens)} tokens")


@main.command()
@_config_option
@click.option("--top", default="delta45_top", show_default=True, help="Name of the top module.")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="Folder.")
@_plain_errors
def verilog(config: Config, top: str, out: Path) -> None:
    """Write plain Verilog, its file list and the memory models."""
    from hdl.export import write_verilog

    if not top.isidentifier() or not top.isascii():
        raise click.ClickException(f"--top: {top!r} is not a Verilog identifier")
    exported = write_verilog(config, out, top)
    for path in (exported.design, exported.models, exported.file_list):
        click.echo(f"written: {path}")
    bits = sum(m.bits for m in exported.memories)
    click.echo(f"{len(exported.memories)} memories, {bits:,} bits")


@main.command()
def doctor() -> None:
    """List every tool: version, path, and how to get it where it is missing."""
    from delta45.doctor import report

    text, missing = report()
    click.echo(text)
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
