"""The exact KL: by definition in a plain float64 loop, the same for every block size and cut of the vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from hybridflow.models.full_kl import Reading, full_kl
from hybridflow.models.logprobs import VocabularyShard
from tests.ranks import run_ranks

N, WIDTH, VOCABULARY, TEMPERATURE = 7, 6, 11, 0.7


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Reading]:
    """hidden, weight, bias of the policy, and a reference near it."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, WIDTH, generator=g), torch.randn(VOCABULARY, WIDTH, generator=g)
    bias = torch.linspace(-1, 1, VOCABULARY)
    reference = Reading(
        hidden + 0.3 * torch.randn(N, WIDTH, generator=g),
        weight + 0.2 * torch.randn(VOCABULARY, WIDTH, generator=g),
        bias.flip(0) * 0.5,
    )
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), reference


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, reference: Reading, limit: int
) -> tuple[list[float], list[torch.Tensor]]:
    """KL by a loop over rows and tokens in float64, and the gradient of sum (i + 1) KL_i by central differences."""

    def distribution(state: torch.Tensor, head: torch.Tensor, offset: torch.Tensor) -> list[float]:
        logits = [
            (sum(float(a) * float(b) for a, b in zip(state, head[v], strict=True)) + float(offset[v])) / TEMPERATURE
            for v in range(limit)
        ]
        top = max(logits)
        total = top + math.log(sum(math.exp(z - top) for z in logits))
        return [z - total for z in logits]

    def values(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[float]:
        found = []
        for row in range(len(h)):
            log_p = distribution(h[row], w, b)
            log_q = distribution(reference.hidden[row].double(), reference.weight.double(), reference.bias.double())
            found.append(sum(math.exp(p) * (p - q) for p, q in zip(log_p, log_q, strict=True)))
        return found

    given = [tensor.detach().double() for tensor in (hidden, weight, bias)]
    gradients, step = [], 1e-5
    for which, tensor in enumerate(given):
        gradient = torch.zeros_like(tensor)
        for place in range(tensor.numel()):
            sides = []
            for sign in (1, -1):
                moved = [held.clone() for held in given]
                moved[which].view(-1)[place] += sign * step
                sides.append(sum((i + 1) * kl for i, kl in enumerate(values(*moved))))
            gradient.view(-1)[place] = (sides[0] - sides[1]) / (2 * step)
        gradients.append(gradient)
    return values(*given), gradients


@pytest.fixture(scope="module")
def expected() -> dict[int | None, tuple[list[float], list[torch.Tensor]]]:
    hidden, weight, bias, reference = inputs()
    return {limit: plain(hidden, weight, bias, reference, limit or VOCABULARY) for limit in (None, 8)}


@pytest.mark.parametrize("limit", [None, 8], ids=lambda limit: f"limit {limit}")
@pytest.mark.parametrize("rows", [1, 2, 1000], ids=lambda rows: f"{rows} rows a block")
def test_value_and_gradient_equal_a_plain_float64_loop(expected, rows: int, limit: int | None) -> None:
    """float32 against float64: 1e-5 of numbers around 1 (gradients are sums over 7 weighted rows: 1e-4)."""
    hidden, weight, bias, reference = inputs()
    kl = full_kl(
        hidden,
        weight,
        reference,
        bias=bias,
        temperature=TEMPERATURE,
        vocab_limit=limit,
        block_bytes=4 * (limit or VOCABULARY) * rows,
    )
    (kl * torch.arange(1, N + 1)).sum().backward()
    values, gradients = expected[limit]
    assert kl.tolist() == pytest.approx(values, abs=1e-5)
    for tensor, gradient in zip((hidden, weight, bias), gradients, strict=True):
        torch.testing.assert_close(tensor.grad.double(), gradient, atol=1e-4, rtol=1e-4)


def test_the_two_action_policy_has_its_closed_form() -> None:
    """C02: policy 1/2, reference 1/4: value 0.1438, gradient by the first logit 0.27465."""
    logits = torch.zeros(1, 2, requires_grad=True)
    reference = Reading(torch.tensor([[0.25, 0.75]]).log(), torch.eye(2), None)
    kl = full_kl(logits, torch.eye(2), reference)
    kl.sum().backward()
    assert kl.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-5)
    assert logits.grad[0, 0].item() == pytest.approx(0.27465, abs=1e-5)


def test_a_policy_has_no_kl_to_itself_and_no_row_is_fine() -> None:
    hidden, weight, bias, _ = inputs()
    same = Reading(hidden.detach(), weight.detach(), bias.detach())
    kl = full_kl(hidden, weight, same, bias=bias)
    kl.sum().backward()
    assert kl.abs().max().item() == 0.0
    assert hidden.grad.abs().max().item() == 0.0
    nothing = Reading(same.hidden[:0], same.weight, same.bias)
    assert full_kl(hidden[:0], weight, nothing, bias=bias).shape == (0,)


def test_only_blocks_of_logits_are_allocated_forward_and_backward() -> None:
    """512 rows over 4096 tokens: all logits of one model are 8 MiB, a block of four rows 64 KiB."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(512, 8, generator=g).requires_grad_(), torch.randn(4096, 8, generator=g)
    reference = Reading(torch.randn(512, 8, generator=g), torch.randn(4096, 8, generator=g), None)
    with torch.profiler.profile(profile_memory=True) as profile:
        full_kl(hidden, weight, reference, block_bytes=4 * 4096 * 4).sum().backward()
    assert max(event.self_cpu_memory_usage for event in profile.events()) <= 4 * 4096 * 4 * 2


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_an_impossible_temperature_is_refused(temperature: float) -> None:
    hidden, weight, bias, reference = inputs()
    with pytest.raises(ValueError, match="above 0"):
        full_kl(hidden, weight, reference, bias=bias, temperature=temperature)


def _sharded(limit: int | None) -> dict[str, torch.Tensor]:
    hidden, weight, bias, reference = inputs()
    rows = slice(0, 6) if dist.get_rank() == 0 else slice(6, VOCABULARY)
    mine = weight.detach()[rows].clone().requires_grad_()
    own_bias = bias.detach()[rows].clone().requires_grad_()
    kl = full_kl(
        hidden,
        mine,
        Reading(reference.hidden, reference.weight[rows], reference.bias[rows]),
        bias=own_bias,
        temperature=TEMPERATURE,
        shard=VocabularyShard(rows.start, dist.group.WORLD, largest=6),
        vocab_limit=limit,
        block_bytes=4 * 6 * 2,
    )
    (kl * torch.arange(1, N + 1)).sum().backward()
    return {"kl": kl.detach(), "hidden": hidden.grad, "weight": mine.grad, "bias": own_bias.grad}


@pytest.mark.parametrize("limit", [None, 8, 4], ids=lambda limit: f"limit {limit}")
def test_a_sharded_vocabulary_gives_the_same_numbers(limit: int | None) -> None:
    """Under the limit 4 rank 1 holds no token that counts."""
    hidden, weight, bias, reference = inputs()
    kl = full_kl(hidden, weight, reference, bias=bias, temperature=TEMPERATURE, vocab_limit=limit)
    (kl * torch.arange(1, N + 1)).sum().backward()
    ranks = run_ranks(2, _sharded, limit)
    for rank in ranks:
        torch.testing.assert_close(rank["kl"], kl.detach(), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(rank["hidden"], hidden.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([rank["weight"] for rank in ranks]), weight.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([rank["bias"] for rank in ranks]), bias.grad, atol=1e-5, rtol=1e-5)
