"""Which mechanism is taken: the strongest that works, or exactly the one that was asked for."""

import pytest

from actors.errors import ContainmentUnavailable
from actors.process.containment import Containment, choose, try_out
from actors.process.runner import KeeperLost


def works(_mechanism):
    return None


def forbidden(mechanism):
    return f"{mechanism}: Operation not permitted"


def test_auto_takes_the_strongest_that_works():
    """Where namespaces work nothing else is used, and nothing is to be explained."""
    assert choose("auto", works) == Containment(mechanism="pidns")


def test_auto_falls_back_and_says_why():
    """Where namespaces are forbidden a subreaper holds the jobs, and the reason is kept."""
    found = choose("auto", forbidden)

    assert found.mechanism == "subreaper"
    assert found.why_not == {"pidns": "pidns: Operation not permitted"}


def test_a_weaker_one_may_be_asked_for():
    """The configuration's own choice is taken without trying the others, and named as such."""
    found = choose("subreaper", forbidden)

    assert found.mechanism == "subreaper"
    assert found.why_not == {"pidns": "the configuration asks for subreaper"}


@pytest.mark.parametrize(
    ("mode", "text"),
    [("pidns", "Operation not permitted"), ("cgroup", "this version does not have it")],
)
def test_one_that_does_not_work_is_an_error_that_says_why(mode, text):
    """What was asked for and can not be had stops the start, with the reason and the way out."""
    with pytest.raises(ContainmentUnavailable, match=text) as refused:
        choose(mode, forbidden)

    assert f"mode = {mode}" in str(refused.value)
    assert "auto" in str(refused.value)


@pytest.mark.acceptance
def test_the_probe_answers_what_the_system_says(tmp_path):
    """A subreaper works everywhere; a program that can not start is a reason, not a crash."""
    assert try_out("subreaper", tmp_path) is None
    assert "could not be started" in try_out("subreaper", tmp_path / "not-there")


@pytest.mark.acceptance
async def test_a_keeper_whose_mechanism_fails_says_why(monkeypatch, tmp_path):
    """The reason of the operating system comes with KeeperLost, and the keeper is reaped."""
    from actors.process import runner
    from actors.process.pool import open_keeper_pool

    wrapper = tmp_path / "actors" / "process" / "keeper.py"
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text(
        f"import sys; sys.path.append({str(runner.KEEPER_FILE.parents[2])!r})\n"
        "from actors.process import keeper\n"
        "def refuse(*_): raise OSError(1, 'unshare: Operation not permitted')\n"
        "keeper.PidNamespace._unshare = refuse\n"
        "keeper.main()\n"
    )
    monkeypatch.setattr(runner, "KEEPER_FILE", wrapper)

    async with open_keeper_pool(size=0, mechanism="pidns") as pool:
        with pytest.raises(KeeperLost, match="Operation not permitted"):
            await pool.acquire()

        assert pool.registry.pids == set()
