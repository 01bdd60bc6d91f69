"""The ring keeps the newest bytes and counts all; decoding never raises."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from actors.ring_buffer import RingBuffer, Utf8Decoder, tail_text

PIECES = st.lists(st.binary(max_size=40), max_size=20)


@given(PIECES, st.integers(0, 64))
def test_the_ring_is_the_end_of_all_that_was_pushed(pieces, capacity):
    """Whatever the pieces, the newest bytes are kept and all are counted."""
    ring = RingBuffer(capacity)

    for piece in pieces:
        ring.push(piece)

    whole = b"".join(pieces)
    kept = whole[-capacity:] if capacity else b""
    assert ring.tail() == kept
    assert ring.total == len(whole)
    assert ring.offset == len(whole) - len(kept)
    assert ring.truncated == (len(whole) > len(kept))


def test_capacity_0_only_counts():
    """Nothing is kept, everything is counted."""
    ring = RingBuffer(0)

    ring.push(b"abc")

    assert (ring.tail(), ring.total, ring.tail(2)) == (b"", 3, b"")


def test_a_push_larger_than_the_ring_keeps_its_last_bytes():
    """At the limit, one below and one above."""
    for size, kept in ((3, b"bcd"), (4, b"abcd"), (5, b"abcd")):
        ring = RingBuffer(size)
        ring.push(b"abcd")
        assert ring.tail() == kept


def test_a_shorter_tail_can_be_asked_for():
    """The newest bytes of what is kept; 0 is none."""
    ring = RingBuffer(8)
    ring.push(b"abcdef")

    assert (ring.tail(2), ring.tail(0), ring.tail(99)) == (b"ef", b"", b"abcdef")


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_decoding_piece_by_piece_is_decoding_the_whole(data, cuts):
    """A character that is cut between two pieces comes out whole; what is not UTF-8 is U+FFFD."""
    decoder = Utf8Decoder()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]

    text = "".join(decoder.feed(data[a:b]) for a, b in itertools.pairwise(edges))
    text += decoder.finish()

    assert text == data.decode("utf-8", "replace")


def test_a_cut_tail_does_not_begin_with_half_a_character():
    """The rest of a character whose start is gone is left away; real damage is shown."""
    tail = "ä€🙂x".encode()[1:]

    assert tail_text(tail, truncated=True) == "€🙂x"
    assert tail_text(tail, truncated=False) == "\ufffd€🙂x"
    assert tail_text(b"", truncated=True) == ""
