"""What counts as right: cosine per row and argmax with the 1 % rule."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: A choice is right when its reference logit lies within this share of the row's
#: standard deviation of the row's maximum.
ARGMAX_TOLERANCE = 0.01
MUST_COSINE = 0.98
MUST_ARGMAX = 0.99
GOAL_ONE_MINUS_COS = 2e-5


@dataclass(frozen=True)
class Verdict:
    """Judgement of a run, row by row."""

    one_minus_cos: npt.NDArray[np.float64]
    argmax_right: npt.NDArray[np.bool_]

    @property
    def one_minus_cos_max(self) -> float:
        """Largest 1 − cosine of a row."""
        return float(self.one_minus_cos.max())

    @property
    def argmax_agree(self) -> float:
        """Share of rows whose argmax is right by the rule."""
        return float(self.argmax_right.mean())

    @property
    def must(self) -> bool:
        """Every row at least 0.98 and 99 % of the choices right."""
        return self.one_minus_cos_max <= 1 - MUST_COSINE and self.argmax_agree >= MUST_ARGMAX

    @property
    def goal(self) -> bool:
        """1 − cosine at most 2e-5 on every row and every choice right."""
        return self.one_minus_cos_max <= GOAL_ONE_MINUS_COS and bool(self.argmax_right.all())


def judge(logits: npt.ArrayLike, chosen: npt.ArrayLike, reference: npt.ArrayLike) -> Verdict:
    """Compare logits [n, vocab] of any positive scale and choices [n] with the reference.

    Raises:
        ValueError: the shapes differ.
    """
    x, r = np.asarray(logits, np.float64), np.asarray(reference, np.float64)
    if x.shape != r.shape or len(np.asarray(chosen)) != len(r):
        raise ValueError(f"logits {x.shape} and reference {r.shape} differ in shape")
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(r, axis=1)
    # A zero row has no direction; it counts as unrelated unless both are zero.
    cosine = np.where(norms > 0, (x * r).sum(axis=1) / np.where(norms > 0, norms, 1), 0.0)
    picked = r[np.arange(len(r)), np.asarray(chosen)]
    right = picked >= r.max(axis=1) - ARGMAX_TOLERANCE * r.std(axis=1)
    return Verdict(1 - cosine, right)
