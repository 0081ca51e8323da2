"""Names of the sequencer's steps, for the profile of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from golden_model.config import Config
from hdl.program import MixOp, Program

_LAYER = {"L": "delta attention", "F": "latent attention"}


@dataclass(frozen=True)
class Phase:
    """A step of a token's program: its name, its part of the network, its cycles.

    A step's cycles run from the start of the step before to its own start: that is
    how long it waited for its inputs, its weights or its unit.
    """

    label: str
    group: str
    cycles: float


def phases(config: Config, profile: Sequence[int], tokens: int) -> list[Phase]:
    """Mean cycles per token and step.

    Args:
        config: the chip.
        profile: cycles of a whole run by step, as the bench counts them.
        tokens: positions of the run.
    """
    program = Program(config)
    model = config.model
    found = []
    mixes = 0
    for step, cycles in zip(program.steps, profile, strict=True):
        if step == "embed":
            label, group = "embedding, load, tail of the head", "head and embedding"
        elif isinstance(step, MixOp):
            layer, second = divmod(mixes, 2)
            mixes += 1
            group = "residual mixers and norms"
            if layer == model.n_layers:
                label = "output mixer"
            else:
                label = f"L{layer} mixer before {'experts' if second else 'attention'}"
        else:
            op = program.products[int(step)]
            label = op.tensor
            if op.rank is not None:
                label = label.replace(".e0.", f".choice {op.rank + 1}.")
            if op.family == "moe":
                group = f"L{op.layer} experts"
            elif op.family == "head":
                group = "head and embedding"
            else:
                group = f"L{op.layer} {_LAYER[model.layers[op.layer]]}"
        found.append(Phase(label, group, cycles / tokens))
    return found
