"""The command line in front of the strict loader: Hydra composes, ``config/load.py`` judges.

Hydra sees the defaults tree that is generated from the dataclasses, under small YAML groups (``configs/``). So that a
key never fails in Hydra's words, every ``key=value`` reaches it as ``++key=value``; what does not exist is then our
error, with a suggestion. Hydra writes no folder, configures no logging, and its exit code for a broken command line
becomes ours.

Exit codes: 0 done, 1 the run failed, 2 the configuration cannot work, 3 this machine (or cluster) lacks something, 4 a
worker died or hung and no restart was left (launch/restart.py), 130 and 143 a run that SIGINT or SIGTERM ended after a
step (launch/signals.py).
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.markup import escape

from hybridflow.config.problems import MAX_SHOWN, InvalidConfigError, Problem, did_you_mean, raise_if_any
from hybridflow.config.tree import defaults_tree
from hybridflow.utils.errors import ConfigError, DataError, DeadlineError, HybridFlowError, LostError, MachineError

OK, FAILED, BAD_CONFIG, BAD_MACHINE, LOST = 0, 1, 2, 3, 4
DEFAULTS_NODE = "hybridflow_defaults"
FLAGS = {"--dry-run": "++trainer.dry_run=True", "--strict": "++trainer.strict=True"}
"""Our own flags, as overrides."""
HELP = """\
usage: python -m hybridflow.{command} [KEY=VALUE ...] [--dry-run] [--strict] [--cfg job]

{about}

  KEY=VALUE       any key of docs/reference/configuration.md; +KEY= and ++KEY= mean the same
  preset=NAME     an algorithm with the settings that belong to it:
                  {presets}
  --dry-run       judge the configuration, print the plan, start nothing
  --strict        with --dry-run: fail for what this machine lacks, too
  --cfg job       print the composed configuration
  --config-dir DIR --config-name NAME   a YAML file of your own, with `defaults: [ppo_trainer, _self_]`

exit codes: 0 done, 1 the run failed, 2 the configuration cannot work, 3 this machine lacks something,
  4 a worker died or hung and trainer.max_restarts is used up: the same command goes on from the last checkpoint,
  130 / 143 ended early by SIGINT / SIGTERM: the step was finished and saved; the same command goes on"""
_ASSIGNMENT = re.compile(r"^(?P<plus>\+{0,2})(?P<key>[A-Za-z_][\w.\-]*)=")
_VALUED_FLAGS = frozenset(
    {"--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd", "--package", "-p", "--cfg", "-c"}
)
_HYDRA_FLAGS = _VALUED_FLAGS | {"--resolve", "--info", "-i", "--hydra-help", "--version", "--shell-completion", "-sc"}
FULL_ERROR = "HYDRA_FULL_ERROR"
CANNOT = "The configuration cannot work"
_OFFERED_FLAGS = ("--dry-run", "--strict", "--cfg", "--resolve", "--config-dir", "--config-name", "--help")


def compose_and_run(
    kind: type,
    config_name: str,
    task: Callable[[dict[str, Any]], int],
    argv: Sequence[str] | None = None,
    *,
    about: str = "",
) -> int:
    """The exit code of ``task``, called with the tree that Hydra composes from ``argv`` (None: this process's).

    Args:
        kind: root dataclass; its defaults are the tree under the YAML.
        config_name: YAML of the command in ``configs/``.
        task: gets plain nested dicts; its ConfigError, DataError and MachineError are printed and become exit codes.
        argv: arguments without the program's name.
        about: what the command does, for --help.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not {"--help", "-h"}.isdisjoint(arguments):
        presets = ", ".join(sorted(file.stem for file in (config_folder() / "preset").glob("*.yaml")))
        print(HELP.format(command=Path(sys.argv[0]).stem, about=about, presets=presets))
        return OK
    if guarded(lambda: _judge(arguments)) != OK:
        return BAD_CONFIG
    ConfigStore.instance().store(name=DEFAULTS_NODE, node=defaults_tree(kind))
    outcome: list[int] = []
    full = os.environ.get(FULL_ERROR)

    def judged(config: DictConfig) -> None:
        _set_or_unset(FULL_ERROR, full)
        outcome.append(FAILED)
        try:
            outcome.append(guarded(lambda: task(to_tree(config))))
        except Exception:  # noqa: BLE001  the end of the process: nobody's fault but ours, or that of the user's code
            traceback.print_exc()

    before, sys.argv = sys.argv, [sys.argv[0], *rewrite(arguments)]
    os.environ[FULL_ERROR] = "1"  # while Hydra composes: it hands errors to us in place of printing them
    try:
        hydra.main(version_base="1.3", config_path=config_location(), config_name=config_name)(judged)()
    except SystemExit as end:
        if end.code not in (0, None) and not outcome:
            return BAD_CONFIG  # Hydra has said why
    except (HydraException, OmegaConfBaseException) as error:
        if outcome:
            raise
        report(ConfigError(str(error).strip().partition("\n\n")[0]), CANNOT)
        return BAD_CONFIG
    finally:
        sys.argv = before
        _set_or_unset(FULL_ERROR, full)
    return outcome[-1] if outcome else OK  # no outcome: Hydra only showed something (--cfg, --help)


def _set_or_unset(name: str, value: str | None) -> None:
    """Gives a variable of this process back its value."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _judge(arguments: Sequence[str]) -> int:
    """OK when every argument is an option or can be read as KEY=VALUE.

    Raises:
        ConfigError: for all that cannot, in our words: Hydra names one, with its own spelling and no way out.
    """
    parser = OverridesParser.create()
    problems: list[Problem] = []
    after_flag = False
    for argument in arguments:
        if not after_flag:
            problems += _option(argument) if argument.startswith("-") else _assignment(argument, parser)
        after_flag = argument in _VALUED_FLAGS
    raise_if_any(problems)
    return OK


def _option(argument: str) -> Iterator[Problem]:
    """What is wrong with an argument that begins with a dash."""
    name = argument.partition("=")[0]
    if name in ("--multirun", "-m"):
        yield Problem(key=name, text="sweeps are not supported", fix="Start one run per value from a shell loop.")
    elif name not in _HYDRA_FLAGS and argument not in FLAGS:
        key = argument.lstrip("-")
        plain = f"Settings have no dashes: {key if '=' in key else f'{key}=VALUE'}."
        looks_like_key = "=" in key or "." in key or "_" in key
        fix = plain if looks_like_key else did_you_mean(name, _OFFERED_FLAGS) or "--help shows the options."
        yield Problem(key=argument, text="no such option", fix=fix)


def _assignment(argument: str, parser: OverridesParser) -> Iterator[Problem]:
    """What is wrong with an argument that should be KEY=VALUE (or ~KEY)."""
    match = _ASSIGNMENT.match(argument)
    if argument.startswith(("~", "hydra.")):
        return  # Hydra's own business
    if match is None:
        fix = "Write KEY=VALUE, without blanks around the sign; --help shows the options."
        yield Problem(key=argument, text="is neither KEY=VALUE nor an option", fix=fix)
        return
    key, value = match["key"], argument[match.end() :]
    if not all(key.split(".")):
        yield Problem(key=key, text="no such key: a part between two dots is empty", fix="Write section.key=VALUE.")
        return
    if key in config_groups():
        yield from _choice(key, value)
        return
    quoted = "TEXT" if {"'", '"'} & set(value) else value
    fix = f"""Write a list as '{key}=[a,b]', and a text with such signs in quotes of its own: '{key}="{quoted}"'."""
    try:
        several = parser.parse_override(f"++{key}={_in_quotes(value)}").is_sweep_override()
    except HydraException:
        pairs = all(value.count(left) == value.count(right) for left, right in ("[]", "{}", "()"))
        why = "it has a sign that needs quotes" if pairs else "a bracket has no partner"
        yield Problem(key=key, given=value, text=f"the value cannot be read: {why}", fix=fix)
        return
    if several:
        fix = f"""A list stands in brackets: '{key}=[{value}]'; a text with commas in quotes: '{key}="{quoted}"'."""
        yield Problem(key=key, given=value, text="several values without brackets", fix=fix)


def _choice(group: str, value: str) -> Iterator[Problem]:
    """What is wrong with the choice from a group of ``configs/``; a list takes several, the later win."""
    known = sorted(file.stem for file in (config_folder() / group).glob("*.yaml"))
    for name in value.strip("[]").split(","):
        if name.strip() not in known:
            yield Problem(
                key=group, given=value, text=f"must be one of {', '.join(known)}", fix=did_you_mean(name, known)
            )


def _in_quotes(value: str) -> str:
    """``value``, in quotes where it is a path in the home folder: Hydra knows no ``~`` in a bare word."""
    return f'"{value}"' if value.startswith("~/") and '"' not in value else value


def guarded(task: Callable[[], int]) -> int:
    """The exit code of ``task``; errors of the user's making are printed without a traceback."""
    try:
        return task()
    except (ConfigError, DataError) as error:
        report(error, CANNOT if isinstance(error, ConfigError) else "The data cannot be used")
        return BAD_CONFIG
    except MachineError as error:
        report(error, "This machine cannot run it")
        return BAD_MACHINE
    except (LostError, DeadlineError) as error:
        report(error, "The run lost a worker" if isinstance(error, LostError) else "The run waited too long")
        return LOST
    except HybridFlowError as error:  # a worker's has that rank's traceback in it; the driver's tells nothing more
        report(error, "The run failed")
        return FAILED


def report(error: Exception, headline: str) -> None:
    """Prints an error on one screen, on stderr."""
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"[bold red]{headline}[/]", highlight=False)
    if not isinstance(error, InvalidConfigError):
        console.print(escape(str(error)), highlight=False)
        return
    for number, problem in enumerate(error.problems[:MAX_SHOWN], 1):
        given = "" if problem.given is None else f"={problem.given}"
        console.print(f"{number:>3}. [bold]{escape(problem.key)}[/]{escape(given)}", highlight=False)
        console.print(f"     {escape(problem.text)}.", highlight=False)
        if problem.fix:
            console.print(f"     [green]{escape(problem.fix)}[/]", highlight=False)
    if len(error.problems) > MAX_SHOWN:
        console.print(f"     ... and {len(error.problems) - MAX_SHOWN} more", highlight=False)


def to_tree(config: DictConfig) -> dict[str, Any]:
    """Plain nested dicts with interpolations resolved.

    Raises:
        ConfigError: an interpolation points nowhere.
    """
    try:
        tree = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        key, said = getattr(error, "full_key", None) or "configuration", str(error).splitlines()[0].rstrip(".")
        missing = re.match(r"Interpolation key '(\w+)' not found", said)
        unset = re.search(r"Environment variable '(\w+)' not found", said)
        fix = "Write ${key.of.the.tree} or the value itself."
        if unset:
            said, fix = (
                f"the environment variable {unset[1]} is not set",
                f"Set it, or write ${{oc.env:{unset[1]},DEFAULT}}.",
            )
        elif missing and missing[1].isupper():
            fix = f"An environment variable is ${{oc.env:{missing[1]}}}."
        raise ConfigError(f"{key}: {said}. {fix}") from error
    if not isinstance(tree, dict):
        raise ConfigError("the composed configuration is no mapping")
    return {str(key): value for key, value in tree.items()}


def rewrite(arguments: Sequence[str]) -> list[str]:
    """Arguments as Hydra gets them: our flags as overrides, ``key=`` and ``+key=`` as ``++key=``, groups without plus.

    Raises nothing: what cannot be read is left for Hydra to refuse.
    """
    groups = config_groups()
    found = []
    after_flag = False
    for argument in arguments:
        match = _ASSIGNMENT.match(argument)
        if after_flag or match is None or argument.startswith("hydra."):
            found.append(FLAGS.get(argument, argument))
        elif match["key"] in groups:
            found.append(argument[len(match["plus"]) :])
        else:
            found.append(f"++{match['key']}={_in_quotes(argument[match.end() :])}")
        after_flag = argument in _VALUED_FLAGS
    return found


def config_groups() -> frozenset[str]:
    """Names of the groups in ``configs/``."""
    return frozenset(
        folder.name for folder in config_folder().iterdir() if folder.is_dir() and any(folder.glob("*.yaml"))
    )


def config_location() -> str:
    """Where Hydra looks for YAML: the installed package, or the folder beside the package in a checkout."""
    return "pkg://hybridflow.configs" if importlib.util.find_spec("hybridflow.configs") else str(config_folder())


def config_folder() -> Path:
    """The folder ``configs``.

    Raises:
        MachineError: the installation has none.
    """
    spec = importlib.util.find_spec("hybridflow.configs")
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    folder = Path(__file__).resolve().parents[2] / "configs"
    if not (folder / "ppo_trainer.yaml").is_file():
        raise MachineError(f"the YAML files of hybridflow are missing (looked for hybridflow.configs and {folder})")
    return folder
