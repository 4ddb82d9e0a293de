"""Who may use the devices now: a state machine between training and generation on the same ranks.

    TRAINING ---- to_generating(publish) ----> GENERATING
       ^      wake weights, publish, offload      |
       |      the trainer, wake the KV cache      |  publish: new weights between steps
       +------------- to_training ----------------+
              sleep the generator, onload the trainer

Memory order matters on a GPU: weights are woken and written while the KV cache is still released, and the trainer
leaves before the KV cache comes back. On CPU the actions do little, but the machine still refuses the moves that would
hang or corrupt there (generating while asleep never ends in vLLM; weights written into a sleeping engine are lost).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from hybridflow.utils.errors import StateError

Metrics = dict[str, float]
Publish = Callable[[], Mapping[str, float]]


class State(Enum):
    """What the devices of these ranks hold."""

    TRAINING = "training"
    """Trainer resident, generator asleep."""
    GENERATING = "generating"
    """Generator awake with weights of a known version."""
    MOVING = "moving"
    """Inside a transition."""
    FAILED = "failed"
    """A transition broke in a way that cannot be undone; nothing is allowed any more."""


def _nothing() -> None:
    """An action that this backend does not need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """What moving means on this rank; the engines' own methods, injected."""

    wake_weights: Callable[[], None] = _nothing
    wake_cache: Callable[[], None] = _nothing
    sleep: Callable[[], None] = _nothing
    """Releases KV cache and, by level, weights."""
    offload_trainer: Callable[[], None] = _nothing
    onload_trainer: Callable[[], None] = _nothing
    memory_bytes: Callable[[], Mapping[str, int]] = dict
    """Bytes held now by what (weights, kv_cache, parameters, optimizer, ...)."""


class Residency:
    """The state machine of one rank. All ranks make the same moves in the same order.

    Args:
        actions: what moving means here.
        weights_survive_sleep: whether the generator keeps its weights while asleep (sleep level 1). If not, a publish
            is part of every way to generation.
    """

    def __init__(self, actions: Actions, *, weights_survive_sleep: bool = True) -> None:
        self._actions = actions
        self._survive = weights_survive_sleep
        self._state = State.TRAINING
        self._has_weights = False

    @property
    def state(self) -> State:
        """Where the machine stands."""
        return self._state

    def require(self, needed: State, doing: str) -> None:
        """Does nothing in state ``needed``.

        Raises:
            StateError: in any other state; names both and what was tried.
        """
        if self._state is not needed:
            raise StateError(
                f"{doing} needs the state {needed.value!r}, but these ranks are in the state {self._state.value!r}"
            )

    def to_generating(self, publish: Publish | None = None) -> Metrics:
        """Moves TRAINING -> GENERATING; metrics of the publish and the memory of every step.

        A publish that fails puts the generator back to sleep and leaves TRAINING; the next attempt starts from there.

        Args:
            publish: brings the new weights while the trainer is still resident; None: the old ones are kept.

        Raises:
            StateError: from another state, or without publish when the generator holds no weights.
        """
        self.require(State.TRAINING, "moving to generation")
        if publish is None and not self._has_weights:
            raise StateError(
                "moving to generation without a publish needs a generator in the state 'with weights', but it is in "
                "the state 'without weights' (nothing published yet, the last publish failed, or sleep dropped them)"
            )
        self._state = State.MOVING
        metrics = self._timed("wake_weights", self._actions.wake_weights)
        if publish is not None:
            try:
                metrics |= self._published(publish)
            except BaseException:
                self._timed("sleep", self._actions.sleep)
                self._state = State.TRAINING
                raise
        metrics |= self._timed("offload_trainer", self._actions.offload_trainer)
        metrics |= self._timed("wake_cache", self._actions.wake_cache)
        self._state = State.GENERATING
        return metrics

    def to_training(self) -> Metrics:
        """Moves GENERATING -> TRAINING; the memory of every step.

        Raises:
            StateError: from another state.
        """
        self.require(State.GENERATING, "moving to training")
        self._state = State.MOVING
        metrics = self._timed("sleep", self._actions.sleep)
        self._has_weights = self._has_weights and self._survive
        metrics |= self._timed("onload_trainer", self._actions.onload_trainer)
        self._state = State.TRAINING
        return metrics

    def publish_while_generating(self, publish: Publish) -> Metrics:
        """Brings new weights between two generation steps; metrics of the publish.

        The trainer must be resident for it and is moved in and out where it is offloaded.

        Raises:
            StateError: when the generator is asleep.
        """
        self.require(State.GENERATING, "publishing between generation steps")
        self._state = State.MOVING
        metrics = self._timed("onload_trainer", self._actions.onload_trainer)
        try:
            metrics |= self._published(publish)
        finally:
            if self._state is State.MOVING:
                metrics |= self._timed("offload_trainer", self._actions.offload_trainer)
                self._state = State.GENERATING
        return metrics

    def _published(self, publish: Publish) -> Metrics:
        """The publish's metrics; the generator counts as without weights until it has returned."""
        self._has_weights = False
        metrics = dict(publish())
        self._has_weights = True
        return metrics

    def _timed(self, name: str, action: Callable[[], None]) -> Metrics:
        """Runs one step of a transition; its seconds and the bytes held afterwards. A failure ends the machine."""
        started = time.perf_counter()
        try:
            action()
        except BaseException:
            self._state = State.FAILED
            raise
        metrics = {f"residency/{name}_seconds": time.perf_counter() - started}
        held = self._actions.memory_bytes()
        return metrics | {f"residency/{name}/{what}_bytes": float(count) for what, count in held.items()}
