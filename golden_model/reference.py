"""The float32 reference: the network's formulas, in the order a reader expects them.

Source of the formulas: Kimi Linear (delta attention, arXiv:2510.26692), DeepSeek-V2
(latent attention, arXiv:2405.04434), and attention residuals as used by Kimi K3.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from golden_model.config import ModelConfig
from golden_model.weights import Matrix, Weights, tensors

Floats = npt.NDArray[np.floating]

RMS_EPS = 1e-5
L2_EPS = 1e-6
DECAY_LOWER_BOUND = -5.0
EXPERT_SCALE = 2.828

_FRACTION = {"norm": 13, "conv": 11, "decay_bias": 11, "proj": 11, "bias": 11, "decay_rate": 8}


def dequantise(model: ModelConfig, weights: Weights) -> dict[str, Floats]:
    """Every tensor as float32: matrices [fan_in, fan_out] (``emb`` [vocab, d_model]).

    Norm weights are returned as the factor ``1 + w``.
    """
    values = {}
    for tensor in tensors(model):
        value = weights[tensor.name]
        if isinstance(value, Matrix):
            axis = 1 if tensor.name == "emb" else 0
            size = min(model.group_size, value.q.shape[axis])
            s, z = (np.repeat(a, size, axis=axis) for a in (value.s, value.z))
            real = (value.q - z) * s / 4096
        else:
            real = value / 2 ** _FRACTION[tensor.kind]
            if tensor.kind == "norm":
                real = real + 1
        values[tensor.name] = real.astype(np.float32)
    return values


def rms(x: Floats, factor: Floats) -> Floats:
    """RMSNorm over the last axis; ``factor`` is ``1 + w``."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(RMS_EPS)) * factor


def sigmoid(x: Floats) -> Floats:
    """Logistic function."""
    return 1 / (1 + np.exp(-x))


def silu(x: Floats) -> Floats:
    """``x · sigmoid(x)``."""
    return x * sigmoid(x)


def softmax(x: Floats) -> Floats:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class Reference:
    """Decodes one token at a time in float32.

    ``dump``, when given, receives intermediate values named
    ``p{position}.{name}``.
    """

    def __init__(
        self, model: ModelConfig, weights: Weights, dump: dict[str, npt.NDArray] | None = None
    ) -> None:
        self.model = model
        self.w = dequantise(model, weights)
        self.dump = dump
        self.position = 0
        m = model
        kda = [i for i, kind in enumerate(m.layers) if kind == "L"]
        mla = [i for i, kind in enumerate(m.layers) if kind == "F"]
        self.state = {i: np.zeros((m.kda_heads, m.kda_dim, m.kda_dim), np.float32) for i in kda}
        self.history = {i: np.zeros((3, m.conv_kernel - 1, m.kda_width), np.float32) for i in kda}
        self.cache: dict[int, list[tuple[Floats, Floats]]] = {i: [] for i in mla}

    def run(self, tokens: npt.NDArray[np.int64]) -> Floats:
        """Logits [len(tokens), vocab] of a sequence, token ids given."""
        return np.stack([self.step(int(t)) for t in tokens])

    def step(self, token: int) -> Floats:
        """Logits [vocab] of the next position."""
        m, w = self.model, self.w
        x = w["emb"][token]
        blocks: list[Floats] = []
        for i, kind in enumerate(m.layers):
            name = f"L{i}."
            boundary = i % m.attn_res_block == 0
            prefix, past = x, list(blocks)
            if boundary:
                blocks.append(x)
            if past:
                x = self._mix(x, past, name + "res_attn")
            attention = self._kda if kind == "L" else self._mla
            a = attention(rms(x, w[name + "norm1.w"]), i)
            prefix = a if boundary else prefix + a
            x = self._mix(prefix, blocks, name + "res_mlp")
            x = prefix + self._moe(rms(x, w[name + "norm2.w"]), i)
            self._record(name + "out", x)
        x = self._mix(x, blocks, "res_out")
        logits = rms(x, w["final_norm.w"]) @ w["head"]
        self.position += 1
        return logits

    def _record(self, name: str, value: npt.NDArray) -> None:
        if self.dump is not None:
            self.dump[f"p{self.position}.{name}"] = np.array(value)

    def _mix(self, prefix: Floats, blocks: list[Floats], name: str) -> Floats:
        candidates = np.stack([*blocks, prefix])
        scores = rms(candidates, self.w[name + ".norm.w"]) @ self.w[name + ".proj"]
        p = softmax(scores)
        self._record(name + ".p", p)
        return p @ candidates

    def _kda(self, h: Floats, layer: int) -> Floats:
        m, name = self.model, f"L{layer}.kda."
        w = {k[len(name) :]: v for k, v in self.w.items() if k.startswith(name)}
        heads = (m.kda_heads, m.kda_dim)
        qkv = []
        for part, history in zip("qkv", self.history[layer], strict=True):
            window = np.vstack([history, h @ w[part]])
            history[:] = window[1:]
            taps = w[f"{part}conv"].T
            qkv.append(silu((taps * window).sum(axis=0)).reshape(heads))
        q, k, v = qkv
        q = q / np.sqrt((q * q).sum(axis=-1, keepdims=True) + np.float32(L2_EPS))
        k = k / np.sqrt((k * k).sum(axis=-1, keepdims=True) + np.float32(L2_EPS))
        beta = sigmoid(h @ w["b"])
        f = (h @ w["f1"] @ w["f2"] + w["dtb"]).reshape(heads)
        alpha = np.exp(np.float32(DECAY_LOWER_BOUND) * sigmoid(w["A"][:, None] * f))
        gate = sigmoid(h @ w["g1"] @ w["g2"]).reshape(heads)
        state = self.state[layer]
        state *= alpha[:, :, None]
        u = v - np.einsum("hi,hij->hj", k, state)
        state += np.einsum("hi,hj->hij", beta[:, None] * k, u)
        o = np.einsum("hi,hij->hj", q, state) / np.sqrt(np.float32(m.kda_dim))
        core = rms(o, w["onorm.w"]) * gate
        self._record(f"L{layer}.kda.core", core)
        return core.reshape(-1) @ w["o"]

    def _mla(self, h: Floats, layer: int) -> Floats:
        m, name = self.model, f"L{layer}.mla."
        w = {k[len(name) :]: v for k, v in self.w.items() if k.startswith(name)}
        heads = m.n_heads
        c = rms(h @ w["wc"], w["knorm.w"])
        q = np.hstack([(h @ w["wq_c"]).reshape(heads, -1), (h @ w["wq_r"]).reshape(heads, -1)])
        shared = np.broadcast_to(h @ w["wk_r"], (heads, m.mla_dr))
        k = np.hstack([(c @ w["wk_c"]).reshape(heads, -1), shared])
        v = (c @ w["wv"]).reshape(heads, -1)
        self.cache[layer].append((k, v))
        keys = np.stack([k for k, _ in self.cache[layer]])
        values = np.stack([v for _, v in self.cache[layer]])
        scale = np.sqrt(np.float32(m.mla_dk + m.mla_dr))
        p = softmax(np.einsum("hd,phd->hp", q, keys) / scale)
        context = np.einsum("hp,phd->hd", p, values)
        self._record(f"L{layer}.mla.ctx", context)
        return context.reshape(-1) @ w["o"]

    def _moe(self, h: Floats, layer: int) -> Floats:
        name = f"L{layer}.moe."
        scores = sigmoid(h @ self.w[name + "router"])
        biased = scores + self.w[name + "bias"]
        chosen = np.argsort(-biased, kind="stable")[: self.model.top_k]
        weight = scores[chosen] / scores[chosen].sum() * np.float32(EXPERT_SCALE)
        self._record(name + "sel", np.stack([chosen.astype(np.float32), weight]))
        self._record(name + "biased", biased)
        out = self._expert(h, name + "shared")
        for expert, share in zip(chosen, weight, strict=True):
            out = out + share * self._expert(h, f"{name}e{expert}")
        return out

    def _expert(self, h: Floats, name: str) -> Floats:
        w = self.w
        return (silu(h @ w[name + ".g"]) * (h @ w[name + ".u"])) @ w[name + ".d"]
