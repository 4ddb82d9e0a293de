"""The one dynamic import of the code base.

Heavy things (engines, workers, trackers) and the user's own functions are named as ``"module:attribute"`` (or
``"module.attribute"``) and resolved here, so that a dry run imports no torch and a machine without vLLM can train.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any

from hybridflow.utils.errors import ConfigError


def load(target: str) -> Any:
    """The object that ``"package.module:attribute"`` (or the same with a last dot) names.

    Raises:
        ConfigError: when the module or the attribute does not exist; the message says which.
    """
    module_name, separator, attribute = target.partition(":")
    if not separator:
        module_name, _, attribute = target.rpartition(".")
    if not module_name or not attribute:
        raise ConfigError(f"{target!r} names no object: write 'package.module:attribute'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{target!r} cannot be imported: no module named {error.name!r}") from error
    found: Any = module
    for part in attribute.split("."):
        if part not in vars(found) and not hasattr(found, part):
            raise ConfigError(f"{target!r} cannot be imported: {module_name!r} has no attribute {attribute!r}")
        found = getattr(found, part)
    return found


def load_from_file(path: str, name: str) -> Any:
    """The object called ``name`` in the user's Python file ``path``, which runs once however often this is asked.

    The module gets a name of its own, so a file called ``math.py`` shadows nothing; its folder goes to the *end* of the
    import path, so that it may import its neighbours.

    Raises:
        ConfigError: no such file, or no such name in it. What the file itself raises propagates.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"{path!r} is no file (looked for {file})")
    module_name = f"hybridflow_user_{hashlib.blake2b(str(file).encode(), digest_size=8).hexdigest()}"
    if module_name not in sys.modules:
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        loader = importlib.machinery.SourceFileLoader(module_name, str(file))
        spec = importlib.util.spec_from_loader(module_name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    found = vars(sys.modules[module_name])
    if name not in found:
        names = ", ".join(sorted(key for key, value in found.items() if callable(value) and not key.startswith("_")))
        raise ConfigError(f"{path!r} has no {name!r}; it has {names or 'nothing that can be called'}")
    return found[name]
