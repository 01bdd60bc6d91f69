"""Runs git inside a keeper, with a configuration that nobody but us wrote.

Decisions use exit codes, never git's words. The settings below are given by the environment, which
outranks every file: a repository's own hooks, fsmonitor and ownership do not count.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

from actors.process.runner import KeeperProcess
from actors.process.tool import ToolResult, run_tool

_PASSED: Final = ("PATH", "LD_LIBRARY_PATH", "TZ")
_PASSED_TO_REMOTES: Final = (
    "HOME",
    "USER",
    "LOGNAME",
    "XDG_CONFIG_HOME",
    "SSH_AUTH_SOCK",
    "GIT_SSH",
    "GIT_SSH_COMMAND",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTPS_PROXY",
    "NO_PROXY",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "GIT_SSL_CAINFO",
)
_SETTINGS: Final = (
    ("safe.directory", "*"),
    ("core.hooksPath", "/dev/null"),
    ("core.fsmonitor", "false"),
    ("core.untrackedCache", "false"),
    ("core.protectNTFS", "false"),
    ("core.protectHFS", "false"),
    ("core.quotePath", "false"),
    ("gc.auto", "0"),
    ("maintenance.auto", "false"),
    ("protocol.file.allow", "always"),
    ("advice.detachedHead", "false"),
    ("index.version", "2"),
    ("feature.manyFiles", "false"),
    ("submodule.recurse", "false"),
    ("fetch.recurseSubmodules", "false"),
)
# Local transports start git-upload-pack without GIT_CONFIG_COUNT; only this file reaches it.
_CONFIG_FILE: Final = """\
[safe]
\tdirectory = *
[gc]
\tauto = 0
[core]
\thooksPath = /dev/null
[uploadpack]
\tallowAnySHA1InWant = true
"""
_INCLUDES: Final = """\
[include]
\tpath = ~/.config/git/config
[include]
\tpath = ~/.gitconfig
"""
_MESSAGE_BYTES_MAX: Final = 2_000
_NOT_A_REPOSITORY: Final = 128


class GitFailed(Exception):
    """git ended with another code than it should; ``message`` is the end of what it said."""

    def __init__(self, command: str, code: int, message: str) -> None:
        super().__init__(f"git {command} ended with {code}: {message}")
        self.command = command
        self.code = code
        self.message = message


@attrs.frozen(kw_only=True)
class GitSetup:
    """The configuration files of all git children; made once per data folder.

    ``config`` is ours alone. ``remote_config`` includes the user's own (credentials, proxies,
    ``url.insteadOf``), for commands that talk to a remote.
    """

    config: Path
    remote_config: Path

    @classmethod
    def write(cls, folder: Path) -> "GitSetup":
        """Write the files into a folder and answer where they are; blocks shortly."""
        folder.mkdir(parents=True, exist_ok=True)
        setup = cls(config=folder / "config", remote_config=folder / "remote-config")
        setup.config.write_text(_CONFIG_FILE)
        setup.remote_config.write_text(_INCLUDES + _CONFIG_FILE)
        return setup


class Git:
    """git for one owner (a job or a repository): its keeper, and the mark of its processes."""

    def __init__(
        self, keeper: KeeperProcess, setup: GitSetup, *, extra: Mapping[str, str] | None = None
    ) -> None:
        self._keeper = keeper
        self._setup = setup
        self._extra = dict(extra or {})

    async def run(
        self,
        *words: str | bytes,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        stdout_to: int | None = None,
        ok: Sequence[int] = (0,),
        remote: bool = False,
    ) -> ToolResult:
        """Run one command and answer its result; raises GitFailed for a code not in ``ok``.

        Also raises SpawnFailed (no git), KeeperLost and OutputTooLong. ``remote`` lets the user's
        own configuration and agent sockets take part. Cancelling kills all in the keeper.
        """
        result = await run_tool(
            self._keeper,
            ("git", "--no-optional-locks", *words),
            env=self._environment(remote) | dict(env or {}),
            cwd=cwd,
            stdin=stdin,
            stdout_to=stdout_to,
        )
        if result.code not in ok:
            said = result.stderr[-_MESSAGE_BYTES_MAX:].decode("utf-8", "replace").strip()
            raise GitFailed(os.fsdecode(words[0]), result.code, without_credentials(said))
        return result

    async def text(self, *words: str | bytes, cwd: Path, remote: bool = False) -> str:
        """Answer the output of a command as text without the line's end."""
        result = await self.run(*words, cwd=cwd, remote=remote)
        return result.stdout.decode("utf-8", "surrogateescape").rstrip("\n")

    def _environment(self, remote: bool) -> dict[str, str]:
        names = _PASSED + (_PASSED_TO_REMOTES if remote else ())
        environment = {name: os.environ[name] for name in names if name in os.environ}
        environment |= {
            "LC_ALL": "C",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": str(self._setup.remote_config if remote else self._setup.config),
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_CONFIG_COUNT": str(len(_SETTINGS)),
            "GIT_ADVICE": "0",
            "GIT_EDITOR": "true",
        }
        for number, (key, value) in enumerate(_SETTINGS):
            environment[f"GIT_CONFIG_KEY_{number}"] = key
            environment[f"GIT_CONFIG_VALUE_{number}"] = value
        if remote:
            environment.setdefault("GIT_SSH_COMMAND", "ssh -oBatchMode=yes")
        return environment | self._extra


def without_credentials(text: str) -> str:
    """Answer a text without the user and the password of any address in it."""
    return re.sub(r"://[^/@\s]+@", "://", text)


def is_local(repo: str) -> bool:
    """Answer whether a repository's name is a folder of this machine."""
    return repo.startswith(("file://", "/")) or Path(repo).is_dir()
