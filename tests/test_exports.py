"""The shape of the product: faces, sizes, and what only one place may do."""

import ast
import importlib
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(p for name in ("actors", "storage", "web") for p in (ROOT / name).rglob("*.py"))
LINES_MAX = 500
FUNCTION_LINES_MAX = 60
DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]

# Who may read the environment, and why: the configuration is the only one that decides by it.
# The others pass it on to a child, or take it where their caller gave none.
READS_ENVIRONMENT = {
    "web/config.py",
    "actors/agent_definitions.py",
    "actors/git.py",
    "actors/local_host.py",
    "actors/process/keeper.py",
    "actors/process/runner.py",
    "web/cli_demo.py",
}


def name_of(path):
    return str(path.relative_to(ROOT))


def dotted(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tree_of(path):
    return ast.parse(path.read_bytes())


def functions(tree):
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def with_face():
    return [dotted(p) for p in MODULES if "\n__all__ = [" in p.read_text()]


@pytest.mark.parametrize("module", with_face())
def test_a_face_names_what_is_there(module):
    """Every name of ``__all__`` can be imported, once."""
    face = importlib.import_module(module)

    assert [name for name in face.__all__ if not hasattr(face, name)] == []
    assert len(set(face.__all__)) == len(face.__all__)


def test_packages_inside_a_room_have_a_face():
    """What others may use of the kernel and of the backends is said by them."""
    assert {"actors.kernel", "actors.backends"} <= set(with_face())


@pytest.mark.parametrize("package", ["actors.kernel", "actors.backends"])
def test_others_use_the_face_of_the_kernel(package):
    """Modules outside import from the package, never from its parts, but for types."""
    inside = package.replace(".", "/")
    allowed = {"actors.backends.backend"}  # What a backend is made of, for the one who runs it.
    reached = set()
    for path in MODULES:
        if not name_of(path).startswith(inside):
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                    package + "."
                ):
                    reached.add(node.module)

    assert reached - allowed == set()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_is_small_and_so_are_its_functions(path):
    """At most 500 lines, and 60 for a function."""
    long = [
        f.name for f in functions(tree_of(path)) if f.end_lineno - f.lineno >= FUNCTION_LINES_MAX
    ]

    assert len(path.read_text().splitlines()) <= LINES_MAX
    assert long == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_says_what_it_is(path):
    """Its docstring is one sentence first, whatever follows."""
    doc = ast.get_docstring(tree_of(path))

    assert doc
    assert doc.split("\n\n")[0].replace("\n", " ").rstrip().endswith(".")


def test_only_the_command_line_prints():
    """With its progress lines; the service itself says all in its journal, in one place."""
    printing = {
        name_of(path)
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id == "print"
    }

    assert {name for name in printing if not name.startswith("web/cli")} <= {
        "web/serving.py",
        "web/progress.py",
    }


def reads_environment(tree):
    """Whether a module looks at the environment of its process."""
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in {"environ", "environb", "getenv"}
        for node in ast.walk(tree)
    )


def test_only_the_configuration_reads_the_environment():
    """Every other place gets its settings; the exceptions are named."""
    reading = {name_of(path) for path in MODULES if reads_environment(tree_of(path))}

    assert reading - READS_ENVIRONMENT == set()
    assert "web/config.py" in reading


def test_no_module_does_anything_when_imported():
    """Beside definitions and constants there is nothing at the top of a module."""
    allowed = (
        ast.Import,
        ast.ImportFrom,
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
        ast.Assign,
        ast.AnnAssign,
        ast.Assert,
        ast.If,  # TYPE_CHECKING, __main__
    )
    acting = {
        f"{name_of(path)}:{node.lineno}"
        for path in MODULES
        for node in tree_of(path).body
        if not isinstance(node, allowed)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    }

    assert {place for place in acting if not place.startswith("web/__main__.py")} == set()
