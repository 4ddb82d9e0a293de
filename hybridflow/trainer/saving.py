"""One save at a time: roles write, the driver completes, and training goes on meanwhile where it may.

    begin -> roles copy and write -> (all written) -> roles finish -> state, digests, manifest, rename -> complete

With ``checkpoint.async_save`` all but the copy overlaps the steps that follow: the first arrow is polled after each
step, the last stage runs in a thread. The next save, and the end of the run, wait for the one before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from hybridflow.batch.futures import gather
from hybridflow.engines.train.random_state import random_state, read_random_state, set_random_state, write_random_state
from hybridflow.roles.protocols import Checkpointed
from hybridflow.trainer.checkpoint import Checkpoint, CheckpointStore
from hybridflow.trainer.remote import RemoteError
from hybridflow.utils.background import in_background
from hybridflow.utils.errors import DeadlineError, MachineError, WorkerError

logger = logging.getLogger(__name__)

DRIVER_RANDOM = "driver_rng.pt"


class Saver:
    """Saves of a run.

    Args:
        store: where they go.
        roles: who has state, by folder name.
        overlaps: whether training goes on while files are written.
        goes_on: what a save that the disk refuses leads to: a loud message and a count, or the end of the run.
        deadline_s: of the driver's own part of a save (the roles' parts have their calls' deadlines).
    """

    def __init__(
        self,
        store: CheckpointStore,
        roles: Mapping[str, Checkpointed],
        *,
        overlaps: bool,
        goes_on: bool,
        deadline_s: float = float("inf"),
    ) -> None:
        self.failed = 0
        """Saves that the disk refused."""
        self.saved_at: int | None = None
        """Step of the last save that was begun."""
        self._store = store
        self._roles = roles
        self._overlaps = overlaps
        self._goes_on = goes_on
        self._deadline_s = deadline_s
        self._open: _Open | None = None
        self._completing: Future[Checkpoint] | None = None

    def save(self, step: int, state: Mapping[str, Any], *, score: float | None) -> None:
        """Begins the save of ``step`` once the one before is complete; returns when training may go on.

        Raises:
            MachineError: the disk refuses, and ``goes_on`` is False.
        """
        self.settle()
        self.saved_at = step
        self._open = _Open(step, state, score)
        try:
            folder = self._store.begin(step)
            write_random_state(random_state(), folder / DRIVER_RANDOM)
            for name, role in self._roles.items():
                (folder / name).mkdir()
                gather(role.save_checkpoint(str(folder / name)))
        except DeadlineError:  # an OSError by its class, and no answer of the disk
            raise
        except (OSError, WorkerError) as error:
            self._refused(error)
        if not self._overlaps:
            self.settle()

    def load(self, found: Checkpoint) -> None:
        """Restores the driver's random streams and every role."""
        self.saved_at = found.step
        if (found.folder / DRIVER_RANDOM).exists():
            set_random_state(read_random_state(found.folder / DRIVER_RANDOM))
        for name, role in self._roles.items():
            gather(role.load_checkpoint(str(found.folder / name)))

    def poll(self) -> None:
        """Moves an open save on as far as it goes without waiting; reports its failure.

        Raises:
            MachineError: see ``save``.
        """
        if self._completing is not None:
            if self._completing.done():
                self.settle()
        elif self._open is not None and all(gather(role.checkpoint_written()) for role in self._roles.values()):
            self._finish_roles()

    def settle(self) -> None:
        """Waits until no save is open.

        Raises:
            MachineError: see ``save``.
        """
        if self._open is not None and self._completing is None:
            self._finish_roles()
        if self._completing is None:
            return
        completing, self._completing = self._completing, None
        opened, self._open = self._open, None
        try:
            done = self._wait_for(completing)
        except DeadlineError:
            raise
        except (OSError, MachineError) as error:
            self._open = opened
            self._refused(error)
        else:
            logger.info("checkpoint %s is complete", done.folder)

    def _wait_for(self, completing: Future[Checkpoint]) -> Checkpoint:
        """The checkpoint; consumes the background thread's result, unblocked by it or by the deadline."""
        try:
            return completing.result(None if self._deadline_s == float("inf") else self._deadline_s)
        except TimeoutError as error:
            if completing.done():  # the disk's own timeout
                raise
            raise DeadlineError(
                f"the checkpoint of step {self.saved_at} below {self._store.root} was not complete within "
                f"{self._deadline_s:g} s (trainer.timeouts.save_s): digests, manifest, rename or copy wait for the "
                f"disk. The checkpoints before it are untouched"
            ) from error

    def close(self) -> None:
        """Completes what is open, also when the run ends by an error, which no further one must hide."""
        self._goes_on = True
        try:
            self.settle()
        except (WorkerError, DeadlineError) as error:
            logger.error("the checkpoint of step %s is lost with its workers: %s", self.saved_at, error)

    def _finish_roles(self) -> None:
        opened = self._open
        assert opened is not None
        try:
            for role in self._roles.values():
                gather(role.finish_checkpoint())
        except WorkerError as error:
            self._refused(error)
            return
        complete = self._store.complete
        self._completing = in_background("checkpoint", complete, opened.step, opened.state, score=opened.score)

    def _refused(self, error: OSError | MachineError | WorkerError) -> None:
        """Counts or raises what the disk refused; any other failure of a worker is raised as it is."""
        if isinstance(error, WorkerError) and not isinstance(error.__cause__, (OSError, MachineError)):
            raise error
        assert self._open is not None
        step, self._open = self._open.step, None
        # A role that had begun must end, or it refuses the next save; its own failure is the same disk's.
        for role in self._roles.values():
            try:
                gather(role.finish_checkpoint())
            except WorkerError as follower:
                logger.info("checkpoint of step %d: %s", step, _reason(follower))
        self._store.abandon(step)
        self.failed += 1
        if isinstance(error, RemoteError):
            text = f"the checkpoint of step {step} is complete below {self._store.root}, but its copy is not"
            advice = "Mend what trainer.checkpoint_copy names"
        else:
            text = f"the checkpoint of step {step} could not be written below {self._store.root}"
            advice = "Free some space or give another trainer.default_local_dir"
        text += f": {_reason(error)}"
        if not self._goes_on:
            raise MachineError(
                f"{text}. The run stops here; the checkpoints before it are untouched. {advice}, and start again: it "
                "goes on from the newest. trainer.save_failure=warn goes on training without checkpoints"
            ) from error
        logger.error("%s. Training goes on (trainer.save_failure=warn); failed saves so far: %d", text, self.failed)


class _Open:
    """A save that is not complete."""

    def __init__(self, step: int, state: Mapping[str, Any], score: float | None) -> None:
        self.step = step
        self.state = state
        self.score = score


def _reason(error: OSError | MachineError | WorkerError) -> str:
    cause = error.__cause__ if isinstance(error, WorkerError) else error
    return f"{type(cause).__name__}: {cause}"
