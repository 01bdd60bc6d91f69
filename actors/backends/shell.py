"""The built-in agent ``shell``: its prompt is a shell script, run in the workspace."""

from pathlib import Path

from actors.backends.backend import PROMPT_FILE, Launch, PlainBackend


class ShellBackend(PlainBackend):
    """Runs ``/bin/sh`` on a file that holds the prompt: of any size, and stdin stays free."""

    def launch(self, *, home: Path, tree: Path) -> Launch:
        """Answer the shell with the script's file."""
        return Launch(argv=("/bin/sh", str(home / PROMPT_FILE)), prompt_file=True)
