"""The shape of the house: public names, sizes, raises, interfaces, errors, names with units.

Every check is a function from source text to complaints, so that the end of this file can show
that it complains about a violation; the tests in between run it over the tree.
"""

from __future__ import annotations

import ast
import collections.abc
import enum
import importlib
import inspect
import os
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "everystep"

MAX_PUBLIC_NAMES = 15
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PROTOCOL_METHODS = 7

# Files that may pass the size limits: {"src/everystep/x.py": "why"}.
EXCEPTIONS: dict[str, str] = {}

# Files for which pyproject.toml lifts ruff's TID251, and the only banned names each may use.
EXEMPT = {
    "src/everystep/store/durable.py": {"os.replace", "os.rename", "os.fsync"},
    "src/everystep/state/rng.py": {"torch.cuda"},
    "src/everystep/cli/export.py": {"torch.save"},
}
BANNED = {"pickle", "marshal", "torch.load"}.union(*EXEMPT.values())

# Banned in tests alone: a test waits through tests/waiting.py, and equality is equality.
BANNED_IN_TESTS = {"time.sleep"}

UNIT_SUFFIXES = (
    *("_s", "_bytes", "_steps", "_ratio", "_fraction", "_share", "_probability"),
    *("_per_s", "_per_step", "_per_byte", "_per_hour"),
)

# ---------------------------------------------------------------- checkers: source → complaints


def first_sentence_complaints(tree: ast.Module) -> list[str]:
    docstring = ast.get_docstring(tree)
    if not docstring:
        return ["no module docstring"]
    paragraph = docstring.split("\n\n")[0]
    if not re.search(r"\.(\s|$)", paragraph):
        return ["the first sentence of the module docstring does not end in a period"]
    return []


def size_complaints(source: str) -> list[str]:
    found = []
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        found.append(f"{lines} lines (at most {MAX_FILE_LINES})")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                found.append(f"{node.name} has {lines} lines (at most {MAX_FUNCTION_LINES})")
    return found


def raise_complaints(tree: ast.Module) -> list[str]:
    bare = {"RuntimeError", "AssertionError", "Exception", "BaseException"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append(f"line {node.lineno}: assert")
        elif isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = ast.unparse(raised).removeprefix("builtins.")
            if name in bare:
                found.append(f"line {node.lineno}: raise {name}")
    return found


def protocol_complaints(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or not any(map(_is_protocol, node.bases)):
            continue
        methods = [m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)]
        # a property is a fact to branch on (`backend.abilities`), not a verb
        verbs = {m.name for m in methods if "property" not in map(ast.unparse, m.decorator_list)}
        if len(verbs) > MAX_PROTOCOL_METHODS:
            found.append(f"{node.name} has more than {MAX_PROTOCOL_METHODS} methods")
        found += [
            f"{node.name}.{m.name} takes *args or **kwargs"
            for m in methods
            if m.args.vararg or m.args.kwarg
        ]
    return found


def _is_protocol(base: ast.expr) -> bool:
    if isinstance(base, ast.Subscript):
        base = base.value
    return ast.unparse(base).split(".")[-1] == "Protocol"


def unit_complaints(tree: ast.Module) -> list[str]:
    return [
        f"{function.name}({arg.arg}) is a float without a unit"
        for function in _public_functions(tree.body)
        for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if _holds_float(arg.annotation) and not arg.arg.endswith(UNIT_SUFFIXES)
    ]


def _public_functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("_") or node.name == "__init__":
                yield node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public_functions(node.body)


def _holds_float(annotation: ast.expr | None) -> bool:
    """Whether `float` stands in the annotation, other than inside a Callable."""
    if annotation is None:
        return False
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.Subscript) and "Callable" in ast.unparse(annotation.value):
        return False
    if isinstance(annotation, ast.Name):
        return annotation.id == "float"
    children = ast.iter_child_nodes(annotation)
    return any(_holds_float(child) for child in children if isinstance(child, ast.expr))


def used_names(tree: ast.Module) -> set[str]:
    """Every dotted name that a file imports or reaches, aliases resolved, with its prefixes."""
    aliases: dict[str, str] = {}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                found.add(a.name)
                aliases[a.asname or a.name.split(".")[0]] = a.name if a.asname else ""
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for a in node.names:
                found.add(f"{node.module}.{a.name}")
                aliases[a.asname or a.name] = f"{node.module}.{a.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", dotted := ast.unparse(node)):
            head, _, rest = dotted.partition(".")
            if head in aliases:
                found.add(f"{aliases[head] or head}.{rest}")
    parts = [name.split(".") for name in found]
    return {".".join(part[:length]) for part in parts for length in range(1, len(part) + 1)}


def path_complaints(text: str, forbidden: list[str]) -> list[str]:
    return [
        f"contains the path {path}"
        for path in forbidden
        if re.search(rf"(?<![\w.~)}}/-]){re.escape(path)}" + r"(?![\w-])" * (path[-1] != "/"), text)
    ]


# ---------------------------------------------------------------- the tree


def modules() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def complaints(paths: list[Path], check: Callable[[ast.Module], list[str]]) -> list[str]:
    found = []
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(ROOT)}: {complaint}" for complaint in check(tree)]
    return found


def test_there_is_something_to_check() -> None:
    assert modules()


def test_public_names_are_few_and_documented() -> None:
    everystep = importlib.import_module("everystep")
    headings = re.findall(
        r"^### `?everystep\.(\w+)", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.M
    )
    assert len(everystep.__all__) <= MAX_PUBLIC_NAMES
    assert sorted(everystep.__all__) == sorted(headings)
    for name in everystep.__all__:
        assert getattr(everystep, name) is not None


def test_every_module_starts_with_its_sentence() -> None:
    assert complaints(modules(), first_sentence_complaints) == []


def test_files_and_functions_are_short() -> None:
    too_long = {
        str(path.relative_to(ROOT)): found
        for path in modules()
        if (found := size_complaints(path.read_text(encoding="utf-8")))
    }
    assert {path: found for path, found in too_long.items() if path not in EXCEPTIONS} == {}
    assert EXCEPTIONS.keys() - too_long.keys() == set(), "an exception that nothing needs"
    assert all(EXCEPTIONS.values()), "an exception without its reason"


def test_no_bare_builtin_is_raised_and_nothing_is_asserted() -> None:
    assert complaints(modules(), raise_complaints) == []


def test_protocols_are_narrow() -> None:
    assert complaints(modules(), protocol_complaints) == []


def test_floats_of_the_planning_functions_carry_units() -> None:
    assert complaints(sorted((SRC / "planning").rglob("*.py")), unit_complaints) == []


def test_exempt_files_use_only_what_they_are_exempt_for() -> None:
    for name, allowed in EXEMPT.items():
        if (ROOT / name).exists():
            used = used_names(ast.parse((ROOT / name).read_text(encoding="utf-8")))
            assert used & (BANNED - allowed) == set(), name


def test_tests_wait_for_states_and_never_sleep() -> None:
    waiting = ROOT / "tests" / "waiting.py"
    paths = sorted(path for path in waiting.parent.rglob("*.py") if path != waiting)
    assert complaints(paths, lambda tree: sorted(used_names(tree) & BANNED_IN_TESTS)) == []


@pytest.mark.parametrize(
    "program",
    [
        "import everystep",
        "import everystep.errors, everystep.types",
        "from everystep.cli.main import main\n"
        "sys.argv = ['everystep', '--help']\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code",
    ],
    ids=["import", "nouns", "help"],
)
def test_torch_is_not_loaded_before_it_is_needed(program: str) -> None:
    check = "print('LOADED' if 'torch' in sys.modules else 'NOT LOADED')"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{program}\n{check}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "NOT LOADED"


def test_every_error_belongs_to_the_tree_and_can_be_formatted() -> None:
    errors = importlib.import_module("everystep.errors")
    classes = [
        thing
        for name, thing in vars(errors).items()
        if inspect.isclass(thing) and thing.__module__ == errors.__name__ and name[0] != "_"
    ]
    assert errors.EverystepError in classes
    for cls in classes:
        assert issubclass(cls, errors.EverystepError), cls
        assert issubclass(cls, Exception), cls
        for every_field in (False, True):
            error = an_instance(cls, every_field=every_field)
            assert str(error).strip(), f"{cls.__name__} says nothing"
            assert repr(error)


def repository_files() -> list[Path]:
    """What is, or would be, committed; without git, everything but environments and caches."""
    if not (ROOT / ".git").exists():
        skipped = {".venv", "build", "dist", "__pycache__"}
        return [
            path
            for path in ROOT.rglob("*")
            if path.is_file()
            and not skipped.intersection(path.parts)
            and not any(p.endswith(("_cache", ".egg-info")) for p in path.relative_to(ROOT).parts)
        ]
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    paths = [ROOT / os.fsdecode(name) for name in listed.split(b"\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def test_no_file_names_a_path_of_this_machine() -> None:
    # a folder directly below / (a container's /src, or /root as home) is looked for with a slash
    # behind it: alone it is too common a word
    places = [place for place in {ROOT, Path.home()} if place != Path("/")]
    forbidden = [str(p) if len(p.parts) > 2 else f"{p}/" for p in places]
    found = [
        f"{path.relative_to(ROOT)}: {complaint}"
        for path in repository_files()
        for complaint in path_complaints(
            path.read_bytes().decode("utf-8", errors="replace"), forbidden
        )
    ]
    assert found == []


# ---------------------------------------------------------------- made-up arguments for errors


def an_instance(cls: type, *, every_field: bool) -> object:
    """An object of `cls` from made-up arguments of the annotated types."""
    names = {
        **vars(typing),
        **vars(collections.abc),
        "Path": Path,
        **vars(importlib.import_module("everystep.types")),
        **vars(sys.modules[cls.__module__]),
    }
    init = cls.__init__ if inspect.isfunction(cls.__init__) else cls.__new__
    hints = typing.get_type_hints(init, globalns=names) if inspect.isfunction(init) else {}
    if not hints and hasattr(cls, "__annotations__"):
        hints = typing.get_type_hints(cls, globalns=names)
    positional, named = [], {}
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional.append("what happened")
        elif parameter.default is parameter.empty or every_field:
            value = a_value(hints.get(parameter.name, str), every_field=every_field)
            if parameter.kind is parameter.KEYWORD_ONLY:
                named[parameter.name] = value
            else:
                positional.append(value)
    return cls(*positional, **named)


SAMPLES: dict[object, object] = {
    bool: True,
    int: 7,
    float: 1.5,
    str: "sample",
    bytes: b"sample",
    Path: Path("some", "file"),
    object: "sample",
    typing.Any: "sample",
    type(None): None,
}


def a_value(hint: object, *, every_field: bool) -> object:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in SAMPLES:
        return SAMPLES[hint]
    if origin is typing.Literal:
        return args[0]
    if origin in (typing.Union, types.UnionType):
        return a_value(args[0], every_field=every_field)
    container = origin or hint
    if isinstance(container, type):
        if issubclass(container, collections.abc.Mapping):
            return {a_value(args[0] if args else str, every_field=every_field): "sample"}
        if issubclass(container, collections.abc.Iterable) and container.__module__ in (
            *("builtins", "collections.abc"),
        ):
            items = [a_value(args[0] if args else str, every_field=every_field)]
            concrete = container if container.__module__ == "builtins" else tuple
            return concrete(items)
        if issubclass(container, enum.Enum):
            return next(iter(container))
        if issubclass(container, BaseException):
            return OSError(28, "sample")
        return an_instance(container, every_field=every_field)
    return "sample"


# ---------------------------------------------------------------- do the checkers complain?


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (first_sentence_complaints, '"""One\nsentence. Two.\n\nMore"""', "x = 1"),
        (first_sentence_complaints, '"""One."""', '"""A title\n\nA sentence."""'),
        (raise_complaints, "raise ValueError(1)", "raise RuntimeError(1)"),
        (raise_complaints, "raise", "raise builtins.Exception"),
        (raise_complaints, "raise errors.NotRuntimeError", "def f():\n raise AssertionError"),
        (raise_complaints, "x = 'assert x'", "assert x"),
        (
            protocol_complaints,
            "class P(Protocol):\n @property\n def fact(self): ...\n"
            + "".join(f" def m{n}(self): ...\n" for n in range(7)),
            "class P(typing.Protocol[T]):\n" + "".join(f" def m{n}(self): ...\n" for n in range(8)),
        ),
        (
            protocol_complaints,
            "class P(Base):\n def m(self, *args): ...",
            "class P(Protocol):\n def m(self, *args): ...",
        ),
        (
            protocol_complaints,
            "class P(Protocol):\n def m(self, *, a): ...",
            "class P(Protocol):\n async def m(self, **kwargs): ...",
        ),
        (unit_complaints, "def f(x_s: float): ...", "def f(x: float): ..."),
        (unit_complaints, "def _f(x: float): ...", "def f(*, x: float | None = None): ..."),
        (unit_complaints, "def f(x: int): ...", "class C:\n def f(self, x: 'float'): ..."),
        (
            unit_complaints,
            "def f(x: Callable[[float], float]): ...",
            "def f(x: Sequence[float]): ...",
        ),
    ],
)
def test_the_checkers_complain(
    check: Callable[[ast.Module], list[str]], good: str, bad: str
) -> None:
    assert check(ast.parse(good)) == []
    assert len(check(ast.parse(bad))) == 1


def test_the_size_checker_complains() -> None:
    function = "def f():\n" + " x = 1\n" * (MAX_FUNCTION_LINES - 1)
    assert size_complaints(function) == []
    assert len(size_complaints(function + " x = 1\n")) == 1
    assert size_complaints("x = 1\n" * MAX_FILE_LINES) == []
    assert len(size_complaints("x = 1\n" * (MAX_FILE_LINES + 1))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(1)",
        "import time as t\nt.sleep(1)",
        "from time import sleep",
        "from time import sleep as nap",
    ],
)
def test_the_finder_of_names_sees_through_aliases(source: str) -> None:
    assert "time.sleep" in used_names(ast.parse(source))
    assert "time.sleep" not in used_names(ast.parse("import clock\nclock.time.sleep(1)"))


def test_the_finder_of_names_knows_the_names_above() -> None:
    assert "torch.cuda" in used_names(ast.parse("import torch\ntorch.cuda.is_available()"))
    assert "pickle" in used_names(ast.parse("from pickle import loads"))
    assert "os.fsync" not in used_names(ast.parse("import os\nos.fsync_later()"))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("see /a/home/b", 1),
        ('"/a/home"', 1),
        ("file:/a/home/x.py", 1),
        ("src/a/home/b", 0),
        ("/a/homes", 0),
        ("$(X)/a/home", 0),
    ],
)
def test_the_checker_of_paths_complains(text: str, number: int) -> None:
    assert len(path_complaints(text, ["/a/home"])) == number
    assert len(path_complaints(text, ["/a/"])) == number + (text == "/a/homes")


def test_made_up_errors_are_built_from_their_annotations() -> None:
    class Sample(Exception):
        def __init__(self, path: Path, *, steps: tuple[int, ...], at: int | None = None) -> None:
            super().__init__(f"{path} {steps} {at}")

    assert str(an_instance(Sample, every_field=False)) == f"{Path('some', 'file')} (7,) None"
    assert str(an_instance(Sample, every_field=True)).endswith("7")
