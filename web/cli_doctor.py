"""``watchkeeper doctor``: what this machine has, and the settings in force."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, Literal

import attrs
import click
import msgspec

from web import local
from web.cli_common import settings_of, with_config, with_json
from web.config import shown
from web.settings import Settings

HELD_BY: Final = {
    "pidns": "a pid namespace for each job ends with its keeper, and all processes with it",
    "subreaper": "a keeper for each job reaps all its processes",
}
Verdict = Literal["ok", "note", "bad"]
TOOL_S: Final = 5.0
GIT_LEAST: Final = (2, 25)


@attrs.frozen
class Check:
    """One thing that was looked at; ``note`` is worth knowing, ``bad`` stops jobs."""

    name: str
    verdict: Verdict
    text: str


@click.command()
@with_json
@with_config
def doctor(*, as_json: bool, config: Path | None, data: Path | None) -> int:
    """Check git, the agents' programs, containment and disk; show every setting's origin.

    The exit code is 1 if something would stop jobs.
    """
    settings = settings_of(config, data)
    checks = all_checks(settings)
    if as_json:
        whole = {
            "checks": [attrs.asdict(check) for check in checks],
            "settings": [{"key": k, "value": v, "from": o} for k, v, o in shown(settings)],
        }
        print(msgspec.json.encode(whole).decode())
    else:
        _show(checks, settings)
    return 1 if any(check.verdict == "bad" for check in checks) else 0


def all_checks(settings: Settings) -> list[Check]:
    """Answer what was found; starts a few programs for their version."""
    looks = (_python, _git, _data, _service, _disk, _containment, _agents)
    tools = [
        _tool("git-crypt", "needed for repositories that use it"),
        _tool("git-lfs", "needed for repositories that use it"),
        _tool("claude", "needed for agents with backend claude"),
        _tool("codex", "needed for agents with backend codex"),
        _tool("opencode", "needed for agents with backend opencode"),
    ]
    return [look(settings) for look in looks] + tools


def _python(_settings: Settings) -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", "ok", version)


def _git(_settings: Settings) -> Check:
    text = _version("git")
    if text is None:
        return Check("git", "bad", "is not installed: jobs on repositories can not run; install it")
    numbers = [int(part) for part in text.split()[-1].split(".")[:2] if part.isdigit()]
    if tuple(numbers) < GIT_LEAST:
        return Check("git", "bad", f"{text} is too old; 2.25 or newer is needed")
    return Check("git", "ok", text)


def _data(settings: Settings) -> Check:
    folder = settings.server.data
    if not folder.exists():
        return Check("data", "ok", f"{folder} will be made at the first start")
    mode = folder.stat().st_mode & 0o777
    if mode & 0o077:
        return Check("data", "note", f"{folder} has mode {mode:o}; the service sets it to 700")
    return Check("data", "ok", str(folder))


def _service(settings: Settings) -> Check:
    from storage.folder import DataFolder

    service = local.find(settings.server.data)
    if service is not None:
        return Check("service", "ok", f"lives at {service.url}, process {service.pid}")
    holder = DataFolder(settings.server.data).holder()
    if holder is not None:
        return Check("service", "note", f"process {holder} holds the data folder")
    return Check("service", "ok", "none lives on this data folder")


def _disk(settings: Settings) -> Check:
    free = shutil.disk_usage(_nearest(settings.server.data)).free
    low = settings.log.low_water_bytes
    text = f"{free / 1e9:.1f} GB free where the data is"
    if free < low:
        return Check("disk", "bad", f"{text}; below {low / 1e6:.0f} MB no job is accepted")
    return Check("disk", "ok", text)


def _nearest(folder: Path) -> Path:
    """Answer the folder itself, or the nearest one above it that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def _containment(settings: Settings) -> Check:
    from actors.errors import ContainmentUnavailable
    from actors.process.containment import find_containment

    wanted = settings.containment.mode
    try:
        found = find_containment(wanted, _nearest(settings.server.data))
    except ContainmentUnavailable as error:
        return Check("containment", "bad", str(error))
    text = f"{found.mechanism}: {HELD_BY[found.mechanism]} (configured: {wanted})"
    reasons = [f"not {name}: {why}" for name, why in found.why_not.items()]
    open_still = "jobs run as this user and can read its files"
    verdict: Verdict = "note" if reasons else "ok"
    return Check("containment", verdict, "; ".join([text, *reasons, open_still]))


def _agents(settings: Settings) -> Check:
    names = sorted(f.stem for folder in settings.agents.folder for f in folder.glob("*.md"))
    folders = ", ".join(map(str, settings.agents.folder))
    if not names:
        return Check("agents", "note", f"none in {folders}; shell and echo are built in")
    return Check("agents", "ok", f"{', '.join(names)} (and shell, echo)")


def _tool(name: str, use: str) -> Check:
    text = _version(name)
    if text is None:
        return Check(name, "note", f"is not installed; {use}")
    return Check(name, "ok", text)


def _version(name: str) -> str | None:
    path = shutil.which(name)
    if path is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603  a program from PATH, asked for its version
            [path, "--version"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=TOOL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return f"{path} (does not say its version)"
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    return lines[0].strip() if lines else path


def _show(checks: list[Check], settings: Settings) -> None:
    marks = {"ok": "ok  ", "note": "note", "bad": "BAD "}
    colours = {"ok": "32", "note": "33", "bad": "31"}
    for check in checks:
        mark = marks[check.verdict]
        if sys.stdout.isatty():
            mark = f"\x1b[{colours[check.verdict]}m{mark}\x1b[0m"
        print(f"{mark}  {check.name:<12} {check.text}")
    print()
    rows = shown(settings)
    width = max(len(key) for key, _, _ in rows)
    for key, value, origin in rows:
        print(f"{key:<{width}}  {value}  ({origin})")
