"""``config_keys``: what happens to a key, and the generated reference pages."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import yaml

from hybridflow.cli.combinations import combinations_page
from hybridflow.cli.front import config_folder
from hybridflow.config.key_rules import RULES
from hybridflow.config.keys import answer, flatten
from hybridflow.config.load import nearest_key
from hybridflow.config.problems import show
from hybridflow.config.root import PPOConfig
from hybridflow.config.tree import leaf_names, leaves
from hybridflow.config.unread import is_unread
from hybridflow.config.verl_keys import VERL_KEYS
from hybridflow.trainer.metric_table import SECTIONS

MADE_BY = "<!-- Made by `python -m hybridflow.config_keys --write docs/reference`; do not edit. -->\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Answers for the keys given, or writes the pages; 1 when a key is unknown."""
    parser = argparse.ArgumentParser(prog="python -m hybridflow.config_keys", description=main.__doc__)
    parser.add_argument("keys", nargs="*", help="dotted keys; none: print the table of verl's keys")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the pages there")
    arguments = parser.parse_args(argv)
    if arguments.write is not None:
        for name, page in pages().items():
            file = arguments.write / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(page, encoding="utf-8")
        return 0
    if not arguments.keys:
        print(keys_page(), end="")
        return 0
    unknown = 0
    for key in arguments.keys:
        found = answer(key)
        unknown += found is None
        print(f"{key}: {_cell(str(found)) + _type_of(key) if found is not None else _unknown(key)}")
    return 1 if unknown else 0


def pages() -> dict[str, str]:
    """Every generated page by its place under docs/reference."""
    return {
        "config_keys.md": keys_page(),
        "configuration.md": configuration_page(),
        "metrics.md": metrics_page(),
        "../algorithms/combinations.md": combinations_page(),
    }


def keys_page() -> str:
    """docs/reference/config_keys.md: one answer per key of verl, then the rules behind them."""
    lines = [
        MADE_BY,
        "# verl's keys\n",
        "The keys that public verl scripts set, most frequent first, and what `python -m hybridflow.main_ppo` does",
        "with them. A key neither here nor in [configuration](configuration.md) is an error that names the nearest",
        "one; none is silently ignored. `null` always means *not set*. Ask for any key:",
        "`python -m hybridflow.config_keys KEY`.\n",
        "| key | answer | |",
        "|---|---|---|",
    ]
    for key in VERL_KEYS:
        found = answer(key)
        assert found is not None, key
        lines.append(f"| `{key}` | {'honoured' if found.honoured else 'refused'} | {_cell(found.text)} |")
    lines += [
        "\n## Rules for keys that are not ours\n",
        "`**` stands for everything below a key. The first rule that fits decides.\n",
        "| keys | answer | |",
        "|---|---|---|",
    ]
    for rule in RULES:
        found = answer(rule.pattern.replace("**", "x").replace("*", "x"))
        assert found is not None, rule.pattern
        lines.append(f"| `{rule.pattern}` | {'honoured' if found.honoured else 'refused'} | {_cell(found.text)} |")
    return "\n".join(lines) + "\n"


def configuration_page() -> str:
    """docs/reference/configuration.md: every key, its type, default and meaning."""
    lines = [
        MADE_BY,
        "# Configuration\n",
        "Every key of `python -m hybridflow.main_ppo`, from the dataclasses in `hybridflow/config`. Set them as",
        "`key=value`; `python -m hybridflow.main_ppo --cfg job` shows what a command line composes to. Over these",
        f"defaults `configs/ppo_trainer.yaml` sets, for the default job, {_set_in_yaml()}.\n",
    ]
    section = ""
    for leaf in leaves(PPOConfig):
        above = leaf.key.rpartition(".")[0]
        if above != section:
            section = above
            lines += [f"\n## {section}\n", "| key | type | default | |", "|---|---|---|---|"]
        kind = leaf.type + (f"; {leaf.allowed}" if leaf.allowed else "")
        unread = " *(no effect yet)*" if is_unread(leaf.key) else ""
        lines.append(f"| `{leaf.key}` | {_cell(kind)} | `{leaf.default}` | {_cell(leaf.doc)}{unread} |")
    return "\n".join(lines) + "\n"


def _set_in_yaml() -> str:
    """What main_ppo's YAML sets, as ``key=value``."""
    tree = yaml.safe_load((config_folder() / "ppo_trainer.yaml").read_text())
    own = {section: tree[section] for section in tree if section not in ("defaults", "hydra")}
    return ", ".join(f"`{'.'.join(path)}={show(value)}`" for path, value in flatten(own))


def metrics_page() -> str:
    """docs/reference/metrics.md: every metric of a run, its unit, meaning and the file that computes it."""
    lines = [
        MADE_BY,
        "# Metrics\n",
        "What a run writes to `metrics.jsonl` and to every tracker, from `hybridflow/trainer/metric_table.py`. `*`",
        "stands for anything. Token metrics count policy tokens of valid rows that no bound rejected, each alike; row",
        "metrics count rows alike; all are the same for any number of ranks (times, bytes and memory aside). Metrics",
        "of a loss of your own appear under the names that it gives.",
    ]
    for title, section in SECTIONS.items():
        lines += [f"\n## {title}\n", "| name | unit | meaning | computed in |", "|---|---|---|---|"]
        lines += [f"| `{m.name}` | {m.unit} | {_cell(m.meaning)} | `{m.source}` |" for m in section]
    return "\n".join(lines) + "\n"


def _type_of(key: str) -> str:
    """Type, limits and default of a key of ours, in brackets."""
    leaf = next((leaf for leaf in leaves(PPOConfig) if leaf.key == key), None)
    if leaf is None:
        return ""
    return f" ({leaf.type + (f'; {leaf.allowed}' if leaf.allowed else '')}; default {leaf.default})"


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


def _unknown(key: str) -> str:
    close = nearest_key(key, key.rpartition(".")[2], [], list(leaf_names(PPOConfig)))
    return "unknown" + (f"; did you mean {close}?" if close else "")
