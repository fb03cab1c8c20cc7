"""What holds for every file of the tree: sizes, broad handlers, words that do not belong."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kvtools", "tui/kvtop", "probes/kvdoctor", "daemon/kvd", "daemon/kvgate")
LONGEST_FILE = 600
LONGEST_FUNCTION = 80
BROAD_PER_KLOC = 1.0

SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Put together from pieces, so that this file does not hold what it looks for.
FORBIDDEN = tuple(
    "".join(pieces)
    for pieces in (
        ("py", "pi.org"),
        ("python", "hosted.org"),
        ("deb.", "debian.org"),
        ("npm", "js.org"),
        ("index", "-url"),
        ("find", "-links"),
        ("/wo", "rk/"),
        ("/opt/", "wheels"),
        ("/root/", ".pyenv"),
    )
)
"""Hosts of registries and paths of one machine: an installation says where packages come from, the project does not."""


def tracked() -> list[Path]:
    """Files that git would commit: tracked, or new and not ignored."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 20
    assert len(TESTS) > 5
    assert tracked()


def test_no_file_is_longer_than_one_story() -> None:
    long = {named(path): lines for path in [*SOURCES, *TESTS] if (lines := len(path.read_text().splitlines())) > LONGEST_FILE}
    assert not long


def test_no_function_is_longer_than_a_screen() -> None:
    long = {}
    for path in SOURCES:
        for function in functions(ast.parse(path.read_text())):
            lines = (function.end_lineno or 0) - function.lineno + 1
            if lines > LONGEST_FUNCTION:
                long[f"{named(path)}:{function.lineno} {function.name}"] = lines
    assert not long


def broad_handlers() -> list[tuple[Path, int, str]]:
    """Handlers in the packages that end Exception, BaseException or everything: file, line, and the text around it.

    One whose last statement is a bare `raise` cleans up and passes the error on: it is none.
    """
    found = []
    for path in SOURCES:
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _passes_on(node):
                found.append((path, node.lineno, "\n".join(lines[max(0, node.lineno - 2) : node.lineno + 1])))
    return found


def _passes_on(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def _is_broad(kind: ast.expr | None) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(_is_broad(one) for one in kind.elts)
    return kind is None or (isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"})


def test_a_broad_handler_says_why_it_is_one() -> None:
    silent = [
        f"{named(path)}:{line}"
        for path, line, text in broad_handlers()
        if not re.search(r"#\s*(?!noqa: \w+\s*$)\S+", re.sub(r"#\s*noqa: [A-Z0-9, ]+(?:- )?", "# ", text))
    ]
    assert not silent, "each needs a comment: which process, thread or tick ends here, and what happens to the error"


def test_broad_handlers_are_rare() -> None:
    thousands = sum(len(path.read_text().splitlines()) for path in SOURCES) / 1000
    found = [f"{named(path)}:{line}" for path, line, _ in broad_handlers()]
    assert len(found) <= max(3, BROAD_PER_KLOC * thousands), found


@pytest.mark.parametrize("word", FORBIDDEN)
def test_no_registry_and_no_machine_is_named(word: str) -> None:
    pattern = re.compile(rf"(?<![\w.-]){re.escape(word)}" if word.startswith("/") else re.escape(word))
    found = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{named(path)}:{n}" for n, line in enumerate(text.splitlines(), 1) if pattern.search(line)]
    assert not found


def test_every_package_says_what_its_modules_are() -> None:
    """A package's docstring is the map of its room: it names every module and sub-package in it."""
    missing = []
    for package in PACKAGES:
        for folder in [ROOT / package, *(p for p in (ROOT / package).rglob("*") if p.is_dir() and (p / "__init__.py").exists())]:
            map_ = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
            rooms = {p.stem for p in folder.glob("*.py")} | {p.name for p in folder.iterdir() if (p / "__init__.py").exists()}
            for room in sorted(rooms - {"__init__", "__main__"}):
                if not re.search(rf"\b{re.escape(room)}\b", map_):
                    missing.append(f"{named(folder)}/__init__.py does not name {room}")
    assert not missing


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_carry_their_types(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()
