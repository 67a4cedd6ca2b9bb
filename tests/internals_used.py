"""Which internals of other packages the source uses: read from its syntax, beside the classes that it derives from."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

import lightning_zenflow

REPO = Path(__file__).resolve().parent.parent
FOREIGN = ("deepspeed", "lightning", "torch", "jsonargparse")

PUBLIC_NAMES = {
    *("deepspeed.__version__", "deepspeed.accelerator.get_accelerator", "deepspeed.comm", "deepspeed.init_distributed"),
    *("deepspeed.initialize", "deepspeed.ops.adam", "deepspeed.utils.logging.logger"),
}
"""What DeepSpeed documents of the names used here, with all that is behind them."""

OF_ENGINES = {"module", "optimizer", "backward", "step", "zero_grad", "destroy"}
"""What it documents of its engine."""

PUBLIC_MODULES = {
    *("", ".accelerators", ".callbacks", ".cli", ".core.optimizer", ".plugins.precision", ".strategies"),
    *(".trainer.states", ".utilities", ".utilities.rank_zero"),
}
"""Modules of `lightning.pytorch` whose names are documented, unless they begin with an underscore."""

OWN_WORDS = {
    *(
        "_abc_impl",
        "_exit",
        "_extra_state",
        "_interval",
        "_2",
        "_parsing",
        "_type",
    ),  # of Python, of stored states, parts of names
    *("ds_autoep_layers", "ds_config", "ds_version", "ds_zenflow"),  # keys of checkpoints; a name of ours
}
"""What looks like an internal and is none."""


def used() -> set[str]:
    """Internals that the source uses: dotted where it says whose they are, else the bare name."""
    modules = [_nodes(path) for path in _sources()]
    own = {name for nodes in modules for name in _defined(nodes)}
    found = {name for nodes in modules for name in [*_imported(nodes), *_of_engines_and_parameters(nodes)]}
    found |= {name for nodes in modules for name in _words(nodes) if _looks_internal(name)} - own
    return (found | _of_bases()) - OWN_WORDS


def words() -> set[str]:
    """Every identifier of the source, also in strings."""
    return {name for path in _sources() for name in _words(_nodes(path))}


def is_internal(dotted: str) -> bool:
    """Whether a dotted name of another package is not documented there."""
    package = dotted.partition(".")[0]
    if package not in FOREIGN or package == dotted:
        return False
    if package == "deepspeed":
        return not any(dotted == name or dotted.startswith(f"{name}.") for name in PUBLIC_NAMES)
    if any(map(_is_private, dotted.split("."))):
        return True
    return package == "lightning" and _module_of(dotted).removeprefix("lightning.pytorch") not in PUBLIC_MODULES


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _looks_internal(name: str) -> bool:
    return _is_private(name) or name.startswith("ds_")


@cache
def _module_of(dotted: str) -> str:
    """The part of a dotted name that is a module."""
    while dotted:
        try:
            importlib.import_module(dotted)
            return dotted
        except ImportError:
            dotted = dotted.rpartition(".")[0]
    return ""


def _sources() -> Iterator[str]:
    for folder in ("lightning_zenflow", "cli"):
        for path in sorted((REPO / folder).rglob("*.py")):
            # The table itself uses nothing, and `cli` may be a link to the other folder.
            if path.name != "internals_table.py" and "lightning_zenflow/cli/" not in path.as_posix():
                yield str(path)


@cache
def _nodes(path: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(Path(path).read_text())))


# -- what the syntax says ----------------------------------------------------------------------------------------------


def _defined(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _imported(nodes: list[ast.AST]) -> set[str]:
    """What is imported, and what is reached through it."""
    found, aliases = set(), dict[str, str]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            found |= {node.value} if all(map(str.isidentifier, node.value.split("."))) else set()
    found |= set(aliases.values())
    for node in nodes:
        if isinstance(node, ast.Attribute) and (chain := _chain(node)):
            found.add(".".join([aliases.get(chain[0], chain[0]), *chain[1:]]))
    found = {name for name in found if name.partition(".")[0] in FOREIGN}
    found = {name for name in found if not any(other.startswith(f"{name}.") for other in found)}
    return {_without_members(name) for name in found if is_internal(name)}


def _without_members(dotted: str) -> str:
    """The name itself if it is that of a class's member, else what is imported of a module."""
    module = _module_of(dotted)
    first, _, rest = dotted.removeprefix(module).removeprefix(".").partition(".")
    is_member = bool(rest) and isinstance(getattr(sys.modules[module], first, None), type)
    return dotted if not first or (is_member and not rest.startswith("__")) else f"{module}.{first}"


def _chain(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := _chain(node.value)):
        return [*before, node.attr]
    return []


def _words(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, (ast.Name, ast.Attribute, ast.FunctionDef, ast.alias)):
            name = getattr(node, "id", getattr(node, "attr", getattr(node, "name", "")))
            yield name.rpartition(".")[2]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = node.value.split(".")
            yield from parts if all(map(str.isidentifier, parts)) else ()


def _of_engines_and_parameters(nodes: list[ast.AST]) -> Iterator[str]:
    """Attributes of what the source calls an engine or a parameter, beyond those that are documented."""
    of_parameters = dir(torch.nn.Parameter(torch.zeros(1)))
    for node in nodes:
        chain = _chain(node) if isinstance(node, ast.Attribute) else []
        if len(chain) > 1 and chain[-2] in ("engine", "deepspeed_engine") and chain[-1] not in OF_ENGINES:
            yield chain[-1]
        if len(chain) == 2 and chain[0] in ("param", "tensor") and chain[1] not in of_parameters:
            yield chain[1]


def _is_self(node: ast.expr) -> bool:
    is_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return is_super or (isinstance(node, ast.Name) and node.id == "self")


# -- what the classes say ----------------------------------------------------------------------------------------------


def _of_bases() -> set[str]:
    """What our classes use of their base classes, or replace of them: private names, and of DeepSpeed's every name."""
    found = set()
    for kind in _classes():
        touched = {name for base in kind.__mro__ if _package(base) not in FOREIGN for name in _touched(base)}
        for base in kind.__mro__:
            names = touched & _given(base) if _package(base) in FOREIGN else set()
            found |= {name for name in names if _package(base) == "deepspeed" or _is_private(name)}
    return {name for name in found if not name.startswith("__")}


def _classes() -> Iterator[type]:
    for module in pkgutil.walk_packages(lightning_zenflow.__path__, "lightning_zenflow."):
        if not module.name.endswith(("__main__", "offload.child")):  # they do something
            for member in vars(importlib.import_module(module.name)).values():
                if isinstance(member, type) and member.__module__ == module.name:
                    yield member


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


@cache
def _touched(kind: type) -> frozenset[str]:
    """What a class defines, and what its methods use of `self`; nothing of classes that are not ours."""
    if _package(kind) != "lightning_zenflow":
        return frozenset()
    return frozenset({node.attr for node in _attributes_of_self(kind)} | set(vars(kind)))


@cache
def _given(kind: type) -> frozenset[str]:
    """What a class gives its instances: members, and what its methods set."""
    stored = {node.attr for node in _attributes_of_self(kind) if isinstance(node.ctx, ast.Store)}
    return frozenset(stored | set(vars(kind)))


def _attributes_of_self(kind: type) -> list[ast.Attribute]:
    path = getattr(sys.modules[kind.__module__], "__file__", None)
    if path is None or not path.endswith(".py"):
        return []
    trees = [node for node in _nodes(path) if isinstance(node, ast.ClassDef) and node.name == kind.__name__]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return [node for node in nodes if isinstance(node, ast.Attribute) and _is_self(node.value)]
