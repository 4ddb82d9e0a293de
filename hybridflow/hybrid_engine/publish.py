"""The way of a new weight version from trainer to generator: one call, all ranks, all or nothing.

    agree on version and layouts -> (first time) gather boxes, check, plan -> take the old version from the generator
    -> move -> checksums -> give it the new one -> are its packed copies of it?

Checks come before the first byte is written: a parameter that is missing, extra or mis-shaped anywhere raises on every
rank and the generator keeps its version. Before bytes move, every generator is told that it holds ``NO_VERSION`` (a
step raises StateError), after they have arrived everywhere that it holds the new one: however a publish ends in
between, a signal or a dead peer included, no token is sampled from a mixture. A failure on any rank is learnt by all,
who write everything again from the trainer's shards, a bounded number of times; the publish after a failed one starts
from scratch too, and so needs nothing of what that left behind (docs/design/0015-publish-is-atomic.md).
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engines.rollout.base import NO_VERSION, EngineParameters
from hybridflow.engines.rollout.inflight import DTYPES
from hybridflow.engines.train.base import Shard
from hybridflow.hybrid_engine.boxes import Box
from hybridflow.hybrid_engine.match import Block, match
from hybridflow.hybrid_engine.plan import RankPlan, Slice, ideal_bytes, plan_rank
from hybridflow.hybrid_engine.transport import Transport
from hybridflow.hybrid_engine.verify import MASK, checksum, checksums, differences
from hybridflow.utils.errors import EngineError

logger = logging.getLogger(__name__)

Metrics = dict[str, float]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Ready:
    """What is kept between publishes while layouts stay the same on every rank."""

    digests: tuple[str, ...]
    slices: tuple[Slice, ...]
    plan: RankPlan
    transport: Transport


class _TryError(EngineError):
    """A try that failed while all ranks could still talk: it may be repeated."""


class Publisher:
    """Moves the trainer's weights into the generator's storage. One per rank; every method is collective.

    A rank may have only one side (no shards: it only generates; no parts: it only trains), so the same class serves
    colocated and separate devices of one process group.

    Args:
        engine_shards: this rank's training blocks, read anew at every publish.
        parameters: this rank's generation storage, looked up anew at every publish: what the engine computes with now.
        written: told ``NO_VERSION`` before the first byte is written, and the version once the storage holds it
            (``RolloutEngine.weights_written``).
        group: ranks that take part; None: the default group when torch.distributed is up, else this process alone.
        rollout_dtype: dtype that the generator should store, torch's or by its configured name (float32 parts are
            allowed beside it); None: any.
        bucket_bytes: size of a transfer bucket; at most two exist at a time.
        tied: other names of parameters: alias -> name; either side may use either.
        verify: when checksums of both sides are compared: ``first``, ``always`` or ``never`` (measurements only).
            ``always`` also compares the generator, before it is written, with what the last publish left there.
        ranks_per_node: ranks of one machine, consecutive; replicated slices come from inside it.
        attempts: tries of one publish, the first included.
        wire: how bytes travel (``wires.KINDS``); None: what fits where the ranks sit.
        stale_copies: asked with the checksums, after ``written``: lines on blocks whose copies, with which the
            generator computes, are not of its storage (``RolloutEngine.stale_copies``).
    """

    def __init__(
        self,
        engine_shards: Callable[[], Sequence[Shard]],
        parameters: Callable[[], EngineParameters],
        written: Callable[[int], None],
        *,
        group: dist.ProcessGroup | None = None,
        rollout_dtype: torch.dtype | str | None = None,
        bucket_bytes: int = 64 << 20,
        tied: Mapping[str, str] | None = None,
        verify: str = "first",
        ranks_per_node: int | None = None,
        attempts: int = 2,
        wire: str | None = None,
        stale_copies: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        if verify not in ("first", "always", "never"):
            raise EngineError(f"verify={verify!r} is unknown: use first, always or never")
        self._engine_shards = engine_shards
        self._parameters = parameters
        self._written = written
        self._group = group if group is not None or not dist.is_initialized() else dist.group.WORLD
        self._rank = self._group.rank() if self._group is not None else 0
        self._world = self._group.size() if self._group is not None else 1
        if self._world == 1:
            self._group = None
        self._rollout_dtype = _torch_dtype(rollout_dtype)
        self._bucket_bytes = bucket_bytes
        self._tied = dict(tied or {})
        self._verify = verify
        self._ranks_per_node = ranks_per_node
        self._attempts = attempts
        self._wire = wire
        self._stale_copies = stale_copies
        self._ready: _Ready | None = None
        self._verified = False
        self._left: dict[tuple[str, Box], int] = {}
        self.version = NO_VERSION
        """Version that the generator holds for sure."""

    @property
    def plan(self) -> RankPlan | None:
        """This rank's plan; None before the first publish."""
        return self._ready.plan if self._ready else None

    @torch.no_grad()
    def publish(self, version: int) -> Metrics:
        """On return every generator holds ``version`` and was told so. Collective.

        Returns:
            Of this rank: ``publish/bytes`` received, ``publish/sent_bytes``, ``publish/local_bytes`` copied in place,
            ``publish/bound_bytes`` (least that this rank can receive, given its shards), ``publish/ratio_to_bound``,
            ``publish/ideal_bytes`` (least over all training layouts), ``publish/peak_extra_bytes`` (buckets),
            ``publish/rounds``, ``publish/messages``, ``publish/retries`` (tries beyond the first; the other numbers are
            the last try's), ``publish/seconds`` (of all tries) and its parts ``publish/plan_seconds``,
            ``publish/move_seconds``, ``publish/verify_seconds``; of moving, what this thread did (``Moved.seconds``):
            ``publish/pack_seconds``, ``publish/copy_seconds``, ``publish/wait_seconds``, ``publish/write_seconds``.

        Raises:
            EngineError: with every missing, extra or mis-shaped parameter (nothing was written); or with the rank and
                the reason of the last try's failure (the generator then holds no version until the next publish); or
                because the ranks cannot talk any more (no version either; the group must be made anew).
        """
        started = time.perf_counter()
        side = self._agree(version)
        ready = self._prepare(side)
        planned = time.perf_counter() - started
        drifted = self._drifted(ready, side)
        self.version = NO_VERSION
        self.together("taking the old version from the generator", lambda: self._written(NO_VERSION))
        if drifted:
            raise EngineError(
                "the generator's weights changed since the last publish, and not by one; it holds no version until the "
                "next publish\n" + "\n".join(drifted)
            )
        metrics, retries = self._write(ready, side, version)
        return metrics | {
            "publish/bound_bytes": float(ready.plan.bound_bytes),
            "publish/ideal_bytes": float(ideal_bytes(ready.slices, self._rank)),
            "publish/retries": float(retries),
            "publish/plan_seconds": planned,
            "publish/seconds": time.perf_counter() - started,
        }

    def _write(self, ready: _Ready, side: _Side, version: int) -> tuple[Metrics, int]:
        """Metrics of the try that succeeded, and how many failed before it."""
        for failed in range(self._attempts):
            try:
                return self._try(ready, side, version), failed
            except _TryError as error:
                if failed + 1 == self._attempts:
                    raise
                logger.warning("try %d of %d: %s; everything is written again", failed + 1, self._attempts, error)
        raise AssertionError("attempts is at least 1")

    def _try(self, ready: _Ready, side: _Side, version: int) -> Metrics:
        """Writes everything once and gives the generator its version."""
        started = time.perf_counter()
        sources = {self._source_name(shard.name): shard.local for shard in side.shards}
        targets = _targets(ready.slices, side.parts, self._source_name)
        moved = self.together("moving weights", lambda: ready.transport.run(sources, targets))
        arrived = time.perf_counter()
        verify = self._verify == "always" or (self._verify == "first" and not self._verified)
        if verify:
            self._compare(ready, sources, targets)
        verified = time.perf_counter()
        self.together("telling the generator its version", lambda: self._written(version))
        told = time.perf_counter()
        if verify:
            self._compare_copies()
            self._verified = True
        verify_seconds = verified - arrived + time.perf_counter() - told
        self.version = version
        bound = ready.plan.bound_bytes
        return {
            "publish/bytes": float(moved.received_bytes),
            "publish/sent_bytes": float(moved.sent_bytes),
            "publish/local_bytes": float(moved.local_bytes),
            "publish/ratio_to_bound": moved.received_bytes / bound if bound else 1.0,
            "publish/peak_extra_bytes": float(moved.bucket_bytes),
            "publish/rounds": float(moved.rounds),
            "publish/messages": float(moved.messages),
            "publish/move_seconds": arrived - started,
            "publish/verify_seconds": verify_seconds,
            **{f"publish/{kind}_seconds": seconds for kind, seconds in moved.seconds.items()},
        }

    def _agree(self, version: int) -> _Side:
        """Both sides of this rank; raises on all ranks when one cannot take part or means another version."""
        side, failure, cause = _Side((), EngineParameters(()), (), ()), "", None
        try:
            side = _side(self._engine_shards(), self._parameters())
        except Exception as error:  # noqa: BLE001 - raised below on all ranks: a rank that left would keep the others waiting
            failure, cause = f"{type(error).__name__}: {error}", error
        said = self.gather((version, side.digest(), failure))
        failed = [f"rank {rank}: {reason}" for rank, (_, _, reason) in enumerate(said) if reason]
        if failed:
            raise EngineError("publish cannot start; nothing was written\n" + "\n".join(failed)) from cause
        versions = {rank: other for rank, (other, _, _) in enumerate(said)}
        if len(set(versions.values())) > 1:
            raise EngineError(f"publish was called with different versions by rank: {versions}; nothing was written")
        return replace(side, digests=tuple(digest for _, digest, _ in said))

    def _prepare(self, side: _Side) -> _Ready:
        """The checked plan for these layouts; the kept one while nothing changed on any rank."""
        if self._ready is not None and self._ready.digests == side.digests:
            return self._ready
        everyone = self.gather((side.owned, side.held))
        slices = match(
            [owned for owned, _ in everyone], [held for _, held in everyone], tied=self._tied, dtype=self._rollout_dtype
        )
        plan = plan_rank(slices, self._rank, ranks_per_node=self._ranks_per_node)
        tensors = [part.view for part in side.parts.parts] or [shard.local for shard in side.shards]
        device = tensors[0].device if tensors else torch.device("cpu")
        transport = Transport(
            plan, slices, group=self._group, bucket_bytes=self._bucket_bytes, device=device, wire=self._wire
        )
        self._ready = _Ready(side.digests, tuple(slices), plan, transport)
        return self._ready

    def _drifted(self, ready: _Ready, side: _Side) -> list[str]:
        """One line for each block, of any rank, that is not what the last publish left. Collective where asked for."""
        if self._verify != "always":
            return []
        left, self._left = self._left, {}
        targets = _targets(ready.slices, side.parts, self._source_name)
        held = _held_checksums(ready.slices, targets, self._rank) if left else {}
        lines = [
            f"{name} {box} on generator rank {self._rank}: checksum {held[name, box] & MASK:016x}, "
            f"after the last publish {checksum & MASK:016x}"
            for (name, box), checksum in left.items()
            if held.get((name, box), checksum) != checksum
        ]
        return [line for of_rank in self.gather(lines) for line in of_rank]

    def _compare(self, ready: _Ready, sources: Mapping[str, Tensor], targets: Sequence[Tensor | None]) -> None:
        """Raises on all ranks when a generator's block differs from the trainer's. Collective."""
        sums = self.together("computing checksums", lambda: checksums(ready.slices, sources, targets, rank=self._rank))
        differing = differences(ready.slices, sums, rank=self._rank, group=self._group, device=ready.transport.device)

        def judge() -> None:
            if differing:
                raise EngineError("the generator does not hold what the trainer owns:\n" + "\n".join(differing))

        self.together("comparing checksums", judge)
        if self._verify == "always":
            self._left = {
                (ready.slices[index].name, cast(Box, ready.slices[index].needed[self._rank])): found
                for index, (_, found) in sums.held.items()
            }

    def _compare_copies(self) -> None:
        """Raises on all ranks when a generator computes with another copy than that of its storage. Collective."""

        def judge() -> None:
            if stale := self._stale_copies():
                lines = (f"{line} on generator rank {self._rank}" for line in stale)
                raise EngineError("the generator does not compute with the weights that it holds:\n" + "\n".join(lines))

        self.together("comparing packed copies", judge)

    def together(self, doing: str, action: Callable[[], T]) -> T:
        """The result of ``action``, once every rank has succeeded in it. Collective.

        Raises:
            EngineError: on every rank, when one failed. Its generator may by then hold the new version, for which
                reason it is taken away again.
        """
        result, failure, cause = None, "", None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 - raised below on all ranks
            failure, cause = f"{type(error).__name__}: {error}", error
        try:
            said = self.gather(failure)
        except RuntimeError as error:
            self._written(NO_VERSION)
            raise EngineError(
                f"publish broke off while {doing}: the ranks cannot talk any more, because one died or did not come "
                f"within the timeout of the process group, which must be made anew; the generator of rank {self._rank} "
                f"holds no version until a publish over a new one\n{failure or error}"
            ) from (cause or error)
        failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(said) if reason]
        if not failed:
            return cast(T, result)
        try:
            self._written(NO_VERSION)
        except Exception as error:  # noqa: BLE001 - told below, beside the failure that came first
            failed.append(f"rank {self._rank}: the generator did not give up its version: {error}")
        raise _TryError(
            f"publish failed while {doing}; the generators hold no version until the next publish\n" + "\n".join(failed)
        ) from cause

    def gather(self, own: T) -> list[T]:
        """``own`` of every rank. Collective."""
        if self._group is None:
            return [own]
        found: list[T] = [own] * self._world
        try:
            dist.all_gather_object(found, own, group=self._group)
        except ValueError as error:
            # To log a failure torch (2.13) looks the group up among those of its world, where a joint group is not.
            failure: BaseException | None = error
            while failure is not None and not isinstance(failure, RuntimeError):
                failure = failure.__context__
            raise failure or error from None
        return found

    def _source_name(self, name: str) -> str:
        """The one name of a tied parameter."""
        return self._tied.get(name, name)


@dataclass(frozen=True, slots=True)
class _Side:
    """This rank's tensors, and what it tells the others about them."""

    shards: Sequence[Shard]
    parts: EngineParameters
    owned: tuple[Block, ...]
    held: tuple[Block, ...]
    digests: tuple[str, ...] = ()
    """Digest of every rank's blocks."""

    def digest(self) -> str:
        """A hash of this rank's layout."""
        return hashlib.sha256(repr((self.owned, self.held)).encode()).hexdigest()


def _torch_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The torch dtype of a configured name."""
    return getattr(torch, DTYPES[dtype]) if isinstance(dtype, str) else dtype


def _side(shards: Sequence[Shard], parts: EngineParameters) -> _Side:
    """This rank's two sides."""
    return _Side(
        shards,
        parts,
        tuple(_block(shard.name, shard.box, shard.shape, shard.local) for shard in shards),
        tuple(_block(part.hf_name, part.hf_box, part.hf_shape, part.view) for part in parts.parts),
    )


def _block(name: str, box: Box, shape: Sequence[int], stored: Tensor) -> Block:
    """What the others need to know of one tensor."""
    plain_box = tuple((int(low), int(high)) for low, high in box)
    dtype = str(stored.dtype).removeprefix("torch.")
    return Block(name, plain_box, tuple(int(n) for n in shape), tuple(stored.shape), dtype, stored.element_size())


def _held_checksums(slices: Sequence[Slice], targets: Sequence[Tensor | None], rank: int) -> dict[tuple[str, Box], int]:
    """Checksum of every block that this rank's generator stores, as ``verify.checksums`` has it."""
    return {
        (piece.name, box): checksum(target, box, salt=index)
        for index, (piece, target) in enumerate(zip(slices, targets, strict=True))
        if target is not None and (box := piece.needed[rank]) is not None
    }


def _targets(slices: Sequence[Slice], parts: EngineParameters, canonical: Callable[[str], str]) -> list[Tensor | None]:
    """This rank's storage by slice index."""
    taken: Counter[str] = Counter()
    found: dict[tuple[str, int], Tensor] = {}
    for part in parts.parts:
        name = canonical(part.hf_name)
        found[name, taken[name]] = part.view
        taken[name] += 1
    return [found.get((piece.name, piece.slot)) for piece in slices]
