"""Signal layouts shared by the blocks: lanes, tags, commands and ports."""

from __future__ import annotations

from amaranth.hdl import Shape, signed, unsigned
from amaranth.lib import data, enum, wiring
from amaranth.lib.wiring import In, Out

from golden_model.config import Config

#: Width of residual-format values, the format of every result stream.
RES = 24
#: Fractional bits of residual-format values.
RES_FRAC = 18


class Function(enum.Enum, shape=unsigned(3)):
    """What the vector unit does to a matrix-vector result."""

    IDENTITY = 0
    SIGMOID = 1
    CONVOLUTION = 2
    DECAY = 3
    GATE = 4
    UP = 5


class Target(enum.Enum, shape=unsigned(4)):
    """Where a result stream goes."""

    KDA_Q = 0
    KDA_K = 1
    KDA_V = 2
    KDA_BETA = 3
    KDA_ALPHA = 4
    NORM_GATE = 5
    MLA_QC = 6
    MLA_QR = 7
    MLA_KC = 8
    MLA_KR = 9
    MLA_V = 10
    ROUTER = 11
    SLOT = 12
    NORM = 13
    RESIDUAL = 14
    LOGITS = 15


class ParamUnit(enum.Enum, shape=unsigned(3)):
    """Memory that a beat of parameters is loaded into."""

    NORM_WEIGHT = 0
    MIX_WEIGHT = 1
    MIX_PROJ = 2
    ROUTER_BIAS = 3
    KERNEL = 4
    DECAY_BIAS = 5
    DECAY_RATE = 6


#: What a result stream carries along: see :class:`Target` for the meaning of ``base``.
TAG = data.StructLayout(
    {
        "function": Function,
        "target": Target,
        "ordinal": 4,  # index of the layer among those of its kind (of all, for experts)
        "base": 10,  # SLOT: first word; RESIDUAL: first word; NORM: first weight word
        "set": 1,  # RESIDUAL: overwrite the prefix instead of adding
        "weight": 3,  # RESIDUAL: 0 = one, r = weight of the r-th chosen expert
        "mark": 4,  # scoreboard bit to clear with the last element (0 = none)
    }
)

#: One beat of parameters on its way to a unit's memory.
PARAM_WRITE = data.StructLayout({"valid": 1, "unit": ParamUnit, "address": 13, "data": 128})


def lanes(shape: Shape | int, count: int) -> data.ArrayLayout:
    """``count`` values side by side."""
    return data.ArrayLayout(shape, count)


def result_stream(config: Config) -> data.StructLayout:
    """A beat of a result stream: ``vector_lanes`` residual-format values with their tag."""
    return data.StructLayout(
        {
            "valid": 1,
            "index": 12,  # beat number inside the vector
            "last": 1,
            "tag": TAG,
            "data": lanes(signed(RES), config.hardware.vector_lanes),
        }
    )


def vector_stream(config: Config) -> data.StructLayout:
    """A beat of residual-format values without a tag."""
    return data.StructLayout(
        {"valid": 1, "last": 1, "data": lanes(signed(RES), config.hardware.vector_lanes)}
    )


def slot_write(config: Config) -> data.StructLayout:
    """A write of ``vector_lanes`` activations into the activation buffer."""
    width = config.hardware.formats.activation.width
    return data.StructLayout(
        {
            "valid": 1,
            "address": 10,
            "last": 1,
            "mark": 4,
            "data": lanes(signed(width), config.hardware.vector_lanes),
        }
    )


def norm_job() -> data.StructLayout:
    """What the norm unit does with the vector that follows."""
    return data.StructLayout(
        {
            "log_words": 3,  # log2 of the vector's length in beats
            "log_length": 3,  # log2 of its length in elements
            "weight": 10,  # first word of its weights
            "scaled_eps": 1,  # eps times the head dimension (delta attention's norm)
            "gated": 1,
            "gate": 6,  # first word of the gate
            "slot": 10,  # first word written in the activation buffer
            "mark": 4,
        }
    )


class ScalarPort(wiring.Signature):
    """Request of a reciprocal (or reciprocal square root) by one unit.

    Attributes: ``valid``/``ready`` handshake ``arg``; ``done`` is up for one cycle
    with ``mantissa`` and ``exponent`` of the answer, in request order.
    """

    def __init__(self) -> None:
        super().__init__(
            {
                "valid": Out(1),
                "ready": In(1),
                "arg": Out(56),
                "done": In(1),
                "mantissa": In(17),
                "exponent": In(6),
            }
        )
