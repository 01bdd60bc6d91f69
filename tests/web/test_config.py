"""Settings: a file, the environment over it, options over both, and nothing unknown."""

from pathlib import Path

import pytest

from web.config import ConfigError, digest, load, shown
from web.settings import Settings

HOME = {"HOME": "/home/x"}


def settings(
    tmp_path: Path, text: str | None = None, env: dict[str, str] | None = None, **options: str
) -> Settings:
    if text is not None:
        (tmp_path / "watchkeeper.toml").write_text(text)
    return load(
        None,
        {k.replace("__", "."): v for k, v in options.items()},
        environ=HOME | (env or {}),
        folder=tmp_path,
    )


def test_the_defaults_are_those_of_the_contract(tmp_path: Path) -> None:
    """Without a file and without variables."""
    found = settings(tmp_path)

    assert (found.server.host, found.server.port) == ("127.0.0.1", 8470)
    assert found.server.data == Path("/home/x/.local/state/watchkeeper")
    assert found.audit.key == Path("/home/x/.config/watchkeeper/log.key")
    assert (found.limits.capacity, found.limits.queue_depth, found.limits.grace_s) == (10, 100, 5)
    assert found.limits.output_limit_bytes == 256 * 1024 * 1024
    assert found.agents.folder == (tmp_path / "agents",)
    assert found.agents.allow_shell is False
    assert found.models.default == "sonnet"
    assert found.models.allowed[:3] == ("haiku", "sonnet", "opus")
    assert (found.workspace.repo, found.workspace.kind) == (None, None)
    assert (found.log.drain_s, found.url, found.token) == (30, "http://127.0.0.1:8470", None)
    assert set(found.provenance.values()) == {"default"}


def test_xdg_folders_are_used_when_they_are_absolute(tmp_path: Path) -> None:
    """A relative one is ignored, as the specification says."""
    good = settings(tmp_path, env={"XDG_STATE_HOME": "/state", "XDG_CONFIG_HOME": "/config"})
    bad = settings(tmp_path, env={"XDG_STATE_HOME": "state"})

    assert good.server.data == Path("/state/watchkeeper")
    assert good.audit.key == Path("/config/watchkeeper/log.key")
    assert bad.server.data == Path("/home/x/.local/state/watchkeeper")


def test_options_win_over_the_environment_over_the_file(tmp_path: Path) -> None:
    """And each says where it came from."""
    text = "[server]\nport = 1\nhost = 'a'\n[limits]\ncapacity = 3\n"
    env = {"WATCHKEEPER_SERVER_PORT": "2", "WATCHKEEPER_LIMITS_CAPACITY": "4"}

    found = settings(tmp_path, text, env, server__port="3")

    assert (found.server.port, found.server.host, found.limits.capacity) == (3, "a", 4)
    assert found.provenance["server.port"] == "option --port"
    assert found.provenance["limits.capacity"] == "environment WATCHKEEPER_LIMITS_CAPACITY"
    assert found.provenance["server.host"] == f"file {tmp_path / 'watchkeeper.toml'}"
    assert ("server.port", "3", "option --port") in shown(found)


def test_keys_with_underscores_are_overridable(tmp_path: Path) -> None:
    """The section ends at the first underscore."""
    env = {
        "WATCHKEEPER_AGENTS_ALLOW_SHELL": "true",
        "WATCHKEEPER_MODELS_ALLOWED": "a, b",
        "WATCHKEEPER_AGENTS_FOLDER": "x:~/y",
        "WATCHKEEPER_LOG_LOW_WATER_BYTES": "1",
        "WATCHKEEPER_WORKSPACE_REPO": "",
        "WATCHKEEPER_CONTAINMENT_CONFINE": "false",
    }

    found = settings(tmp_path, env=env)

    assert found.agents.allow_shell is True
    assert found.models.allowed == ("a", "b")
    assert found.agents.folder == (tmp_path / "x", Path("/home/x/y"))
    assert (found.log.low_water_bytes, found.workspace.repo) == (1, None)
    assert found.containment.confine == "false"


def test_paths_of_a_file_are_relative_to_the_file(tmp_path: Path) -> None:
    """Those of variables to the working folder."""
    (tmp_path / "conf").mkdir()
    file = tmp_path / "conf" / "w.toml"
    file.write_text("[agents]\nfolder = ['a', '/b']\n[server]\ndata = 'd'\n")

    found = load(file, environ=HOME, folder=tmp_path)

    assert found.agents.folder == (tmp_path / "conf" / "a", Path("/b"))
    assert found.server.data == tmp_path / "conf" / "d"


@pytest.mark.parametrize(
    ("text", "env", "names"),
    [
        (
            "[limits]\ncapacty = 1\n",
            {},
            ["limits.capacty", "capacity", "queue_depth", "watchkeeper.toml"],
        ),
        ("[limit]\ncapacity = 1\n", {}, ["[limit]", "[limits]", "[server]"]),
        ("port = 1\n", {}, ["[port]", "[server]"]),
        ("[limits]\ncapacity = 0\n", {}, ["limits.capacity", "from 1"]),
        ("[limits]\ncapacity = true\n", {}, ["limits.capacity", "integer"]),
        ("[server]\nport = 65536\n", {}, ["server.port", "65535"]),
        ("[limits\n", {}, ["watchkeeper.toml", "TOML"]),
        ("", {"WATCHKEEPER_LIMITS_CAPACTY": "1"}, ["WATCHKEEPER_LIMITS_CAPACTY", "capacity"]),
        ("", {"WATCHKEEPER_PORT": "1"}, ["WATCHKEEPER_PORT", "[server]"]),
        ("", {"WATCHKEEPER_SERVER_PORT": "x"}, ["server.port", "WATCHKEEPER_SERVER_PORT"]),
        ("", {"WATCHKEEPER_SERVER_PORT": "9" * 5000}, ["server.port"]),
        ("", {"WATCHKEEPER_LIMITS_GRACE_S": "nan"}, ["limits.grace_s"]),
        ("", {"WATCHKEEPER_AGENTS_ALLOW_SHELL": "maybe"}, ["agents.allow_shell", "true or false"]),
        ("", {"WATCHKEEPER_CONTAINMENT_MODE": "docker"}, ["containment.mode", "pidns"]),
        ("[models]\nallowed = 3\n", {}, ["models.allowed", "list"]),
        ("[models]\nallowed = [3]\n", {}, ["models.allowed"]),
    ],
)
def test_what_can_not_be_used_is_named(
    tmp_path: Path, text: str, env: dict[str, str], names: list[str]
) -> None:
    """The key, where it was found, and what would do."""
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, text, env)

    for name in names:
        assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_variables_that_mark_a_child_are_no_settings(tmp_path: Path) -> None:
    """A job that starts watchkeeper again is not refused."""
    env = {"WATCHKEEPER_JOB_ID": "x", "WATCHKEEPER_TOKEN": "s3cret", "WATCHKEEPER_URL": "http://h/"}

    found = settings(tmp_path, env=env)

    assert (found.token, found.url, found.url_given) == ("s3cret", "http://h", True)
    assert "s3cret" not in repr(found)


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    """--config is not silently ignored."""
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "missing.toml", environ=HOME, folder=tmp_path)


def test_the_digest_changes_with_a_setting_and_not_with_the_token(tmp_path: Path) -> None:
    """It goes into the log, so it holds no secret."""
    one = digest(settings(tmp_path))

    assert digest(settings(tmp_path, env={"WATCHKEEPER_TOKEN": "secret"})) == one
    assert digest(settings(tmp_path, env={"WATCHKEEPER_LIMITS_CAPACITY": "2"})) != one


def test_the_runtime_gets_its_limits_in_its_units(tmp_path: Path) -> None:
    """Seconds become milliseconds."""
    limits = settings(tmp_path, env={"WATCHKEEPER_LIMITS_GRACE_S": "0.25"}).runtime_limits()

    assert (limits.grace_ms, limits.drain_ms, limits.capacity) == (250, 30_000, 10)
