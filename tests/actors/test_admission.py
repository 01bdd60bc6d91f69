"""Promises of the queue's order."""

import hypothesis.strategies as st
from hypothesis import given

from actors.admission import Queue, QueuedJob
from storage.ids import JobId


def queued(priority, seq):
    return QueuedJob.of(JobId(f"job_{seq}"), priority=priority, submitted_seq=seq, version=1)


entries = st.lists(
    st.tuples(st.integers(-9, 9), st.integers(1, 1000)), unique_by=lambda pair: pair[1]
).map(lambda pairs: [queued(*pair) for pair in pairs])


@given(entries)
def test_the_order_is_by_priority_then_by_submission(jobs):
    """Whatever the order of arrival, higher priority starts first, then the lower seq."""
    queue = Queue()
    for job in jobs:
        queue.add(job)

    taken = [queue.take_first() for _ in jobs]

    assert taken == sorted(jobs, key=lambda job: (job.rank, job.submitted_seq))
    assert queue.take_first() is None


@given(entries, st.data())
def test_a_job_is_taken_from_anywhere_and_the_others_keep_their_order(jobs, data):
    """Taking one leaves all others in their places."""
    queue = Queue()
    for job in jobs:
        queue.add(job)
    out = data.draw(st.sampled_from(jobs)) if jobs else queued(0, 1)

    taken = queue.take(out.job)

    assert taken == (out if jobs else None)
    assert list(queue) == sorted(job for job in jobs if job != out)
    assert queue.take(out.job) is None
    assert out.job not in queue


@given(entries)
def test_a_position_counts_those_that_start_before(jobs):
    """Position 0 starts next; who does not wait has none."""
    queue = Queue()
    for job in jobs:
        queue.add(job)

    positions = [queue.position(job.job) for job in sorted(jobs)]

    assert positions == list(range(len(jobs)))
    assert len(queue) == len(jobs)
    assert queue.position(JobId("job_none")) is None
