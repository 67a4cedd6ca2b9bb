"""Whether the installed packages are those that this one was made for: one clear error instead of one from deep inside."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import CodeType, FunctionType, ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet

from lightning_zenflow.internals_table import SUPPORTED, TABLE, Internal

_SHOWN = 3
"""So many missing names are listed."""


@cache  # of success: an error is raised again
def check(*packages: str, command_line: bool = False) -> None:
    """Refuses versions that are not supported, and packages that lack a name which is used.

    Imports DeepSpeed if it is one of them, which takes seconds: for whoever is about to use it.

    Args:
        packages: Those to check; all if there is none.
        command_line: Whether to check what the command line uses, instead of what training does.

    Raises:
        ImportError: The message names package, version, supported range, what is missing and the remedy.
    """
    for package, supported in SUPPORTED.items():
        rows = [row for row in TABLE if row.package == package and row.by_command_line == command_line]
        if not rows or package not in (packages or SUPPORTED):
            continue
        found = installed_version(package)
        missing = [problem for row in rows for problem in problems(row)] if found else []
        if missing or not is_supported(package, found):
            raise ImportError(_message(package, found, supported, missing))


def explained(error: ImportError) -> ImportError:
    """What to raise where this package fails to import: that a version is not supported, if one is not."""
    for package, supported in SUPPORTED.items():
        found = installed_version(package)
        if not is_supported(package, found):
            return ImportError(_message(package, found, supported, [str(error)]))
    return error


def installed_version(package: str) -> str | None:
    """Version of a package, or `None` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def is_supported(package: str, found: str | None) -> bool:
    """Whether a version is one that is supported; `+cpu` and the like do not count."""
    return found is not None and SpecifierSet(SUPPORTED[package]).contains(found, prereleases=True)


def _message(package: str, found: str | None, supported: str, missing: Sequence[str]) -> str:
    lacks = f", without {'; '.join(missing[:_SHOWN])}" if missing else ""
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    why = "It is not installed." if found is None else "ZenFlow uses names of it that other versions may not have."
    return (
        f"`{package}` must be a supported version ({supported}), got {found}{lacks}{more}. {why} Install one with"
        f' `pip install --force-reinstall "{package}{supported}"`.'
    )


# -- the names ---------------------------------------------------------------------------------------------------------


def problems(row: Internal) -> Iterator[str]:
    """What of a row the installed package lacks, with what it is used for."""
    use = f" (used to {row.use})"
    try:
        found = _resolve(row.name)
    except (ImportError, AttributeError):
        yield f"`{row.name}`{use}"
        return
    if row.params:
        have = inspect.signature(_unwrapped(found)).parameters
        yield from (f"parameter `{name}` of `{row.name}`{use}" for name in row.params if name not in have)
    mentioned = _mentioned(found) if row.attributes else frozenset()
    for name in row.attributes:
        if not hasattr(found, name) and name not in mentioned:
            yield f"`{row.name}.{name}`{use}"


def _resolve(name: str) -> Any:
    """The object at a dotted name, whose first parts are modules."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def _unwrapped(function: Any) -> Any:
    """What decorators hide; DeepSpeed's take any arguments, and do not say what they wrap."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or code.co_argcount or not code.co_flags & inspect.CO_VARARGS:
        return function
    inner = [cell.cell_contents for cell in function.__closure__ or ()]
    return next((cell for cell in inner if isinstance(cell, FunctionType) and cell is not function), function)


@cache
def _mentioned(found: Any) -> frozenset[str]:
    """Names in the code of a function, a class with its bases, or a module: attributes that it gives its instances."""
    return frozenset(name for code in _codes(found) for name in _names(code))


def _codes(found: Any) -> Iterator[CodeType]:
    if isinstance(found, ModuleType):
        for member in list(vars(found).values()):
            if getattr(member, "__module__", None) == found.__name__:
                yield from _codes(member)
    elif isinstance(found, type):
        for base in found.__mro__:
            for member in vars(base).values():
                member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                if not isinstance(member, type):
                    yield from _codes(member)
    elif isinstance(code := getattr(_unwrapped(found), "__code__", None), CodeType):
        yield code


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):
            yield constant
