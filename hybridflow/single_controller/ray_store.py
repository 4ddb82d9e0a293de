"""What a rank on Ray keeps for others: an object of Ray's store, which the rank owns and which dies with it."""

from __future__ import annotations

from collections.abc import Callable

import ray
from ray.exceptions import GetTimeoutError, RayError

from hybridflow.batch.refs import Bytes, Kept
from hybridflow.utils.errors import DeadlineError, WorkerError

READ_TIMEOUT_S = 300.0
"""How long one object may take to arrive: at most 1 MiB, or one row."""


class RayKept(Kept):
    """An object of Ray's store; ``token`` is its ObjectRef, and Ray counts who holds it.

    Args:
        before_read: called with this reference before each read; may refuse by raising.
    """

    def __init__(
        self, token: ray.ObjectRef[Bytes], size: int, owner: str, before_read: Callable[[Kept], None] | None = None
    ) -> None:
        super().__init__(token, size, owner)
        self._before_read = before_read

    def read(self) -> Bytes:
        """See ``Kept.read``.

        Raises:
            DeadlineError: the object did not arrive.
        """
        if self._before_read is not None:
            self._before_read(self)
        try:
            return ray.get(self.token, timeout=READ_TIMEOUT_S)
        except GetTimeoutError as error:
            raise DeadlineError(f"rows that {self.owner} keeps did not arrive within {READ_TIMEOUT_S:g} s") from error
        except RayError as error:
            raise WorkerError(f"rows are lost: they were kept by {self.owner}, which is gone ({error})") from error


class RayStore:
    """Objects that this process keeps.

    Args:
        owner: who this process is, for errors.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def put(self, data: Bytes) -> Kept:
        """See ``Store.put``."""
        return RayKept(ray.put(data), data.size, self._owner)

    def open(self, token: ray.ObjectRef[Bytes], size: int, owner: str) -> Kept:
        """See ``Store.open``."""
        return RayKept(token, size, owner)
