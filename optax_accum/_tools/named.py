"""Owns what a command is given by name: `module:name`, or `file.py:name`."""

import importlib
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
    file = pathlib.Path(module).resolve()
    folder, module = (file.parent, file.stem) if module.endswith(".py") else (pathlib.Path.cwd(), module)
    sys.path.insert(0, str(folder))
    try:
        found = importlib.import_module(module)
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


def _functions(module: ModuleType) -> list[str]:
    """Returns the public names of what can be called and was made in a module."""
    of = lambda value: getattr(value, "__module__", None)
    made = lambda value: not inspect.isclass(value) and of(value) == of(type(value))  # an object has that of its class
    own = lambda value: callable(value) and (of(value) == module.__name__ or made(value))
    return [name for name, value in vars(module).items() if own(value) and not name.startswith("_")]
