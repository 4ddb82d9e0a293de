"""What a rank on Ray keeps for others: an object of Ray's store, which the rank owns and which dies with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from hybridflow.batch.refs import Bytes, Kept
from hybridflow.utils.errors import DeadlineError, LostError

READ_TIMEOUT_S = 300.0
"""How long the rows of one call may take to arrive."""


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
        return self.read_with(())[0]

    def read_with(self, others: Sequence[Kept]) -> list[Bytes]:
        """See ``Kept.read_with``: objects of other nodes travel at the same time."""
        alike: list[Kept] = [self, *others]
        for kept in alike:
            assert isinstance(kept, RayKept)
            if kept._before_read is not None:
                kept._before_read(kept)
        try:
            return ray.get([kept.token for kept in alike], timeout=READ_TIMEOUT_S)
        except GetTimeoutError as error:
            owners = " and ".join(dict.fromkeys(kept.owner for kept in alike))
            raise DeadlineError(f"rows kept by {owners} did not arrive within {READ_TIMEOUT_S:g} s") from error
        except ObjectLostError as error:
            owner = next(kept.owner for kept in alike if kept.token.hex() == error.object_ref_hex)
            raise LostError(f"rows are lost: they were kept by {owner}, which is gone ({error})") from error


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
