"""Names and variables of the rollout engines cost no heavy import."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

from hybridflow.config import choices
from hybridflow.engines.rollout.base import InFlight
from hybridflow.engines.rollout.environment import unset, variables
from hybridflow.engines.rollout.registry import ROLLOUT_ENGINES
from hybridflow.utils.optional import load


def test_names_and_variables_are_known_without_torch() -> None:
    code = (
        "import sys, hybridflow.engines.rollout.environment, hybridflow.engines.rollout.registry;"
        "sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_registry_holds_the_allowed_names() -> None:
    assert tuple(ROLLOUT_ENGINES) == choices.ROLLOUT_ENGINES
    assert load(ROLLOUT_ENGINES["hf"]).__name__ == "HFEngine"
    assert get_args(InFlight) == choices.IN_FLIGHT


def test_only_a_cpu_vllm_turns_the_compiler_off() -> None:
    # on a GPU the variable would also switch off torch.compile of the trainer in the same process
    assert "TORCHDYNAMO_DISABLE" in variables("vllm", "cpu")
    assert "TORCHDYNAMO_DISABLE" not in variables("vllm", "cuda") | variables("hf", "cpu")
    assert unset("vllm", "cpu") == ("VLLM_CPU_KVCACHE_SPACE",)
    assert unset("hf", "cpu") == ()
