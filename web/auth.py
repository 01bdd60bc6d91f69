"""Who asks: tokens, their scopes, and the one comparison."""

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

import attrs

from web.errors import Problem

Scope = Literal["read", "run", "admin"]
ALL_SCOPES: Final[frozenset[Scope]] = frozenset({"read", "run", "admin"})
TOKEN_PREFIX: Final = "wk_"  # noqa: S105  the public beginning of every token we make
TOKEN_BYTES_MAX: Final = 4_096


@attrs.frozen(kw_only=True)
class Principal:
    """A caller: the name of its token, what it may do, and whether it is on this machine.

    ``local`` allows the ``shell`` agent and repositories of this machine.
    """

    name: str
    scopes: frozenset[Scope]
    local: bool = False

    def may(self, scope: Scope) -> bool:
        """Answer whether a scope is granted; ``admin`` grants all."""
        return scope in self.scopes or "admin" in self.scopes


@attrs.frozen(kw_only=True)
class TokenBook:
    """The tokens that are accepted, by the SHA-256 of their bytes."""

    entries: tuple[tuple[bytes, Principal], ...] = ()

    def with_token(self, token: str, principal: Principal) -> "TokenBook":
        """Answer a book that accepts one more token."""
        entry = (_digest(token.encode("utf-8", "surrogateescape")), principal)
        return TokenBook(entries=(*self.entries, entry))

    def principal(self, presented: bytes) -> Principal | None:
        """Answer whose token this is, in a time that does not depend on its bytes."""
        digest = _digest(presented)
        found: Principal | None = None
        for known, principal in self.entries:
            if hmac.compare_digest(known, digest):
                found = principal
        return found


def authenticate(headers: Iterable[tuple[bytes, bytes]], book: TokenBook) -> Principal:
    """Answer the caller of a request, from its raw headers; raises Problem 401.

    ``Authorization: Bearer T`` (scheme in any case) or ``X-Api-Key: T``; both may be sent if
    they agree on the token. Two headers of one name are refused.
    """
    bearer, key = _one(headers)
    tokens = {_bearer_token(bearer)} if bearer is not None else set()
    if key is not None:
        tokens.add(key.strip())
    if not tokens:
        raise unauthenticated("send a token: Authorization: Bearer TOKEN")
    if len(tokens) > 1:
        raise unauthenticated("Authorization and X-Api-Key carry different tokens")
    token = tokens.pop()
    principal = book.principal(token) if 0 < len(token) <= TOKEN_BYTES_MAX else None
    if principal is None:
        raise unauthenticated("the token is not known")
    return principal


def unauthenticated(detail: str) -> Problem:
    """Answer the 401 that names the scheme."""
    headers = (("WWW-Authenticate", 'Bearer realm="watchkeeper"'),)
    return Problem(401, "unauthenticated", detail, headers=headers)


def require(principal: Principal, scope: Scope) -> None:
    """Raise Problem 403 unless the caller may."""
    if not principal.may(scope):
        raise Problem(403, "scope_missing", f"token {principal.name!r} lacks the scope {scope!r}")


def new_token() -> str:
    """Answer a new random token of 256 bits."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def token_from_file(path: Path) -> tuple[str, bool]:
    """Answer the token kept in a file, and whether it was made just now; its mode is 0600."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        token = ""
    if token:
        path.chmod(0o600)
        return token, False
    token = new_token()
    write_private(path, token.encode() + b"\n")
    return token, True


def write_private(path: Path, data: bytes) -> None:
    """Replace a file by one of mode 0600, in one step."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _one(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes | None, bytes | None]:
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        lower = name.lower()
        if lower in {b"authorization", b"x-api-key"}:
            if lower in found:
                raise unauthenticated("a credential header was sent twice")
            found[lower] = value
    return found.get(b"authorization"), found.get(b"x-api-key")


def _bearer_token(value: bytes) -> bytes:
    scheme, _, token = value.strip().partition(b" ")
    if scheme.lower() != b"bearer":
        raise unauthenticated("only the Bearer scheme is accepted")
    return token.strip()


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
