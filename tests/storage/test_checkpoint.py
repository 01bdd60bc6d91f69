"""A signed tree head verifies with its key, for its log, and with nothing else."""

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from storage import checkpoint as c

NAME = "watchkeeper/log_0"
ROOT = bytes(range(32))


def key(seed=1, name=NAME):
    return c.SigningKey(name, Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32))


def head(**changes):
    return c.Checkpoint(**{"origin": NAME, "size": 7, "root": ROOT, **changes})


def test_the_note_has_the_published_form():
    """Three lines, a blank one, then the signature line with the em dash."""
    note = key().sign(head())

    origin, size, root, blank, signature, end = note.split("\n")
    assert (origin, size, blank, end) == (NAME, "7", "", "")
    assert root == base64.b64encode(ROOT).decode()
    assert signature.startswith(f"\u2014 {NAME} ")
    assert len(base64.b64decode(signature.rpartition(" ")[2])) == 4 + 64


def test_the_verifier_key_of_the_go_documentation_is_read():
    """PeterNeumann's key from the signed note documentation has the id we compute."""
    text = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"

    verifier = c.Verifier.parse(text)

    assert (verifier.name, str(verifier)) == ("PeterNeumann", text)


def test_the_signature_of_the_go_documentation_verifies():
    """The example of golang.org/x/mod/sumdb/note: text and signature were made by others."""
    verifier = c.Verifier.parse(
        "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
    )
    text = (
        "If you think cryptography is the answer to your problem,\n"
        "then you don't know what your problem is.\n"
    )
    signature = (
        "x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6Ry"
        "yBwJnAM="
    )

    assert c.verify_note(f"{text}\n\u2014 PeterNeumann {signature}\n", verifier) == text


def test_a_signed_head_comes_back():
    """Sign, then verify with the public half alone."""
    verifier = c.Verifier.parse(str(key().verifier()))

    assert c.verify(key().sign(head()), verifier) == head()


def test_another_logs_checkpoint_is_refused():
    """A good signature over another origin does not count."""
    note = key().sign(head(origin="watchkeeper/log_1"))

    with pytest.raises(c.CheckpointRefused, match="log_1"):
        c.verify(note, key().verifier())
    assert c.verify(note, key().verifier(), origin="watchkeeper/log_1").size == 7


@pytest.mark.parametrize("at", [0, 18, 20, 40, 60, 90, 120])
def test_a_changed_note_is_refused(at):
    """One character of text or signature changed: refused."""
    note = key().sign(head())
    changed = note[:at] + ("B" if note[at] != "B" else "C") + note[at + 1 :]

    with pytest.raises(c.CheckpointRefused):
        c.verify(changed, key().verifier())


def test_another_key_is_refused_and_other_signatures_are_skipped():
    """The key's own line is looked for among all; without it there is no proof."""
    note = key().sign(head())
    other = key(2, "witness").sign(head()).split("\n")[4]

    with pytest.raises(c.CheckpointRefused, match="has not signed"):
        c.verify(note, key(2).verifier())
    assert c.verify(note.replace("\n\n", f"\n\n{other}\n"), key().verifier()) == head()


@pytest.mark.parametrize(
    "note",
    [
        "",
        "\n\n",
        "a\n1\n",
        "a\n1\nAAAA\n\nx\n",
        "a\nx\nAAAA\n\n\u2014 n AAAA\n",
        "\n" * 9,
        "é\n\n\u2014",
    ],
)
def test_what_is_no_checkpoint_is_refused(note):
    """Any text at all is answered with CheckpointRefused."""
    with pytest.raises(c.CheckpointRefused):
        c.parse(note)


@pytest.mark.parametrize("size", ["-1", "07", "1e3", "", "٣", "+1", "1_0"])
def test_a_size_is_a_plain_decimal_number(size):
    """No sign, no leading zero, no other digits."""
    root = base64.b64encode(ROOT).decode()

    with pytest.raises(c.CheckpointRefused, match="size"):
        c.parse(f"{NAME}\n{size}\n{root}\n\n\u2014 n AAAA\n")


def test_a_key_is_made_once_and_only_its_owner_reads_it(tmp_path):
    """Mode 0600; the second call loads the same key; nothing else is left in the folder."""
    path = tmp_path / "keys" / "log.key"

    first = c.load_or_create_key(path, NAME)
    second = c.load_or_create_key(path, NAME)

    assert path.stat().st_mode & 0o777 == 0o600
    assert first.verifier() == second.verifier()
    assert [p.name for p in path.parent.iterdir()] == ["log.key"]


def test_a_key_that_others_may_read_is_refused(tmp_path):
    """The error says what to do."""
    path = tmp_path / "log.key"
    c.load_or_create_key(path, NAME)
    path.chmod(0o640)

    with pytest.raises(c.KeyUnusable, match="0600"):
        c.load_key(path, NAME)


def test_a_file_that_is_no_key_is_refused_and_kept(tmp_path):
    """It is never overwritten."""
    path = tmp_path / "log.key"
    path.write_bytes(b"not a key")
    path.chmod(0o600)

    with pytest.raises(c.KeyUnusable, match="PEM"):
        c.load_or_create_key(path, NAME)
    assert path.read_bytes() == b"not a key"
