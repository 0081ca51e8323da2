"""Metrics, table and picture of simulated runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from golden_model.config import Config
from golden_model.files import write_atomically
from golden_model.roofline import roofline, streaming_cycles
from sim.phases import Phase
from sim.verify import Comparison, Expected

CLOCK_HZ = 100_000_000


@dataclass(frozen=True)
class Run:
    """One simulated run and what was expected of it."""

    comparison: Comparison
    expected: Expected


def tokens_per_second(cycles_per_token: float) -> float:
    """Throughput at 100 MHz."""
    return CLOCK_HZ / cycles_per_token


def metrics(config: Config, runs: Sequence[Run]) -> dict[str, Any]:
    """Content of ``metrics.json``; the first run is the one that counts."""
    first = runs[0].comparison
    return {
        "config": config.name,
        "cycles_per_token": round(first.cycles_per_token, 2),
        "tokens_per_second": round(tokens_per_second(first.cycles_per_token)),
        "roofline_cycles_per_token": roofline(config),
        "streaming_cycles_per_token": streaming_cycles(config.model),
        "runs": [
            {
                "seq_len": run.comparison.seq_len,
                "cycles": run.comparison.result.cycles,
                "bit_exact": run.comparison.bit_exact,
                "one_minus_cos_max": run.comparison.verdict.one_minus_cos_max,
                "argmax_agree": run.comparison.verdict.argmax_agree,
                "read_beats": run.comparison.result.read_beats,
                "write_beats": run.comparison.result.write_beats,
                "simulated_cycles_per_second": round(
                    run.comparison.result.cycles / run.comparison.result.seconds
                ),
                "golden_model_tokens_per_second": round(run.expected.golden_tokens_per_second),
            }
            for run in runs
        ],
    }


def write_metrics(path: Path, values: dict[str, Any]) -> None:
    """Write metrics as JSON, atomically."""
    write_atomically(path, json.dumps(values, indent=2) + "\n")


def table(config: Config, runs: Sequence[Run]) -> str:
    """What ``delta45 sim`` prints: a column per run."""
    bound, streaming = roofline(config), streaming_cycles(config.model)
    rows: list[tuple[str, list[str]]] = [
        ("tokens in the run", [f"{r.comparison.seq_len}" for r in runs]),
        ("cycles", [f"{r.comparison.result.cycles:,}" for r in runs]),
        ("cycles per token", [f"{r.comparison.cycles_per_token:,.1f}" for r in runs]),
        (
            "tokens/s at 100 MHz",
            [f"{tokens_per_second(r.comparison.cycles_per_token):,.0f}" for r in runs],
        ),
        (
            f"share of the roofline ({bound:,} cycles)",
            [f"{bound / r.comparison.cycles_per_token:.1%}" for r in runs],
        ),
        (
            f"times streaming all weights ({streaming:,} cycles)",
            [f"{streaming / r.comparison.cycles_per_token:.2f}" for r in runs],
        ),
        ("largest 1 - cosine", [f"{r.comparison.verdict.one_minus_cos_max:.1e}" for r in runs]),
        ("argmax agreement", [f"{r.comparison.verdict.argmax_agree:.1%}" for r in runs]),
        ("bit-exact", ["yes" if r.comparison.bit_exact else "NO" for r in runs]),
        (
            "golden model tokens/s, this machine",
            [f"{r.expected.golden_tokens_per_second:,.0f}" for r in runs],
        ),
    ]
    label = max(len(name) for name, _ in rows)
    width = max(10, *(len(cell) for _, cells in rows for cell in cells))
    lines = [
        f"{name:<{label}}  " + "  ".join(f"{cell:>{width}}" for cell in cells)
        for name, cells in rows
    ]
    return "\n".join(lines)


def draw_phases(config: Config, phases: Sequence[Phase], tokens: int, path: Path) -> None:
    """Draw where the cycles of a token go, one bar per step of the program.

    The cycles are means over a run of ``tokens``, loading included.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    groups = list(dict.fromkeys(p.group for p in phases))
    colours = {g: plt.get_cmap("tab10")(i % 10) for i, g in enumerate(groups)}
    figure, axes = plt.subplots(figsize=(10, 0.9 + 0.19 * len(phases)), layout="constrained")
    start = 0.0
    for i, phase in enumerate(phases):
        axes.barh(i, phase.cycles, left=start, color=colours[phase.group], height=0.8)
        start += phase.cycles
        axes.text(start, i, f" {phase.cycles:.0f}", va="center", fontsize=7)
    axes.set_yticks(range(len(phases)), [p.label for p in phases], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"clock cycles of one token (mean of {tokens}, loading included)")
    axes.set_title(f"{config.name}: {start:,.0f} cycles per token")
    totals = {g: sum(p.cycles for p in phases if p.group == g) for g in groups}
    handles = [Rectangle((0, 0), 1, 1, color=colours[g]) for g in groups]
    axes.legend(handles, [f"{g}: {totals[g]:.0f}" for g in groups], fontsize=8, loc="upper right")
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format=path.suffix[1:], dpi=120)
    plt.close(figure)
    temporary.replace(path)
