"""The one dynamic import of the code base.

Heavy things (engines, workers, trackers) and the user's own functions are named as ``"module:attribute"`` (or
``"module.attribute"``) and resolved here, so that a dry run imports no torch and a machine without vLLM can train.
"""

from __future__ import annotations

import importlib
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
