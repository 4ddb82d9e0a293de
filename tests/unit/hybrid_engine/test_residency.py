"""The state machine of residency: order of actions, illegal moves, what a failure leaves behind."""

from __future__ import annotations

import pytest

from hybridflow.hybrid_engine.residency import Actions, Residency, State
from hybridflow.utils.errors import StateError


class Devices:
    """Two tenants of one device, counted in bytes."""

    def __init__(self):
        self.held = {"trainer": 40, "weights": 0, "kv_cache": 0}
        self.log: list[str] = []
        self.peak = 0

    def _set(self, name, **held):
        self.log.append(name)
        self.held |= held
        self.peak = max(self.peak, sum(self.held.values()))

    def actions(self, **changed):
        return Actions(
            **{
                "wake_weights": lambda: self._set("wake_weights", weights=20),
                "wake_cache": lambda: self._set("wake_cache", kv_cache=60),
                "sleep": lambda: self._set("sleep", weights=0, kv_cache=0),
                "offload_trainer": lambda: self._set("offload_trainer", trainer=0),
                "onload_trainer": lambda: self._set("onload_trainer", trainer=40),
                "memory_bytes": lambda: dict(self.held),
                **changed,
            }
        )


def publishing(devices, metrics=None):
    def publish():
        devices.log.append("publish")
        return metrics or {"publish/bytes": 5.0}

    return publish


def failing():
    raise RuntimeError("a peer died")


def test_a_cycle_never_holds_trainer_and_cache_together():
    devices = Devices()
    residency = Residency(devices.actions())
    there = residency.to_generating(publishing(devices))
    back = residency.to_training()
    assert devices.log == [
        "wake_weights",
        "publish",
        "offload_trainer",
        "wake_cache",
        "sleep",
        "onload_trainer",
    ]
    assert devices.peak == 80  # weights and cache; trainer, weights and cache together would be 120
    assert there["publish/bytes"] == 5.0
    assert there["residency/wake_cache/kv_cache_bytes"] == 60.0
    assert there["residency/offload_trainer/trainer_bytes"] == 0.0
    assert back["residency/onload_trainer/trainer_bytes"] == 40.0
    assert residency.state is State.TRAINING


def test_illegal_moves_name_both_states_and_change_nothing():
    devices = Devices()
    residency = Residency(devices.actions())
    with pytest.raises(StateError, match=r"'generating'.*'training'"):
        residency.to_training()
    with pytest.raises(StateError, match=r"generate_sequences.*'generating'.*'training'"):
        residency.require(State.GENERATING, "generate_sequences")
    with pytest.raises(StateError, match=r"'generating'.*'training'"):
        residency.publish_while_generating(publishing(devices))
    residency.to_generating(publishing(devices))
    before = list(devices.log)
    with pytest.raises(StateError, match=r"update_actor.*'training'.*'generating'"):
        residency.require(State.TRAINING, "update_actor")
    with pytest.raises(StateError, match=r"'training'.*'generating'"):
        residency.to_generating(publishing(devices))
    assert devices.log == before


def test_generation_without_any_weights_is_refused():
    residency = Residency(Devices().actions())
    with pytest.raises(StateError, match="without weights"):
        residency.to_generating()


@pytest.mark.parametrize("survive", [True, False])
def test_old_weights_may_be_reused_only_if_sleep_keeps_them(survive):
    devices = Devices()
    residency = Residency(devices.actions(), weights_survive_sleep=survive)
    residency.to_generating(publishing(devices))
    residency.to_training()
    if survive:
        residency.to_generating()
        assert residency.state is State.GENERATING
    else:
        with pytest.raises(StateError, match="without weights"):
            residency.to_generating()


def test_a_failed_publish_leaves_training_and_the_next_one_succeeds():
    devices = Devices()
    residency = Residency(devices.actions())
    residency.to_generating(publishing(devices))
    residency.to_training()
    with pytest.raises(RuntimeError, match="a peer died"):
        residency.to_generating(failing)
    assert residency.state is State.TRAINING
    assert devices.held == {"trainer": 40, "weights": 0, "kv_cache": 0}
    with pytest.raises(StateError, match="without weights"):
        residency.to_generating()
    residency.to_generating(publishing(devices))
    assert residency.state is State.GENERATING


def test_publishing_between_steps_brings_the_trainer_back_only_for_that():
    devices = Devices()
    residency = Residency(devices.actions())
    residency.to_generating(publishing(devices))
    devices.log.clear()
    residency.publish_while_generating(publishing(devices))
    assert devices.log == ["onload_trainer", "publish", "offload_trainer"]
    assert residency.state is State.GENERATING
    with pytest.raises(RuntimeError, match="a peer died"):
        residency.publish_while_generating(failing)
    assert residency.state is State.GENERATING  # the engine itself refuses steps: it was told that it holds no version


def test_a_move_that_breaks_ends_the_machine():
    devices = Devices()
    residency = Residency(devices.actions(wake_cache=failing))
    with pytest.raises(RuntimeError, match="a peer died"):
        residency.to_generating(publishing(devices))
    with pytest.raises(StateError, match=r"'training'.*'failed'"):
        residency.to_generating(publishing(devices))
