"""The integer model: what the chip computes, bit for bit.

Each function is one block of the hardware; :class:`IntegerModel` strings them
together in the order of :mod:`golden_model.reference`. Values are int64 arrays of
raw fixed-point numbers; docs/numerics.md lists every format. "Residual" means
24 bits with 18 fractional, the format of every matrix-vector result.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from golden_model.config import Config, Fixed, Formats
from golden_model.fixed import (
    DECAY,
    DECAY_FRAC,
    EXPERT_SCALE,
    EXPERT_SCALE_FRAC,
    LOG2E,
    LOG2E_FRAC,
    UNIT_FRAC,
    Ints,
    convert,
    exp2_negative,
    reciprocal,
    round_shift,
    rsqrt,
    saturate,
    sigmoid,
)
from golden_model.weights import Matrix, Weights

RES_FRAC = 18
NORM_WEIGHT_FRAC = 13
PARAM_FRAC = 11
WEIGHT_FRAC = 12
ONE = 1 << UNIT_FRAC
#: RMSNorm and L2-norm eps as integers on the scale of squared residual values.
RMS_EPS = round(1e-5 * 2 ** (2 * RES_FRAC))
L2_EPS = round(1e-6 * 2 ** (2 * RES_FRAC))
#: Format of a normalised value before and after its weight: |x| <= sqrt(128).
NORMALISED = Fixed(22, 16)
#: Format of a mixer's score.
SCORE = Fixed(24, 16)
#: Fractional bits of log2(e)/sqrt(dk+dr), the scale of attention scores.
ATTENTION_SCALE_FRAC = 18


def attention_scale(width: int) -> int:
    """log2(e)/sqrt(width) with ATTENTION_SCALE_FRAC bits."""
    return round(np.log2(np.e) / np.sqrt(width) * 2**ATTENTION_SCALE_FRAC)


def embed(fmts: Formats, q: Ints, s: int, z: int) -> Ints:
    """Residual values of one embedding row: (q − z)·s·2⁻¹²."""
    return saturate((q - z) * s << (RES_FRAC - WEIGHT_FRAC), fmts.residual)


def matvec(fmts: Formats, x: Ints, matrix: Matrix) -> Ints:
    """Residual result of activations [fan_in] times a quantised matrix.

    Per group (Σx·q − z·Σx)·s, summed over the groups exactly, rounded once.
    """
    groups = matrix.s.shape[0]
    xg = x.reshape(groups, -1)
    qg = matrix.q.reshape(groups, xg.shape[1], -1)
    dot = np.einsum("gi,gio->go", xg, qg)
    total = ((dot - matrix.z * xg.sum(axis=1)[:, None]) * matrix.s).sum(axis=0)
    return convert(total, fmts.activation.frac + WEIGHT_FRAC, fmts.residual)


def norm(fmts: Formats, x: Ints, w: Ints, eps: int = RMS_EPS, gate: Ints | None = None) -> Ints:
    """RMSNorm of residual values [n], times (1 + w), times a gate: activations [n].

    ``eps`` is on the scale of squared residual values; ``gate`` has UNIT_FRAC bits.
    """
    mean = int((x * x).sum()) >> (len(x).bit_length() - 1)
    m, h = rsqrt(mean + eps)
    t = saturate(round_shift(x * m, h), NORMALISED)
    t = saturate(round_shift(t * ((1 << NORM_WEIGHT_FRAC) + w), NORM_WEIGHT_FRAC), NORMALISED)
    gate = np.full_like(x, ONE) if gate is None else gate
    return convert(t * gate, NORMALISED.frac + UNIT_FRAC, fmts.activation)


#: Fractional bits of a mixer's coefficient (1 + w)·proj and of its rounded dot product.
MIX_COEFFICIENT_FRAC = 16
MIX_DOT_FRAC = 20


def mix(fmts: Formats, candidates: Ints, w: Ints, proj: Ints) -> tuple[Ints, Ints]:
    """Attention residual over candidates [n, d]: residual result [d], probabilities [n]."""
    if len(candidates) == 1:
        return candidates[0], np.array([ONE], np.int64)
    d = candidates.shape[1]
    coefficient = round_shift(
        ((1 << NORM_WEIGHT_FRAC) + w) * proj,
        NORM_WEIGHT_FRAC + PARAM_FRAC - MIX_COEFFICIENT_FRAC,
    )
    dots = (candidates * coefficient).sum(axis=1)
    dots = round_shift(dots, RES_FRAC + MIX_COEFFICIENT_FRAC - MIX_DOT_FRAC)
    scores = []
    for v, dot in zip(candidates, dots, strict=True):
        m, h = rsqrt((int((v * v).sum()) >> (d.bit_length() - 1)) + RMS_EPS)
        # dot·2⁻²⁰ · m·2⁻⁽¹⁶⁺ʰ⁾·2¹⁸, on SCORE's 16 fractional bits
        shift = MIX_DOT_FRAC + 16 - RES_FRAC - SCORE.frac + h
        scores.append(saturate(round_shift(dot * m, shift), SCORE))
    score = np.array(scores)
    e = exp2_negative(round_shift((score.max() - score) * LOG2E, LOG2E_FRAC))
    m, shift = reciprocal(int(e.sum()))
    p = round_shift(e * m, shift)
    return convert((p[:, None] * candidates).sum(axis=0), UNIT_FRAC + RES_FRAC, fmts.residual), p


def silu(t: Ints) -> Ints:
    """SiLU of residual values, residual result."""
    return round_shift(t * sigmoid(t), UNIT_FRAC)


def convolution(fmts: Formats, window: Ints, kernel: Ints) -> Ints:
    """Depthwise convolution and SiLU: window [4, n] of activations, kernel [n, 4]."""
    total = (window.T * kernel).sum(axis=1)
    return silu(convert(total, fmts.activation.frac + PARAM_FRAC, fmts.residual))


def decay(fmts: Formats, f: Ints, bias: Ints, rate: Ints) -> Ints:
    """Alpha = exp(−5·sigmoid(A·(f + dt_bias))), UNIT_FRAC bits."""
    t = (f + (bias << (RES_FRAC - PARAM_FRAC))) * rate
    t = saturate(round_shift(t, 8), fmts.residual)
    return exp2_negative(round_shift(sigmoid(t) * DECAY, DECAY_FRAC - (16 - UNIT_FRAC)))


def unit_vector(fmts: Formats, x: Ints) -> Ints:
    """L2-normalised residual values [n], in the key format."""
    m, h = rsqrt(int((x * x).sum()) + L2_EPS)
    return saturate(round_shift(x * m, h + 16 - fmts.key.frac), fmts.key)


def delta_step(
    fmts: Formats, state: Ints, q: Ints, k: Ints, v: Ints, alpha: Ints, beta: int
) -> Ints:
    """One head's delta-rule step; updates ``state`` [dh, dh] in place.

    q, k are unit vectors in the key format, v residual, alpha [dh] and beta with
    UNIT_FRAC bits. Returns sqrt(dh)·o in residual format.
    """
    kf, sf = fmts.key.frac, fmts.state.frac
    decayed = round_shift(alpha[:, None] * state, UNIT_FRAC)
    read_k = round_shift(k @ decayed, kf + sf - RES_FRAC)
    read_q = round_shift(q @ decayed, kf + sf - RES_FRAC)
    u = saturate(v - read_k, fmts.residual)
    qk = round_shift(np.asarray((q * k).sum()), 2 * kf - UNIT_FRAC)
    strength = round_shift(qk * beta, UNIT_FRAC)
    o = saturate(read_q + round_shift(strength * u, UNIT_FRAC), fmts.residual)
    write = round_shift(k * beta, UNIT_FRAC)
    update = round_shift(np.outer(write, u), kf + RES_FRAC - sf)
    state[:] = saturate(decayed + update, fmts.state)
    return o


#: Fractional bits of a rounded attention dot product; bits dropped before the final scale.
ATTENTION_DOT_FRAC = 14
CONTEXT_DROP = 8


def latent_attention(fmts: Formats, q: Ints, keys: Ints, values: Ints) -> Ints:
    """One head's softmax attention over the cached positions: activations [dv].

    q [dk+dr] activations; keys [positions, dk+dr], values [positions, dv] cache format.
    """
    af, cf = fmts.activation.frac, fmts.cache.frac
    dots = round_shift(keys @ q, af + cf - ATTENTION_DOT_FRAC)
    scores = round_shift(
        dots * attention_scale(len(q)), ATTENTION_DOT_FRAC + ATTENTION_SCALE_FRAC - 16
    )
    p = exp2_negative(scores.max() - scores)
    m, shift = reciprocal(int(p.sum()))
    total = round_shift(p @ values, CONTEXT_DROP)
    drop = cf - CONTEXT_DROP + 16 + shift - af
    return saturate(round_shift(total * m, drop), fmts.activation)


def route(scores: Ints, bias: Ints, top_k: int) -> tuple[list[int], Ints]:
    """Chosen experts, best first, and their weights (UNIT_FRAC bits).

    ``scores`` are sigmoids (UNIT_FRAC bits), ``bias`` the int16 parameter. Ties go to
    the lowest index.
    """
    biased = scores + (bias << (UNIT_FRAC - PARAM_FRAC))
    chosen = [int(i) for i in np.argsort(-biased, kind="stable")[:top_k]]
    m, shift = reciprocal(int(scores[chosen].sum()))
    share = round_shift(scores[chosen] * m, shift)
    return chosen, round_shift(share * EXPERT_SCALE, EXPERT_SCALE_FRAC)


def gated(fmts: Formats, gate: Ints, up: Ints) -> Ints:
    """silu(gate) ⊙ up of residual values, as activations."""
    g = convert(silu(gate), RES_FRAC, fmts.activation)
    return convert(g * up, fmts.activation.frac + RES_FRAC, fmts.activation)


def accumulate(fmts: Formats, prefix: Ints, y: Ints, weight: int = ONE) -> Ints:
    """Prefix + weight·y, residual format."""
    return saturate(prefix + round_shift(y * weight, UNIT_FRAC), fmts.residual)


@dataclass
class Trace:
    """Intermediate values of a run, for the tests of single blocks.

    ``values[name]`` lists one array per position; names are those of the float
    reference plus the inputs of each block.
    """

    values: dict[str, list[Ints]] = field(default_factory=dict)

    def add(self, name: str, value: npt.ArrayLike) -> None:
        """Append the value of one position."""
        self.values.setdefault(name, []).append(np.array(value, np.int64))


class IntegerModel:
    """Decodes one token at a time with the chip's arithmetic."""

    def __init__(self, config: Config, weights: Weights, trace: Trace | None = None) -> None:
        m = self.model = config.model
        self.fmts = config.hardware.formats
        self.w = weights
        self.trace = trace
        kda = [i for i, kind in enumerate(m.layers) if kind == "L"]
        mla = [i for i, kind in enumerate(m.layers) if kind == "F"]
        self.state = {i: np.zeros((m.kda_heads, m.kda_dim, m.kda_dim), np.int64) for i in kda}
        self.history = {i: np.zeros((3, m.conv_kernel - 1, m.kda_width), np.int64) for i in kda}
        self.keys: dict[int, list[Ints]] = {i: [] for i in mla}
        self.values: dict[int, list[Ints]] = {i: [] for i in mla}

    def run(self, tokens: npt.NDArray[np.int64]) -> Ints:
        """Raw logits [len(tokens), vocab], RES_FRAC fractional bits."""
        return np.stack([self.step(int(t)) for t in tokens])

    def step(self, token: int) -> Ints:
        """Raw logits [vocab] of the next position."""
        m, fmts = self.model, self.fmts
        emb = self._matrix("emb")
        x = embed(fmts, emb.q[token], emb.s[token, 0], emb.z[token, 0])
        blocks: list[Ints] = []
        for i, kind in enumerate(m.layers):
            name = f"L{i}."
            boundary = i % m.attn_res_block == 0
            prefix, past = x, list(blocks)
            if boundary:
                blocks.append(x)
            x = self._mix(x, past, name + "res_attn")
            attention = self._kda if kind == "L" else self._mla
            a = attention(norm(fmts, x, self._param(name + "norm1.w")), i)
            prefix = a if boundary else accumulate(fmts, prefix, a)
            x = self._mix(prefix, blocks, name + "res_mlp")
            x = self._moe(prefix, norm(fmts, x, self._param(name + "norm2.w")), i)
            self._record(name + "out", x)
        x = self._mix(x, blocks, "res_out")
        return self._matvec(norm(fmts, x, self._param("final_norm.w")), "head")

    def _record(self, name: str, value: npt.ArrayLike) -> None:
        if self.trace is not None:
            self.trace.add(name, value)

    def _matrix(self, name: str) -> Matrix:
        value = self.w[name]
        assert isinstance(value, Matrix)
        return value

    def _param(self, name: str) -> Ints:
        value = self.w[name]
        assert not isinstance(value, Matrix)
        return value

    def _matvec(self, x: Ints, name: str) -> Ints:
        return matvec(self.fmts, x, self._matrix(name))

    def _mix(self, prefix: Ints, blocks: list[Ints], name: str) -> Ints:
        weights = self._param(name + ".norm.w"), self._param(name + ".proj")
        x, p = mix(self.fmts, np.stack([*blocks, prefix]), *weights)
        self._record(name + ".p", p)
        return x

    def _activation(self, y: Ints) -> Ints:
        return convert(y, RES_FRAC, self.fmts.activation)

    def _kda(self, h: Ints, layer: int) -> Ints:
        m, fmts, name = self.model, self.fmts, f"L{layer}.kda."
        heads = (m.kda_heads, m.kda_dim)
        qkv = []
        for part, history in zip("qkv", self.history[layer], strict=True):
            window = np.vstack([history, self._activation(self._matvec(h, name + part))])
            history[:] = window[1:]
            y = convolution(fmts, window, self._param(f"{name}{part}conv"))
            qkv.append(y.reshape(heads))
        beta = sigmoid(self._matvec(h, name + "b"))
        low_rank = self._activation(self._matvec(h, name + "f1"))
        rate = np.repeat(self._param(name + "A"), m.kda_dim)
        alpha = decay(fmts, self._matvec(low_rank, name + "f2"), self._param(name + "dtb"), rate)
        low_rank = self._activation(self._matvec(h, name + "g1"))
        gate = sigmoid(self._matvec(low_rank, name + "g2"))
        alpha, gate = alpha.reshape(heads), gate.reshape(heads)
        self._record(name + "inputs", np.stack([*qkv, alpha, gate]))
        self._record(name + "beta", beta)
        core = []
        for head, (q, k, v) in enumerate(zip(*qkv, strict=True)):
            q, k = unit_vector(fmts, q), unit_vector(fmts, k)
            state = self.state[layer][head]
            o = delta_step(fmts, state, q, k, v, alpha[head], int(beta[head]))
            weight = self._param(name + "onorm.w")
            core.append(norm(fmts, o, weight, m.kda_dim * RMS_EPS, gate[head]))
            self._record(name + "o", o)
        self._record(name + "core", np.stack(core))
        return self._matvec(np.concatenate(core), name + "o")

    def _mla(self, h: Ints, layer: int) -> Ints:
        m, fmts, name = self.model, self.fmts, f"L{layer}.mla."
        c = norm(fmts, self._matvec(h, name + "wc"), self._param(name + "knorm.w"))
        qc, qr = (self._matvec(h, name + part) for part in ("wq_c", "wq_r"))
        kr = np.tile(self._matvec(h, name + "wk_r"), (m.n_heads, 1))
        kc, v = self._matvec(c, name + "wk_c"), self._matvec(c, name + "wv")
        per_head = (m.n_heads, -1)
        q = self._activation(np.hstack([qc.reshape(per_head), qr.reshape(per_head)]))
        k = convert(np.hstack([kc.reshape(per_head), kr]), RES_FRAC, fmts.cache)
        self.keys[layer].append(k)
        self.values[layer].append(convert(v.reshape(per_head), RES_FRAC, fmts.cache))
        self._record(name + "q", q)
        self._record(name + "k", k)
        self._record(name + "v", self.values[layer][-1])
        keys, values = np.stack(self.keys[layer]), np.stack(self.values[layer])
        context = [latent_attention(fmts, q[i], keys[:, i], values[:, i]) for i in range(m.n_heads)]
        self._record(name + "ctx", np.stack(context))
        return self._matvec(np.concatenate(context), name + "o")

    def _moe(self, prefix: Ints, h: Ints, layer: int) -> Ints:
        fmts, name = self.fmts, f"L{layer}.moe."
        scores = sigmoid(self._matvec(h, name + "router"))
        chosen, weights = route(scores, self._param(name + "bias"), self.model.top_k)
        self._record(name + "sel", np.stack([np.array(chosen), weights]))
        x = accumulate(fmts, prefix, self._expert(h, name + "shared"))
        for expert, weight in zip(chosen, weights, strict=True):
            x = accumulate(fmts, x, self._expert(h, f"{name}e{expert}"), int(weight))
        return x

    def _expert(self, h: Ints, name: str) -> Ints:
        hidden = gated(self.fmts, self._matvec(h, name + ".g"), self._matvec(h, name + ".u"))
        return self._matvec(hidden, name + ".d")


def argmax(logits: Ints) -> Ints:
    """Token out of each row: the largest logit, lowest index on a tie."""
    return np.argmax(logits, axis=-1)


def output_bytes(logits: Ints) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """The logits region (rows on the image's stride) and the argmax region, as bytes."""
    rows = logits.astype("<i4")
    pad = -rows.shape[1] % 4
    rows = np.pad(rows, ((0, 0), (0, pad)))
    chosen = argmax(logits).astype("<u4")
    return rows.reshape(-1).view(np.uint8), chosen.view(np.uint8)
