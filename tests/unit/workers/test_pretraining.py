from __future__ import annotations

import torch

from hybridflow.algorithms.aggregation import counts_of
from hybridflow.algorithms.contract import Outputs
from hybridflow.algorithms.pretraining import WEIGHT, PretrainingMix
from hybridflow.batch.batch import Batch
from hybridflow.config.data import BUILTIN_TASK
from hybridflow.data.pretraining import text_blocks
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.workers.pretraining import Pretraining

BLOCKS = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11], [12, 13, 14, 15]]


def policy_rows(count: int = 2, width: int = 3) -> Batch:
    return Batch(
        {
            "prompt_ids": torch.ones(count, 4, dtype=torch.long),
            "prompt_length": torch.full((count,), 4),
            "response_ids": torch.ones(count, width, dtype=torch.long),
            "response_length": torch.full((count,), width),
            "response_mask": torch.ones(count, width, dtype=torch.bool),
            "loss_mask": torch.ones(count, width, dtype=torch.bool),
            "advantages": torch.ones(count, width),
            "row_index": torch.arange(count),
        }
    )


def joined(coordinates: int, size: int = 3, number: int = 0) -> list[Batch]:
    return [
        Pretraining(BLOCKS, size=size, seed=5, coordinate=at, coordinates=coordinates).join(
            policy_rows(), step=1, number=number
        )
        for at in range(coordinates)
    ]


def text_of(batch: Batch) -> list[list[int]]:
    rows = []
    for i in range(len(batch)):
        if bool((batch[WEIGHT][i] > 0).any()):
            length = int(batch["response_length"][i])
            rows.append([int(batch["prompt_ids"][i, 0]), *batch["response_ids"][i, :length].tolist()])
    return rows


def test_text_stands_behind_the_rows_and_is_in_no_mask():
    (batch,) = joined(1)
    assert len(batch) == 5 and not bool(batch["loss_mask"][2:].any()) and not bool(batch[WEIGHT][:2].any())
    assert counts_of(batch["loss_mask"]).tokens == counts_of(policy_rows()["loss_mask"]).tokens == 6
    assert all(block in BLOCKS for block in text_of(batch)) and len(text_of(batch)) == 3


def test_weights_of_a_mini_batch_sum_to_one_over_any_number_of_ranks():
    whole = text_of(joined(1)[0])
    for coordinates in (2, 3, 4):
        parts = joined(coordinates)
        assert abs(sum(float(part[WEIGHT].sum()) for part in parts) - 1) < 1e-6
        assert sorted(block for part in parts for block in text_of(part)) == sorted(whole)


def test_draws_depend_on_step_and_mini_batch_alone_and_repeat_nothing_while_there_is_enough():
    assert text_of(joined(1, number=1)[0]) == text_of(joined(1, number=1)[0])
    draws = [text_of(joined(1, size=2, number=number)[0]) for number in range(8)]
    assert len({str(draw) for draw in draws}) > 1
    assert all(len({str(block) for block in text_of(joined(1, size=4, number=n)[0])}) == 4 for n in range(4))
    assert len(text_of(joined(1, size=9)[0])) == 9  # more than there are: some come twice


class NoPolicyLoss:
    """No term of the policy."""

    needs = frozenset({"log_probs"})

    def __call__(self, outputs, rows, counts):
        return torch.zeros((), dtype=torch.float64), {}


def test_the_loss_is_the_mean_over_text_tokens_however_the_mini_batch_is_cut():
    generator = torch.Generator().manual_seed(0)
    (batch,) = joined(1)
    log_probs = -torch.rand(batch["response_ids"].shape, generator=generator, dtype=torch.float64)
    log_probs[:2] = float("nan")  # rows of the policy are never read here
    loss, counts = PretrainingMix(NoPolicyLoss(), 0.5), counts_of(batch["loss_mask"])
    picked = [float(log_probs[i, t]) for i in range(5) for t in range(log_probs.shape[1]) if batch[WEIGHT][i, t] > 0]
    expected = -sum(picked) / len(picked)
    whole, metrics = loss(Outputs(log_probs=log_probs), batch, counts)
    # Weights are float32: a sum of a few of them is right to 1e-6.
    assert abs(float(whole) - 0.5 * expected) < 1e-6
    assert abs(float(metrics["actor/ptx_loss"].value) - expected) < 1e-6
    cut = [loss(Outputs(log_probs=log_probs[part]), batch.rows(part), counts)[0] for part in ([0, 3], [1, 2, 4])]
    assert abs(float(sum(cut)) - float(whole)) < 1e-9


def test_documents_end_with_one_end_token_each_and_cut_blocks_get_none(tmp_path):
    """E13."""
    tokenizer = load_tokenizer(BUILTIN_TASK)
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "1+1=2"}\n{"text": "2"}\n')
    eos = tokenizer.eos_ids[0]
    (whole,) = text_blocks([str(file)], tokenizer, length=100)
    assert [i for i, token in enumerate(whole) if token == eos] == [5, 7]
    cut = text_blocks([str(file)], tokenizer, length=3)
    assert [token for block in cut for token in block] == whole
    assert [len(block) for block in cut] == [3, 3, 2]
