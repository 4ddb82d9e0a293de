"""A guard for tensor-parallel ranks that must do the same thing at the same step.

Ranks of a tensor-parallel engine schedule for themselves and meet only inside the forward pass. Another order of
requests on one rank gives no error there, only wrong numbers, and another number of rows hangs in a shared-memory
reduction that no timeout covers. So every rank hashes what it was told and what it sampled, and the group compares
hashes *before* each forward, over a gloo group of its own. The same message carries a number of the first rank, so that
all of them know it after one and the same step.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.utils.errors import EngineError

_DIGEST_BYTES = 16
_NOTE_BYTES = 8
_MESSAGE_BYTES = 231
_HEAD_BYTES = 1 + _DIGEST_BYTES + _NOTE_BYTES
_RUNNING, _FAILED = 0, 1


class Lockstep:
    """One rank's view of its tensor-parallel group of consecutive ranks."""

    def __init__(self, size: int, timeout_s: float) -> None:
        """Collective over the whole world: every rank calls it, at the same point.

        Args:
            size: ranks of a group; it divides the world.
            timeout_s: longest wait for the slowest rank of a comparison.
        """
        world, rank = dist.get_world_size(), dist.get_rank()
        if world % size:
            raise EngineError(f"a world of {world} ranks has no tensor-parallel groups of {size}")
        for first in range(0, world, size):
            ranks = list(range(first, first + size))
            group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
            if rank in ranks:
                self.ranks, self._group = ranks, group
        self._timeout_s = timeout_s
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._last_word: tuple[dist.Work, list[Tensor]] | None = None
        self._broken = ""
        self.note = -1
        """A number for the others; what counts is the first rank's."""
        self.heard = -1
        """The first rank's note at the last comparison."""

    def record(self, *facts: object) -> None:
        """Adds to what the group has to agree on; ``repr`` of equal facts must be equal on every rank."""
        self._hash.update(repr(facts).encode())

    def agree(self) -> None:
        """Waits for every rank of the group, which calls it too, and compares all that was recorded since the start.

        Raises:
            EngineError: when a rank recorded something else, has failed, or did not come within the timeout.
        """
        if self._broken:
            raise EngineError(f"tensor-parallel ranks {self.ranks} are out of step since: {self._broken}")
        try:
            self._compare()
        except EngineError as error:
            self._broken = str(error)
            raise

    def _compare(self) -> None:
        answers = self._new_answers()
        try:
            dist.all_gather(answers, self._answer(_RUNNING, ""), group=self._group)
        except RuntimeError as error:
            raise EngineError(
                f"tensor-parallel ranks {self.ranks}: no common step within {self._timeout_s:.0f} s; a rank is gone, "
                f"or got other commands than rank {dist.get_rank()} ({error})"
            ) from error
        spoken = {rank: bytes(answer.tolist()) for rank, answer in zip(self.ranks, answers, strict=True)}
        failed = {rank: answer for rank, answer in spoken.items() if answer[0] == _FAILED}
        if failed:
            told = "; ".join(f"rank {rank}: {_message(answer)}" for rank, answer in failed.items())
            raise EngineError(f"a tensor-parallel peer failed in its step: {told}")
        self.heard = int.from_bytes(spoken[self.ranks[0]][1 + _DIGEST_BYTES : _HEAD_BYTES], "little", signed=True)
        camps: dict[bytes, list[int]] = {}
        for rank, answer in spoken.items():
            camps.setdefault(answer[1 : 1 + _DIGEST_BYTES], []).append(rank)
        if len(camps) > 1:
            raise EngineError(
                f"tensor-parallel ranks disagree: {' | '.join(map(str, camps.values()))} were given other commands (or "
                "another order of them) or sampled other tokens; every rank must submit, cancel and step alike"
            )

    def fail(self, error: BaseException) -> None:
        """Leaves ``error`` as this rank's word at the next comparison, without waiting for it."""
        self._broken = f"rank {dist.get_rank()}: {error!r}"
        answers = self._new_answers()
        work = dist.all_gather(answers, self._answer(_FAILED, repr(error)), group=self._group, async_op=True)
        assert work is not None, "every rank that steps belongs to the group"
        self._last_word = (work, answers)

    def _answer(self, status: int, message: str) -> Tensor:
        text = message.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
        note = self.note.to_bytes(_NOTE_BYTES, "little", signed=True)
        return torch.tensor(list(bytes([status]) + self._hash.digest() + note + text), dtype=torch.uint8)

    def _new_answers(self) -> list[Tensor]:
        return [torch.empty(_HEAD_BYTES + _MESSAGE_BYTES, dtype=torch.uint8) for _ in self.ranks]


def _message(answer: bytes) -> str:
    return answer[_HEAD_BYTES:].rstrip(b"\0").decode(errors="replace")
