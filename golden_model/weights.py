"""Names, kinds and order of the tensors, and their synthetic values.

Synthetic values are splitmix64 draws (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014), seeded per tensor through FNV-1a.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from golden_model.config import ModelConfig

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Tensor:
    """One tensor of the image.

    ``kind`` is ``matrix`` (a triple .q .s .z) or the parameter's own kind:
    ``norm``, ``proj``, ``bias``, ``conv``, ``decay_bias`` or ``decay_rate``.
    ``shape`` is [fan_in, fan_out] of a matrix ([vocab, d_model] for ``emb``),
    else the array's shape.
    """

    name: str
    kind: str
    shape: tuple[int, ...]


def tensors(model: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of the image, in its fixed order."""
    m = model
    d, p = m.d_model, m.kda_width

    def matrix(name: str, fan_in: int, fan_out: int) -> Tensor:
        return Tensor(name, "matrix", (fan_in, fan_out))

    def expert(name: str) -> Iterator[Tensor]:
        yield matrix(f"{name}.g", d, m.d_ff)
        yield matrix(f"{name}.u", d, m.d_ff)
        yield matrix(f"{name}.d", m.d_ff, d)

    yield matrix("emb", m.vocab, d)
    for i, kind in enumerate(m.layers):
        base = f"L{i}."
        yield Tensor(base + "res_attn.norm.w", "norm", (d,))
        yield Tensor(base + "res_attn.proj", "proj", (d,))
        yield Tensor(base + "norm1.w", "norm", (d,))
        if kind == "F":
            yield matrix(base + "mla.wc", d, m.mla_dc)
            yield matrix(base + "mla.wq_c", d, m.n_heads * m.mla_dk)
            yield matrix(base + "mla.wq_r", d, m.n_heads * m.mla_dr)
            yield matrix(base + "mla.wk_c", m.mla_dc, m.n_heads * m.mla_dk)
            yield matrix(base + "mla.wk_r", d, m.mla_dr)
            yield matrix(base + "mla.wv", m.mla_dc, m.n_heads * m.mla_dv)
            yield matrix(base + "mla.o", m.n_heads * m.mla_dv, d)
            yield Tensor(base + "mla.knorm.w", "norm", (m.mla_dc,))
        else:
            for part in "qkv":
                yield matrix(f"{base}kda.{part}", d, p)
            yield matrix(base + "kda.b", d, m.kda_heads)
            yield matrix(base + "kda.f1", d, m.kda_dim)
            yield matrix(base + "kda.f2", m.kda_dim, p)
            yield matrix(base + "kda.g1", d, m.kda_dim)
            yield matrix(base + "kda.g2", m.kda_dim, p)
            yield matrix(base + "kda.o", p, d)
            for part in "qkv":
                yield Tensor(f"{base}kda.{part}conv", "conv", (p, m.conv_kernel))
            yield Tensor(base + "kda.A", "decay_rate", (m.kda_heads,))
            yield Tensor(base + "kda.dtb", "decay_bias", (p,))
            yield Tensor(base + "kda.onorm.w", "norm", (m.kda_dim,))
        yield Tensor(base + "res_mlp.norm.w", "norm", (d,))
        yield Tensor(base + "res_mlp.proj", "proj", (d,))
        yield Tensor(base + "norm2.w", "norm", (d,))
        yield matrix(base + "moe.router", d, m.n_experts)
        yield Tensor(base + "moe.bias", "bias", (m.n_experts,))
        yield from expert(base + "moe.shared")
        for j in range(m.n_experts):
            yield from expert(f"{base}moe.e{j}")
    yield Tensor("res_out.norm.w", "norm", (d,))
    yield Tensor("res_out.proj", "proj", (d,))
    yield Tensor("final_norm.w", "norm", (d,))
    yield matrix("head", d, m.vocab)


def fnv1a64(text: str) -> int:
    """64-bit FNV-1a hash."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & _MASK
    return value


def uniform(seed: int, stream: str, count: int, low: int, high: int) -> npt.NDArray[np.int64]:
    """``count`` splitmix64 draws of a stream, uniform in [low, high]."""
    state = (seed ^ fnv1a64(stream)) & _MASK
    with np.errstate(over="ignore"):
        n = np.arange(1, count + 1, dtype=np.uint64)
        z = np.uint64(state) + n * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z % np.uint64(high - low + 1)).astype(np.int64) + low


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix: value = (q − z)·s·2⁻¹².

    ``q`` [rows, columns] holds 0..15; ``s`` (int16) and ``z`` (uint8) are
    [groups, fan_out]. ``emb`` is token-major: q [vocab, d_model], s and z
    [vocab, groups].
    """

    q: npt.NDArray[np.int64]
    s: npt.NDArray[np.int64]
    z: npt.NDArray[np.int64]


#: Values by tensor name: matrices and int16 parameters (``kda.A`` unsigned).
Weights = dict[str, "Matrix | npt.NDArray[np.int64]"]

_RANGES = {
    "conv": (-1024, 1023),
    "proj": (-512, 511),
    "bias": (-512, 511),
    "decay_bias": (-2048, 2047),
    "norm": (-2048, 2047),
    "decay_rate": (128, 1024),
}


def _scale(name: str, fan_in: int) -> int:
    s0 = 4096 * 1000 * 1024 // (4610 * math.isqrt(fan_in << 20))
    if name.rsplit(".", 1)[-1] in ("b", "f2"):
        s0 = int(s0 * 2 ** (-6 / 4))
    return min(max(s0, 1), 32767)


def synthetic_weights(model: ModelConfig, seed: int) -> Weights:
    """Synthetic weights of a seed; streams are named after ``model.name``."""
    weights: Weights = {}
    for tensor in tensors(model):
        stream = f"{model.name}/{tensor.name}"
        if tensor.kind != "matrix":
            low, high = _RANGES[tensor.kind]
            count = math.prod(tensor.shape)
            weights[tensor.name] = uniform(seed, stream, count, low, high).reshape(tensor.shape)
            continue
        rows, columns = tensor.shape
        token_major = tensor.name == "emb"
        fan_in = columns if token_major else rows
        groups = model.groups(fan_in)
        n = rows * columns // 2
        lo = uniform(seed, f"{stream}.q/lo", n, 0, 15)
        hi = uniform(seed, f"{stream}.q/hi", n, 0, 15)
        if token_major:
            q = np.stack([lo, hi], axis=-1).reshape(rows, columns)
            scales = (rows, groups)
        else:
            pair = (rows // 2, columns)
            q = np.stack([lo.reshape(pair), hi.reshape(pair)], axis=1).reshape(rows, columns)
            scales = (groups, columns)
        s0 = _scale(tensor.name, fan_in)
        count = scales[0] * scales[1]
        low, high = -s0 // 4, s0 // 4
        s = np.maximum(1, s0 + uniform(seed, f"{stream}.s", count, low, high)).reshape(scales)
        z = uniform(seed, f"{stream}.z", count, 6, 9).reshape(scales)
        weights[tensor.name] = Matrix(q, s, z)
    return weights


def synthetic_tokens(
    model: ModelConfig, seed: int, prompt: int, length: int
) -> npt.NDArray[np.int64]:
    """``length`` token ids of a synthetic prompt."""
    return uniform(seed, f"{model.name}/tokens/{prompt}", length, 0, model.vocab - 1)
