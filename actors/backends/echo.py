"""The built-in agent ``echo``: answers its prompt, on the same way as every other agent."""

from pathlib import Path

from actors.backends.backend import Launch, PlainBackend, Verdict, judge_exit
from storage import events as e


class EchoBackend(PlainBackend):
    """Runs ``cat`` on the prompt."""

    def launch(self, *, home: Path, tree: Path) -> Launch:
        """Answer ``cat`` with the prompt as its input."""
        return Launch(argv=("cat",), stdin=self._spec.prompt.encode())

    def verdict(
        self,
        exit_status: e.ExitStatus,
        stdout: bytes,
        stderr: bytes,
    ) -> Verdict:
        """Exit code 0 is success with the whole prompt as the result."""
        return judge_exit(exit_status, result=self._spec.prompt.encode(), stderr=stderr)
