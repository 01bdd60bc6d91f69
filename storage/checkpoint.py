"""Signed tree heads: the text of C2SP tlog-checkpoint in a C2SP signed note, with Ed25519.

A checkpoint says of a log (its origin) how many events it had and what root they had. The note
is text, then a blank line, then one line per signature; other tools verify it with the
*verifier key* that :meth:`SigningKey.verifier` answers.
"""

import base64
import binascii
import contextlib
import hashlib
import os
from pathlib import Path
from typing import Final

import attrs
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from storage.errors import StorageError

ALGORITHM_ED25519: Final = b"\x01"
KEY_BYTES: Final = 32
ROOT_BYTES: Final = 32
NOTE_BYTES_MAX: Final = 1_000_000

_DASH: Final = "\N{EM DASH} "
_ID_BYTES: Final = 4
_LINES: Final = 3


class CheckpointRefused(StorageError):
    """A note that is no checkpoint, is of another log, or that the key did not sign."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the checkpoint is refused: {reason}")
        self.reason = reason


class KeyUnusable(StorageError):
    """The file of the signing key holds something else, or others may read it."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"the signing key {path} can not be used: {reason}")
        self.path = path
        self.reason = reason


@attrs.frozen(kw_only=True)
class Checkpoint:
    """A tree head: the log's origin, its number of events, and their root (32 bytes)."""

    origin: str
    size: int
    root: bytes

    def text(self) -> str:
        """Answer the note's text: three lines, each with its end."""
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"


@attrs.frozen(kw_only=True)
class Verifier:
    """A public key and the name that its signatures carry."""

    name: str
    public: bytes

    @property
    def key_id(self) -> bytes:
        """Answer the 4 bytes that mark a signature line of this key."""
        material = self.name.encode() + b"\n" + ALGORITHM_ED25519 + self.public
        return hashlib.sha256(material).digest()[:_ID_BYTES]

    def __str__(self) -> str:
        encoded = base64.b64encode(ALGORITHM_ED25519 + self.public).decode()
        return f"{self.name}+{self.key_id.hex()}+{encoded}"

    @classmethod
    def parse(cls, text: str) -> "Verifier":
        """Answer the key of a ``NAME+ID+KEY`` line; raises CheckpointRefused."""
        name, _, rest = text.strip().partition("+")
        identity, _, encoded = rest.partition("+")
        material = _decode(encoded, "the verifier key is not base64")
        if material[:1] != ALGORITHM_ED25519 or len(material) != 1 + KEY_BYTES:
            raise CheckpointRefused("the verifier key is not an Ed25519 key")
        verifier = cls(name=name, public=material[1:])
        if not _is_name(name) or verifier.key_id.hex() != identity:
            raise CheckpointRefused("the verifier key's name and id do not agree")
        return verifier


class SigningKey:
    """An Ed25519 key; its name is the origin of the log's checkpoints."""

    def __init__(self, name: str, private: Ed25519PrivateKey) -> None:
        assert _is_name(name), "the name of a key has no space and no plus sign"
        self.name = name
        self._private = private

    def verifier(self) -> Verifier:
        """Answer the public half, which is what an auditor keeps."""
        public = self._private.public_key().public_bytes(
            serialization.Encoding.Raw, serialization.PublicFormat.Raw
        )
        return Verifier(name=self.name, public=public)

    def sign(self, checkpoint: Checkpoint) -> str:
        """Answer the signed note of a tree head; equal heads have equal notes."""
        text = checkpoint.text()
        signature = self.verifier().key_id + self._private.sign(text.encode())
        return f"{text}\n{_DASH}{self.name} {base64.b64encode(signature).decode()}\n"


def parse(note: str) -> Checkpoint:
    """Answer what a note says, its signatures unchecked; raises CheckpointRefused.

    Lines after the root are extensions; they are signed, and skipped here.
    """
    text, _ = _split(note)
    lines = text.splitlines()
    if len(lines) < _LINES or not lines[0]:
        raise CheckpointRefused("it has not an origin, a size and a root")
    size = lines[1]
    if not (size.isascii() and size.isdigit()) or (size != "0" and size.startswith("0")):
        raise CheckpointRefused("its size is not a decimal number")
    root = _decode(lines[2], "its root is not base64")
    if len(root) != ROOT_BYTES:
        raise CheckpointRefused("its root is not 32 bytes long")
    return Checkpoint(origin=lines[0], size=int(size), root=root)


def verify(note: str, verifier: Verifier, *, origin: str | None = None) -> Checkpoint:
    """Answer what a note says once the key's signature holds; raises CheckpointRefused.

    ``origin`` None takes the verifier's name: a checkpoint of another log is refused. Signatures
    of other keys are skipped, as the format asks.
    """
    checkpoint = parse(note)
    if checkpoint.origin != (verifier.name if origin is None else origin):
        reason = f"it is of the log {checkpoint.origin}"
        raise CheckpointRefused(reason)
    verify_note(note, verifier)
    return checkpoint


def verify_note(note: str, verifier: Verifier) -> str:
    """Answer the text of any signed note once the key's signature holds."""
    text, signatures = _split(note)
    public = Ed25519PublicKey.from_public_bytes(verifier.public)
    for name, signature in signatures:
        if name == verifier.name and signature[:_ID_BYTES] == verifier.key_id:
            try:
                public.verify(signature[_ID_BYTES:], text.encode())
            except InvalidSignature:
                raise CheckpointRefused("the signature does not fit its text") from None
            return text
    reason = f"{verifier.name} has not signed it"
    raise CheckpointRefused(reason)


def load_or_create_key(path: Path, name: str) -> SigningKey:
    """Answer the key of a file, made with mode 0600 when missing; raises KeyUnusable.

    The path lies outside the data folder: who can edit the log must not sign it.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(FileExistsError):
        _create_key(path)
    return load_key(path, name)


def load_key(path: Path, name: str) -> SigningKey:
    """Answer the key of an existing file; raises KeyUnusable and FileNotFoundError."""
    if path.stat().st_mode & 0o077:
        raise KeyUnusable(path, "others may read it; set its mode to 0600")
    try:
        private = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise KeyUnusable(path, "it is not an unencrypted PEM key") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise KeyUnusable(path, "it is not an Ed25519 key")
    return SigningKey(name, private)


def _create_key(path: Path) -> None:
    """Make the file at once whole: written beside, synced, then linked to its name."""
    pem = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    if path.exists():
        raise FileExistsError(path)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
        path.hardlink_to(fresh)
    finally:
        fresh.unlink()


def _split(note: str) -> tuple[str, list[tuple[str, bytes]]]:
    if len(note) > NOTE_BYTES_MAX:
        raise CheckpointRefused("it is too long")
    text, separator, block = note.rpartition("\n\n")
    if not separator or not block.endswith("\n"):
        raise CheckpointRefused("it has no signature")
    signatures = []
    for line in block[:-1].split("\n"):
        name, space, encoded = line.removeprefix(_DASH).partition(" ")
        if not line.startswith(_DASH) or not space or not _is_name(name):
            raise CheckpointRefused("a signature line is malformed")
        signatures.append((name, _decode(encoded, "a signature is not base64")))
    return text + "\n", signatures


def _decode(text: str, reason: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CheckpointRefused(reason) from error


def _is_name(name: str) -> bool:
    return bool(name) and "+" not in name and not any(c.isspace() for c in name)
