"""Names in a configuration that belong to other packages: arguments of ``ray.init``, protocols of fsspec.

Ray's are read from its source: importing Ray takes a second, which a plan does without.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec

from hybridflow.config.constraints import is_url
from hybridflow.config.problems import Problem, did_you_mean, show
from hybridflow.config.root import PPOConfig

RAY_INIT = "_private/worker.py"
"""Where Ray defines ``init``, since 1.13."""
_COUNTS = ("num_cpus", "num_gpus", "object_store_memory", "dashboard_port")
_MAPPINGS = ("resources", "labels", "runtime_env", "_system_config")
_ADDRESS = re.compile(r"auto|local|(ray://)?[^\s/]+:\d+")


def foreign_problems(config: PPOConfig) -> Iterator[Problem]:
    """Arguments that ``ray.init`` does not have, and places of checkpoints that fsspec does not know."""
    if config.trainer.controller == "ray":
        yield from _ray_problems(config)
    for key, place in (
        ("trainer.checkpoint_copy", config.trainer.checkpoint_copy),
        ("trainer.resume_from_path", config.trainer.resume_from_path),
    ):
        if place is not None:
            yield from _protocol_problems(key, place)


def _ray_problems(config: PPOConfig) -> Iterator[Problem]:
    given = {key: value for key, value in config.ray_kwargs.ray_init.items() if value is not None}
    known = ray_arguments() if given else frozenset()
    for key, value in given.items():
        if known and key not in known:
            public = sorted(name for name in known if not name.startswith("_"))
            text, fix = "is no argument of ray.init", did_you_mean(key, sorted(known))
            fix = fix or f"Its arguments: {', '.join(public)}."
            yield Problem(key=f"ray_kwargs.ray_init.{key}", given=show(value), text=text, fix=fix)
        elif wanted := _wanted(key, value):
            yield Problem(key=f"ray_kwargs.ray_init.{key}", given=show(value), text=f"must be {wanted}")
    address = os.environ.get("RAY_ADDRESS")
    if address and "address" not in given and not _ADDRESS.fullmatch(address):
        fix = "Unset it for a Ray of this run's own."
        yield Problem(key="RAY_ADDRESS", given=address, text="must be HOST:PORT, auto or local", fix=fix)


def _wanted(key: str, value: Any) -> str:
    """What an argument of ``ray.init`` must be where ``value`` is not; Ray would say so from deep inside."""
    if key in _COUNTS and (type(value) is not int or value < 0):
        return "a whole number of at least 0"
    if key in _MAPPINGS and not isinstance(value, Mapping):
        return f"a mapping: ray_kwargs.ray_init.{key}.NAME=VALUE"
    if key == "address" and not _ADDRESS.fullmatch(str(value)):
        return "HOST:PORT, auto or local"
    return ""


def ray_arguments() -> frozenset[str]:
    """Names that the installed ``ray.init`` takes, hidden ones included; empty where its source does not tell."""
    spec = importlib.util.find_spec("ray")
    files = [Path(place) / RAY_INIT for place in (spec.submodule_search_locations or () if spec else ())]
    tree = ast.parse(files[0].read_bytes()) if files and files[0].is_file() else ast.Module([], [])
    init = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "init"), None)
    if init is None:
        return frozenset()
    calls = [node for node in ast.walk(init) if isinstance(node, ast.Call) and ast.unparse(node.func) == "kwargs.pop"]
    hidden = {str(call.args[0].value) for call in calls if isinstance(call.args[0], ast.Constant)}
    return frozenset({argument.arg for argument in (*init.args.args, *init.args.kwonlyargs)} | hidden)


def _protocol_problems(key: str, place: str) -> Iterator[Problem]:
    protocols = [*fsspec.available_protocols(), *fsspec.registry]
    lost = re.match(r"(\w+):/*(?=[^/])", place)
    if not is_url(place):
        if lost and lost[1] in protocols:  # it would be a folder called "s3:"
            fix = f"Write {lost[1]}://{place[lost.end() :]}."
            yield Problem(key=key, given=place, text="is no URL: two slashes stand behind the colon", fix=fix)
        return
    *chained, last = place.split("::")  # fsspec chains file systems: simplecache::s3://...
    for part in [*chained, *([last] if is_url(last) else [])]:
        protocol = part.partition("://")[0]
        if protocol not in protocols:
            fix = did_you_mean(protocol, protocols) or "s3, gs, abfs, hdfs and file are the usual ones."
            text = f"fsspec knows no protocol {protocol!r}"
            yield Problem(key=key, given=place, text=text, fix=fix)
