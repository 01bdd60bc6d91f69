"""How each backend is started, what its lines mean, and how its end is judged."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.backends import BACKENDS
from actors.host import RunSpec
from storage import events as e
from storage.ids import JobId

HOME, TREE = Path("/ws/home"), Path("/ws/tree")
GOOD, BAD, KILLED = e.ExitStatus(code=0), e.ExitStatus(code=137), e.ExitStatus(signal=9)


def backend(name="command", **options):
    values = {
        "job": JobId("job_x"),
        "epoch": 1,
        "agent": "a",
        "backend": name,
        "prompt": "do it",
        "workspace": e.WorkspaceRequest(),
        "timeout_ms": 1000,
        "max_budget_microusd": 1,
        "grace_ms": 1,
        "output_bytes_max": 1000,
    }
    return BACKENDS[name](RunSpec(**(values | options)))


def jsonl(**options):
    return backend(line_format="jsonl", argv=("agent",), **options)


def test_the_shell_runs_a_file_with_no_input():
    """The script is a file, so that it has any size and its stdin is free."""
    launch = backend("shell").launch(home=HOME, tree=TREE)

    assert launch.argv == ("/bin/sh", "/ws/home/watchkeeper-prompt")
    assert launch.prompt_file
    assert launch.stdin is None


def test_echo_answers_the_whole_prompt():
    """The result is the prompt itself, though the tail of the output is cut."""
    echo = backend("echo", prompt="x" * 100_000)

    assert echo.launch(home=HOME, tree=TREE).stdin == b"x" * 100_000
    assert echo.verdict(GOOD, b"xx", b"").result == b"x" * 100_000


def test_a_command_is_filled_in():
    """Placeholders become the file, the model and the workspace; nothing is split."""
    command = backend(
        argv=("a b", "--m={model}", "{workspace}/x", "{prompt_file}"), model="big one"
    )

    launch = command.launch(home=HOME, tree=TREE)

    assert launch.argv == ("a b", "--m=big one", "/ws/tree/x", "/ws/home/watchkeeper-prompt")
    assert (launch.prompt_file, launch.stdin) == (True, None)


def test_a_command_gets_its_prompt_on_stdin_unless_told_otherwise():
    """By stdin or by file, never as an argument."""
    by_stdin = backend(argv=("a", "{model}")).launch(home=HOME, tree=TREE)
    by_file = backend(argv=("a",), prompt_by="file").launch(home=HOME, tree=TREE)

    assert (by_stdin.argv, by_stdin.stdin, by_stdin.prompt_file) == (("a", ""), b"do it", False)
    assert (by_file.stdin, by_file.prompt_file) == (None, True)


@pytest.mark.parametrize(
    ("status", "cause", "detail"),
    [(GOOD, None, None), (BAD, "agent_exit", "exit code 137"), (KILLED, "agent_exit", "signal 9")],
)
def test_a_plain_end_is_judged_by_its_exit(status, cause, detail):
    """Exit 0 is success; anything else is agent_exit, with code and signal apart."""
    verdict = backend("shell").verdict(status, b"out", b"err")

    assert (verdict.cause, verdict.detail) == (cause, detail)
    assert verdict.result == b"out"
    assert verdict.error == (None if cause is None else b"err")


def test_known_lines_are_facts():
    """Progress, usage, tool calls and sessions of an agent go to the log."""
    agent = jsonl(session_id="ses_1")

    facts = [
        fact
        for line in (
            b'{"type":"progress","text":"half"}',
            b'{"type":"usage","input_tokens":5,"output_tokens":6,"cost_usd":0.25,"model":"m"}',
            b'{"type":"tool","name":"read","arguments":{"p":"\xc3\xa4"},"duration_ms":3}',
            b'{"type":"session","session":"theirs"}',
            b'{"type":"progress"}',
        )
        for fact in agent.line(line)
    ]

    assert [fact.event for fact in facts] == [
        e.AgentTurnFinished(turn=1, text=e.PayloadRef(digest="", size=4)),
        e.UsageRecorded(input_tokens=5, output_tokens=6, cost_microusd=250_000, model="m"),
        e.AgentToolCalled(name="read", arguments=e.PayloadRef(digest="", size=11), duration_ms=3),
        e.SessionBound(session_id="ses_1", agent_session="theirs"),
        e.AgentTurnFinished(turn=2),
    ]
    assert facts[0].texts == (("text", b"half"),)
    assert facts[2].texts == (("arguments", '{"p": "ä"}'.encode()),)


@pytest.mark.parametrize(
    "line",
    [
        b"plain",
        b"",
        b"{",
        b"[]",
        b'{"type":"other"}',
        b'{"type":"usage","input_tokens":"many"}',
        b'{"type":"tool"}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"null",
    ],
)
def test_every_other_line_is_plain_output(line):
    """A broken line, or one that we do not know, means nothing and harms nothing."""
    agent = jsonl()

    assert agent.line(line) == []
    assert agent.verdict(GOOD, line, b"").cause == "no_result"


@given(st.binary(max_size=200))
def test_no_line_raises(line):
    """Whatever an agent prints, a line of it can be taken."""
    jsonl().line(line)


def test_absurd_numbers_stay_numbers():
    """Sums of what an agent claims must fit into the ledger."""
    (fact,) = jsonl().line(b'{"type":"usage","input_tokens":-5,"cost_usd":1e300}')

    assert fact.event == e.UsageRecorded(input_tokens=0, cost_microusd=10**15)


def test_long_arguments_are_cut():
    """What a tool was called with is kept up to a bound."""
    (fact,) = jsonl().line(b'{"type":"tool","name":"w","arguments":"' + b"x" * 10_000 + b'"}')

    assert len(fact.texts[0][1]) == 4_096


def test_a_missing_result_is_no_result_even_at_exit_0():
    """An agent whose stream was cut off did not end well."""
    verdict = jsonl().verdict(GOOD, b"", b"")

    assert verdict.cause == "no_result"


def test_an_error_result_is_a_failure_even_at_exit_0():
    """Its text comes from the errors, when the result has none (SV050)."""
    agent = jsonl()
    agent.line(b'{"type":"result","is_error":true,"result":"","errors":["x","y"]}')

    verdict = agent.verdict(GOOD, b"", b"")

    assert (verdict.cause, verdict.error, verdict.result) == (
        "agent_reported_error",
        b"x\ny",
        None,
    )


def test_the_last_result_is_the_answer():
    """A result line is the result; an exit code other than 0 is still a failure."""
    agent = jsonl()
    agent.line(b'{"type":"result","result":"first"}')
    agent.line(b'{"type":"result","result":"second"}')

    assert agent.verdict(GOOD, b"noise", b"").result == b"second"
    assert agent.verdict(GOOD, b"noise", b"").cause is None
    assert agent.verdict(BAD, b"noise", b"").cause == "agent_exit"


def test_lines_mean_nothing_to_plain_agents():
    """Only a definition that says JSON Lines has its lines read."""
    assert not backend("shell").reads_lines
    assert not backend(argv=("a",)).reads_lines
    assert jsonl().reads_lines
    assert backend("echo").line(b'{"type":"progress"}') == []
