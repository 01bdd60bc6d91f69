"""Tests on the virtual clock, each under a fixed order of trio's tasks."""

import functools
import inspect
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, overload

import trio
from trio._core import _run
from trio.testing import MockClock

P = ParamSpec("P")
T = TypeVar("T")
AsyncTest = Callable[P, Coroutine[Any, Any, T]]


@overload
def virtual_clock(test: AsyncTest[P, T], /) -> Callable[P, T]: ...


@overload
def virtual_clock(
    *, schedules: int
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, T]]: ...


def virtual_clock(test: Any = None, /, *, schedules: int = 1) -> Any:  # the overloads say what
    """Answer an async test as a plain one that runs under trio on a clock that jumps.

    Waiting takes no time: when nothing is left to do the clock goes to the next deadline. Tasks
    that could run at the same moment run in an order that is drawn from a fixed seed; the test
    is run ``schedules`` times, each with another order, and its error says in which one it
    failed. For pytest the test is not async, so that no plugin for async tests is needed, or
    disturbed.
    """
    if test is None:
        return functools.partial(_plain, schedules=schedules)
    return _plain(test, schedules=schedules)


def _plain(test: Callable[P, Coroutine[Any, Any, T]], *, schedules: int) -> Callable[P, T]:
    if not inspect.iscoroutinefunction(test):
        raise TypeError(f"virtual_clock is for async functions, and {test!r} is none")
    if schedules < 1:
        raise ValueError(f"a test runs at least once, not {schedules} times")

    def run_test(*args: P.args, **kwargs: P.kwargs) -> T:
        call = functools.partial(test, *args, **kwargs)
        for schedule in range(schedules - 1):
            _run_once(call, schedule)
        return _run_once(call, schedules - 1)

    functools.update_wrapper(run_test, test)
    # pytest finds the fixtures by the signature, and must not find the async function behind it.
    del run_test.__wrapped__  # type: ignore[attr-defined]
    run_test.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    return run_test


def _run_once(call: Callable[[], Coroutine[Any, Any, T]], schedule: int) -> T:
    try:
        with _scheduled(schedule):
            return trio.run(call, clock=MockClock(autojump_threshold=0))
    except BaseException as error:
        error.add_note(f"in schedule {schedule} of trio's tasks")
        raise


@contextmanager
def _scheduled(seed: int) -> Iterator[None]:
    """Let trio draw the order of its tasks from a seed, by the switch that it has for tests."""
    assert hasattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING"), "trio has no such switch any more"
    names: dict[str, Any] = vars(_run)
    before, state = names["_ALLOW_DETERMINISTIC_SCHEDULING"], _run._r.getstate()  # noqa: SLF001
    names["_ALLOW_DETERMINISTIC_SCHEDULING"] = True
    _run._r.seed(seed)  # noqa: SLF001
    try:
        yield
    finally:
        names["_ALLOW_DETERMINISTIC_SCHEDULING"] = before
        _run._r.setstate(state)  # noqa: SLF001
