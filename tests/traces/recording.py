"""What the two recorders share: stand-ins for missing modules, and the table of linear layers.

An engine's model code imports compiled extensions and GPU libraries that a machine without a GPU cannot load.
`install_stubs` lets those imports succeed with stand-ins that compute nothing. The model classes themselves,
their linear layers and their quantization methods are the engine's own.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import re
import sys
import types
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _StubType(type):
    """The class of every stand-in: attributes, calls, indexing and unions give further stand-ins."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return make_stub(name)

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return object

    __ror__ = __or__

    def __iter__(cls) -> Any:
        return iter(())


def make_stub(name: str) -> Any:
    """A class that can be subclassed, called, and used as a decorator with or without arguments."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else self

    def attribute(self: Any, attr: str) -> Any:
        if attr.startswith("__") and attr.endswith("__"):
            raise AttributeError(attr)
        return make_stub(attr)()

    def schema(cls: Any, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__dict__.get("_is_stub") and len(args) == 1 and isinstance(args[0], types.FunctionType):
            return args[0]  # Used as a plain decorator.
        return object.__new__(cls)

    body = {
        "_is_stub": True,
        "__new__": new,
        "__init__": lambda self, *args, **kwargs: None,
        "__call__": call,
        "__getattr__": attribute,
        "__get_pydantic_core_schema__": classmethod(schema),
    }
    return _StubType(name, (), body)


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "99.0"
        if name.startswith("__"):
            raise AttributeError(name)
        stub = make_stub(name)
        setattr(self, name, stub)
        return stub


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes stand-ins for `always`, and for whatever else the engine's own files import and nobody has.

    Modules in `absent` stay missing, so that the engine takes its way without them. A question whether a
    module exists (`importlib.util.find_spec`) is answered with yes only for names in `present`.
    """

    def __init__(self, root: Path, always: Iterable[str], absent: Iterable[str], present: Iterable[str]):
        self.root = str(root)
        self.always = tuple(always)
        self.absent = tuple(absent)
        self.present = tuple(present)
        self.made: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        if _within(name, self.absent):
            return None
        if not _within(name, self.always):
            known = top in sys.stdlib_module_names or top == Path(self.root).name
            if known or (top in sys.modules and top not in self.made and path is not None):
                return None
            if top not in self.made and not self._asked_by_engine():
                return None
        if _asked_by_find_spec() and not _within(name, (*self.present, *self.made)):
            return None
        self.made.add(name if _within(name, self.always) else top)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _StubModule(spec.name)
        module.__path__ = []
        module.__file__ = f"<stand-in for {spec.name}>"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass

    def _asked_by_engine(self) -> bool:
        return any(frame.startswith(self.root) for frame in _importers()[:1])


class _AbsentFinder(importlib.abc.MetaPathFinder):
    def __init__(self, absent: Iterable[str]):
        self.absent = tuple(absent)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if _within(name, self.absent) and not _asked_by_find_spec():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


class _AlwaysFinder(importlib.abc.MetaPathFinder):
    def __init__(self, stubs: StubFinder):
        self.stubs = stubs

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return self.stubs.find_spec(name, path, target) if _within(name, self.stubs.always) else None


def _within(name: str, names: Iterable[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in names)


def _importers() -> list[str]:
    """The files of the frames above the import machinery, nearest first."""
    files = []
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith("<frozen importlib") or "/importlib/" in file or file == __file__):
            files.append(file)
        frame = frame.f_back
    return files


def _asked_by_find_spec() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "find_spec" and (
            "importlib/util" in code.co_filename or code.co_filename == "<frozen importlib.util>"
        ):
            return True
        if not (code.co_filename.startswith("<frozen") or code.co_filename == __file__):
            return False
        frame = frame.f_back
    return False


def install_stubs(
    engine: str, *, always: Sequence[str] = (), absent: Sequence[str] = (), present: Sequence[str] = ()
) -> StubFinder:
    """Installs the stand-ins for `engine`; must run before its first import."""
    spec = importlib.machinery.PathFinder.find_spec(engine)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{engine} is not installed in this environment")
    root = Path(next(iter(spec.submodule_search_locations)))
    stubs = StubFinder(root, always, absent, present)
    sys.meta_path.insert(0, _AlwaysFinder(stubs))
    sys.meta_path.insert(0, _AbsentFinder(absent))
    sys.meta_path.append(stubs)
    return stubs


class _StubOp:
    """Stands for an op and for its overloads."""

    def __init__(self, name: str):
        self.__name__ = self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


def accept_missing_ops(namespaces: Sequence[str]) -> None:
    """Lets `torch.ops.<namespace>.<name>` resolve without the compiled extension that defines it.

    The stand-in for an op answers True, which is what the engines' capability queries need; no other op runs.
    """
    from torch._ops import _OpNamespace

    real = _OpNamespace.__getattr__

    def lookup(self: Any, name: str) -> Any:
        try:
            return real(self, name)
        except AttributeError:
            if self.name not in namespaces or name.startswith("__"):
                raise
            return _StubOp(name)

    _OpNamespace.__getattr__ = lookup
    register = torch.library.Library._register_fake

    def register_fake(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return register(self, *args, **kwargs)
        except RuntimeError as error:
            if "does not exist" not in str(error):
                raise
            return None

    torch.library.Library._register_fake = register_fake
    load = torch.ops.load_library

    def load_library(path: str) -> None:
        try:
            load(path)
        except OSError as error:  # It needs CUDA's libraries.
            print(f"not loaded: {Path(path).name} ({error})", file=sys.stderr)

    torch.ops.load_library = load_library


def fake_streams() -> None:
    """Lets modules own CUDA streams and events, which are only used in a forward pass."""
    torch.cuda.Stream = make_stub("Stream")
    torch.cuda.Event = make_stub("Event")
    torch.cuda.current_stream = lambda device=None: torch.cuda.Stream()


class OnMeta(TorchFunctionMode):
    """Creates every tensor on the meta device, also where the engine asks for a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


@dataclass(frozen=True, order=True)
class Linear:
    """One kind of linear layer on a rank: `[n, k]`, or `[experts, n, k]`. `method`: the engine's class."""

    what: str
    n: int
    k: int
    experts: int | None
    fp8: bool
    method: str


def pattern(name: str) -> str:
    """A module's path with every number in it replaced by a star."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def linears_of(
    model: torch.nn.Module,
    prefix: str,
    *,
    experts: type,
    dense: tuple[type, ...],
    routers: tuple[str, ...] = (),
) -> list[Linear]:
    """The linear layers of an engine's model: its classes of experts and of dense layers, and torch's own.

    `routers` are names of classes that have a weight and are none of these.
    """
    found = []
    for name, module in model.named_modules():
        what = prefix + pattern(name)
        if isinstance(module, experts):
            for part, weight in (("w13", module.w13_weight), ("w2", module.w2_weight)):
                found.append(_linear(f"{what}.{part}", weight, module.quant_method))
        elif isinstance(module, dense):
            if hasattr(module, "output_size_per_partition"):
                expected = (module.output_size_per_partition, module.input_size_per_partition)
                assert tuple(module.weight.shape) == expected, (name, module.weight.shape, expected)
            found.append(_linear(what, module.weight, module.quant_method))
        elif isinstance(module, torch.nn.Linear) or type(module).__name__ in routers:
            found.append(_linear(what, module.weight, module))
    return found


def _linear(what: str, weight: torch.Tensor, method: Any) -> Linear:
    *experts, n, k = weight.shape
    fp8 = weight.dtype == torch.float8_e4m3fn
    return Linear(what, n, k, experts[0] if experts else None, fp8, type(method).__name__)


def write_trace(path: Path, header: dict[str, Any], linears: Iterable[Linear]) -> None:
    """Writes the header's fields and the counted, sorted linear layers."""
    counts = Counter(linears)
    rows = [
        {**asdict(linear), "count": count}
        for linear, count in sorted(counts.items(), key=lambda item: (item[0].what, item[0].n, item[0].k))
    ]
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in header.items()]
    table = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["{", *lines, '  "linears": [', table, "  ]", "}", ""]), encoding="utf-8")
    for row in rows:
        print(row)
