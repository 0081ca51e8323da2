"""The memory image: layout, builder and reader (version 1).

Order: header, descriptor table, tensors, token ids, logits, argmax, status,
scratch; every region starts on 16 bytes; little-endian.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from golden_model.config import ModelConfig
from golden_model.weights import Matrix, Weights, fnv1a64, tensors

MAGIC = 0x4B444143
VERSION = 1
HEADER_BYTES = 256
DESCRIPTOR_BYTES = 16
STATUS_DONE = 0x600DD00D
STATUS_BAD = 0xBAD00000

#: Header words that describe the shape, by index.
SHAPE_WORDS = {
    2: "n_layers",
    3: "d_model",
    4: "n_heads",
    5: "mla_dk",
    6: "mla_dr",
    7: "mla_dv",
    8: "mla_dc",
    9: "kda_heads",
    10: "kda_dim",
    11: "conv_kernel",
    12: "n_experts",
    13: "top_k",
    14: "n_shared",
    15: "d_ff",
    16: "attn_res_block",
    17: "vocab",
    18: "max_seq",
}
WORD_SEQ_LEN, WORD_GROUP_SIZE, WORD_BITMAP = 19, 20, 21
WORD_DESCRIPTORS, WORD_DESCRIPTOR_ADDRESS = 22, 23
WORD_TOKENS, WORD_LOGITS, WORD_ARGMAX, WORD_STATUS = 24, 25, 26, 27
WORD_STRIDE = 30


class ImageError(ValueError):
    """An image that is truncated, corrupt or made for another shape."""


def align16(n: int) -> int:
    """``n`` rounded up to a multiple of 16."""
    return (n + 15) & ~15


def layer_bitmap(model: ModelConfig) -> int:
    """Bit i is set where layer i is MLA."""
    return sum(1 << i for i, kind in enumerate(model.layers) if kind == "F")


@dataclass(frozen=True)
class Descriptor:
    """Where one array of the image lies."""

    name: str
    address: int
    bytes: int
    aux: int


@dataclass(frozen=True)
class Layout:
    """Addresses of every region of an image for a model and a sequence length."""

    model: ModelConfig
    seq_len: int

    @cached_property
    def descriptors(self) -> tuple[Descriptor, ...]:
        """Descriptor table entries, in order."""
        parts: list[tuple[str, int, int]] = []
        for tensor in tensors(self.model):
            count = math.prod(tensor.shape)
            if tensor.kind != "matrix":
                parts.append((tensor.name, 2 * count, 0))
                continue
            rows, columns = tensor.shape
            fan_in, others = (columns, rows) if tensor.name == "emb" else (rows, columns)
            scales = others * self.model.groups(fan_in)
            parts.append((f"{tensor.name}.q", count // 2, fan_in))
            parts.append((f"{tensor.name}.s", 2 * scales, 0))
            parts.append((f"{tensor.name}.z", scales, 0))
        address = align16(HEADER_BYTES + DESCRIPTOR_BYTES * len(parts))
        found = []
        for name, size, aux in parts:
            found.append(Descriptor(name, address, size, aux))
            address = align16(address + size)
        return tuple(found)

    @cached_property
    def address_of(self) -> dict[str, int]:
        """Byte address by array name."""
        return {d.name: d.address for d in self.descriptors}

    @property
    def tokens(self) -> int:
        """Address of the token ids."""
        last = self.descriptors[-1]
        return align16(last.address + last.bytes)

    @property
    def logits(self) -> int:
        """Address of the logits region."""
        return align16(self.tokens + 4 * self.seq_len)

    @property
    def stride(self) -> int:
        """Bytes from one logits row to the next."""
        return align16(4 * self.model.vocab)

    @property
    def argmax(self) -> int:
        """Address of the argmax region."""
        return self.logits + self.stride * self.seq_len

    @property
    def status(self) -> int:
        """Address of the status word."""
        return align16(self.argmax + 4 * self.seq_len)

    @property
    def scratch(self) -> int:
        """Address of the scratch region."""
        return self.status + 16

    @property
    def scratch_bytes(self) -> int:
        """Size of the scratch region."""
        m = self.model
        kv = m.max_seq * m.n_heads * (m.mla_dk + m.mla_dr + m.mla_dv) * 2 * m.layers.count("F")
        history = 3 * (m.conv_kernel - 1) * m.kda_width
        st = (m.kda_heads * m.kda_dim**2 + history) * 4 * m.layers.count("L")
        return align16(max(1 << 20, 8 * (kv + st)))

    @property
    def bytes(self) -> int:
        """Size of the whole image."""
        return self.scratch + self.scratch_bytes

    def header(self) -> npt.NDArray[np.uint32]:
        """The 64 header words."""
        words = np.zeros(64, np.uint32)
        words[0], words[1] = MAGIC, VERSION
        for index, name in SHAPE_WORDS.items():
            words[index] = getattr(self.model, name)
        words[19] = words[31] = self.seq_len
        words[20] = self.model.group_size
        words[21] = layer_bitmap(self.model)
        words[22], words[23] = len(self.descriptors), HEADER_BYTES
        words[24:31] = [
            *(self.tokens, self.logits, self.argmax, self.status),
            *(self.scratch, self.scratch_bytes, self.stride),
        ]
        return words


def build_image(
    model: ModelConfig, weights: Weights, tokens: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """The bytes of an image, outputs and scratch zeroed.

    Raises:
        ImageError: no tokens, more than ``max_seq``, or an id outside the vocabulary.
    """
    if not 1 <= len(tokens) <= model.max_seq:
        raise ImageError(f"sequence length {len(tokens)} is not within 1..{model.max_seq}")
    if np.min(tokens) < 0 or np.max(tokens) >= model.vocab:
        raise ImageError(f"a token id is not within 0..{model.vocab - 1}")
    layout = Layout(model, len(tokens))
    image = np.zeros(layout.bytes, np.uint8)
    image[:HEADER_BYTES] = layout.header().view(np.uint8)
    table = np.array(
        [(fnv1a64(d.name) & 0xFFFFFFFF, d.address, d.bytes, d.aux) for d in layout.descriptors],
        np.uint32,
    )
    image[HEADER_BYTES : HEADER_BYTES + table.nbytes] = table.reshape(-1).view(np.uint8)

    def put(address: int, values: npt.NDArray) -> None:
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        image[address : address + data.size] = data

    for tensor in tensors(model):
        value = weights[tensor.name]
        if isinstance(value, Matrix):
            if tensor.name == "emb":
                low, high = value.q[:, 0::2], value.q[:, 1::2]
            else:
                low, high = value.q[0::2], value.q[1::2]
            put(layout.address_of[f"{tensor.name}.q"], (low | high << 4).astype(np.uint8))
            put(layout.address_of[f"{tensor.name}.s"], value.s.astype(np.int16))
            put(layout.address_of[f"{tensor.name}.z"], value.z.astype(np.uint8))
        else:
            put(layout.address_of[tensor.name], value.astype(np.uint16))
    put(layout.tokens, np.asarray(tokens, np.uint32))
    return image


@dataclass(frozen=True)
class Image:
    """A parsed image: what a run of it computes."""

    model: ModelConfig
    weights: Weights
    tokens: npt.NDArray[np.int64]
    data: npt.NDArray[np.uint8]

    @property
    def layout(self) -> Layout:
        """Addresses of its regions."""
        return Layout(self.model, len(self.tokens))


def read_image(data: npt.NDArray[np.uint8], model: ModelConfig) -> Image:
    """Parse and check an image for the shape of ``model``.

    Sequence length and group size are taken from the header. Outputs and scratch
    may be missing at the end of ``data``; they are filled with zeros.

    Raises:
        ImageError: truncated, of another shape, or not laid out as version 1 says.
    """
    data = np.asarray(data, np.uint8)
    if data.size < HEADER_BYTES:
        raise ImageError(f"truncated: {data.size} bytes, the header alone has {HEADER_BYTES}")
    words = data[:HEADER_BYTES].view("<u4")
    if words[0] != MAGIC:
        raise ImageError(f"not an image: magic 0x{words[0]:08X}, expected 0x{MAGIC:08X}")
    if words[1] != VERSION:
        raise ImageError(f"version {words[1]}, only version {VERSION} is known")
    for index, name in SHAPE_WORDS.items():
        expected = getattr(model, name)
        if words[index] != expected:
            raise ImageError(
                f"{name} is {words[index]} (header word {index}), the configuration has {expected}"
            )
    if words[WORD_GROUP_SIZE] not in (64, 128):
        raise ImageError(f"group_size {words[WORD_GROUP_SIZE]} (header word 20), not 64 or 128")
    length = int(words[WORD_SEQ_LEN])
    if not 1 <= length <= model.max_seq:
        raise ImageError(f"seq_len {length} (header word 19) is not within 1..{model.max_seq}")
    model = replace(model, group_size=int(words[WORD_GROUP_SIZE]))
    layout = Layout(model, length)
    for index, expected in enumerate(layout.header()):
        if words[index] != expected:
            raise ImageError(f"header word {index} is {words[index]}, expected {expected}")
    if data.size < layout.logits:
        raise ImageError(
            f"truncated: {data.size} bytes, weights and tokens reach to {layout.logits}"
        )
    if data.size > layout.bytes:
        raise ImageError(f"{data.size} bytes, the header describes only {layout.bytes}")
    table = data[HEADER_BYTES:].view()[: 16 * len(layout.descriptors)].copy().view("<u4")
    for row, d in zip(table.reshape(-1, 4), layout.descriptors, strict=True):
        if tuple(row) != (fnv1a64(d.name) & 0xFFFFFFFF, d.address, d.bytes, d.aux):
            raise ImageError(f"corrupt: the descriptor of {d.name} is not what the header implies")

    def get(address: int, count: int, dtype: str) -> npt.NDArray[np.int64]:
        size = count * np.dtype(dtype).itemsize
        return data[address : address + size].copy().view(dtype).astype(np.int64)

    weights: Weights = {}
    for tensor in tensors(model):
        name = tensor.name
        if tensor.kind != "matrix":
            dtype = "<u2" if tensor.kind == "decay_rate" else "<i2"
            values = get(layout.address_of[name], math.prod(tensor.shape), dtype)
            weights[name] = values.reshape(tensor.shape)
            continue
        rows, columns = tensor.shape
        packed = get(layout.address_of[f"{name}.q"], rows * columns // 2, "u1")
        if name == "emb":
            packed = packed.reshape(rows, columns // 2)
            q = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, columns)
            scales = (rows, model.groups(columns))
        else:
            packed = packed.reshape(rows // 2, columns)
            q = np.stack([packed & 15, packed >> 4], axis=1).reshape(rows, columns)
            scales = (model.groups(rows), columns)
        count = scales[0] * scales[1]
        s = get(layout.address_of[f"{name}.s"], count, "<i2").reshape(scales)
        z = get(layout.address_of[f"{name}.z"], count, "u1").reshape(scales)
        weights[name] = Matrix(q, s, z)
    tokens = get(layout.tokens, length, "<u4")
    if tokens.max() >= model.vocab:
        raise ImageError(f"corrupt: token id {tokens.max()} is outside the vocabulary")
    full = np.zeros(layout.bytes, np.uint8)
    full[: data.size] = data
    return Image(model, weights, tokens, full)


def load_image(path: str | Path, model: ModelConfig) -> Image:
    """Read an image file; see :func:`read_image`.

    Raises:
        ImageError: as there, or the file cannot be read; the message names it.
    """
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise ImageError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return read_image(data, model)
    except ImageError as error:
        raise ImageError(f"{path}: {error}") from None


def synthetic_image(model: ModelConfig, seed: int, prompt: int, length: int) -> Image:
    """Image of synthetic weights and a synthetic prompt."""
    from golden_model.weights import synthetic_tokens, synthetic_weights

    weights = synthetic_weights(model, seed)
    tokens = synthetic_tokens(model, seed, prompt, length)
    return Image(model, weights, tokens, build_image(model, weights, tokens))
