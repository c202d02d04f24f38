"""Owns what a command is given by name: `module:name`, or `file.py:name`."""

import importlib.util
import inspect
import pathlib
import sys
from types import ModuleType
from typing import Any


def load(name: str) -> Any:
    """Returns what `module:name` names, seen from the folder of the command, or `file.py:name`."""
    module, _, attribute = name.rpartition(":")
    if not (module and attribute):
        raise ValueError(f'Pass what is meant as "module:name", or "file.py:name": {name!r}. Write train:make_step.')
    file = pathlib.Path(module).resolve() if module.endswith(".py") else None
    module = file.stem if file else module
    sys.path.insert(0, str(file.parent if file else pathlib.Path.cwd()))
    try:
        found = _of_file(file) if file else importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(
                f"There is no module {module!r} (of {name!r}). Call the command from the folder that it is in, or set "
                "PYTHONPATH."
            ) from error
        said = " ".join(str(error).split())
        raise ValueError(
            f"{module} (of {name!r}) must be a module that Python can import: it raised {type(error).__name__}: {said}"
        ) from error
    if not hasattr(found, attribute):
        raise ValueError(
            f"{module} has no {attribute!r} (of {name!r}). It has {', '.join(_functions(found)) or 'no function'}."
        )
    return getattr(found, attribute)


def _of_file(file: pathlib.Path) -> ModuleType:
    """Returns the module of a file, whatever else has its name: a user's `types.py` is not that of Python."""
    taken = sys.modules.get(file.stem)
    if taken and getattr(taken, "__file__", None) == str(file):
        return taken
    spec = importlib.util.spec_from_file_location(f"{file.stem}_of_file" if taken else file.stem, file)
    if not (file.exists() and spec and spec.loader):
        raise ModuleNotFoundError(f"No file {file}", name=file.stem)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses ask for it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module


def _functions(module: ModuleType) -> list[str]:
    """Returns the public names of what can be called and was made in a module."""
    of = lambda value: getattr(value, "__module__", None)
    made = lambda value: not inspect.isclass(value) and of(value) == of(type(value))  # an object has that of its class
    own = lambda value: callable(value) and (of(value) == module.__name__ or made(value))
    return [name for name, value in vars(module).items() if own(value) and not name.startswith("_")]
