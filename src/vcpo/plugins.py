"""Loading a user's own object by name: ``package.module:name`` or ``path/to/file.py:name``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from vcpo.errors import UserError, suggest


def split_spec(spec: str) -> tuple[str, str]:
    """The module (or file) and the name in it. Reads and imports nothing.

    Raises ValueError with one sentence when the form is wrong or a named file does not exist.
    """
    source, separator, name = spec.rpartition(":")
    if not separator or not source or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{spec!r} must be written package.module:name or path/to/file.py:name")
    if _is_file(source):
        if not Path(source).is_file():
            raise ValueError(f"{spec!r}: there is no file {str(Path(source).absolute())!r}")
    elif not all(part.isidentifier() for part in source.split(".")):
        raise ValueError(f"{spec!r}: {source!r} is neither a module name nor a path that ends in .py")
    return source, name


def load_object(spec: str) -> Any:
    """The object that ``spec`` names.

    A module is looked up as ``import`` would, then in the current directory; a file is executed once per process, and
    may import its neighbours. Raises UserError when the module, the file or the name does not exist, and when the
    user's code fails while it is loaded (with that failure's own message, file and line).
    """
    try:
        source, name = split_spec(spec)
    except ValueError as error:
        raise UserError(str(error)) from None
    module = _load_file(spec, Path(source)) if _is_file(source) else _load_module(spec, source)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [word for word in vars(found) if not word.startswith("_")]
            raise UserError(f"{spec!r}: {source} has no {part!r}{suggest(part, public) if public else ''}")
        found = getattr(found, part)
    return found


def _is_file(source: str) -> bool:
    return source.endswith(".py") or "/" in source or "\\" in source


def _load_module(spec: str, name: str) -> ModuleType:
    # a console script does not have the current directory on its path, where a user's module usually lies
    _add_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise UserError(
                f"{spec!r}: there is no module {error.name!r} among the installed packages or in {str(Path.cwd())!r}"
            ) from None
        raise _user_code_failed(spec, error) from error
    except Exception as error:
        raise _user_code_failed(spec, error) from error


def _load_file(spec: str, path: Path) -> ModuleType:
    path = path.resolve()
    # the path is part of the name, so that two files called rewards.py are two modules
    name = f"vcpo_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    _add_to_path(path.parent)
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"{spec!r}: {str(path)!r} is not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(module_spec)
    # dataclasses and pickling look a module up by its name while it is still being executed
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _user_code_failed(spec, error) from error
    return module


def _add_to_path(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


def _user_code_failed(spec: str, error: Exception) -> UserError:
    if isinstance(error, SyntaxError):
        where = f"{error.filename}, line {error.lineno}"
    else:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
        where = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "unknown place"
    return UserError(f"{spec!r} failed while it was loaded: {type(error).__name__}: {error} ({where})")
