"""What a step cost, from the observers of all processes: where the time of every role went, and its memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hybridflow.roles.profiles import Generated, StepCosts

_GB = 1e9


def cost_metrics(pools: Sequence[Sequence[StepCosts]], step_seconds: float) -> dict[str, float]:
    """Metrics of one step from its costs by pool and rank.

    For every role, means over its ranks: ``perf/compute_s`` and ``perf/communication_s`` add up to the time that it
    worked, ``perf/idle_s`` is the rest of the step (other roles' turn, the driver, the queue).
    """
    found: dict[str, float] = {}
    for ranks in pools:
        found |= generation_metrics([costs.generated for costs in ranks if costs.generated is not None])
        busy: defaultdict[str, float] = defaultdict(float)
        communicating: defaultdict[str, float] = defaultdict(float)
        for costs in ranks:
            found |= costs.metrics
            for call in costs.calls:
                busy[call.role] += call.seconds / len(ranks)
                communicating[call.role] += call.communication_seconds / len(ranks)
                phase = f"cost_{call.method}" if call.role == "cost_critic" else call.method
                name = f"perf/max_memory_gb/{phase}"
                found[name] = max(found.get(name, 0.0), call.peak_bytes / _GB)
        for role, seconds in busy.items():
            found[f"perf/compute_s/{role}"] = seconds - communicating[role]
            found[f"perf/communication_s/{role}"] = communicating[role]
            found[f"perf/idle_s/{role}"] = max(0.0, step_seconds - seconds)
    return found


def generation_metrics(ranks: Sequence[Generated]) -> dict[str, float]:
    """MFU, tokens of responses per second and device, and balance of a generator's ranks; empty without any."""
    if not ranks:
        return {}
    device_seconds = max(rank.seconds for rank in ranks) * len(ranks)
    return {
        "perf/tokens_per_second_per_device/rollout": sum(rank.tokens for rank in ranks) / device_seconds,
        "perf/mfu/rollout": sum(rank.flops / rank.peak_flops for rank in ranks) / device_seconds,
        "perf/imbalance/rollout": device_seconds / sum(rank.seconds for rank in ranks),
    }
