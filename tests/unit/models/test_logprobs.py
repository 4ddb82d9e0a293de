"""Log-probs and entropy: hand-computed, by definition, and the same for every block size."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from hybridflow.models.logprobs import SMALL_VOCABULARY, VocabularyShard, sum_of_squares, token_log_probs
from tests.ranks import run_ranks

VOCABULARIES = [11, SMALL_VOCABULARY + 1]
"""One of each of the two ways to log p."""


def naive(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float):
    log_p = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return log_p[torch.arange(len(targets)), targets], -(log_p.exp() * log_p).sum(-1)


def inputs(n: int = 7, width: int = 6, vocabulary: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, width, generator=g).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=g).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (n,), generator=g)


def test_hand_computed_log_probs_at_temperature_one_half() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(3, 3)
    found, _ = token_log_probs(logits, torch.eye(3), torch.arange(3), temperature=0.5)
    assert found.tolist() == pytest.approx([-0.142932, -2.142932, -4.142932], abs=1e-6)


def test_hand_computed_entropy() -> None:
    _, entropy = token_log_probs(torch.tensor([[2.0, 1.0, 0.0]]), torch.eye(3), torch.tensor([0]), entropy=True)
    assert entropy is not None
    assert float(entropy) == pytest.approx(0.832396, abs=1e-6)


@pytest.mark.parametrize("keep_bytes", [0, 1 << 20])
@pytest.mark.parametrize("block_rows", [1, 2, 1000])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_values_and_gradients_equal_the_definition(
    keep_bytes: int, block_rows: int, entropy: bool, vocabulary: int
) -> None:
    hidden, weight, targets = inputs(vocabulary=vocabulary)
    mix = torch.randn(2, len(targets), generator=torch.Generator().manual_seed(1))
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    want_log_probs, want_entropy = naive(*exact, targets, 0.7)
    want = (want_log_probs * mix[0]).sum() + (want_entropy * mix[1]).sum() * entropy
    want_grads = torch.autograd.grad(want, exact)
    log_probs, entropies = token_log_probs(
        hidden,
        weight,
        targets,
        temperature=0.7,
        entropy=entropy,
        keep_bytes=keep_bytes,
        block_bytes=4 * weight.shape[0] * block_rows,
    )
    total = (log_probs * mix[0]).sum()
    torch.testing.assert_close(log_probs, want_log_probs.float(), atol=2e-6, rtol=1e-6)
    if entropy:
        assert entropies is not None
        torch.testing.assert_close(entropies, want_entropy.float(), atol=2e-6, rtol=1e-6)
        total = total + (entropies * mix[1]).sum()
    else:
        assert entropies is None
    for got, expected in zip(torch.autograd.grad(total, (hidden, weight)), want_grads, strict=True):
        # Of the gradient's sums over columns, a thousand of them cancel: 2^-24 of the terms' sizes is left.
        torch.testing.assert_close(got, expected.float(), atol=1e-5 if vocabulary < 100 else 4e-5, rtol=1e-5)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("vocabulary", [1, 11, SMALL_VOCABULARY, SMALL_VOCABULARY + 1])
def test_a_row_has_the_same_bits_in_any_micro_batch(vocabulary: int, entropy: bool) -> None:
    """A head of ones and zeros: its products are exact in any order, so the logits are the same bits in any cut."""
    g = torch.Generator().manual_seed(5)
    logits = 4 * torch.randn(9, vocabulary, generator=g)
    targets = torch.randint(0, vocabulary, (9,), generator=g)

    def found(rows: slice, keep_bytes: int) -> list[torch.Tensor]:
        hidden = logits[rows].clone().requires_grad_()
        log_probs, entropies = token_log_probs(
            hidden, torch.eye(vocabulary), targets[rows], temperature=0.7, entropy=entropy, keep_bytes=keep_bytes
        )
        total = log_probs.sum() if entropies is None else (log_probs + 0.3 * entropies).sum()
        (slope,) = torch.autograd.grad(total, hidden)
        return [log_probs.detach(), slope, *([] if entropies is None else [entropies.detach()])]

    whole = found(slice(0, 9), 1 << 30)
    for size in (1, 4):
        for keep_bytes in (0, 1 << 30):
            parts = [found(slice(start, start + size), keep_bytes) for start in range(0, 9, size)]
            for want, pieces in zip(whole, zip(*parts, strict=True), strict=True):
                assert torch.equal(want, torch.cat(pieces))


@pytest.mark.parametrize("vocabulary", [64, 256, SMALL_VOCABULARY, SMALL_VOCABULARY + 1])
def test_log_probs_are_right_to_the_last_digits_of_float32(vocabulary: int) -> None:
    """Logits of the order 10, exact in float32: what is left is rounding of log p itself, some 2^-24 of 30."""
    g = torch.Generator().manual_seed(6)
    logits = 4 * torch.randn(64, vocabulary, generator=g)
    targets = torch.randint(0, vocabulary, (64,), generator=g)
    got, entropy = token_log_probs(logits, torch.eye(vocabulary), targets, entropy=True)
    want, want_entropy = naive(logits.double(), torch.eye(vocabulary, dtype=torch.float64), targets, 1.0)
    assert float((got.double() - want).abs().max()) < 4e-6
    assert entropy is not None
    assert float((entropy.double() - want_entropy).abs().max()) < 4e-6


def test_a_bias_counts_in_values_and_gradient() -> None:
    hidden, weight, targets = inputs()
    bias = torch.linspace(-1, 1, weight.shape[0]).requires_grad_()
    want = torch.log_softmax((hidden @ weight.T + bias) / 2, -1)[torch.arange(len(targets)), targets]
    got, _ = token_log_probs(hidden, weight, targets, bias=bias, temperature=2.0)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(got.sum(), bias)[0], torch.autograd.grad(want.sum(), bias)[0], atol=1e-6, rtol=1e-5
    )


def test_no_token_at_all_is_fine() -> None:
    hidden, weight, _ = inputs()
    log_probs, _ = token_log_probs(hidden[:0], weight, torch.zeros(0, dtype=torch.int64))
    log_probs.sum().backward()
    assert log_probs.shape == (0,)
    assert weight.grad is not None
    assert float(weight.grad.abs().max()) == 0.0


def test_low_precision_inputs_give_float32_numbers() -> None:
    hidden, weight, targets = inputs()
    low = (hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_())
    log_probs, _ = token_log_probs(low[0], low[1], targets)
    log_probs.sum().backward()
    assert log_probs.dtype == torch.float32
    assert low[1].grad is not None
    assert low[1].grad.dtype == torch.bfloat16
    want, _ = naive(hidden, weight, targets, 1.0)
    torch.testing.assert_close(log_probs, want, atol=0.1, rtol=0.02)


def test_log_probs_without_gradient_allocate_only_one_block() -> None:
    hidden, weight, targets = inputs(n=64, vocabulary=2 * SMALL_VOCABULARY)
    block_bytes = 4 * 2 * SMALL_VOCABULARY * 4
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        token_log_probs(hidden, weight, targets, block_bytes=block_bytes)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest <= block_bytes * 2


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_an_impossible_temperature_is_refused(temperature: float) -> None:
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match="above 0"):
        token_log_probs(hidden, weight, targets, temperature=temperature)


@pytest.mark.parametrize("keep_bytes", [0, 1 << 20])
@pytest.mark.parametrize("limit", [7, SMALL_VOCABULARY + 1])
def test_ids_beyond_the_limit_take_no_part(keep_bytes: int, limit: int) -> None:
    hidden, weight, targets = inputs(vocabulary=limit + 4)
    targets = targets.clamp(max=limit - 1)
    want_log_probs, want_entropy = naive(hidden, weight[:limit], targets, 0.7)
    want = torch.autograd.grad((want_log_probs + 0.3 * want_entropy).sum(), (hidden, weight))
    log_probs, entropy = token_log_probs(
        hidden,
        weight,
        targets,
        temperature=0.7,
        entropy=True,
        vocab_limit=limit,
        keep_bytes=keep_bytes,
        block_bytes=11 * limit,
    )
    torch.testing.assert_close(log_probs, want_log_probs, atol=1e-6, rtol=1e-6)
    assert entropy is not None
    torch.testing.assert_close(entropy, want_entropy, atol=1e-6, rtol=1e-6)
    got = torch.autograd.grad((log_probs + 0.3 * entropy).sum(), (hidden, weight))
    for mine, expected in zip(got, want, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)
    assert float(got[1][limit:].abs().max()) == 0.0


def test_a_bias_is_cut_with_the_head() -> None:
    hidden, weight, targets = inputs()
    targets = targets.clamp(max=4)
    bias = torch.linspace(-1, 1, weight.shape[0]).requires_grad_()
    want = torch.log_softmax(hidden @ weight[:5].T + bias[:5], -1)[torch.arange(len(targets)), targets]
    got, _ = token_log_probs(hidden, weight, targets, bias=bias, vocab_limit=5)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(got.sum(), bias)[0], torch.autograd.grad(want.sum(), bias)[0], atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("vocab_limit", [None, 7])
@pytest.mark.parametrize("block_rows", [1, 3, 1000])
def test_sums_of_squared_probabilities_equal_the_definition(block_rows: int, vocab_limit: int | None) -> None:
    hidden, weight, _ = inputs()
    bias = torch.linspace(-1, 1, weight.shape[0])
    columns = vocab_limit or weight.shape[0]
    found = sum_of_squares(
        hidden, weight, bias=bias, temperature=0.7, vocab_limit=vocab_limit, block_bytes=4 * columns * block_rows
    )
    want = torch.softmax((hidden @ weight[:vocab_limit].T + bias[:vocab_limit]) / 0.7, -1).square().sum(-1)
    torch.testing.assert_close(found, want.detach(), atol=1e-6, rtol=1e-6)
    assert not found.requires_grad


def test_a_token_that_cannot_be_sampled_is_refused() -> None:
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match="ids from 3 on are never sampled"):
        token_log_probs(hidden, weight, targets.clamp(min=3), vocab_limit=3)


def _sharded(keep_bytes: int, vocab_limit: int | None, block_bytes: int) -> dict[str, torch.Tensor]:
    hidden, weight, targets = inputs(vocabulary=11)
    targets = targets.clamp(max=(vocab_limit or 11) - 1)
    start, end = (0, 6) if dist.get_rank() == 0 else (6, 11)
    mine = weight.detach()[start:end].clone().requires_grad_()
    log_probs, entropy = token_log_probs(
        hidden,
        mine,
        targets,
        temperature=0.7,
        entropy=True,
        shard=VocabularyShard(start, dist.group.WORLD, largest=6),
        vocab_limit=vocab_limit,
        keep_bytes=keep_bytes,
        block_bytes=block_bytes,
    )
    (log_probs.sum() + 0.3 * entropy.sum()).backward()
    squares = sum_of_squares(
        hidden,
        mine,
        temperature=0.7,
        shard=VocabularyShard(start, dist.group.WORLD, largest=6),
        vocab_limit=vocab_limit,
        block_bytes=block_bytes,
    )
    found = {"log_probs": log_probs.detach(), "entropy": entropy.detach(), "squares": squares}
    return found | {"hidden": hidden.grad, "weight": mine.grad}


@pytest.mark.parametrize("vocab_limit", [None, 8, 6, 4], ids=lambda limit: f"limit {limit}")
@pytest.mark.parametrize("keep_bytes", [0, 1 << 20])
def test_a_sharded_vocabulary_gives_the_same_numbers(keep_bytes: int, vocab_limit: int | None) -> None:
    """Rank 0 holds ids 0 to 5, rank 1 the rest: under the limits 6 and 4 it holds none that counts.

    Blocks of two rows: the ranks reduce block by block, equally often though their slices differ.
    """
    hidden, weight, targets = inputs(vocabulary=11)
    log_probs, entropy = naive(hidden, weight[:vocab_limit], targets.clamp(max=(vocab_limit or 11) - 1), 0.7)
    (log_probs.sum() + 0.3 * entropy.sum()).backward()
    ranks = run_ranks(2, _sharded, keep_bytes, vocab_limit, 4 * 6 * 2)
    for rank in ranks:
        torch.testing.assert_close(rank["log_probs"], log_probs.detach(), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(rank["entropy"], entropy.detach(), atol=1e-6, rtol=1e-6)
        squares = torch.softmax(hidden @ weight[:vocab_limit].T / 0.7, -1).square().sum(-1)
        torch.testing.assert_close(rank["squares"], squares.detach(), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(rank["hidden"], hidden.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([rank["weight"] for rank in ranks]), weight.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocabulary", [40, SMALL_VOCABULARY + 1])
def test_the_gradient_of_a_half_precision_head_is_summed_in_float32_over_blocks(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(512, 8, generator=generator).bfloat16()
    weight = (torch.randn(vocabulary, 8, generator=generator) / 8).bfloat16().requires_grad_()
    targets = torch.randint(40, (512,), generator=generator)
    wanted = torch.autograd.grad(naive(hidden.double(), weight.double(), targets, 1.0)[0].sum(), weight)[0]
    for keep_bytes in (0, 1 << 20):  # block by block, and all at once
        log_probs, _ = token_log_probs(hidden, weight, targets, keep_bytes=keep_bytes, block_bytes=16 * vocabulary)
        (grad,) = torch.autograd.grad(log_probs.sum(), weight)
        # Logits, their gradient and the result are rounded to bfloat16 (2^-8 of values up to 20).
        torch.testing.assert_close(grad.double(), wanted.double(), atol=0.15, rtol=0.02)
