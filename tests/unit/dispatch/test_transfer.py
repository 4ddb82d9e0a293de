"""Distribute and collect, without processes: what each rank gets, and that the caller gets its rows back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybridflow.batch.batch import Batch, empty
from hybridflow.dispatch.transfer import (
    PROTOCOLS,
    Arguments,
    Transfer,
    add_protocol,
    check_writes,
    join,
    protocol,
    row_count,
    select_reads,
    split_rows,
)
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ColumnError, ConfigError, EngineError

SIZES = (0, 1, 2, 3, 5, 8)
LAYOUTS = (
    ParallelDims(dp_shard=4),
    ParallelDims(dp_replicate=2, dp_shard=2),
    ParallelDims(dp_shard=2, tp=2),
    ParallelDims(dp_shard=2, sp=2),
    ParallelDims(pp=2, dp_shard=2),
    ParallelDims(pp=2, dp_shard=2, tp=2),
    ParallelDims(pp=2, dp_shard=1, sp=2, tp=2),
    ParallelDims(tp=4),
)
SPLITTING = ("DP_COMPUTE", "MESH_3D", "MESH_3D_MICRO_DP")


def rows_of(count: int, **columns: Any) -> Batch:
    generator = torch.Generator().manual_seed(count)
    return Batch(
        {
            "id": torch.arange(count),
            "response_mask": torch.ones(count, 3, dtype=torch.bool),
            "loss_mask": torch.ones(count, 3),
            "reward": torch.rand(count, generator=generator),
            "text": [f"row {i}" for i in range(count)],
            **columns,
        }
    )


def run(
    name: str, layout: ParallelDims, work: Callable[[int, Arguments], Any], *args: Any, **kwargs: Any
) -> tuple[Any, list[Arguments | None]]:
    """The collected result, and what each rank got; ranks that do not answer return None, as on the wire."""
    transfer = PROTOCOLS[name]
    arguments = Arguments(args, kwargs)
    shares = list(transfer.distribute(layout, arguments))
    answering = range(layout.world) if transfer.answering is None else transfer.answering(layout)
    results = [
        work(rank, share) if share is not None and rank in answering else None for rank, share in enumerate(shares)
    ]
    return transfer.collect(layout, results, row_count(arguments)), shares


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("name", SPLITTING)
def test_row_i_of_the_result_belongs_to_row_i_of_the_argument(name: str, rows: int, layout: ParallelDims) -> None:
    batch = rows_of(rows)

    def work(rank: int, share: Arguments) -> Batch:
        block = share.args[0]
        return Batch({"twice": block["id"] * 2, "text": block.objects("text")})

    result, _ = run(name, layout, work, batch)
    assert result["twice"].tolist() == [2 * i for i in range(rows)]
    assert result.objects("text") == batch.objects("text")


@pytest.mark.parametrize("rows", SIZES)
def test_four_ranks_get_equal_blocks_and_pads_enter_no_sum(rows: int) -> None:
    batch = rows_of(rows)
    _, shares = run("DP_COMPUTE", ParallelDims(dp_shard=4), lambda _, share: share.args[0], batch)
    blocks = [share.args[0] for share in shares if share is not None]
    padding = sum(len(block) for block in blocks) - rows
    assert len({len(block) for block in blocks}) == 1
    assert padding == -rows % 4
    valid = torch.cat([block["valid"] for block in blocks])
    assert valid.tolist() == [True] * rows + [False] * padding
    masks = torch.cat([block["response_mask"] for block in blocks])
    assert masks.sum() == 3 * rows, "a pad row has no token of the policy"
    assert torch.cat([block["loss_mask"] for block in blocks]).sum() == 3 * rows
    reward = torch.cat([block["reward"] for block in blocks])
    assert torch.equal((reward * valid).sum(), batch["reward"].sum())


def test_pads_are_cyclic_copies_of_real_rows_even_when_there_are_more_pads_than_rows() -> None:
    blocks = split_rows(rows_of(3), 8)
    assert [block["id"].item() for block in blocks] == [0, 1, 2, 0, 1, 2, 0, 1]


def test_invalid_rows_of_the_caller_stay_invalid() -> None:
    batch = rows_of(3, valid=torch.tensor([True, False, True]))
    assert torch.cat([block["valid"] for block in split_rows(batch, 2)]).tolist() == [True, False, True, False]
    assert batch["response_mask"].all(), "the caller's batch is not changed"


def test_positional_and_keyword_batches_are_cut_alike_and_other_arguments_go_to_all() -> None:
    batch, other = rows_of(5), Batch({"weight": torch.arange(5) * 10})

    def work(rank: int, share: Arguments) -> Batch:
        assert share.args[1] == 0.5 and share.kwargs["flag"] is True
        return Batch({"both": share.args[0]["id"] + share.kwargs["more"]["weight"]})

    result, _ = run("MESH_3D", ParallelDims(dp_shard=2, tp=2), work, batch, 0.5, more=other, flag=True)
    assert result["both"].tolist() == [0, 11, 22, 33, 44]


def test_batches_of_different_length_are_refused_by_name() -> None:
    with pytest.raises(ColumnError, match="argument 0 has 5, argument 'more' has 4"):
        run("MESH_3D", ParallelDims(), lambda *_: None, rows_of(5), more=rows_of(4))


def test_mesh_gives_every_rank_of_a_replica_the_same_block_and_asks_the_last_stage() -> None:
    layout = ParallelDims(pp=2, dp_shard=2, sp=2, tp=2)
    asked = []

    def work(rank: int, share: Arguments) -> Batch:
        asked.append(rank)
        return share.args[0]

    _, shares = run("MESH_3D", layout, work, rows_of(4))
    for rank, share in enumerate(shares):
        assert share is not None
        coordinate = layout.dp_coordinate(rank)
        assert share.args[0]["id"].tolist() == [2 * coordinate, 2 * coordinate + 1]
    assert [layout.coordinates(rank) for rank in asked] == [
        {"pp": 1, "dp_replicate": 0, "dp_shard": dp, "sp": 0, "tp": 0} for dp in range(2)
    ]
    assert len({id(share) for share in shares}) == 2, "one object per block, so that it is packed once"


def test_micro_dp_splits_a_replica_over_its_stages_and_keeps_tp_ranks_together() -> None:
    layout = ParallelDims(pp=2, dp_shard=2, tp=2)
    _, shares = run("MESH_3D_MICRO_DP", layout, lambda _, share: share.args[0], rows_of(8))
    ids = {rank: share.args[0]["id"].tolist() for rank, share in enumerate(shares) if share is not None}
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        start = 4 * layout.dp_coordinate(rank) + 2 * at["pp"]
        assert ids[rank] == [start, start + 1], "rows of a dp replica stay inside it"


def test_metrics_come_from_the_first_answering_rank_beside_a_joined_batch() -> None:
    result, metrics = run(
        "MESH_3D", ParallelDims(pp=2, dp_shard=2), lambda rank, share: (share.args[0], {"rank": rank}), rows_of(3)
    )[0]
    assert metrics == {"rank": 2}
    assert result["id"].tolist() == [0, 1, 2]


def test_blocks_of_different_width_are_joined_with_padding_on_the_right() -> None:
    def work(rank: int, share: Arguments) -> Batch:
        return Batch({"response_ids": torch.full((1, rank + 1), rank + 1)})

    result, _ = run("DP_COMPUTE", ParallelDims(dp_shard=2), work, rows_of(2))
    assert result["response_ids"].tolist() == [[1, 0], [2, 2]]


def test_a_call_without_batches_reaches_every_rank_as_it_is() -> None:
    result, shares = run("MESH_3D", ParallelDims(dp_shard=2, tp=2), lambda rank, _: {"rank": rank}, step=3)
    assert result == {"rank": 0}
    assert all(share is not None and share.kwargs == {"step": 3} for share in shares)


def test_protocols_without_rows_reach_whom_they_name() -> None:
    layout = ParallelDims(pp=2, dp_shard=2)
    assert run("ONE_TO_ALL", layout, lambda rank, share: (rank, share.args), "a")[0] == [(r, ("a",)) for r in range(4)]
    result, shares = run("RANK_ZERO", layout, lambda rank, _: rank)
    assert result == 0
    assert [share is not None for share in shares] == [True, False, False, False]
    assert run("PP_ONLY", layout, lambda rank, _: rank)[0] == [0, 2]
    result, _ = run(
        "ALL_TO_ALL", layout, lambda rank, share: (*share.args, share.kwargs["b"]), [1, 2, 3, 4], b=list("wxyz")
    )
    assert result == [(1, "w"), (2, "x"), (3, "y"), (4, "z")]


def test_all_to_all_wants_one_entry_per_rank() -> None:
    with pytest.raises(EngineError, match="2 entries"):
        run("ALL_TO_ALL", ParallelDims(dp_shard=2), lambda *_: None, [1, 2, 3])


def test_a_rank_that_loses_rows_is_an_error_not_a_shift() -> None:
    with pytest.raises(ColumnError, match=r"got 2 rows and must return as many, in order; got \[2, 1\]"):
        join([rows_of(2), rows_of(1)], 4)


def test_values_that_cannot_be_joined_are_refused_instead_of_dropped() -> None:
    with pytest.raises(EngineError, match="list"):
        join([[1], [2]], None)
    with pytest.raises(EngineError, match="some ranks"):
        join([rows_of(2), None], 4)


def test_reads_selects_the_columns_that_travel_and_valid_always_does() -> None:
    batch = rows_of(2, valid=torch.ones(2, dtype=torch.bool))
    chosen = select_reads(Arguments((batch,), {"n": 1}), ("id", "text", "values?"))
    assert set(chosen.args[0].names) == {"id", "text", "valid"}
    assert chosen.kwargs == {"n": 1}
    with pytest.raises(ColumnError, match="no column 'values'"):
        select_reads(Arguments((batch,)), ("id", "values"))


def test_writes_is_checked_in_every_returned_batch() -> None:
    check_writes((rows_of(1), {"loss": 1.0}), ("id", "old_entropy?"))
    with pytest.raises(ColumnError, match="'values' promised by writes"):
        check_writes(rows_of(1), ("id", "values"))


def test_a_batch_without_columns_keeps_its_rows() -> None:
    blocks = split_rows(empty(3), 2)
    assert [len(block) for block in blocks] == [2, 2]


def test_users_add_their_own_pair_by_name_or_directly() -> None:
    def distribute(layout: ParallelDims, arguments: Arguments) -> list[Arguments | None]:
        return [arguments if rank % 2 else None for rank in range(layout.world)]

    def collect(layout: ParallelDims, results: Any, rows: int | None) -> Any:
        return sum(results[rank] for rank in range(layout.world) if rank % 2)

    odd = Transfer(distribute, collect)
    try:
        add_protocol("ODD_RANKS", odd)
        assert protocol("ODD_RANKS") is odd is protocol(odd)
        assert run("ODD_RANKS", ParallelDims(dp_shard=4), lambda rank, _: rank)[0] == 4
        with pytest.raises(ConfigError, match="exists already"):
            add_protocol("ODD_RANKS", Transfer(distribute, lambda *_: None))
    finally:
        PROTOCOLS.pop("ODD_RANKS", None)
    with pytest.raises(ConfigError, match="no transfer protocol 'MESH'"):
        protocol("MESH")
