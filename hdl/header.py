"""Header check: compares an image's header with the shape the chip was made for."""

from __future__ import annotations

from amaranth.hdl import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from golden_model.config import Config
from golden_model.image import (
    WORD_ARGMAX,
    WORD_DESCRIPTOR_ADDRESS,
    WORD_DESCRIPTORS,
    WORD_GROUP_SIZE,
    WORD_LOGITS,
    WORD_SEQ_LEN,
    WORD_STATUS,
    WORD_STRIDE,
    WORD_TOKENS,
    Layout,
)

#: Words 0 to 31 of the header are read; the rest is zero.
HEADER_BEATS = 8
WORDS = 4


class Header(wiring.Component):
    """Takes the header beat by beat, keeps what a run needs.

    Attributes
    ----------
    start : In
        A run begins: forget the last header.
    valid, beat, data : In
        Beat number ``beat`` of the header.
    bad, bad_word : Out
        Whether a word seen so far is not the chip's, and the first such word's index.
    seq_len, group128 : Out
        Length of the run; group size 128, else 64.
    descriptors, tokens, logits, argmax, status, stride : Out
        Byte addresses, and the distance of logits rows.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        super().__init__(
            {
                "start": In(1),
                "valid": In(1),
                "beat": In(range(HEADER_BEATS)),
                "data": In(128),
                "bad": Out(1),
                "bad_word": Out(5),
                "seq_len": Out(16),
                "group128": Out(1),
                **{
                    name: Out(32)
                    for name in ("descriptors", "tokens", "logits", "argmax", "status", "stride")
                },
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        model = self.config.model
        expected = Layout(model, 1).header()
        checked = {*range(WORD_SEQ_LEN), WORD_SEQ_LEN + 2, WORD_DESCRIPTORS}
        kept = {
            WORD_DESCRIPTOR_ADDRESS: self.descriptors,
            WORD_TOKENS: self.tokens,
            WORD_LOGITS: self.logits,
            WORD_ARGMAX: self.argmax,
            WORD_STATUS: self.status,
            WORD_STRIDE: self.stride,
        }
        with m.If(self.start):
            m.d.sync += self.bad.eq(0)
        with m.If(self.valid):
            for i in range(HEADER_BEATS * WORDS):
                word = self.data.word_select(i % WORDS, 32)
                with m.If(self.beat == i // WORDS):
                    if i in kept:
                        m.d.sync += kept[i].eq(word)
                    elif i == WORD_SEQ_LEN:
                        m.d.sync += self.seq_len.eq(word)
                    elif i == WORD_GROUP_SIZE:
                        m.d.sync += self.group128.eq(word[7])
            wrong = Signal(WORDS)
            for beat in range(HEADER_BEATS):
                with m.If(self.beat == beat):
                    for i in range(WORDS):
                        index = beat * WORDS + i
                        word = self.data.word_select(i, 32)
                        if index in checked:
                            m.d.comb += wrong[i].eq(word != int(expected[index]))
                        elif index == WORD_SEQ_LEN:
                            m.d.comb += wrong[i].eq((word == 0) | (word > model.max_seq))
                        elif index == WORD_GROUP_SIZE:
                            m.d.comb += wrong[i].eq((word != 64) & (word != 128))
            with m.If(wrong.any() & (~self.bad | self.start)):
                m.d.sync += self.bad.eq(1)
                for i in reversed(range(WORDS)):
                    with m.If(wrong[i]):
                        m.d.sync += self.bad_word.eq(self.beat * WORDS + i)
        return m
