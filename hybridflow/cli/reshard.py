"""What a change from a training layout to a generation layout costs: who sends which bytes to whom, without weights.

python -m hybridflow.reshard --model qwen2.5-7b --train dp_shard=8 --rollout tp=2
python -m hybridflow.reshard --model FOLDER --train dp_shard=512 tp=2 --rollout tp=4 --ranks-per-node 8
python -m hybridflow.reshard check --model FOLDER --tp 2
python -m hybridflow.reshard check --model FOLDER --tp 2 --rules my_package.rules:RULES
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hybridflow.hybrid_engine.presets import PRESETS
from hybridflow.topology.parallel import AXES
from hybridflow.utils.errors import ConfigError, EngineError, MachineError
from hybridflow.utils.optional import load

PLAN = "hybridflow.cli.reshard_plan"
"""Imports torch, which a question for help should not wait for."""
CHECK = "Whether a model can be resharded: every parameter has a rule, cuts divide, a rehearsal gives the original."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 0 when all is well, 1 when a check failed, 2 when the question itself is wrong."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    checks = given[:1] == ["check"]
    chosen = _check_parser().parse_args(given[1:]) if checks else _table_parser().parse_args(given)
    try:
        return load(f"{PLAN}:{'check' if checks else 'table'}")(chosen)
    except (ConfigError, EngineError, MachineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _table_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hybridflow.reshard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help=f"model folder, config.json, or one of {', '.join(PRESETS)}")
    parser.add_argument("--train", required=True, nargs="+", metavar="AXIS=N", help=f"degrees of {', '.join(AXES)}")
    parser.add_argument(
        "--rollout", required=True, nargs="+", metavar="tp=N", help="the replicas follow from the ranks"
    )
    parser.add_argument("--order", choices=("auto", "permuted", "plain"), default="auto", help="order of FSDP shards")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="dtype of the generator")
    parser.add_argument("--expert-parallel", action="store_true", help="generation ranks hold whole experts")
    parser.add_argument(
        "--ranks-per-node", type=_positive, default=None, help="replicated slices come from inside a node"
    )
    parser.add_argument("--bucket-mb", type=_positive, default=64, help="MiB of a transfer bucket")
    parser.add_argument("--explain", type=int, default=None, metavar="RANK", help="print the whole plan of this rank")
    return parser


def _check_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hybridflow.reshard check", description=CHECK)
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--tp", type=_positive, default=2, help="tensor-parallel ranks of the generator")
    parser.add_argument("--rules", default=None, metavar="MODULE:NAME", help="your own list of ShardingRule")
    return parser


def _positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number of at least 1 is expected")
    return int(text)
