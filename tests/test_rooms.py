"""The rooms of the package: each imports only what stands above it, so that any of them is read without those below."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import equipoise
from equipoise.runs.environment import NOT_NUMERIC

SOURCE = Path(equipoise.__file__).parent
FLOORS = "errors, randomness, files, settings, data, nets, method losses remedies methods, engine, learner, runs, paper"
FLOORS += ", report, cli"
ABOVE = {room: floor for floor, rooms in enumerate(FLOORS.split(", ")) for room in rooms.split()}


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
    for path in sorted(SOURCE.rglob("*.py")):
        inside = path.relative_to(SOURCE)
        room = inside.parts[0].removesuffix(".py")
        if room not in ("__init__", "__main__"):
            for other in set(imported(path)) - {"__version__"}:
                assert ABOVE[other] <= ABOVE[room], f"{inside} imports from {other}"


def test_there_are_few_rooms_and_all_have_a_place() -> None:
    modules = {path.stem for path in SOURCE.glob("*.py")}
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert len(modules) <= 9 and len(rooms) <= 11
    assert modules | rooms == {*ABOVE, "__init__", "__main__"}


def test_what_cannot_change_a_result_is_there() -> None:
    for name in NOT_NUMERIC:
        assert (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file(), name
