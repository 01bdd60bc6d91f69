"""The newest bytes of a stream, and the decoding of a stream that is cut anywhere."""

import codecs
from typing import Final

RING_BYTES: Final = 65_536
_UTF8_CONTINUATION: Final = 0b1000_0000
_UTF8_CONTINUATION_MASK: Final = 0b1100_0000
_UTF8_CONTINUATIONS_MAX: Final = 3


class RingBuffer:
    """Keeps the newest ``capacity`` bytes and counts all; capacity 0 only counts."""

    def __init__(self, capacity: int = RING_BYTES) -> None:
        assert capacity >= 0, "a capacity is a number of bytes"
        self._capacity = capacity
        self._bytes = bytearray()
        self._total = 0

    @property
    def total(self) -> int:
        """How many bytes were ever pushed."""
        return self._total

    @property
    def offset(self) -> int:
        """Where in the stream the kept bytes begin."""
        return self._total - len(self._bytes)

    @property
    def truncated(self) -> bool:
        """Whether bytes were pushed that are not kept any more."""
        return self.offset > 0

    def push(self, data: bytes) -> None:
        """Add bytes at the end; the oldest go."""
        self._total += len(data)
        if self._capacity == 0:
            return
        self._bytes += data[-self._capacity :]
        if len(self._bytes) > self._capacity:
            del self._bytes[: len(self._bytes) - self._capacity]

    def tail(self, size: int | None = None) -> bytes:
        """Answer the newest ``size`` bytes that are kept; None: all that are."""
        if size is None:
            return bytes(self._bytes)
        return bytes(self._bytes[-size:]) if size else b""


class Utf8Decoder:
    """Decodes UTF-8 piece by piece: a character may be cut between pieces.

    What is not UTF-8 becomes U+FFFD; nothing raises.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """Answer the text that is complete by now."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Answer what a stream that ends here leaves: U+FFFD for half a character."""
        return self._decoder.decode(b"", final=True)


def tail_text(tail: bytes, *, truncated: bool) -> str:
    """Answer a tail as text; with ``truncated`` half a character at its start is left away."""
    start = 0
    if truncated:
        while (
            start < min(len(tail), _UTF8_CONTINUATIONS_MAX)
            and tail[start] & _UTF8_CONTINUATION_MASK == _UTF8_CONTINUATION
        ):
            start += 1
    return tail[start:].decode("utf-8", "replace")
