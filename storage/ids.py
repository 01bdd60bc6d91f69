"""Names of things: the id types and the source that makes new ones.

An id is a prefix, an underscore and 26 characters of Crockford's base 32: 48 bits of Unix
milliseconds, then 80 random bits (the layout of a ULID). Ids of one prefix sort by time.
"""

import secrets
import time
from collections.abc import Callable
from typing import Final, NewType

JobId = NewType("JobId", str)
Seq = NewType("Seq", int)
StreamName = NewType("StreamName", str)

SERVICE_STREAM: Final = StreamName("service")
ID_PATTERN: Final = r"^[a-z]{2,8}_[0-9A-HJKMNP-TV-Z]{26}$"

_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_RANDOM_BITS: Final = 80
_TIME_BITS: Final = 48
_ID_CHARACTERS: Final = 26
_NS_PER_MS: Final = 1_000_000


class IdSource:
    """Makes ids and salts; the two arguments are the seams that a simulation replaces.

    ``clock_ns`` answers wall time in UTC nanoseconds; ``random_bytes(n)`` answers ``n`` bytes.
    """

    def __init__(
        self,
        clock_ns: Callable[[], int] = time.time_ns,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._clock_ns = clock_ns
        self._random_bytes = random_bytes

    def new(self, prefix: str) -> str:
        """Answer a new id with this prefix, for example ``job``; never waits."""
        milliseconds = (self._clock_ns() // _NS_PER_MS) % (1 << _TIME_BITS)
        number = (milliseconds << _RANDOM_BITS) | int.from_bytes(
            self._random_bytes(_RANDOM_BITS // 8), "big"
        )
        return f"{prefix}_{_crockford(number)}"

    def new_job(self) -> JobId:
        """Answer a new job id."""
        return JobId(self.new("job"))

    def salt(self) -> bytes:
        """Answer 16 random bytes that keep a payload's digest from being guessed."""
        return self._random_bytes(16)


def job_stream(job: JobId) -> StreamName:
    """Answer the name of a job's stream."""
    return StreamName(f"job/{job}")


def job_of_stream(stream: str) -> JobId | None:
    """Answer the job a stream belongs to; None for the stream of the service."""
    return JobId(stream[4:]) if stream.startswith("job/") else None


def _crockford(number: int) -> str:
    characters = []
    for _ in range(_ID_CHARACTERS):
        number, index = divmod(number, 32)
        characters.append(_ALPHABET[index])
    return "".join(reversed(characters))
