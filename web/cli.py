"""The command ``watchkeeper``: as little as possible is imported for what was asked."""

import sys

from web.version import VERSION


def main() -> None:
    """Run the command of this process, and exit with its code."""
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print(f"watchkeeper {VERSION}")
        return
    from web.cli_group import run

    sys.exit(run(arguments))


if __name__ == "__main__":
    main()
