"""Owns what a command is given by name: `module:name`, or `file.py:name`."""

import importlib
import pathlib
import sys
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
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise ValueError(
            f"There is no module {module!r} (of {name!r}). Call the command from the folder that it is in, or set "
            "PYTHONPATH."
        ) from error
    if not hasattr(found, attribute):
        named = [key for key, value in vars(found).items() if getattr(value, "__module__", "") == module]
        raise ValueError(f"{module} has no {attribute!r} (of {name!r}). It has {', '.join(named) or 'none'}.")
    return getattr(found, attribute)
