"""What the chip does for one token, as tables made from the configuration.

The order of matrix products, where each input and result lives, where each tensor
lies in the image and in the weight store. The sequencer, the fetch unit and the
receive unit hold these tables as constant logic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from amaranth.hdl import Array, Const, Module, Signal, Value

from golden_model.config import COLUMNS, Config
from golden_model.image import Layout
from hdl.activations import GROUP, slots
from hdl.layouts import Function, ParamUnit, Target

#: Names of the scoreboard bits; bit 0 is "none".
MARKS = ("none", "h", "f", "g", "c", "o", "act0", "act1", "act2", "act3", "act4", "prefix")
MARK = {name: i for i, name in enumerate(MARKS)}


@dataclass(frozen=True)
class MatVecOp:
    """One matrix product of the token's program."""

    tensor: str  # name in the image; that of expert 0 for a routed expert
    fan_in: int
    fan_out: int
    slot: str
    function: Function
    target: Target
    family: str
    layer: int = 0
    ordinal: int = 0
    base: int = 0
    set: bool = False
    weight: int = 0
    mark: str = "none"
    rank: int | None = None  # routed expert: which of the chosen ones
    last_of_expert: bool = False
    resident: bool = False
    store: int = 0  # first word in the weight store
    scales: int = 0  # first word in the memory of scales

    @property
    def blocks(self) -> int:
        """Blocks of 16 columns."""
        return -(-self.fan_out // COLUMNS)


@dataclass(frozen=True)
class MixOp:
    """A residual mix followed by a norm into slot ``h``."""

    count: int  # candidates, the prefix included
    params: int  # first word of the mixer's parameters
    weight: int  # first word of the norm's weights


@dataclass(frozen=True)
class Param:
    """A parameter tensor and the memory it is loaded into, in beats of 8 values."""

    tensor: str
    unit: ParamUnit
    address: int
    beats: int


class Program:
    """All tables of a configuration.

    ``steps`` is the program of one token: ``"embed"``, a :class:`MixOp` or an index
    into ``products``.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.params: list[Param] = []
        self.products: list[MatVecOp] = []
        self.steps: list[str | MixOp | int] = ["embed"]
        self._beats = dict.fromkeys(ParamUnit, 0)
        self._norm_words: dict[str, int] = {}
        self._place_params()
        self._write_program()
        self._place_weights()

    # Parameters

    def _place_params(self) -> None:
        m = self.config.model
        ordinal = {"L": 0, "F": 0}
        for i, kind in enumerate(m.layers):
            name = f"L{i}."
            if i > 0:
                self._mixer(name + "res_attn")
            self._norm(name + "norm1.w", m.d_model)
            if kind == "F":
                self._norm(name + "mla.knorm.w", m.mla_dc)
            else:
                for part in "qkv":
                    self._param(f"{name}kda.{part}conv", ParamUnit.KERNEL, m.kda_width // 2)
                self._param(name + "kda.A", ParamUnit.DECAY_RATE, 1)
                self._param(name + "kda.dtb", ParamUnit.DECAY_BIAS, m.kda_width // 8)
                self._norm(name + "kda.onorm.w", m.kda_dim)
            self._mixer(name + "res_mlp")
            self._norm(name + "norm2.w", m.d_model)
            self._param(name + "moe.bias", ParamUnit.ROUTER_BIAS, -(-m.n_experts // 8))
            ordinal[kind] += 1
        self._mixer("res_out")
        self._norm("final_norm.w", m.d_model)

    def _param(self, tensor: str, unit: ParamUnit, beats: int) -> int:
        address = self._beats[unit]
        self.params.append(Param(tensor, unit, address, beats))
        self._beats[unit] += beats
        return address * 8 // self.config.hardware.vector_lanes

    def _norm(self, tensor: str, length: int) -> None:
        self._norm_words[tensor] = self._param(tensor, ParamUnit.NORM_WEIGHT, length // 8)

    def _mixer(self, name: str) -> None:
        beats = self.config.model.d_model // 8
        self._norm_words[name] = self._param(name + ".norm.w", ParamUnit.MIX_WEIGHT, beats)
        self._param(name + ".proj", ParamUnit.MIX_PROJ, beats)

    def param_beats(self, unit: ParamUnit) -> int:
        """Capacity a unit's memory needs."""
        return max(self._beats[unit], 1)

    # Program of a token

    def _write_program(self) -> None:
        m = self.config.model
        words = m.d_model // self.config.hardware.vector_lanes
        ordinal = {"L": 0, "F": 0}
        row = 0  # row of the prefix in the residual memory
        for i, kind in enumerate(m.layers):
            boundary = i % m.attn_res_block == 0
            self._mix(row + 1, f"L{i}.res_attn", f"L{i}.norm1.w")
            row += boundary
            layer = self._kda if kind == "L" else self._mla
            for op in layer(f"L{i}.", ordinal[kind]):
                if op.target == Target.RESIDUAL:
                    op = replace(op, base=row * words, set=boundary)
                self._product(replace(op, layer=i, ordinal=ordinal[kind]))
            ordinal[kind] += 1
            self._mix(row + 1, f"L{i}.res_mlp", f"L{i}.norm2.w")
            for op in self._moe(f"L{i}.moe."):
                base = row * words if op.target == Target.RESIDUAL else op.base
                self._product(replace(op, layer=i, ordinal=i, base=base))
        self._mix(row + 1, "res_out", "final_norm.w")
        head = MatVecOp("head", m.d_model, m.vocab, "h", Function.IDENTITY, Target.LOGITS, "head")
        self._product(head)

    def _product(self, op: MatVecOp) -> None:
        op = replace(op, resident=op.family in self.config.hardware.resident)
        self.steps.append(len(self.products))
        self.products.append(op)

    def _mix(self, count: int, mixer: str, norm: str) -> None:
        self.steps.append(MixOp(count, self._norm_words.get(mixer, 0), self._norm_words[norm]))

    def slot_word(self, slot: str) -> int:
        """First word of a slot in the activation buffer's write address."""
        per_group = GROUP // self.config.hardware.vector_lanes
        return slots(self.config)[slot].group * per_group

    def norm_word(self, tensor: str) -> int:
        """First word of a norm's weights."""
        return self._norm_words[tensor]

    def _kda(self, name: str, ordinal: int) -> Iterator[MatVecOp]:
        m, name = self.config.model, name + "kda."
        d, p, dh = m.d_model, m.kda_width, m.kda_dim
        f = Function

        def op(
            tensor: str, fan_in: int, fan_out: int, slot: str, function: Function, **to
        ) -> MatVecOp:
            return MatVecOp(name + tensor, fan_in, fan_out, slot, function, family="kda", **to)

        def low_rank(tensor: str, slot: str) -> MatVecOp:
            to = {"target": Target.SLOT, "base": self.slot_word(slot), "mark": slot}
            return op(tensor, d, dh, "h", f.IDENTITY, **to)

        yield low_rank("f1", "f")
        yield low_rank("g1", "g")
        for part, target in zip("qkv", (Target.KDA_Q, Target.KDA_K, Target.KDA_V), strict=True):
            yield op(part, d, p, "h", f.CONVOLUTION, target=target)
        yield op("b", d, m.kda_heads, "h", f.SIGMOID, target=Target.KDA_BETA)
        yield op("f2", dh, p, "f", f.DECAY, target=Target.KDA_ALPHA)
        yield op("g2", dh, p, "g", f.SIGMOID, target=Target.NORM_GATE, mark="o")
        yield op("o", p, d, "o", f.IDENTITY, target=Target.RESIDUAL, mark="prefix")

    def _mla(self, name: str, ordinal: int) -> Iterator[MatVecOp]:
        m = self.config.model
        knorm, name = self.norm_word(name + "mla.knorm.w"), name + "mla."
        d, dc, h = m.d_model, m.mla_dc, m.n_heads

        def op(tensor: str, fan_in: int, fan_out: int, slot: str, target: Target, **to) -> MatVecOp:
            function = Function.IDENTITY
            return MatVecOp(name + tensor, fan_in, fan_out, slot, function, target, "mla", **to)

        yield op("wc", d, dc, "h", Target.NORM, base=knorm, mark="c")
        yield op("wq_c", d, h * m.mla_dk, "h", Target.MLA_QC)
        yield op("wq_r", d, h * m.mla_dr, "h", Target.MLA_QR)
        yield op("wk_r", d, m.mla_dr, "h", Target.MLA_KR)
        yield op("wk_c", dc, h * m.mla_dk, "c", Target.MLA_KC)
        yield op("wv", dc, h * m.mla_dv, "c", Target.MLA_V, mark="o")
        yield op("o", h * m.mla_dv, d, "o", Target.RESIDUAL, mark="prefix")

    def _moe(self, name: str) -> Iterator[MatVecOp]:
        m = self.config.model
        d, ff = m.d_model, m.d_ff
        router = MatVecOp(
            name + "router", d, m.n_experts, "h", Function.SIGMOID, Target.ROUTER, "moe"
        )

        def hidden(expert: str, index: int, rank: int | None) -> Iterator[MatVecOp]:
            slot = f"act{index}"
            shared = {"family": "moe", "rank": rank}
            yield MatVecOp(f"{expert}.g", d, ff, "h", Function.GATE, Target.SLOT, **shared)
            to = {"base": self.slot_word(slot), "mark": slot}
            yield MatVecOp(f"{expert}.u", d, ff, "h", Function.UP, Target.SLOT, **shared, **to)

        def down(expert: str, index: int, rank: int | None) -> MatVecOp:
            last = index == m.top_k
            return MatVecOp(
                f"{expert}.d",
                ff,
                d,
                f"act{index}",
                Function.IDENTITY,
                Target.RESIDUAL,
                "moe",
                weight=index,
                rank=rank,
                mark="prefix" if last else "none",
                last_of_expert=rank is not None,
            )

        yield router
        yield from hidden(name + "shared", 0, None)
        yield down(name + "shared", 0, None)
        for rank in range(m.top_k):
            yield from hidden(name + "e0", rank + 1, rank)
        for rank in range(m.top_k):
            yield down(name + "e0", rank + 1, rank)

    # Weight store

    def _place_weights(self) -> None:
        rows = self.config.hardware.rows
        store = 0
        # Streamed matrices alternate between two sets of two groups' scales.
        scales = 4 if any(not op.resident for op in self.products) else 0
        placed: dict[str, tuple[int, int]] = {}
        self.expert_words = self.expert_scales = 0
        per_layer: dict[int, tuple[int, int]] = {}
        for i, op in enumerate(self.products):
            if not op.resident:
                continue
            words, groups = self._size(op, rows)
            if op.rank is None:
                placed[op.tensor] = (store, scales)
                store, scales = store + words, scales + groups
            elif op.tensor not in placed:
                # Experts of a layer lie one after the other, each as g, u, d.
                if op.layer not in per_layer:
                    parts = [
                        self._size(o, rows)
                        for o in self.products
                        if o.layer == op.layer and o.rank == op.rank
                    ]
                    self.expert_words = sum(w for w, _ in parts)
                    self.expert_scales = sum(g for _, g in parts)
                    per_layer[op.layer] = (store, scales)
                    store += self.expert_words * self.config.model.n_experts
                    scales += self.expert_scales * self.config.model.n_experts
                at, scale_at = per_layer[op.layer]
                placed[op.tensor] = (at, scale_at)
                per_layer[op.layer] = (at + words, scale_at + groups)
            at, scale_at = placed[op.tensor]
            self.products[i] = replace(op, store=at, scales=scale_at)
        self.store_words, self.scale_words = store, max(scales, 4)

    def _size(self, op: MatVecOp, rows: int) -> tuple[int, int]:
        groups = self.config.model.groups(op.fan_in, 64)
        return op.blocks * (op.fan_in // rows), op.blocks * groups

    # Image

    @cached_property
    def layouts(self) -> dict[int, Layout]:
        """Image layout by group size; addresses of tensors do not depend on the length."""
        model = self.config.model
        return {g: Layout(replace(model, group_size=g), 1) for g in (64, 128)}

    def offset(self, name: str, group_size: int) -> int:
        """Beats of 16 bytes from the first tensor to the named array."""
        addresses = self.layouts[group_size].address_of
        return (addresses[name] - addresses["emb.q"]) // 16

    def expert_stride(self, group_size: int) -> int:
        """Beats from one expert to the next."""
        return self.offset("L0.moe.e1.g.q", group_size) - self.offset("L0.moe.e0.g.q", group_size)


def rom(m: Module, values: Sequence[int], index: Value, name: str) -> Signal:
    """A table of constants as logic."""
    width = max(max(values).bit_length(), 1)
    out = Signal(width, name=name)
    m.d.comb += out.eq(Array([Const(v, width) for v in values])[index])
    return out


def log2(n: int) -> int:
    """Exponent of a power of two."""
    assert n & (n - 1) == 0
    return int(math.log2(n))
