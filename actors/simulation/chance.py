"""What a seed decides: how the runs of a history go, and the random sources of its parts.

Every part draws from a source of its own, named by a text, so that one more draw in one part
changes nothing in another, and so that a history of fewer steps is a beginning of the longer one.
"""

import math
import random
from collections import Counter
from typing import Final

import attrs

from actors.host import HostError, RunSpec
from actors.testing import Script, ScriptedFact
from storage import events as e

CAUSES: Final[tuple[e.Cause, ...]] = (
    "no_result",
    "agent_reported_error",
    "budget_exceeded",
    "output_limit",
)
OFFER_CAUSES: Final[tuple[e.Cause, ...]] = ("workspace_failed", "lfs_missing", "disk_full")


class ScriptedBug(Exception):
    """A bug in the host that a script asked for: it crashes the JobActor of its run."""


def source(seed: int, name: str) -> random.Random:
    """Answer the random source of a part; the same for any hash seed."""
    return random.Random(f"{seed}/{name}")  # noqa: S311  reproducible, not secret


def draw_script(seed: int, spec: RunSpec, faults: Counter[str]) -> Script:
    """Answer how a run goes, by the seed and the run's name; counts the trouble in it."""
    chance = source(seed, f"run/{spec.job}/{spec.epoch}")
    script = Script(
        prepare_s=chance.choice((0.0, 0.05, 0.3, 2.0)),
        run_s=chance.choice((0.0, 0.1, 0.5, 1.0, 3.0, 8.0)),
        end_s=chance.choice((0.0, 0.01, 0.2)),
        capture_s=chance.choice((0.0, 0.05, 0.5)),
        remove_s=chance.choice((0.0, 0.0, 0.05, 0.5)),
        close_s=chance.choice((0.0, 0.0, 0.05, 0.5)),
        facts=_draw_facts(chance),
        repeats_facts=chance.random() < 0.3,
        exit_code=chance.choice((0, 0, 0, 0, 1, 127)),
        survives_crash=chance.random() < 0.3,
        children=chance.choice((0, 0, 1, 3)),
    )
    for name, share, change in _TROUBLES:
        if chance.random() < share:
            faults[f"run.{name}"] += 1
            script = attrs.evolve(script, **change(chance))
    return script


def _draw_facts(chance: random.Random) -> tuple[ScriptedFact, ...]:
    facts: list[ScriptedFact] = []
    after_s = 0.0
    for turn in range(chance.choice((0, 0, 1, 2, 4, 7))):
        after_s += chance.choice((0.0, 0.01, 0.2, 1.0))
        tokens = chance.randrange(1_000)
        event: e.JobEvent = chance.choice(
            (
                e.UsageRecorded(input_tokens=tokens, output_tokens=1, cost_microusd=tokens * 3),
                e.AgentTurnFinished(turn=turn + 1),
                e.AgentToolCalled(name="grep"),
                e.SessionBound(session_id="s", agent_session=f"a{turn}"),
            )
        )
        facts.append(ScriptedFact(after_s, event))
    return tuple(facts)


_TROUBLES: Final = (
    ("reports_error", 0.05, lambda c: {"cause": c.choice(CAUSES), "error": b"it said so"}),
    ("hangs", 0.06, lambda _: {"run_s": math.inf}),
    ("ignores_term", 0.15, lambda _: {"ignores_term": True}),
    ("slow_term", 0.1, lambda c: {"term_s": c.choice((0.5, 3.0, 20.0))}),
    ("leaves_children", 0.05, lambda c: {"stuck": 1, "stuck_s": c.choice((0.5, 5.0, 40.0))}),
    ("loses_keeper", 0.08, lambda c: {"keeper_lost_s": c.choice((0.0, 0.2, 2.0))}),
    ("preparing_fails", 0.04, lambda c: {"offer_error": HostError(c.choice(OFFER_CAUSES), "no")}),
    ("preparing_hangs", 0.02, lambda _: {"prepare_s": math.inf}),
    ("spawn_fails", 0.03, lambda _: {"release_error": HostError("spawn_failed", "no exec")}),
    ("ending_hangs", 0.02, lambda _: {"end_s": math.inf}),
    ("capture_fails", 0.05, lambda _: {"capture": "fails"}),
    ("capture_hangs", 0.03, lambda _: {"capture": "hangs"}),
    ("capture_incomplete", 0.05, lambda _: {"capture": "incomplete"}),
    ("removing_fails", 0.03, lambda _: {"remove_error": HostError("internal", "busy")}),
    ("fate_unknown", 0.06, lambda c: {"unknown_s": c.choice((0.5, 5.0, 100.0))}),
    ("host_bug", 0.02, lambda _: {"crash": ScriptedBug("scripted")}),
    ("deaf", 0.05, lambda _: {"message_error": HostError("internal", "deaf")}),
)
