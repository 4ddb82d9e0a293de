"""What the source of the user's own functions says before it runs: is the name there, can it be called as we call it?

Files are parsed, never imported. What cannot be told from the source (a star import, a decorator, a base class) passes.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridflow.batch.columns import TABLE
from hybridflow.config.constraints import is_dotted
from hybridflow.config.data import CustomClassConfig
from hybridflow.config.problems import did_you_mean
from hybridflow.config.root import PPOConfig
from hybridflow.launch.paths import similar
from hybridflow.launch.plan import Finding

REWARD_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Keywords with which a reward function is called."""
READER_ARGUMENTS = ("config", "held_out")
"""Keywords with which a reader of prompts is called, behind the source."""

ESTIMATOR_ARGUMENTS = ("token_rewards", "mask", "group_id", "config")
"""Keywords with which an advantage estimator is called, beside the columns of the step."""
LOSS_ARGUMENTS = ("log_probs", "old_log_probs", "advantages", "mask", "config")
"""Keywords with which a policy loss is called, beside the columns of the rows."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def check_user_code(config: PPOConfig) -> Iterator[Finding]:
    """Findings on the reward function, the reader of prompts, and what dotted paths name."""
    reward = config.reward.custom_reward_function
    keywords = (*REWARD_ARGUMENTS, *reward.reward_kwargs)
    yield from _in_file("reward.custom_reward_function", reward, 0, keywords)
    yield from _in_file("data.custom_cls", config.data.custom_cls, 1, READER_ARGUMENTS)
    actor = config.actor_rollout_ref.actor
    for key, target, named in (
        ("algorithm.adv_estimator", config.algorithm.adv_estimator, ESTIMATOR_ARGUMENTS),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", actor.policy_loss.loss_mode, LOSS_ARGUMENTS),
        ("actor_rollout_ref.actor.optim.optimizer", actor.optim.optimizer, None),
        ("critic.optim.optimizer", config.critic.optim.optimizer, None),
    ):
        if is_dotted(target):
            yield from _by_dotted_path(key, target, named)


def _in_file(key: str, own: CustomClassConfig, positional: int, keywords: Sequence[str]) -> Iterator[Finding]:
    if own.path is None:
        return
    file = Path(own.path).expanduser()
    if not file.is_file():
        text = f"{own.path} is no file" if file.exists() else f"{own.path} does not exist"
        yield Finding(level="error", what=f"{key}.path", text=text, fix=similar(own.path))
        return
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        line = f" line {error.lineno}" if error.lineno else ""
        text = f"{own.path}{line}: {error.msg}"
        yield Finding(level="error", what=f"{key}.path", text=text, fix="Correct the file.")
        return
    except (ValueError, OSError) as error:
        yield Finding(level="error", what=f"{key}.path", text=f"{own.path}: {error}", fix="Correct the file.")
        return
    names = _names(tree)
    known = [name for name in names if name != "*"]
    if own.name is None:
        fix = f"Set {key}.name to one of {', '.join(known) or 'nothing'}."
        yield Finding(level="error", what=f"{key}.name", text="is not given", fix=fix)
    elif own.name not in names and "*" not in names:
        fix = did_you_mean(own.name, known) or f"The file defines {', '.join(known) or 'nothing'}."
        yield Finding(level="error", what=f"{key}.name", text=f"{own.path} defines no {own.name}", fix=fix)
    elif (absent := _absent_import(tree, file)) is not None:
        text, fix = f"{own.path} imports {absent}, which cannot be found", f"Install it, or put it beside {own.path}."
        yield Finding(level="error", what=f"{key}.path", text=text, fix=fix)
    else:
        refusal = _refusal(names.get(own.name), positional, keywords)
        if refusal is None:
            yield Finding(level="ok", what=key, text=f"{own.name} in {own.path}")
        else:
            fix = f"Give it these arguments: {', '.join((*['source'] * positional, *keywords))}; **kwargs takes any."
            yield Finding(level="error", what=key, text=f"{own.name} in {own.path} {refusal}", fix=fix)


def _by_dotted_path(key: str, target: str, keywords: Sequence[str] | None) -> Iterator[Finding]:
    """Whether the module of ``package.module:attribute`` is there, a name in it that can be read, and takes the call.

    ``keywords``: with which it is called, beside columns by name; None: that is not known.
    """
    module, separator, attribute = target.partition(":")
    if not separator:
        module, _, attribute = target.rpartition(".")
    found = _source(module)
    if found is None:
        text, fix = f"{target}: no module {module} can be found", "Put its folder on PYTHONPATH."
        yield Finding(level="error", what=key, text=text, fix=fix)
    elif found.suffix == ".py" and found.name != "__init__.py":
        try:
            names = _names(ast.parse(found.read_bytes(), filename=str(found)))
        except SyntaxError as error:
            text = f"{target}: {found} line {error.lineno}: {error.msg}"
            yield Finding(level="error", what=key, text=text, fix="Correct the file.")
            return
        first = attribute.partition(".")[0]
        if first not in names and "*" not in names:
            fix = did_you_mean(first, list(names)) or f"The module defines {', '.join(names) or 'nothing'}."
            yield Finding(level="error", what=key, text=f"{target}: {found} defines no {first}", fix=fix)
        elif keywords is not None and first == attribute:
            refusal = _refusal(names.get(first), 0, keywords, columns=True)
            if refusal is not None:
                fix = f"Define it as {first}(*, {', '.join(keywords)}, **columns)."
                yield Finding(level="error", what=key, text=f"{target} {refusal}", fix=fix)


def _source(module: str) -> Path | None:
    """The file of a module that is not imported (a folder for a namespace package); None: there is none."""
    head, *rest = module.split(".")
    spec = importlib.util.find_spec(head)
    if spec is None:
        return None
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    found = Path(spec.origin) if spec.origin else places[0]
    for part in rest:
        files = [file for place in places for file in sorted(place.glob(f"{part}.*")) if file.suffix in (".py", ".so")]
        folders = [place / part for place in places if (place / part).is_dir()]
        if not files and not folders:
            return Path() if module in sys.modules else None  # os.path has no file of its name
        inside = [folder / "__init__.py" for folder in folders if (folder / "__init__.py").is_file()]
        found, places = (inside or files or folders)[0], folders
    return found


def _names(tree: ast.Module) -> dict[str, ast.AST]:
    """Names that a module binds at its top level and by what, also under ``if`` and ``try``; ``*``: others, too."""
    names: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, (ast.If, ast.Try, ast.With)):  # one of several: the compound stands for what is not known
            inside = [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
            names |= dict.fromkeys((name for child in inside for name in _bound(child)), node)
        else:
            names |= dict.fromkeys(_bound(node), node)
    return names


def _bound(node: ast.stmt) -> list[str]:
    """Names that one statement binds."""
    if isinstance(node, Definition):
        return [node.name if node.name != "__getattr__" else "*"]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    return []


def _absent_import(tree: ast.Module, file: Path) -> str | None:
    """The first package that a file imports at its top level and that is nowhere; its own folder counts."""
    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        for head in (name.partition(".")[0] for name in names):
            beside = (file.parent / f"{head}.py").is_file() or (file.parent / head).is_dir()
            if not beside and head not in sys.modules and importlib.util.find_spec(head) is None:
                return head
    return None


def _refusal(node: ast.AST | None, positional: int, keywords: Sequence[str], *, columns: bool = False) -> str | None:
    """Why a call would fail; None: it would not, or the source does not tell. ``columns``: all those come by name."""
    if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Constant, ast.List, ast.Dict, ast.Tuple)):
        return f"is {ast.unparse(node.value)[:40]}, which cannot be called"
    skip = 0
    if isinstance(node, ast.ClassDef):
        if node.bases or node.keywords or node.decorator_list:
            return None
        built = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        node, skip = (built[0] if built else None), 1
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.decorator_list:
        return None
    arguments = node.args
    ordered = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    optional = set(ordered[len(ordered) - len(arguments.defaults) :])
    optional |= {one.arg for one, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if given}
    ordered = ordered[skip:]
    filled, open_to = set(ordered[:positional]), {*ordered[positional:], *(one.arg for one in arguments.kwonlyargs)}
    unknown = [name for name in keywords if name not in open_to and arguments.kwarg is None]
    unfilled = [name for name in open_to if name not in optional and name not in keywords]
    if columns:
        unknown = [] if arguments.kwarg else ["**columns"]
        unfilled = [name for name in unfilled if name not in TABLE]
    if not unknown and not unfilled and (len(filled) == positional or arguments.vararg):
        return None
    call = ", ".join((*["source"] * positional, *(f"{name}=" for name in keywords), *["**columns"] * columns))
    return f"takes ({ast.unparse(arguments)}) and is called with ({call})"
