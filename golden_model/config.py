"""The one configuration object: network shape, hardware build and number formats.

A YAML file has two mappings, ``model:`` (a shape of the Kimi K3 family) and
``hardware:`` (lanes, which weights stay on the chip, number formats). Everything
else, widths and counts included, is derived here and handed down.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

#: Columns of a weight matrix that one 16-byte beat carries (a pair of int4 rows each).
COLUMNS = 16
#: Weight families that ``hardware.resident`` may name.
FAMILIES = ("kda", "mla", "moe", "head")


class ConfigError(ValueError):
    """A configuration that is unknown, of a wrong type or impossible; names the key."""


@dataclass(frozen=True)
class Fixed:
    """Two's complement fixed point: ``width`` bits, of which ``frac`` are fractional."""

    width: int
    frac: int

    @property
    def max(self) -> int:
        """Largest raw value."""
        return (1 << (self.width - 1)) - 1

    @property
    def min(self) -> int:
        """Smallest raw value."""
        return -(1 << (self.width - 1))


@dataclass(frozen=True)
class Formats:
    """Number formats of the datapath (see docs/numerics.md for the reasons)."""

    activation: Fixed = Fixed(20, 14)
    residual: Fixed = Fixed(24, 18)
    key: Fixed = Fixed(17, 15)
    state: Fixed = Fixed(21, 18)
    cache: Fixed = Fixed(16, 12)


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the network, named as in the memory image's header."""

    name: str
    d_model: int
    n_layers: int
    layer_pattern: str
    n_heads: int
    mla_dk: int
    mla_dr: int
    mla_dv: int
    mla_dc: int
    kda_heads: int
    kda_dim: int
    conv_kernel: int
    n_experts: int
    top_k: int
    n_shared: int
    d_ff: int
    attn_res_block: int
    vocab: int
    max_seq: int
    group_size: int
    seq_lens: tuple[int, ...]

    @cached_property
    def layers(self) -> str:
        """Layer types, one letter each: ``L`` is KDA, ``F`` is MLA."""
        pattern = self.layer_pattern
        return (pattern * self.n_layers)[: self.n_layers]

    @property
    def kda_width(self) -> int:
        """P, the width of q, k and v of a KDA layer."""
        return self.kda_heads * self.kda_dim

    @property
    def max_candidates(self) -> int:
        """Most candidates a residual mixer sees: every block and the prefix."""
        return -(-self.n_layers // self.attn_res_block) + 1

    def groups(self, fan_in: int, group_size: int | None = None) -> int:
        """Quantisation groups of a matrix with ``fan_in`` rows."""
        return -(-fan_in // min(group_size or self.group_size, fan_in))


@dataclass(frozen=True)
class HardwareConfig:
    """The build: lanes, resident weights and number formats."""

    rows: int
    vector_lanes: int
    state_lanes: int
    attention_split: int
    resident: tuple[str, ...] = ()
    logits_fifo: int = 16
    formats: Formats = field(default_factory=Formats)


@dataclass(frozen=True)
class Config:
    """A chip: the network and the hardware that decodes it."""

    model: ModelConfig
    hardware: HardwareConfig
    path: Path | None = None

    @property
    def name(self) -> str:
        """Name of the build: the file's stem, or the model's name without a file."""
        return self.path.stem if self.path else self.model.name

    def with_model(self, **changes: Any) -> Config:
        """The same chip with fields of the model replaced, checked again."""
        changed = dataclasses.replace(self, model=dataclasses.replace(self.model, **changes))
        _check(changed)
        return changed

    def with_hardware(self, **changes: Any) -> Config:
        """The same chip with fields of the hardware replaced, checked again."""
        changed = dataclasses.replace(self, hardware=dataclasses.replace(self.hardware, **changes))
        _check(changed)
        return changed


def load_config(path: str | Path) -> Config:
    """Read and check a YAML configuration.

    Raises:
        ConfigError: the file cannot be read, or a key is missing, unknown, of a
            wrong type or impossible; the message names the key.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not a text file") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"{path}: not valid YAML: {where}") from error
    try:
        return parse_config(data, path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_config(data: Any, path: Path | None = None) -> Config:
    """Check the mapping read from a YAML file and return its configuration."""
    top = _mapping(data, "the file", {"model", "hardware"}, {"model", "hardware"})
    fields = {f.name: f for f in dataclasses.fields(ModelConfig)}
    shape = _mapping(top["model"], "model", set(fields), set(fields))
    values: dict[str, Any] = {}
    for key, value in shape.items():
        where = f"model.{key}"
        if key in ("name", "layer_pattern"):
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{where}: expected a non-empty string, got {value!r}")
            values[key] = value
        elif key == "seq_lens":
            if not isinstance(value, list) or not value:
                raise ConfigError(f"{where}: expected a list of lengths, got {value!r}")
            values[key] = tuple(_positive(v, where) for v in value)
        else:
            values[key] = _positive(value, where)
    keys = {f.name for f in dataclasses.fields(HardwareConfig)}
    build = _mapping(
        top["hardware"], "hardware", keys, keys - {"resident", "logits_fifo", "formats"}
    )
    settings: dict[str, Any] = {}
    for key, value in build.items():
        where = f"hardware.{key}"
        if key == "resident":
            settings[key] = _families(value, where)
        elif key == "formats":
            settings[key] = _formats(value, where)
        else:
            settings[key] = _positive(value, where)
    config = Config(ModelConfig(**values), HardwareConfig(**settings), path)
    _check(config)
    return config


def _mapping(value: Any, where: str, known: set[str], required: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a mapping, got {value!r}")
    prefix = "" if where == "the file" else f"{where}."
    for key in value:
        if key not in known:
            raise ConfigError(f"{prefix}{key}: unknown key (known: {', '.join(sorted(known))})")
    for key in sorted(required):
        if key not in value:
            raise ConfigError(f"{prefix}{key}: missing")
    return value


def _positive(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{where}: expected an integer, got {value!r}")
    if value < 1:
        raise ConfigError(f"{where}: must be at least 1, got {value}")
    return value


def _families(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{where}: expected a list out of {', '.join(FAMILIES)}, got {value!r}")
    for item in value:
        if item not in FAMILIES:
            raise ConfigError(f"{where}: {item!r} is not one of {', '.join(FAMILIES)}")
    return tuple(f for f in FAMILIES if f in value)


def _formats(value: Any, where: str) -> Formats:
    defaults = Formats()
    known = {f.name for f in dataclasses.fields(Formats)}
    changes = {}
    for key, item in _mapping(value, where, known, set()).items():
        pair = _mapping(item, f"{where}.{key}", {"width", "frac"}, {"width", "frac"})
        fmt = Fixed(*(_positive(pair[k], f"{where}.{key}.{k}") for k in ("width", "frac")))
        if not fmt.frac < fmt.width <= 24:
            raise ConfigError(f"{where}.{key}: needs frac < width <= 24, got {item!r}")
        changes[key] = fmt
    return dataclasses.replace(defaults, **changes)


def _check(config: Config) -> None:
    m, h = config.model, config.hardware

    def require(condition: bool, key: str, reason: str) -> None:
        if not condition:
            section, _, name = key.partition(".")
            value = getattr(getattr(config, section), name)
            raise ConfigError(f"{key}: {reason}, got {value!r}")

    require(set(m.layer_pattern) <= {"L", "F"}, "model.layer_pattern", "only L (KDA) and F (MLA)")
    require(m.n_layers <= 16, "model.n_layers", "at most 16")
    require(
        "L" in m.layers and "F" in m.layers,
        "model.layer_pattern",
        "the layers must hold at least one L and one F",
    )
    for key in (
        *("d_model", "n_heads", "mla_dk", "mla_dr", "mla_dv", "mla_dc", "kda_heads", "kda_dim"),
        *("n_experts", "d_ff", "vocab", "max_seq", "group_size"),
    ):
        value = getattr(m, key)
        require(value & (value - 1) == 0, f"model.{key}", "must be a power of two")
    require(m.conv_kernel == 4, "model.conv_kernel", "only a kernel of 4 is built")
    require(m.n_shared == 1, "model.n_shared", "only one shared expert is built")
    require(m.top_k <= m.n_experts, "model.top_k", "cannot exceed model.n_experts")
    require(m.top_k <= 4, "model.top_k", "at most 4")
    require(4 <= m.n_experts <= 16, "model.n_experts", "must be between 4 and 16")
    require(m.kda_heads <= 8, "model.kda_heads", "at most 8")
    require(m.n_heads <= 8, "model.n_heads", "at most 8")
    require(16 <= m.d_model <= 64, "model.d_model", "must be between 16 and 64")
    require(16 <= m.vocab <= 8192, "model.vocab", "must be between 16 and 8192")
    require(8 <= m.max_seq <= 1024, "model.max_seq", "must be between 8 and 1024")
    require(m.group_size in (64, 128), "model.group_size", "must be 64 or 128")
    require(max(m.seq_lens) <= m.max_seq, "model.seq_lens", "cannot exceed model.max_seq")
    require(m.mla_dc <= 128, "model.mla_dc", "at most 128")
    require(8 <= m.kda_dim <= 64, "model.kda_dim", "must be between 8 and 64")
    require(m.kda_width <= 128, "model.kda_dim", "kda_heads x kda_dim must be at most 128")
    require(m.n_heads * m.mla_dv <= 128, "model.mla_dv", "n_heads x mla_dv must be at most 128")
    require(8 <= m.d_ff <= 128, "model.d_ff", "must be between 8 and 128")
    fan_ins = (m.d_model, m.kda_width, m.kda_dim, m.mla_dc, m.n_heads * m.mla_dv, m.d_ff)
    fmts = h.formats
    r, v = h.rows, h.vector_lanes
    for key in ("rows", "vector_lanes", "state_lanes", "attention_split", "logits_fifo"):
        value = getattr(h, key)
        require(value & (value - 1) == 0, f"hardware.{key}", "must be a power of two")
    require(2 <= r <= 64, "hardware.rows", "must be between 2 and 64")
    require(
        r <= min(fan_ins), "hardware.rows", f"cannot exceed the smallest fan_in ({min(fan_ins)})"
    )
    require(2 <= v <= 8, "hardware.vector_lanes", "must be 2, 4 or 8")
    require(
        v <= min(m.mla_dr, m.n_experts, m.kda_dim, m.d_ff, m.mla_dv),
        "hardware.vector_lanes",
        "cannot exceed mla_dr, mla_dv, n_experts, kda_dim or d_ff",
    )
    require(
        v <= h.state_lanes <= m.kda_dim,
        "hardware.state_lanes",
        "must lie between hardware.vector_lanes and model.kda_dim",
    )
    require(
        min(m.mla_dr, m.mla_dv, m.mla_dk) // h.attention_split >= v,
        "hardware.attention_split",
        "leaves fewer lanes than hardware.vector_lanes for mla_dk, mla_dr or mla_dv",
    )
    require(8 <= h.logits_fifo <= 64, "hardware.logits_fifo", "must be between 8 and 64")
    require(m.d_ff >= 2 * v, "hardware.vector_lanes", "d_ff must hold at least two words of lanes")
    require(
        fmts.residual.frac >= max(fmts.activation.frac, fmts.state.frac, fmts.cache.frac)
        and fmts.activation.frac >= fmts.cache.frac
        and fmts.residual.frac == 18
        and fmts.residual.width == 24,
        "hardware.formats",
        "residual must be 24 bits with 18 fractional and no other format finer",
    )
    require(
        fmts.state.frac >= 10 and fmts.key.frac >= 10 and fmts.activation.frac >= 10,
        "hardware.formats",
        "activation, key and state need at least 10 fractional bits",
    )
