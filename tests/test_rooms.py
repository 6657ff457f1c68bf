"""The rooms of the package: each imports only what stands above it, so that any of them is read without those below."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import equipoise
from equipoise.runs.environment import MEASURING, NUMERIC

SOURCE = Path(equipoise.__file__).parent
FLOORS = "errors, files, settings, data, nets, step method losses remedies methods, engine, learner, runs, paper"
FLOORS += ", report, cli"
ABOVE = {room: floor for floor, rooms in enumerate(FLOORS.split(", ")) for room in rooms.split()}
FILES = sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """The rooms from which a file imports, anywhere in it; names of the package itself, as its version, are none."""
    package = ("equipoise", *path.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [name.name.split(".") for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            found = [[*start, *(node.module or "").split("."), name.name] for name in node.names]
        else:
            continue
        yield from (parts[1] for parts in ([p for p in f if p] for f in found) if parts[0] == "equipoise")


def test_each_room_imports_only_those_above_it() -> None:
    wrong = []
    for path in FILES:
        if (room := room_of(path)) not in ("__init__", "__main__"):
            others = set(imported(path)) - {"__version__"}
            wrong += [f"{path.relative_to(SOURCE)} imports from {o}" for o in others if ABOVE[o] > ABOVE[room]]
    assert wrong == []


def test_imports_are_seen() -> None:
    """A test of the one above: what it reads from files that have all kinds of imports."""
    assert {"method", "step", "data", "errors", "files"} <= set(imported(SOURCE / "learner" / "__init__.py"))
    assert {"losses", "method", "nets", "step"} <= set(imported(SOURCE / "methods" / "lucir.py"))
    assert "runs" in set(imported(SOURCE / "cli" / "run.py")) and set(imported(SOURCE / "errors.py")) == set()


def test_there_are_few_rooms_and_all_have_a_place() -> None:
    modules = {path.stem for path in SOURCE.glob("*.py")}
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert len(modules) <= 9 and len(rooms) <= 9
    assert modules | rooms == {*ABOVE, "__init__", "__main__"}
    forbidden = ("utils", "common", "core", "helpers")
    named = [path for path in SOURCE.rglob("*") if path.stem in forbidden or path.stem.startswith("base_")]
    assert named == []


# The code that computes numbers is part of the key of a shared step


def test_what_computes_a_result_is_part_of_its_key() -> None:
    """Whatever that code imports is so too, but for the file of a method, errors, and how values are written down."""
    for name in (*NUMERIC, *MEASURING):
        assert (SOURCE / name).exists(), name
    known = {name.removesuffix(".py") for name in NUMERIC}
    beside = {"methods", "errors", "files", "settings", "runs", "__version__"}
    for path in FILES:
        if room_of(path) in known:
            assert set(imported(path)) <= known | beside, path
    rest = {*ABOVE} - known
    assert rest == {"errors", "files", "settings", "methods", "runs", "paper", "report", "cli"}


# How much there is to read

PUBLIC = set(equipoise.__all__)
KERNELS = SOURCE / "engine" / "kernels"


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of a file, with the classes and functions that it is in."""
    for node in ast.iter_child_nodes(tree):
        name = f"{inside}{node.name}" if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, node
        yield from functions(node, f"{name}." if name else inside)


def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many there are, without the object itself."""
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_no_file_is_long() -> None:
    lines = {path: path.read_text().count("\n") for path in (*FILES, *SOURCE.rglob("*.js"))}
    assert [f"{path.relative_to(SOURCE)}: {n} lines" for path, n in lines.items() if n > 300] == []


def test_no_function_is_long_and_none_takes_much() -> None:
    """The kernels aside, and the constructors of the public classes."""
    found = []
    for path in FILES:
        if path.is_relative_to(KERNELS):
            continue
        for name, node in functions(ast.parse(path.read_text())):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            where = f"{path.relative_to(SOURCE)}: {name}"
            if length > 60:
                found.append(f"{where} has {length} lines")
            constructs = node.name == "__init__" and name.split(".")[0] in PUBLIC
            if arguments(node) > 7 and not constructs:
                found.append(f"{where} has {arguments(node)} arguments")
    assert found == []


def test_functions_are_measured() -> None:
    """A test of the one above."""
    lines = ["class A:", "    def f(self, a, b, *, c=1, **more):", "        def g(x): return 1", "        return 2"]
    found = dict(functions(ast.parse("\n".join([*lines, "def h(): 0"]))))
    assert list(found) == ["A.f", "A.f.g", "h"] and found["A.f"].end_lineno == 4
    assert [arguments(node) for node in found.values()] == [3, 1, 0]
