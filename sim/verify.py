"""Compares a run of the chip with the integer model and the float reference."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from golden_model.config import Config
from golden_model.image import STATUS_DONE, Image
from golden_model.integer import IntegerModel, argmax, output_bytes
from golden_model.judge import Verdict, judge
from golden_model.reference import Reference
from sim.run import Result

#: Answer of the chip on its response channel after a run.
ANSWER = 0x0000D0DE


@dataclass(frozen=True)
class Expected:
    """What an image must give: integer model's output and float reference's logits."""

    logits: npt.NDArray[np.int64]
    reference: npt.NDArray[np.float32]
    golden_tokens_per_second: float

    @property
    def verdict(self) -> Verdict:
        """The integer model judged by the float reference."""
        return judge(self.logits, argmax(self.logits), self.reference)


@dataclass(frozen=True)
class Comparison:
    """A run of the chip, judged.

    ``faults`` names each difference; ``verdict`` judges the logits that the chip wrote.
    """

    seq_len: int
    result: Result
    faults: tuple[str, ...]
    verdict: Verdict

    @property
    def bit_exact(self) -> bool:
        """Every bit of the output as the integer model says, status word last."""
        return not self.faults

    @property
    def cycles_per_token(self) -> float:
        """Clock cycles from command to answer, loading included, per token."""
        return self.result.cycles / self.seq_len


def expect(config: Config, image: Image) -> Expected:
    """Run both golden models on an image."""
    began = time.perf_counter()
    logits = IntegerModel(config, image.weights).run(image.tokens)
    seconds = time.perf_counter() - began
    reference = Reference(image.model, image.weights).run(image.tokens)
    return Expected(logits, reference, len(image.tokens) / seconds)


def compare(image: Image, expected: Expected, result: Result) -> Comparison:
    """Judge what a run left in memory."""
    layout = image.layout
    length = len(image.tokens)
    want_logits, want_argmax = output_bytes(expected.logits)
    memory = result.memory
    got_logits = memory[layout.logits : layout.logits + want_logits.size]
    got_argmax = memory[layout.argmax : layout.argmax + want_argmax.size]
    faults = []
    rows = (got_logits != want_logits).reshape(length, -1).any(axis=1)
    if rows.any():
        faults.append(f"logits of {rows.sum()} rows differ, first row {int(rows.argmax())}")
    wrong = got_argmax.view("<u4") != want_argmax.view("<u4")
    if wrong.any():
        faults.append(f"{wrong.sum()} argmax differ, first row {int(wrong.argmax())}")
    status = int(memory[layout.status : layout.status + 4].view("<u4")[0])
    if status != STATUS_DONE:
        faults.append(f"status is 0x{status:08X}, not 0x{STATUS_DONE:08X}")
    if result.last_write != layout.status // 16:
        faults.append("the status word was not written last")
    if result.answer != ANSWER:
        faults.append(f"the answer is 0x{result.answer:08X}, not 0x{ANSWER:08X}")
    if not np.array_equal(memory[: layout.logits], image.data[: layout.logits]):
        faults.append("weights or tokens were overwritten")
    logits = got_logits.view("<i4").reshape(length, -1)[:, : image.model.vocab]
    chosen = np.minimum(got_argmax.view("<u4").astype(np.int64), image.model.vocab - 1)
    return Comparison(length, result, tuple(faults), judge(logits, chosen, expected.reference))
