"""Twelve error-prone formulas once more, from their papers, as loops over numbers; gradients by central differences.

The references here know nothing of tensors or masks: a mini-batch is a list of rows, a row the list of its trainable
tokens. They were written from the papers and ``docs/algorithms`` before the library was read; what is compared is the
whole actor loss (policy loss, correction weights, aggregation) or the whole estimator, on random ragged batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hybridflow.algorithms.advantages import ADVANTAGES
from hybridflow.algorithms.aggregation import counts_of
from hybridflow.algorithms.contract import Outputs
from hybridflow.algorithms.correction import correct
from hybridflow.algorithms.covariance import select_by_covariance
from hybridflow.algorithms.losses import ActorLoss
from hybridflow.batch.batch import Batch
from hybridflow.config.actor import PolicyLossConfig
from hybridflow.config.choices import KL_TYPES, LOSS_AGG_MODES
from tests.unit.algorithms.cases import actor, algorithm, correction, lists, padded

Rows = list[list[float]]
SHAPES = {"ragged": (7, 6), "one token": (4, 1), "one row": (1, 5), "one number": (1, 1), "long": (3, 40)}


def mask_of(shape: str, seed: int = 0) -> torch.Tensor:
    """Ragged rows with tool gaps; the last of several rows is all masked."""
    rows, width = SHAPES[shape]
    g = torch.Generator().manual_seed(seed)
    length = torch.randint(1, width + 1, (rows, 1), generator=g)
    mask = (torch.arange(width)[None] < length) & (torch.rand(rows, width, generator=g) > 0.2)
    mask[0, 0] = True
    if rows > 1:
        mask[-1] = False
    return mask


def columns_of(mask: torch.Tensor, seed: int = 0) -> dict[str, torch.Tensor]:
    """Log-probs of three policies, advantages of both signs (one of them exactly 0), weights; junk where masked."""
    g = torch.Generator().manual_seed(100 + seed)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(mask.shape, generator=g, dtype=torch.float64)

    old = -0.02 - 2 * torch.rand(mask.shape, generator=g, dtype=torch.float64)
    found = {
        "old_log_probs": old,
        "log_probs": (old + normal(0.3)).clamp(max=-1e-3),
        "rollout_log_probs": (old + normal(0.2)).clamp(max=-1e-3),
        "advantages": normal(1.0),
        "correction_weights": normal(0.5).exp(),
    }
    if mask.sum() > 2:
        row, token = mask.nonzero()[1].tolist()
        found["advantages"][row, token] = 0.0
    junk = torch.tensor([math.nan, math.inf, -math.inf, 1e30], dtype=torch.float64)
    filler = junk[torch.arange(mask.numel()) % 4].reshape(mask.shape)
    return {name: torch.where(mask, value, filler) for name, value in found.items()}


# Policy losses: one row -> the terms of its tokens. ``now`` is what gradients flow through, ``still`` its stopped copy.


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def vanilla(now: Sequence[float], still: Sequence[float], old: Sequence[float], a: Sequence[float]) -> list[float]:
    """PPO's objective min(r A, clip(r) A), and for A < 0 never below c A (arXiv:1707.06347, 1912.09729)."""
    gains = []
    for x, o, advantage in zip(now, old, a, strict=True):
        r = math.exp(x - o)
        gain = min(r * advantage, clip(r, 1 - 0.1, 1 + 0.2) * advantage)
        gains.append(max(gain, 1.5 * advantage) if advantage < 0 else gain)
    return [-gain for gain in gains]


def gspo(now: Sequence[float], still: Sequence[float], old: Sequence[float], a: Sequence[float]) -> list[float]:
    """arXiv:2507.18071, equations (7), (14): s_t = sg[s] pi / sg[pi]."""
    s = math.exp(sum(x - o for x, o in zip(still, old, strict=True)) / len(still))
    ratios = [s * math.exp(x - frozen) for x, frozen in zip(now, still, strict=True)]
    return [-min(r * A, clip(r, 1 - 0.05, 1 + 0.08) * A) for r, A in zip(ratios, a, strict=True)]


def geo_mean(now: Sequence[float], still: Sequence[float], old: Sequence[float], a: Sequence[float]) -> list[float]:
    """arXiv:2507.20673, equation (4) with the token-level clip: {prod min(r^s, clip(r, e^-eps, e^eps)^s)^s}^(1/n) A."""
    product = 1.0
    for x, o, advantage in zip(now, old, a, strict=True):
        r, sign = math.exp(x - o), 1 if advantage >= 0 else -1
        product *= min(r**sign, clip(r, math.exp(-0.15), math.exp(0.2)) ** sign) ** sign
    return [-(product ** (1 / len(a))) * sum(a) / len(a)] * len(a)


def sapo(now: Sequence[float], still: Sequence[float], old: Sequence[float], a: Sequence[float]) -> list[float]:
    """arXiv:2511.20347, equation (6): f(r) = sigmoid(tau (r - 1)) 4 / tau."""
    terms = []
    for x, o, advantage in zip(now, old, a, strict=True):
        tau = 1.5 if advantage > 0 else 2.5
        terms.append(-sigmoid(tau * (math.exp(x - o) - 1)) * 4 / tau * advantage)
    return terms


def cispo(now: Sequence[float], still: Sequence[float], old: Sequence[float], a: Sequence[float]) -> list[float]:
    """arXiv:2506.13585, equations (4), (5): sg[clip(r, 1 - low, 1 + high)] A log pi."""
    stopped = [clip(math.exp(x - o), 1 - 0.15, 1 + 0.25) for x, o in zip(still, old, strict=True)]
    return [-weight * A * x for weight, A, x in zip(stopped, a, now, strict=True)]


def dro(now: Sequence[float], still: Sequence[float], old: Sequence[float], a: Sequence[float]) -> list[float]:
    """arXiv:2405.19107: A log pi - beta / 2 (log pi / pi_old)^2, to be maximised."""
    return [-(A * x - 0.6 / 2 * (x - o) ** 2) for A, x, o in zip(a, now, old, strict=True)]


def trust_region(divergence: Callable[[float, float], float], limit: float) -> Callable[..., list[float]]:
    """arXiv:2602.04879: r A, without the tokens that left the region and would go on outwards."""

    def terms(now: Sequence[float], still: Sequence[float], old: Sequence[float], a: Sequence[float]) -> list[float]:
        found = []
        for x, frozen, o, advantage in zip(now, still, old, a, strict=True):
            r = math.exp(frozen - o)
            outwards = (advantage > 0 and r > 1) or (advantage < 0 and r < 1)
            outside = divergence(math.exp(o), math.exp(frozen)) > limit
            found.append(0.0 if outwards and outside else -math.exp(x - o) * advantage)
        return found

    return terms


def binary_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


LOSSES: dict[str, tuple[Callable[..., list[float]], dict[str, Any]]] = {
    "vanilla": (vanilla, dict(clip_ratio_low=0.1, clip_ratio_high=0.2, clip_ratio_c=1.5)),
    "gspo": (gspo, dict(clip_ratio_low=0.05, clip_ratio_high=0.08)),
    "geo_mean": (geo_mean, dict(clip_ratio_low=0.15, clip_ratio_high=0.2)),
    "sapo": (sapo, dict(policy=dict(tau_pos=1.5, tau_neg=2.5))),
    "cispo": (cispo, dict(clip_ratio_low=0.15, clip_ratio_high=0.25)),
    "dro": (dro, dict(policy=dict(dro_beta=0.6))),
    "dppo_tv": (trust_region(lambda p, q: abs(p - q), 0.03), dict(policy=dict(dppo_threshold=0.03))),
    "dppo_kl": (trust_region(binary_kl, 0.004), dict(policy=dict(dppo_threshold=0.004))),
}
BY_ROWS = {"gspo", "geo_mean"}


def aggregate(terms: Rows, mode: str, scale: float) -> float:
    """One number of a list of rows; rows without a token are not there."""
    rows = [row for row in terms if row]
    if mode == "token-sum":
        return sum(map(sum, rows))
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    row_value = {
        "seq-mean-token-sum": sum,
        "seq-mean-token-mean": lambda row: sum(row) / len(row),
        "seq-mean-token-sum-norm": lambda row: sum(row) / scale,
    }[mode]
    return sum(map(row_value, rows)) / len(rows)


def differences(function: Callable[[Rows], float], at: Rows, step: float = 1e-5) -> Rows:
    """Gradient of ``function`` by central differences."""
    out = []
    for i, row in enumerate(at):
        out.append([])
        for t in range(len(row)):
            values = []
            for sign in (1, -1):
                moved = [list(other) for other in at]
                moved[i][t] += sign * step
                values.append(function(moved))
            out[i].append((values[0] - values[1]) / (2 * step))
    return out


def compare_loss(
    name: str, mask: torch.Tensor, columns: dict[str, torch.Tensor], mode: str, terms: Any, **options: Any
) -> None:
    """The library's actor loss and its gradient against ``terms(now, still)``, the terms of all rows."""
    now = lists(columns["log_probs"], mask)
    reduced = "seq-mean-token-mean" if name in BY_ROWS else mode

    def reference(rows: Rows) -> float:
        return aggregate(terms(rows, now), reduced, scale=10.0)

    log_probs = columns["log_probs"].clone().requires_grad_()
    rows = Batch({"loss_mask": mask, **{key: value for key, value in columns.items() if key != "log_probs"}})
    loss = ActorLoss(actor(name, loss_agg_mode=mode, **options), max_response_length=10)
    value, _ = loss(Outputs(log_probs=log_probs), rows, counts_of(mask))
    value.backward()
    assert value.item() == pytest.approx(reference(now), rel=1e-10, abs=1e-12)
    slopes = padded(differences(reference, now), mask)
    # central differences of step h are right to h^2 times the third derivative, plus rounding of 1e-16 / h
    torch.testing.assert_close(log_probs.grad, slopes, atol=2e-9, rtol=2e-8)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_an_actor_loss_equals_the_formula_of_its_paper_in_value_and_gradient(
    name: str, mode: str, weighted: bool
) -> None:
    formula, options = LOSSES[name]
    for seed, shape in enumerate(SHAPES if mode == "token-mean" else ("ragged", "one number")):
        mask = mask_of(shape, seed)
        columns = columns_of(mask, seed)
        if name in BY_ROWS:  # one advantage and one weight per row, as their papers have it
            for key in ("advantages", "correction_weights"):
                first = torch.where(mask, columns[key], 0.0).sum(1, keepdim=True)
                columns[key] = torch.where(mask, first, columns[key])
        if not weighted:
            del columns["correction_weights"]
        old, a = lists(columns["old_log_probs"], mask), lists(columns["advantages"], mask)
        w = lists(columns["correction_weights"], mask) if weighted else [[1.0] * len(row) for row in a]

        def terms(now: Rows, still: Rows, old=old, a=a, w=w) -> Rows:
            return [
                [weight * term for weight, term in zip(w[i], formula(now[i], still[i], old[i], a[i]), strict=True)]
                if now[i]
                else []
                for i in range(len(now))
            ]

        compare_loss(name, mask, columns, mode, terms, **options)


KL_TERMS: dict[str, Callable[[float], float]] = {
    "k1": lambda x: x,
    "abs": abs,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(-x) - 1 + x,
}
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


@pytest.mark.parametrize("kind", [kind for kind in KL_TYPES if not kind.startswith("full")])
def test_the_kl_term_has_its_value_and_gradient_in_the_whole_loss(kind: str) -> None:
    """Schulman 2020; ``+``: value of the plain form, gradient of k2 under the current policy (weight now / old)."""
    estimate, plus = KL_TERMS[ALIASES.get(kind.removesuffix("+"), kind.removesuffix("+"))], kind.endswith("+")
    for seed, shape in enumerate(SHAPES):
        mask = mask_of(shape, seed)
        columns = columns_of(mask, seed)
        columns["ref_log_probs"] = columns.pop("rollout_log_probs")
        del columns["correction_weights"]
        columns["advantages"] = torch.where(mask, 0.0, columns["advantages"])
        old, ref = lists(columns["old_log_probs"], mask), lists(columns["ref_log_probs"], mask)

        def term(now: float, still: float, o: float, q: float) -> float:
            if not plus:
                return 0.3 * estimate(now - q)
            weight = min(math.exp(still - o), 10.0)
            return 0.3 * (estimate(still - q) + weight * ((now - q) ** 2 - (still - q) ** 2) / 2)

        def terms(now: Rows, still: Rows, old=old, ref=ref, term=term) -> Rows:
            return [[term(*of) for of in zip(*row, strict=True)] for row in zip(now, still, old, ref, strict=True)]

        settings = dict(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type=kind)
        compare_loss("reinforce", mask, columns, "seq-mean-token-sum", terms, **settings)


def covariances(log_probs: Rows, advantages: Rows) -> Rows:
    """arXiv:2505.22617, equation (9): (log pi - mean)(A - mean) over the tokens of the batch."""
    flat, level = [x for row in log_probs for x in row], [a for row in advantages for a in row]
    centre, mean = sum(flat) / len(flat), sum(level) / len(level)
    return [
        [(x - centre) * (a - mean) for x, a in zip(*pair, strict=True)]
        for pair in zip(log_probs, advantages, strict=True)
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_covariance_losses_equal_their_paper_from_selection_to_gradient(name: str, shape: str) -> None:
    """kl_cov: the floor(k N) highest, -r A + beta |log r| there. clip_cov: floor(r N) drawn from a band, detached."""
    mask = mask_of(shape, 3)
    columns = columns_of(mask, 3)
    del columns["correction_weights"]
    old, a = lists(columns["old_log_probs"], mask), lists(columns["advantages"], mask)
    settings = dict(kl_cov_ratio=0.3, ppo_kl_coef=0.7, clip_cov_ratio=0.3, clip_cov_lb=0.01, clip_cov_ub=0.8)
    chosen = select_by_covariance(
        log_probs=columns["old_log_probs"],
        advantages=columns["advantages"],
        mask=mask,
        config=PolicyLossConfig(loss_mode=name, **settings),
    )
    assert not (chosen & ~mask).any()
    picked = lists(chosen.double(), mask)
    found, size = covariances(old, a), int(mask.sum())
    if name == "kl_cov":
        inside, left = (
            [
                value
                for row, pick in zip(found, picked, strict=True)
                for value, p in zip(row, pick, strict=True)
                if p == q
            ]
            for q in (1, 0)
        )
        assert len(inside) == max(1, math.floor(0.3 * size))
        assert min(inside) >= max(left, default=-math.inf) - 1e-12  # two tokens have one covariance, but for rounding
    else:
        band = [[0.01 <= value <= 0.8 for value in row] for row in found]
        available = sum(map(sum, band))
        assert sum(map(sum, picked)) == min(available, max(1, math.floor(0.3 * size)))
        assert all(
            inside for row, pick in zip(band, picked, strict=True) for inside, p in zip(row, pick, strict=True) if p
        )

    def term(x: float, o: float, advantage: float, special: float) -> float:
        r = math.exp(x - o)
        if name == "kl_cov":
            return -r * advantage + (0.7 * abs(x - o) if special else 0.0)
        return 0.0 if special else -min(r * advantage, clip(r, 0.8, 1.2) * advantage)

    def terms(now: Rows, still: Rows) -> Rows:
        return [[term(*of) for of in zip(now[i], old[i], a[i], picked[i], strict=True)] for i in range(len(now))]

    columns["covariance_selected"] = chosen
    compare_loss(name, mask, columns, "token-mean", terms, policy=settings)


def turns_of(row: Sequence[bool]) -> list[tuple[int, int]]:
    """(turn, position in it) of every policy token."""
    places, turn, position = [], -1, 0
    for t, live in enumerate(row):
        if not live:
            continue
        turn, position = (turn, position + 1) if t and row[t - 1] else (turn + 1, 0)
        places.append((turn, position))
    return places


def optimal_baseline(
    rewards: Rows, share: Rows, square: Rows, weight: Rows, group: list[int], places: list[list[tuple[int, int]]]
) -> Rows:
    """arXiv:2602.07078: b_t = sum_i W_t G_t / sum_i W_t over samples of the group at the same place."""
    to_go = [[sum(row[t:]) for t in range(len(row))] for row in rewards]
    energy: Rows = []
    for p, s, w in zip(share, square, weight, strict=True):
        single = [x * x * (1 - 2 * p_t + s_t) for p_t, s_t, x in zip(p, s, w, strict=True)]
        energy.append([sum(single[: t + 1]) for t in range(len(single))])
    out: Rows = []
    for i, row in enumerate(to_go):
        baseline, advantages = None, []
        for t, value in enumerate(row):
            peers = [
                (energy[j][places[j].index(places[i][t])], to_go[j][places[j].index(places[i][t])])
                for j in range(len(rewards))
                if group[j] == group[i] and places[i][t] in places[j]
            ]
            if len(peers) > 1:
                baseline = sum(w * g for w, g in peers) / sum(w for w, _ in peers)
            advantages.append(0.0 if baseline is None else value - baseline)
        out.append(advantages)
    return out


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_the_optimal_token_baseline_of_random_groups(name: str, seed: int, weighted: bool) -> None:
    """Groups of three, two and one, rows of several turns, an all-masked row, exact sums of squared probabilities."""
    mask, g = mask_of("ragged", seed), torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(*mask.shape, 5, generator=g, dtype=torch.float64)
    share = torch.softmax(logits, -1)
    token = torch.randint(0, 5, mask.shape, generator=g)
    log_probs, square = share.gather(-1, token[..., None])[..., 0].log(), share.square().sum(-1)
    rewards = torch.randn(mask.shape, generator=g, dtype=torch.float64)
    weights = torch.rand(mask.shape, generator=g, dtype=torch.float64) + 0.5
    group = [4, 2, 4, 2, 9, 4, 4]
    columns = {"old_sum_pi_squared": square, **({"correction_weights": weights} if weighted else {})}
    found, _ = ADVANTAGES[name](
        token_rewards=rewards,
        mask=mask,
        group_id=torch.tensor(group),
        config=algorithm(adv_estimator=name),
        old_log_probs=log_probs,
        **columns,
    )
    turns = [turns_of(row) for row in mask.tolist()]
    flat = [[(0, t) for t in range(len(row))] for row in turns]
    expected = optimal_baseline(
        lists(rewards, mask),
        lists(log_probs.exp(), mask),
        lists(square, mask),
        lists(weights, mask) if weighted else [[1.0] * len(row) for row in turns],
        group,
        turns if name.startswith("tir") else flat,
    )
    # the library adds 1e-8 to an energy, which here is of the order 0.1
    torch.testing.assert_close(found, padded(expected, mask), atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_batch_normalised_weights_are_truncated_first_and_then_divided_by_their_mean(level: str, shape: str) -> None:
    mask = mask_of(shape, 5)
    columns = columns_of(mask, 5)
    x = lists(columns["old_log_probs"] - columns["rollout_log_probs"], mask)
    if level == "token":
        cut = [[min(math.exp(value), 1.1) for value in row] for row in x]
        mean = sum(map(sum, cut)) / sum(map(len, cut))
    else:
        cut = [[min(math.exp(sum(row)), 1.1)] * len(row) for row in x]
        mean = sum(row[0] for row in cut if row) / sum(bool(row) for row in cut)
    result = correct(
        old_log_probs=columns["old_log_probs"],
        rollout_log_probs=columns["rollout_log_probs"],
        mask=mask,
        config=correction(rollout_is=level, rollout_is_threshold=1.1, rollout_is_batch_normalize=True),
    )
    expected = padded([[value / mean for value in row] for row in cut], mask)
    torch.testing.assert_close(result.weights, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("level", ["token", "seq_sum", "seq_mean", "seq_max"])
def test_k3_rejection_keeps_what_lies_within_its_bound(level: str, shape: str) -> None:
    """k3 = r - 1 - log r >= 0 with r = old / rollout (Schulman 2020: the estimator under the sampling policy)."""
    mask = mask_of(shape, 6)
    columns = columns_of(mask, 6)
    x = lists(columns["old_log_probs"] - columns["rollout_log_probs"], mask)
    kept = []
    for row in x:
        values = [math.exp(value) - 1 - value for value in row]
        assert all(value >= 0 for value in values)
        judged = {
            "token": values,
            "seq_sum": [sum(values)] * len(values),
            "seq_mean": [sum(values) / max(len(values), 1)] * len(values),
            "seq_max": [max(values, default=0.0)] * len(values),
        }[level]
        kept.append([float(value <= 0.015) for value in judged])
    result = correct(
        old_log_probs=columns["old_log_probs"],
        rollout_log_probs=columns["rollout_log_probs"],
        mask=mask,
        config=correction(rollout_rs=f"{level}_k3", rollout_rs_threshold=0.015),
    )
    assert torch.equal(result.mask, padded(kept, mask).bool())
