"""Every name of CuPy, NVML and the driver that we use exists, and is called as it can be called.

CuPy imports without a GPU, so this needs none. What a type checker would find is found here by a
walk over the sources, as compiled modules have no types; the double is compared name by name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from inspect import Parameter, Signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cuda_double.cupy_double import Nvtx, Runtime
from tests.cuda_double.machine import Machine, MachineConfig
from tests.gpu_check_double import MeasuringRuntime, measuring_cupy_of

pytest.importorskip("cupy")

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    path
    for folder in ("cache", "models", "server", "benchmarks/gpu")
    for path in (ROOT / folder).glob("*.py")
]
PACKAGES = ("cupy", "pynvml", "cuda.bindings")

# What no signature of CuPy says.
NAME_TO_SIGNATURE = {
    "cupy.ndarray": "ndarray(shape, dtype=float, memptr=None, strides=None, order='C')",
    "cupy.cuda.MemoryPool": "MemoryPool(allocator=None)",
}
NAME_TO_RESULT = {
    "cupy.cuda.MemoryPool.malloc": "cupy.cuda.MemoryPointer",
    "cupy.RawModule.get_function": "cupy.RawKernel",
    "cupy.ndarray.view": "cupy.ndarray",
    "cupy.ndarray.reshape": "cupy.ndarray",
}


NAME_TO_VALUE = {"cupy.ndarray.data": "cupy.cuda.MemoryPointer()"}


def thing(path: str) -> Any:
    """What a dotted path names; raises `AttributeError` where it names nothing."""
    parts = path.split(".")
    found: Any = importlib.import_module(parts[0])
    for index, name in enumerate(parts[1:], start=2):
        if not hasattr(found, name) and inspect.ismodule(found):
            try:
                importlib.import_module(".".join(parts[:index]))
            except ImportError:
                raise AttributeError(f"{path} does not exist") from None
        if hasattr(found, name):
            found = getattr(found, name)
        elif inspect.isclass(found) and _is_documented(found, name):
            return None  # an attribute that the constructor sets
        else:
            raise AttributeError(f"{path} does not exist")
    return found


def _is_documented(kind: type, name: str) -> bool:
    return f"~{kind.__name__}.{name} " in (kind.__doc__ or "")


def signature(path: str) -> Signature | None:
    """How it is called, without `self`; None where nothing says so."""
    called = thing(path)
    if path in NAME_TO_SIGNATURE:
        return _parsed(NAME_TO_SIGNATURE[path])
    is_class = inspect.isclass(called)
    for one in (called, called.__init__ if is_class else None):
        first_line = (getattr(one, "__doc__", None) or "").split("\n")[0]
        if re.match(r"[\w.]+\(.*\)", first_line):
            return _parsed(first_line)
    try:
        found = inspect.signature(called)
    except ValueError:
        return None
    is_method = not is_class and inspect.isclass(thing(path.rpartition(".")[0]))
    return _without_self(found) if is_method else found


def _parsed(line: str) -> Signature:
    """A signature as Cython writes it: `name(type name, type name=default, *, type name)`."""
    inside = line[line.index("(") + 1 : line.rindex(")")]
    parameters = []
    kind: Any = Parameter.POSITIONAL_OR_KEYWORD
    for text in filter(None, (part.strip() for part in _split(inside))):
        declared, is_optional, _ = text.partition("=")
        name = declared.split()[-1]
        if name == "*":
            kind = Parameter.KEYWORD_ONLY
        elif name.startswith("**"):
            parameters.append(Parameter(name[2:], Parameter.VAR_KEYWORD))
        elif name.startswith("*"):
            parameters.append(Parameter(name[1:], Parameter.VAR_POSITIONAL))
            kind = Parameter.KEYWORD_ONLY
        elif name not in ("self", "/"):
            default = None if is_optional else Parameter.empty
            parameters.append(Parameter(name, kind, default=default))
    return Signature(parameters)


def _split(text: str) -> list[str]:
    """At the commas that are in no brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _without_self(found: Signature) -> Signature:
    parameters = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    return found.replace(parameters=parameters)


class Walk(ast.NodeVisitor):
    """Follows CuPy through aliases, attributes, constructors and its own methods' results.

    A value is a dotted path; that of an object ends in `()`. Names belong to their function,
    attributes to the whole file, results to the methods of one class.
    """

    def __init__(self, text: str) -> None:
        self.faults: list[str] = []
        self.seen: set[str] = set()
        self._attributes: dict[str, str] = {}
        self._names: list[dict[str, str]] = [{}]
        self._functions: list[str] = []
        self._classes: list[str] = [""]
        self._method_to_result: dict[tuple[str, str], str] = {}
        tree = ast.parse(text)
        for _ in range(2):  # attributes that are used above their assignment
            self.faults.clear()
            self.visit(tree)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.startswith(PACKAGES):
                name = alias.asname or alias.name.split(".")[0]
                self._names[-1][name] = alias.name if alias.asname else name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module is not None and node.module.startswith(PACKAGES):
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                self._names[-1][alias.asname or alias.name] = path
                self._check(node, path)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = [*node.args.args, *node.args.kwonlyargs]
        self._names.append({a.arg: a.arg for a in arguments if a.arg in PACKAGES})
        self._functions.append(node.name)
        self.generic_visit(node)
        self._functions.pop()
        self._names.pop()

    def visit_Return(self, node: ast.Return) -> None:
        self.generic_visit(node)
        if node.value is not None and (value := self._value(node.value)) is not None:
            self._method_to_result[self._classes[-1], self._functions[-1]] = value

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._classes.append(node.name)
        self.generic_visit(node)
        self._classes.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        value = self._value(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._names[-1].pop(target.id, None)
                if value is not None:
                    self._names[-1][target.id] = value
            elif isinstance(target, ast.Attribute) and value is not None:
                self._attributes[target.attr] = value

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        if self._value(node.value) is not None and (path := self._value(node)) is not None:
            self._check(node, path)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if (module := _imported(node)) is not None:
            self._check(node, module)
        path = self._value(node.func)
        if path is None:
            return
        path = f"{path[:-2]}.__call__" if path.endswith("()") else path
        try:
            found = signature(path)
        except AttributeError:
            return  # noted at the attribute
        if found is not None and (fault := _misfit(node, found)):
            self.faults.append(f"line {node.lineno}: {path}{found}: {fault}")

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            path = self._value(item.context_expr)
            if path is not None and path.endswith("()"):
                self._check(node, f"{path[:-2]}.__enter__")
        self.generic_visit(node)

    def _check(self, node: ast.AST, path: str) -> None:
        path = path.removesuffix("()")
        self.seen.add(path)
        try:
            thing(path)
        except AttributeError as error:
            self.faults.append(f"line {node.lineno}: {error}")  # type: ignore[attr-defined]

    def _value(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.IfExp):
            return self._value(node.body) or self._value(node.orelse)
        if isinstance(node, ast.Name):
            return next((n[node.id] for n in reversed(self._names) if node.id in n), None)
        if isinstance(node, ast.Attribute):
            return self._value_of_attribute(node)
        if isinstance(node, ast.Call):
            return self._value_of_call(node)
        return None

    def _value_of_attribute(self, node: ast.Attribute) -> str | None:
        if (base := self._value(node.value)) is not None:
            path = f"{base.removesuffix('()')}.{node.attr}"
            return NAME_TO_VALUE.get(path, path)
        if node.attr.lstrip("_") in PACKAGES:
            return node.attr.lstrip("_")
        return self._attributes.get(node.attr)

    def _value_of_call(self, node: ast.Call) -> str | None:
        if (module := _imported(node)) is not None:
            return module
        path = self._value(node.func)
        if path is None:
            owner, _, name = ast.unparse(node.func).rpartition(".")
            return (
                self._method_to_result.get((self._classes[-1], name)) if owner == "self" else None
            )
        if path in NAME_TO_RESULT:
            return f"{NAME_TO_RESULT[path]}()"
        try:
            return f"{path}()" if inspect.isclass(thing(path)) else None
        except AttributeError:
            return None


def _imported(call: ast.Call) -> str | None:
    """The module of `PACKAGES` that a call of `importlib.import_module` names."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "import_module":
        return None
    names = [str(a.value) for a in call.args if isinstance(a, ast.Constant)]
    return next((name for name in names if name.startswith(PACKAGES)), None)


def _misfit(call: ast.Call, found: Signature) -> str | None:
    """Why the call does not fit; starred arguments fit whatever is left."""
    if any(isinstance(a, ast.Starred) for a in call.args) or any(
        keyword.arg is None for keyword in call.keywords
    ):
        return None
    try:
        found.bind(*call.args, **{str(k.arg): k.value for k in call.keywords})
    except TypeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_exists_and_every_call_fits(path: Path) -> None:
    assert Walk(path.read_text(encoding="utf-8")).faults == []


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (
            "cache/cuda.py",
            {
                "cupy.RawModule.get_function",
                "cupy.cuda.Event.synchronize",
                "cupy.cuda.MemoryPool.malloc",
                "cupy.cuda.Stream.wait_event",
                "cupy.cuda.runtime.hostRegister",
                "cupy.cuda.runtime.memcpyAsync",
            },
        ),
        ("cache/profiling.py", {"cupy.cuda.nvtx"}),
        (
            "benchmarks/gpu/rows.py",
            {
                "cupy.cuda.malloc_managed",
                "cupy.cuda.runtime.cudaDevAttrConcurrentManagedAccess",
                "cupy.cuda.runtime.memcpyDeviceToDevice",
            },
        ),
        ("benchmarks/gpu/timing.py", {"cupy.cuda.get_elapsed_time"}),
    ],
)
def test_the_walk_sees_what_is_used(path: str, names: set[str]) -> None:
    assert names <= Walk((ROOT / path).read_text(encoding="utf-8")).seen


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("cupy.cuda.Streem()", "cupy.cuda.Streem does not exist"),
        ("self._cupy.cuda.runtime.memcpyAsnc(1, 2, 3, 1, 0)", "memcpyAsnc does not exist"),
        ("runtime.memcpyAsync(1, 2, 3, 1)", "missing a required argument: 'stream'"),
        ("runtime.memcpyAsync(1, 2, 3, 1, 0, 0)", "too many positional arguments"),
        ("runtime.hostRegister(1, 2, flag=3)", "missing a required argument: 'flags'"),
        ("cupy.cuda.Stream(nonblocking=True)", "unexpected keyword argument 'nonblocking'"),
        ("self.stream.wait_for(event)", "cupy.cuda.Stream.wait_for does not exist"),
        ("self.stream.wait_event()", "missing a required argument: 'event'"),
        ("cupy.cuda.MemoryPool().malloc()", "missing a required argument: 'size'"),
        ("self.new().synchronise()", "cupy.cuda.Event.synchronise does not exist"),
        ("array.data.pointer", "cupy.cuda.MemoryPointer.pointer does not exist"),
        ("cupy.RawModule(code='').get_function('f')((1,), (1,))", "required argument: 'args'"),
        ("pynvml.nvmlDeviceGetCount(1)", "too many positional arguments"),
        ("pynvml.nvmlDeviceGetCounts()", "pynvml.nvmlDeviceGetCounts does not exist"),
        ("importlib.import_module('cupy.cuda.nvtxx')", "cupy.cuda.nvtxx does not exist"),
        ("from cuda.bindings import drivers", "cuda.bindings.drivers does not exist"),
        ("self.stream.ptr", None),
        ("self.stream.record(event)", None),
        ("pool.malloc(size=3)", None),
        ("runtime.memcpyAsync(1, 2, size=3, kind=1, stream=0)", None),
    ],
)
def test_the_walk_finds_a_wrong_name_and_a_wrong_call(line: str, fault: str | None) -> None:
    text = f"""
import pynvml

class Thing:
    def __init__(self, cupy):
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def use(self, cupy, event):
        runtime = self._cupy.cuda.runtime
        pool = cupy.cuda.MemoryPool()
        array = cupy.ndarray((3,), memptr=pool.malloc(12))
        {line}

    def new(self):
        return self._cupy.cuda.Event()
"""
    faults = Walk(text).faults
    assert len(faults) == (fault is not None), faults
    assert fault is None or fault in faults[0]


DOUBLE = measuring_cupy_of(Machine(MachineConfig()))


def names_of_the_double(value: Any = DOUBLE, path: str = "cupy") -> Iterator[tuple[str, Any]]:
    """Every public name, down to the methods of classes."""
    for name in dir(value):
        is_special = name in (
            "__call__",
            "__enter__",
            "__exit__",
            "__dlpack__",
            "__dlpack_device__",
        )
        if name.startswith("_") and not is_special:
            continue
        found = getattr(value, name)
        yield f"{path}.{name}", found
        is_exception = inspect.isclass(found) and issubclass(found, BaseException)
        if isinstance(found, SimpleNamespace | Runtime | Nvtx) or (
            inspect.isclass(found) and not is_exception
        ):
            yield from names_of_the_double(found, f"{path}.{name}")


@pytest.mark.parametrize(
    ("path", "found"), [pytest.param(*n, id=n[0]) for n in names_of_the_double()]
)
def test_the_double_has_only_names_of_cupy_and_their_signatures(path: str, found: Any) -> None:
    thing(path)
    if not callable(found):
        return
    expected = signature(path)
    assert expected is not None
    ours = inspect.signature(found)
    is_class_member = inspect.isfunction(found)
    assert _shape(_without_self(ours) if is_class_member else ours) == _shape(expected)


def _shape(found: Signature) -> list[tuple[str, str, bool]]:
    return [
        (p.name, p.kind.name, p.default is not Parameter.empty) for p in found.parameters.values()
    ]


@pytest.mark.parametrize(
    ("constant", "path"),
    [
        (name, f"cupy.cuda.runtime.{name}")
        for name in dir(MeasuringRuntime)
        if isinstance(getattr(MeasuringRuntime, name), int)
    ],
)
def test_constants_are_those_of_cupy(constant: str, path: str) -> None:
    assert getattr(MeasuringRuntime, constant) == thing(path)


@pytest.mark.parametrize("status", [1, 2, 9, 35, 100, 101, 400, 700, 712, 713, 719])
def test_errors_read_as_those_of_cupy(status: int) -> None:
    theirs = thing("cupy.cuda.runtime.CUDARuntimeError")(status)
    ours = DOUBLE.cuda.runtime.CUDARuntimeError(status)
    assert (str(ours), ours.status) == (str(theirs), theirs.status)
