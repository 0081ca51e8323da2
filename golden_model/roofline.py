"""Bounds on cycles per token that follow from a configuration alone."""

from __future__ import annotations

import math

from golden_model.config import COLUMNS, Config, ModelConfig
from golden_model.weights import Tensor, tensors

#: Bytes of one beat of the memory port.
BEAT = 16


def family(tensor: str) -> str:
    """Weight family of a tensor as ``hardware.resident`` names it; empty for others."""
    if tensor == "head":
        return "head"
    parts = tensor.split(".")
    return parts[1] if len(parts) > 2 and parts[1] in ("kda", "mla", "moe") else ""


def active_matrices(model: ModelConfig) -> list[tuple[Tensor, int]]:
    """Matrices that one token multiplies with, and how many of each kind it uses.

    A routed expert stands for ``top_k`` of them.
    """
    found = []
    for tensor in tensors(model):
        if tensor.kind != "matrix" or tensor.name == "emb":
            continue
        expert = tensor.name.split(".")[2] if ".moe.e" in tensor.name else None
        if expert is None:
            found.append((tensor, 1))
        elif expert == "e0":
            found.append((tensor, model.top_k))
    return found


def matrix_bytes(model: ModelConfig, fan_in: int, fan_out: int) -> int:
    """Bytes of a matrix in the image: int4 weights, int16 scales, zero points."""
    return fan_in * fan_out // 2 + 3 * model.groups(fan_in) * fan_out


def streaming_cycles(model: ModelConfig) -> int:
    """Cycles to read every active weight of a token once, a beat per cycle.

    Parameters that are no matrix (norms, kernels, biases; 2 bytes each) count too.
    """
    total = float(matrix_bytes(model, model.d_model, 1))
    for tensor, count in active_matrices(model):
        total += count * matrix_bytes(model, *tensor.shape)
    total += sum(2 * math.prod(t.shape) for t in tensors(model) if t.kind != "matrix")
    return round(total / BEAT)


def memory_cycles(config: Config) -> int:
    """Cycles in which the port must read what the build does not keep, and write logits."""
    model = config.model
    total = matrix_bytes(model, model.d_model, 1) + 4 * model.vocab
    for tensor, count in active_matrices(model):
        if family(tensor.name) not in config.hardware.resident:
            total += count * matrix_bytes(model, *tensor.shape)
    return -(-total // BEAT)


def multiply_cycles(config: Config) -> int:
    """Cycles in which the matrix-vector unit is busy: rows × 16 products each.

    A block of 16 columns takes at least as long as its results need to leave.
    """
    rows, lanes = config.hardware.rows, config.hardware.vector_lanes
    total = 0
    for tensor, count in active_matrices(config.model):
        fan_in, fan_out = tensor.shape
        blocks = -(-fan_out // COLUMNS)
        results = max(min(fan_out, COLUMNS) // lanes, 1)
        total += count * blocks * max(fan_in // rows, results)
    return total


def roofline(config: Config) -> int:
    """Least cycles per token of a build: the busier of its port and its multipliers."""
    return max(memory_cycles(config), multiply_cycles(config))
