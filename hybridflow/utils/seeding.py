"""Seeds that depend on what they are for, never on the order in which they were drawn.

Two streams with different keys are independent, and a resumed or re-sharded run derives the same ones again.
"""

from __future__ import annotations

import hashlib

SEED_LIMIT = 1 << 31
"""Seeds are below this: what torch, numpy and vLLM all accept."""


def derive_seed(run_seed: int, *key: int | str) -> int:
    """A seed in [0, 2**31) that depends only on the run's seed and ``key``, on every machine and Python alike."""
    digest = hashlib.blake2b(repr((run_seed, *key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % SEED_LIMIT
