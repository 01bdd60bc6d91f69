"""Output goes to files, tails and facts; nothing but output is ever left out."""

import contextlib

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from actors.agent_output import (
    FACTS_PENDING_MAX,
    FactFeed,
    LineSplitter,
    OutputBudget,
    OutputFile,
    OutputLimit,
)
from actors.ring_buffer import RingBuffer
from storage import events as e
from storage.ids import JobId


@pytest.fixture
def rings():
    """The tails of both streams."""
    return {"stdout": RingBuffer(), "stderr": RingBuffer()}


@pytest.fixture
def feed(rings):
    """The facts of one run."""
    return FactFeed(JobId("job_x"), 1, rings)


def turn(number):
    return e.AgentTurnFinished(turn=number)


@given(st.lists(st.binary(max_size=20), max_size=20))
def test_lines_are_the_same_however_a_stream_is_cut(pieces):
    """The pieces do not matter, the ends of lines do."""
    splitter = LineSplitter()

    lines = [line for piece in pieces for line in splitter.feed(piece)]
    lines += splitter.finish()

    whole = b"".join(pieces).split(b"\n")
    assert lines == (whole if whole[-1] else whole[:-1])


async def test_facts_come_in_order_with_numbers(feed):
    """Nothing is dropped, and the batches count on."""
    feed.put(turn(1))
    batches = feed.batches()
    first = await anext(batches)
    feed.put(turn(2))
    feed.put(turn(3), (("text", b"t"),))
    feed.close()

    rest = [batch async for batch in batches]

    facts = [*first, *(fact for batch in rest for fact in batch)]
    assert [fact.event.turn for fact in facts] == [1, 2, 3]
    assert [fact.n for fact in facts] == [0, 1, 2]
    assert facts[2].texts == (("text", b"t"),)


async def test_output_is_told_once_a_second_and_at_the_end(feed, rings, autojump_clock):
    """Between, the newest tail stands for all; the last one is whole."""
    batches = feed.batches()
    rings["stdout"].push(b"a" * 10_000)
    feed.note_change()
    (first,) = await anext(batches)
    rings["stdout"].push(b"b")
    feed.note_change()
    rings["stdout"].push(b"c")
    feed.note_change()

    (second,) = await anext(batches)
    feed.close()
    rest = [batch async for batch in batches]

    assert (first.event.offset, first.event.size) == (10_000 - 8_192, 8_192)
    assert (second.event.offset + second.event.size, second.texts[0][1][-2:]) == (10_002, b"bc")
    assert autojump_clock.autojump_threshold == 0
    assert rest == []


async def test_a_last_tail_comes_after_the_end(feed, rings):
    """What was written since the last fact is told when the agent has ended."""
    rings["stderr"].push(b"x" * 20_000)
    feed.close()

    (batch,) = [batch async for batch in feed.batches()]

    assert [(fact.event.stream, fact.event.offset, fact.event.size) for fact in batch] == [
        ("stderr", 0, 20_000)
    ]


async def test_a_silent_agent_has_no_output_fact(feed):
    """No bytes, no facts."""
    feed.close()

    assert [batch async for batch in feed.batches()] == []


async def test_who_makes_many_facts_waits_for_the_reader(feed, autojump_clock):
    """At 1,024 pending facts the writer waits; the end lets it go on."""
    for number in range(FACTS_PENDING_MAX - 1):
        feed.put(turn(number))
    await feed.room()
    feed.put(turn(0))

    with trio.move_on_after(1) as scope:
        await feed.room()
    assert scope.cancelled_caught

    async with contextlib.aclosing(feed.batches()) as batches:
        await anext(batches)
    with trio.fail_after(1):
        await feed.room()
    for number in range(FACTS_PENDING_MAX):
        feed.put(turn(number))
    feed.close()
    with trio.fail_after(1):
        await feed.room()


def test_both_streams_share_one_budget(tmp_path):
    """What fits is written, also of the piece that does not; then the limit is raised."""
    budget = OutputBudget(10)
    out, err = OutputFile(tmp_path / "out", budget), OutputFile(tmp_path / "err", budget)
    out.write(b"123456")
    err.write(b"1234")

    with pytest.raises(OutputLimit):
        out.write(b"7")

    out.close()
    err.close()
    out.close()
    assert (tmp_path / "out").read_bytes() == b"123456"
    assert (tmp_path / "err").read_bytes() == b"1234"
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o600


def test_a_file_goes_on_where_it_stopped(tmp_path):
    """Output is appended, so that a file that was adopted is never cut."""
    for text in (b"one", b"two"):
        file = OutputFile(tmp_path / "out", OutputBudget(100))
        file.write(text)
        file.close()

    assert (tmp_path / "out").read_bytes() == b"onetwo"
