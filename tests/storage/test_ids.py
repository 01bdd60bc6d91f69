"""Ids: their form, their order, their seams."""

import re

from hypothesis import given
from hypothesis import strategies as st

from storage.ids import ID_PATTERN, SERVICE_STREAM, IdSource, job_of_stream, job_stream


def test_an_id_has_its_prefix_and_26_characters():
    """The pattern that the edge checks is the pattern that is made."""
    assert re.fullmatch(ID_PATTERN, IdSource().new("job"))


def test_two_ids_differ_though_the_clock_stands():
    """80 random bits tell ids of one millisecond apart."""
    ids = IdSource(clock_ns=lambda: 0)

    assert len({ids.new_job() for _ in range(100)}) == 100


@given(times=st.lists(st.integers(0, 2**47 * 1_000_000), min_size=2, max_size=5))
def test_ids_sort_by_the_millisecond_of_their_time(times):
    """Text order is time order, whatever the random bits."""
    stamped = []
    for time_ns in times:
        ids = IdSource(clock_ns=lambda time_ns=time_ns: time_ns)
        stamped.append((time_ns // 1_000_000, ids.new("job")))

    stamped.sort(key=lambda pair: pair[1])
    assert [time for time, _ in stamped] == sorted(time for time, _ in stamped)


def test_equal_seams_make_equal_ids_and_salts():
    """Clock and random bytes are all that an id depends on."""
    made = [
        (ids.new_job(), ids.salt())
        for ids in (IdSource(lambda: 5, lambda n: b"\x07" * n) for _ in range(2))
    ]

    assert made[0] == made[1]
    assert len(made[0][1]) == 16


def test_a_stream_knows_its_job():
    """The name of a job's stream leads back; the service's leads to none."""
    job = IdSource().new_job()

    assert job_of_stream(job_stream(job)) == job
    assert job_of_stream(SERVICE_STREAM) is None
