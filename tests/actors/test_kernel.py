"""Promises of mailboxes, references, the actor loop and supervision."""

import pytest
import trio

from actors.kernel import (
    Actor,
    ActorGone,
    ChildSpec,
    Mailbox,
    MailboxFull,
    Reply,
    RestartLimit,
    open_supervision,
)


class Ask:
    def __init__(self, reply, what="answer"):
        self.reply = reply
        self.what = what


class Echo(Actor):
    """Answers, crashes, hangs or ends, as it is told."""

    def __init__(self, messages_max=4):
        super().__init__("echo", messages_max)
        self.handled = 0

    async def receive(self, message):
        self.handled += 1
        if message.what == "crash":
            raise RuntimeError("told to")
        if message.what == "hang":
            await trio.sleep_forever()
        message.reply.set(self.handled)
        return message.what != "end"


async def test_a_mailbox_takes_its_maximum_and_not_one_more(autojump_clock):
    """The written limit is exact: one below and at it are taken, one above is refused."""
    box = Mailbox("box", 2)
    box.put_nowait(1)
    box.put_nowait(2)

    with pytest.raises(MailboxFull) as full:
        box.put_nowait(3)

    assert (full.value.actor, full.value.messages_max) == ("box", 2)
    assert str(full.value) == "the mailbox of box holds its 2 messages; try again"
    assert await box.get() == 1


async def test_a_sender_waits_for_room_and_keeps_its_place(autojump_clock):
    """Messages come out in the order in which they were put, also by senders that waited."""
    box = Mailbox("box", 1)
    await box.put("first")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(box.put, "second")
        await trio.testing.wait_all_tasks_blocked()

        taken = [await box.get(), await box.get()]

    assert taken == ["first", "second"]


async def test_a_sender_that_is_cancelled_put_nothing(autojump_clock):
    """A wait for room that ended early leaves no message behind."""
    box = Mailbox("box", 1)
    await box.put("first")

    with trio.move_on_after(1):
        await box.put("second")

    assert box.close() == ["first"]


async def test_a_closed_mailbox_answers_what_nobody_took_and_refuses_the_rest(autojump_clock):
    """Nothing is lost silently: what was left is handed back, also of waiting senders."""
    box = Mailbox("box", 1)
    await box.put("first")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(box.put, "second")
        await trio.testing.wait_all_tasks_blocked()

        assert box.close() == ["first", "second"]

    assert box.close() == []
    with pytest.raises(ActorGone):
        await box.put("third")
    with pytest.raises(ActorGone):
        box.put_nowait("third")


async def test_an_ask_is_answered(autojump_clock):
    """An ask returns what the handler set."""
    echo = Echo()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(echo.run)

        assert await echo.ref.ask(Ask) == 1

        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("way", ["crash", "cancel", "end"])
async def test_every_asker_of_an_actor_that_dies_gets_an_error(way, autojump_clock):
    """The message in hand and those that wait are failed, however the actor ends."""
    echo = Echo()
    errors = []

    async def ask(what):
        try:
            await echo.ref.ask(lambda reply: Ask(reply, what))
        except ActorGone as gone:
            errors.append(gone.actor)

    async with trio.open_nursery() as askers:
        first = {"crash": "crash", "cancel": "hang", "end": "end"}[way]
        askers.start_soon(ask, first)
        await trio.testing.wait_all_tasks_blocked()
        askers.start_soon(ask, "answer")
        askers.start_soon(ask, "answer")
        await trio.testing.wait_all_tasks_blocked()

        with trio.move_on_after(1):
            if way == "crash":
                with pytest.raises(RuntimeError):
                    await echo.run()
            else:
                await echo.run()

    assert len(errors) == (2 if way == "end" else 3)
    with pytest.raises(ActorGone, match="echo has ended"):
        await echo.ref.ask(Ask)


async def test_a_message_is_answered_once(autojump_clock):
    """A second answer is a bug and says so."""
    reply = Reply()
    reply.set(1)

    with pytest.raises(AssertionError):
        reply.fail(ValueError())


class Child:
    """A child that crashes a number of times and then ends or stays."""

    def __init__(self, crashes=0, stays=True, every_s=0.0):
        self.left = crashes
        self.stays = stays
        self.every_s = every_s
        self.runs = 0

    async def run(self):
        self.runs += 1
        await trio.sleep(self.every_s)
        if self.left:
            self.left -= 1
            raise ValueError(self.left)
        if self.stays:
            await trio.sleep_forever()


async def supervise(spec):
    """Run a child for a second."""
    async with open_supervision() as supervision:
        supervision.start(spec)
        await trio.sleep(1)


async def test_a_transient_child_is_restarted_after_a_crash_only(autojump_clock):
    """Crashes restart it, and a normal end does not."""
    seen = []
    child = Child(crashes=3, stays=False)

    async with open_supervision(lambda name, error: seen.append((name, str(error)))) as supervision:
        supervision.start(ChildSpec(name="child", run=child.run))
        await trio.sleep(1)

    assert child.runs == 4
    assert seen == [("child", "2"), ("child", "1"), ("child", "0")]


async def test_one_restart_more_than_the_limit_ends_the_supervision(autojump_clock):
    """At the limit it goes on, one above raises RestartLimit."""
    child = Child(crashes=4)

    with pytest.raises(ExceptionGroup) as caught:
        await supervise(ChildSpec(name="child", run=child.run))

    assert child.runs == 4
    limit = caught.value.exceptions[0]
    assert isinstance(limit, RestartLimit)
    assert str(limit) == "child crashed more than 3 times in 5 s"


async def test_crashes_far_apart_do_not_add_up(autojump_clock):
    """The limit counts within its window: many crashes, each long after the other, are fine."""
    child = Child(crashes=20, every_s=2.0)

    async with open_supervision() as supervision:
        supervision.start(ChildSpec(name="child", run=child.run))
        await trio.sleep(100)

        assert child.runs == 21


async def test_a_permanent_child_is_restarted_also_after_a_normal_end(autojump_clock):
    """``permanent`` means that it always runs."""
    child = Child(stays=False, every_s=3.0)

    async with open_supervision() as supervision:
        supervision.start(ChildSpec(name="child", run=child.run, restart="permanent"))
        await trio.sleep(10)

    assert child.runs == 4


async def test_the_crash_of_a_temporary_child_ends_the_supervision(autojump_clock):
    """``temporary`` is never restarted, and its crash is not swallowed."""
    child = Child(crashes=1)

    with pytest.raises(ExceptionGroup):
        await supervise(ChildSpec(name="child", run=child.run, restart="temporary"))

    assert child.runs == 1


async def test_children_stop_in_the_reverse_order_of_their_start(autojump_clock):
    """Each is waited for before the next is cancelled."""
    order = []

    async def child(name):
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(1)
            order.append((name, trio.current_time()))

    async with open_supervision() as supervision:
        for name in ("first", "second", "third"):
            supervision.start(ChildSpec(name=name, run=lambda name=name: child(name)))
        await trio.testing.wait_all_tasks_blocked()

    assert [name for name, _ in order] == ["third", "second", "first"]
    assert [at - order[0][1] for _, at in order] == [0, 1, 2]
