"""The table of known faults: each that this version can show has a test that names it."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent

# Faults seen in services of this kind, by kind.
COVERED = {
    "git": "SV008 SV010 SV011 SV013 SV014 SV020 SV022 SV023 SV028 SV029",
    "git/artifact": "SV016 SV017 SV019",
    "git/security": "SV026",
    "queue/git": "SV025",
    "disk": "SV031 SV032 SV034 SV035",
    "security": "SV037 SV038",
    "process": "SV040 SV041 SV043 SV044 SV046 SV047 SV049 SV050 SV052 SV053 SV055 SV056 SV058 SV059",
    "streaming": "SV070 SV071 SV076 SV077 SV079 SV080 SV116",
    "cancel": "SV082",
    "http": "SV083 SV085 SV086 SV088",
    "json": "SV089 SV091 SV092 SV097 SV098 SV100",
    "auth": "SV101 SV103 SV104",
    "queue": "SV106 SV107 SV109 SV110 SV113",
    "memory": "SV115",
    "clock": "SV118 SV119",
}

# What needs something that does not exist yet, and what that is.
LATER = {
    "SV001": "submodules",
    "SV002": "LFS",
    "SV004": "git-crypt",
    "SV005": "git-crypt: no smudge filter of a repository is ever run",
    "SV007": "git-crypt",
    "SV061": "the OpenAI endpoint",
    "SV062": "the OpenAI endpoint",
    "SV064": "the OpenAI endpoint",
    "SV065": "the OpenAI endpoint",
    "SV067": "the OpenAI endpoint: a client of /execute does not own its job",
    "SV068": "the OpenAI endpoint",
    "SV073": "the OpenAI endpoint",
    "SV074": "the OpenAI endpoint",
    "SV094": "the OpenAI endpoint",
    "SV095": "the OpenAI endpoint",
    "SV112": "a capacity for each repository",
}

_ID = re.compile(r"SV\d{3}")


def named_in_tests() -> dict[str, list[str]]:
    """Answer the tests that name each fault in their docstring."""
    named: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            is_test = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_test and node.name.startswith("test_"):
                for fault in set(_ID.findall(ast.get_docstring(node) or "")):
                    named.setdefault(fault, []).append(f"{path.name}::{node.name}")
    return named


def test_every_known_fault_has_a_test_that_names_it():
    """No fault of the table is without its test, and no test names one that is not in it."""
    covered = {fault for faults in COVERED.values() for fault in faults.split()}
    named = named_in_tests()

    assert covered - set(named) == set()
    assert set(named) - covered - set(LATER) == set()
    assert covered & set(LATER) == set()
