from __future__ import annotations

import subprocess
import sys

from hybridflow.utils.seeding import SEED_LIMIT, derive_seed


def test_a_seed_depends_on_run_and_key_alone_and_fits_everywhere():
    keys = [(seed, name, i) for seed in (0, 1) for name in ("gen", "shuffle") for i in range(50)]
    seeds = [derive_seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [derive_seed(*key) for key in keys]
    assert all(0 <= seed < SEED_LIMIT for seed in seeds)


def test_a_seed_is_the_same_in_another_process():
    code = "from hybridflow.utils.seeding import derive_seed; print(derive_seed(1, 'gen', 7))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(printed) == derive_seed(1, "gen", 7)


def test_a_number_and_its_text_are_different_keys():
    assert derive_seed(1, 2) != derive_seed(1, "2")
