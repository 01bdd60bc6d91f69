"""Small things about text and errors that need nothing else."""


def one_line(text: str, characters_max: int) -> str:
    """Answer text on one line, without control characters, cut to a length."""
    cut = text[: 4 * characters_max].encode("utf-8", "replace").decode()
    line = " ".join("".join(c if c.isprintable() else " " for c in cut).split())
    return line if len(line) <= characters_max else line[: characters_max - 1] + "…"


def sole(error: BaseException) -> BaseException:
    """Answer the one error inside nested groups; a group of several stays as it is."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
