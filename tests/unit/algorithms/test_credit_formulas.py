"""Credit assignment once more, from its papers, as loops over numbers, on random groups of every odd kind.

The references know nothing of tensors, masks or positions: a step is a list of ``Row``, a group is the rows of one
prompt. Every batch has groups of unequal sizes, a singleton, a group of equal scores that are not exact in binary, rows
of one token and with gaps, a row without a trainable token (in the largest group) and rows in shuffled order.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hybridflow.algorithms.advantages import ADVANTAGES
from hybridflow.algorithms.aggregation import counts_of
from hybridflow.algorithms.contract import Outputs
from hybridflow.algorithms.correction import Correction, correct
from hybridflow.algorithms.kl import AdaptiveKLController
from hybridflow.algorithms.lagrange import LagrangeMultiplier
from hybridflow.algorithms.losses import ActorLoss, CriticLoss
from hybridflow.algorithms.pretraining import PretrainingMix
from hybridflow.algorithms.rewards import RewardNormalizer, shape_scores
from hybridflow.batch.batch import Batch
from hybridflow.config.algorithm import RewardShapingConfig, SafeRLHFConfig
from hybridflow.config.choices import LOSS_AGG_MODES
from hybridflow.config.critic import CriticConfig
from hybridflow.config.reward import OverlongConfig
from tests.unit.algorithms.cases import actor, algorithm, controller, correction, lists, padded
from tests.unit.algorithms.test_formulas import SHAPES, aggregate, columns_of, differences, mask_of

SEEDS = range(6)
Rows = list[list[float]]


@dataclass
class Row:
    """One response: rewards of its trainable tokens, its prompt, and what estimators read beside them."""

    group: int
    rewards: list[float]
    values: list[float]
    greedy: float
    parts: dict[str, float]

    @property
    def score(self) -> float:
        return sum(self.rewards)


@dataclass
class Step:
    """Rows as lists, and the same as tensors with junk at masked positions."""

    rows: list[Row]
    mask: torch.Tensor
    columns: dict[str, Any]


def step(seed: int, *, flat: bool = False) -> Step:
    """A random step; ``flat``: all scores of the batch are equal."""
    draw = random.Random(seed)
    sizes = [5, 1, 2, 3, 4, draw.randint(1, 6)]
    names = draw.sample(range(1000), len(sizes))
    rows = []
    for name, size in zip(names, sizes, strict=True):
        for _ in range(size):
            tokens = draw.choice([1, 1, 2, 4, 6])
            rewards = [draw.gauss(0, 1) for _ in range(tokens)]
            if flat or name == names[3]:
                rewards = [0.0] * (tokens - 1) + [0.1]
            elif name == names[4]:  # right or wrong
                rewards = [0.0] * (tokens - 1) + [float(draw.random() < 0.5)]
            parts = {"right": float(draw.random() < 0.5), "short": round(draw.random(), 1), "same": 0.7}
            if draw.random() < 0.1:
                del parts["short"]
            rows.append(Row(name, rewards, [draw.gauss(0, 1) for _ in rewards], draw.gauss(0, 1), parts))
    rows[0].rewards, rows[0].values = [], []  # of the largest group: rejected as a whole
    rows[5].greedy = math.nan  # the greedy response of the singleton failed
    draw.shuffle(rows)
    width = 8
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        mask[i, sorted(draw.sample(range(width), len(row.rewards)))] = True
    junk = torch.tensor([math.nan, math.inf, -math.inf, 1e30], dtype=torch.float64)
    filler = junk[torch.arange(mask.numel()) % 4].reshape(mask.shape)
    columns = {
        "group_id": torch.tensor([row.group for row in rows]),
        "baseline_score": torch.tensor([row.greedy for row in rows], dtype=torch.float64),
        "reward_info": [row.parts for row in rows],
    }
    for name in ("rewards", "values"):
        column = padded([getattr(row, name) for row in rows], mask)
        columns["token_rewards" if name == "rewards" else name] = torch.where(mask, column, filler)
    return Step(rows, mask, columns)


def by_group(rows: Sequence[Row], credit: Callable[[list[Row], int], float]) -> Rows:
    """Every token of a row gets ``credit(rows of its group, place in it)``; 0 without a sibling."""
    out = []
    for row in rows:
        peers = [other for other in rows if other.group == row.group and other.rewards]
        at = next((i for i, other in enumerate(peers) if other is row), None)
        value = 0.0 if at is None or len(peers) < 2 else credit(peers, at)
        out.append([value] * len(row.rewards))
    return out


def whitened(rows: Rows, counted: Sequence[bool] | None = None) -> Rows:
    """Zero mean and unit (unbiased) deviation over the tokens of ``counted`` rows; 0 elsewhere, and without spread."""
    counted = [True] * len(rows) if counted is None else counted
    flat = [x for row, counts in zip(rows, counted, strict=True) for x in row if counts]
    if len(set(flat)) < 2:
        return [[0.0] * len(row) for row in rows]
    mean, spread = statistics.fmean(flat), math.sqrt(statistics.variance(flat) + 1e-8)
    return [[(x - mean) / spread if counts else 0.0 for x in row] for row, counts in zip(rows, counted, strict=True)]


def has_sibling(rows: Sequence[Row], usable: Callable[[Row], bool] = lambda row: bool(row.rewards)) -> list[bool]:
    return [usable(row) and sum(usable(other) and other.group == row.group for other in rows) > 1 for row in rows]


def standard(values: Sequence[float], at: int) -> float:
    """(x - mean) / (std + 1e-6), std unbiased; values that are all equal are no signal."""
    if len(set(values)) == 1:
        return 0.0
    return (values[at] - statistics.fmean(values)) / (statistics.stdev(values) + 1e-6)


def grpo(rows: Sequence[Row], _: Any) -> Rows:
    """arXiv:2402.03300, section 4.1.2: (r_i - mean(r)) / std(r)."""
    return by_group(rows, lambda peers, i: standard([peer.score for peer in peers], i))


def dr_grpo(rows: Sequence[Row], _: Any) -> Rows:
    """arXiv:2503.20783, equation (3): r_i - mean(r)."""
    return by_group(rows, lambda peers, i: peers[i].score - statistics.fmean(peer.score for peer in peers))


def rloo(rows: Sequence[Row], _: Any) -> Rows:
    """arXiv:2402.14740, equation (8): r_i - mean of the others."""
    return by_group(
        rows, lambda peers, i: peers[i].score - statistics.fmean(p.score for p in peers if p is not peers[i])
    )


def opo(rows: Sequence[Row], _: Any) -> Rows:
    """arXiv:2505.23585: r_i - sum(l r) / sum(l)."""

    def credit(peers: list[Row], i: int) -> float:
        if len({peer.score for peer in peers}) == 1:
            return 0.0
        length = [len(peer.rewards) for peer in peers]
        return peers[i].score - sum(n * p.score for n, p in zip(length, peers, strict=True)) / sum(length)

    return by_group(rows, credit)


def grpo_passk(rows: Sequence[Row], config: Any) -> Rows:
    """arXiv:2503.19595: max of a set of k that holds the row minus the max without it, mean over all such sets."""

    def credit(peers: list[Row], i: int) -> float:
        scores = [peer.score for peer in peers]
        if len(set(scores)) == 1:
            return 0.0
        others = [x for j, x in enumerate(scores) if j != i]
        sets = list(itertools.combinations(others, min(config.passk, len(scores)) - 1))
        gain = statistics.fmean(max(scores[i], *rest) - max(rest) for rest in sets)
        return gain / (statistics.stdev(scores) + 1e-6)

    return by_group(rows, credit)


def gpg(rows: Sequence[Row], _: Any) -> Rows:
    """arXiv:2504.02546: B / (B - M) (r_i - mean), M the rows of groups whose rewards are all equal."""
    present = [row for row in rows if row.rewards]
    dead = sum(len({other.score for other in present if other.group == row.group}) == 1 for row in present)
    factor = len(present) / max(len(present) - dead, 1)
    return [[factor * x for x in row] for row in dr_grpo(rows, None)]


def remax(rows: Sequence[Row], config: Any) -> Rows:
    """arXiv:2310.10505, algorithm 1: reward to go minus the reward of the greedy response; none, no credit."""
    to_go = discounted(rows, config.gamma)
    return [
        [0.0] * len(own) if math.isnan(row.greedy) else [x - row.greedy for x in own]
        for row, own in zip(rows, to_go, strict=True)
    ]


def discounted(rows: Sequence[Row], gamma: float) -> Rows:
    return [[sum(gamma**k * r for k, r in enumerate(row.rewards[t:])) for t in range(len(row.rewards))] for row in rows]


def reinforce_plus_plus(rows: Sequence[Row], config: Any) -> Rows:
    """arXiv:2501.03262: rewards to go, normalised over the batch."""
    return whitened(discounted(rows, config.gamma))


def reinforce_plus_plus_baseline(rows: Sequence[Row], _: Any) -> Rows:
    """arXiv:2501.03262: minus the group's mean, then normalised over the batch."""
    return whitened(by_group(rows, _centred), has_sibling(rows))


def _centred(peers: list[Row], i: int) -> float:
    scores = [peer.score for peer in peers]
    return 0.0 if len(set(scores)) == 1 else scores[i] - statistics.fmean(scores)


def gae(rows: Sequence[Row], config: Any) -> Rows:
    """arXiv:1506.02438, equation (16), then normalised over the batch."""
    out = []
    for row in rows:
        v = [*row.values, 0.0]
        delta = [r + config.gamma * v[t + 1] - v[t] for t, r in enumerate(row.rewards)]
        fade = config.gamma * config.lam
        out.append([sum(fade**k * d for k, d in enumerate(delta[t:])) for t in range(len(delta))])
    return whitened(out)


def gdpo(rows: Sequence[Row], config: Any) -> Rows:
    """arXiv:2601.05242: each component normalised in its group, weighted sum, normalised over the batch's rows."""
    keys, weights = config.gdpo_reward_keys, config.gdpo_reward_weights

    def usable(row: Row) -> bool:
        return bool(row.rewards) and all(key in row.parts for key in keys)

    compared, total = has_sibling(rows, usable), []
    for row, counts in zip(rows, compared, strict=True):
        peers = [other for other in rows if usable(other) and other.group == row.group]
        parts = [[peer.parts[key] for peer in peers] for key in keys]
        own = [i for i, peer in enumerate(peers) if peer is row]
        total.append(
            [sum(w * standard(part, own[0]) for w, part in zip(weights, parts, strict=True))] if counts else []
        )
    white = whitened(total)
    return [[own[0] if own else 0.0] * len(row.rewards) for row, own in zip(rows, white, strict=True)]


PAPERS: dict[str, tuple[Callable[[Sequence[Row], Any], Rows], dict[str, Any]]] = {
    "grpo": (grpo, dict(adv_estimator="grpo")),
    "dr_grpo": (dr_grpo, dict(adv_estimator="grpo", norm_adv_by_std_in_grpo=False)),
    "rloo": (rloo, dict(adv_estimator="rloo")),
    "opo": (opo, dict(adv_estimator="opo")),
    "gpg": (gpg, dict(adv_estimator="gpg")),
    "passk 2": (grpo_passk, dict(adv_estimator="grpo_passk", passk=2)),
    "passk 3": (grpo_passk, dict(adv_estimator="grpo_passk", passk=3)),
    "passk 9": (grpo_passk, dict(adv_estimator="grpo_passk", passk=9)),
    "remax": (remax, dict(adv_estimator="remax", gamma=0.9)),
    "reinforce_plus_plus": (reinforce_plus_plus, dict(adv_estimator="reinforce_plus_plus", gamma=0.9)),
    "reinforce_plus_plus_baseline": (
        reinforce_plus_plus_baseline,
        dict(adv_estimator="reinforce_plus_plus_baseline"),
    ),
    "gae": (gae, dict(adv_estimator="gae", gamma=0.95, lam=0.8)),
    "gdpo": (
        gdpo,
        dict(
            adv_estimator="gdpo",
            gdpo_reward_keys=("right", "short", "same"),
            gdpo_reward_weights=(1.0, 0.5, 2.0),
        ),
    ),
}


@pytest.mark.parametrize("flat", [False, True], ids=["mixed", "all equal"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PAPERS)
def test_an_estimator_equals_its_paper_on_random_groups(name: str, seed: int, flat: bool) -> None:
    paper, options = PAPERS[name]
    work, config = step(seed, flat=flat), algorithm(**options)
    found, _ = ADVANTAGES[config.adv_estimator](mask=work.mask, config=config, **work.columns)
    expected = padded(paper(work.rows, config), work.mask)
    # sums of float64 in another order; where a flat batch is whitened, a spread of rounding alone
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-8)
    group_alone = {"grpo", "dr_grpo", "rloo", "opo", "gpg", "passk 2", "passk 3", "passk 9"}
    if flat and name in group_alone:
        assert not found.any(), "equal scores that are not exact in binary are exactly no signal (B02)"


@pytest.mark.parametrize("buffer", [1, 3, 7, 10])
@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_the_overlong_penalty_is_dapos_equation_13(buffer: int, factor: float) -> None:
    """0 while |y| <= L - buffer; (L - buffer - |y|) / buffer up to L; -1 beyond: times the factor."""
    limit = 10
    for length in range(limit + 3):
        if length <= limit - buffer:
            expected = 0.0
        elif length <= limit:
            expected = ((limit - buffer) - length) / buffer
        else:
            expected = -1.0
        found = shape_scores(
            score=torch.tensor([0.25]),
            response_length=torch.tensor([length]),
            max_response_length=limit,
            shaping=RewardShapingConfig(),
            overlong=OverlongConfig(enable=True, len=buffer, penalty_factor=factor),
            normalizer=None,
        )
        assert found.tolist() == pytest.approx([0.25 + factor * expected], abs=1e-15)


@pytest.mark.parametrize("seed", SEEDS)
def test_shaping_normalises_then_clips_then_takes_both_penalties_off(seed: int) -> None:
    draw, normalizer = random.Random(seed), RewardNormalizer(momentum=0.8)
    history: list[tuple[float, float]] = []
    for number in range(4):
        scores = [draw.gauss(2, 3) for _ in range(draw.randint(1, 6))]
        length = [draw.randint(1, 10) for _ in scores]
        for entry, (weight, x) in enumerate(history):
            history[entry] = (weight * 0.8, x)
        history += [(1 / len(scores), x) for x in scores]
        total = sum(weight for weight, _ in history)
        mean = sum(weight * x for weight, x in history) / total
        spread = math.sqrt(sum(weight * (x - mean) ** 2 for weight, x in history) / total)
        expected = []
        for x, n in zip(scores, length, strict=True):
            white = (x - mean) / (spread if spread > 1e-8 else 1.0)
            over = min(max(n - (10 - 4), 0), 4) / 4
            expected.append(min(max(white, -0.9), 0.9) - 0.03 * n - 0.5 * over)
        normalizer.update(torch.tensor(scores, dtype=torch.float64), torch.ones(len(scores), dtype=torch.bool))
        found = shape_scores(
            score=torch.tensor(scores, dtype=torch.float64),
            response_length=torch.tensor(length),
            max_response_length=10,
            shaping=RewardShapingConfig(normalize=True, clip=0.9, length_penalty=0.03),
            overlong=OverlongConfig(enable=True, len=4, penalty_factor=0.5),
            normalizer=normalizer,
        )
        assert found.tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12), number


@pytest.mark.parametrize("seed", SEEDS)
def test_the_adaptive_kl_coefficient_follows_ziegler_over_many_steps(seed: int) -> None:
    """arXiv:1909.08593, section 2.2: e = clip(KL / target - 1, -.2, .2); beta (1 + e K), K = sequences / horizon."""
    draw = random.Random(seed)
    control, beta = AdaptiveKLController(controller(type="adaptive", kl_coef=0.2, target_kl=0.05, horizon=500)), 0.2
    for _ in range(40):
        kl, sequences = draw.choice([draw.uniform(-0.05, 0.2), 0.05, math.nan, math.inf]), draw.randint(1, 64)
        if math.isfinite(kl):
            error = (kl - 0.05) / 0.05
            error = -0.2 if error < -0.2 else 0.2 if error > 0.2 else error
            beta = beta * (1 + error * sequences / 500)
        control.update(kl=kl, sequences=sequences)
        assert control.value == pytest.approx(beta, rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_lagrange_multiplier_follows_equation_31_over_many_steps(seed: int) -> None:
    """arXiv:2310.12773: ln lambda += alpha lambda (mean cost - limit)."""
    draw = random.Random(seed)
    settings = SafeRLHFConfig(cost_limit=0.3, multiplier_init=1.5, multiplier_lr=0.2)
    multiplier, log = LagrangeMultiplier(settings), math.log(1.5)
    for _ in range(30):
        cost = draw.uniform(-1, 1)
        log = log + 0.2 * math.exp(log) * (cost - 0.3)
        multiplier.update(mean_cost=cost)
        assert multiplier.value == pytest.approx(math.exp(log), rel=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_critics_loss_is_half_the_larger_square_in_value_and_gradient(mode: str, shape: str) -> None:
    """PPO2's value clip: 1/2 max((v - R)^2, (v_old + clip(v - v_old, -c, c) - R)^2)."""
    mask = mask_of(shape, 7)
    columns = columns_of(mask, 7)
    old, returns = columns["old_log_probs"], columns["advantages"]
    values = columns["log_probs"].clone().requires_grad_()
    then, target = lists(old, mask), lists(returns, mask)

    def reference(now: Rows) -> float:
        terms = []
        for row, before, goal in zip(now, then, target, strict=True):
            terms.append([])
            for v, o, r in zip(row, before, goal, strict=True):
                bounded = o + max(-0.2, min(0.2, v - o))
                terms[-1].append(max((v - r) ** 2, (bounded - r) ** 2) / 2)
        return aggregate(terms, mode, scale=10.0)

    loss = CriticLoss(CriticConfig(loss_agg_mode=mode, cliprange_value=0.2), max_response_length=10)
    rows = Batch({"loss_mask": mask, "values": old, "returns": returns})
    value, _ = loss(Outputs(values=values), rows, counts_of(mask))
    value.backward()
    now = lists(columns["log_probs"], mask)
    assert value.item() == pytest.approx(reference(now), rel=1e-10)
    torch.testing.assert_close(values.grad, padded(differences(reference, now), mask), atol=2e-9, rtol=2e-8)


@pytest.mark.parametrize("shape", SHAPES)
def test_ptx_adds_the_mean_negative_log_prob_of_text_tokens(shape: str) -> None:
    """arXiv:2203.02155, equation (2): rows of text (the policy's mask is False on them) beside rows of the policy."""
    mask, text = mask_of(shape, 8), mask_of(shape, 9)
    policy, pretraining = columns_of(mask, 8), columns_of(text, 9)
    both = torch.cat([mask, torch.zeros_like(text)])
    weight = torch.cat([torch.zeros(mask.shape), text / text.sum()])
    log_probs = torch.cat([policy["log_probs"], pretraining["log_probs"]]).requires_grad_()
    rows = Batch(
        {
            "loss_mask": both,
            "ptx_weight": weight,
            **{name: torch.cat([policy[name]] * 2) for name in ("old_log_probs", "advantages")},
        }
    )
    loss = PretrainingMix(ActorLoss(actor("reinforce"), max_response_length=10), coef=0.3)
    value, _ = loss(Outputs(log_probs=log_probs), rows, counts_of(both))
    value.backward()
    x, a = ([v for row in lists(policy[name], mask) for v in row] for name in ("log_probs", "advantages"))
    written = [v for row in lists(pretraining["log_probs"], text) for v in row]
    gain = sum(p * q for p, q in zip(x, a, strict=True)) / len(x)
    assert value.item() == pytest.approx(-gain - 0.3 * statistics.fmean(written), rel=1e-6)
    slope = torch.cat([torch.where(mask, -policy["advantages"] / len(x), 0.0), -0.3 * text.double() / len(written)])
    torch.testing.assert_close(log_probs.grad, slope, atol=1e-8, rtol=1e-6)  # the weights are float32


def corrected(mask: torch.Tensor, columns: dict[str, torch.Tensor], **settings: Any) -> Correction:
    return correct(
        old_log_probs=columns["old_log_probs"],
        rollout_log_probs=columns["rollout_log_probs"],
        mask=mask,
        config=correction(**settings),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["icepop", "mis", "geometric", "veto", "all of them"])
def test_masks_equal_their_papers_and_weights_what_is_left_of_them(kind: str, shape: str) -> None:
    """IcePop (arXiv:2510.18855): a token stays while 1/h <= ratio <= h. Masked importance sampling: a row stays while
    the product of its ratios does; geometric: while its geometric mean does. Veto: no row with a token of ratio below
    a bound. Truncated weights of what stays, over their mean (after truncation), tokens of rejected rows left out."""
    mask = mask_of(shape, 10)
    columns = columns_of(mask, 10)
    if mask.sum() > 4:
        row, token = mask.nonzero()[3].tolist()
        columns["rollout_log_probs"][row, token] = columns["old_log_probs"][row, token] + 4.0  # ratio e^-4
    ratios = [
        [math.exp(x) for x in row] for row in lists(columns["old_log_probs"] - columns["rollout_log_probs"], mask)
    ]
    settings: dict[str, Any] = {
        "icepop": dict(rollout_rs="token", rollout_rs_threshold="0.85_1.2"),
        "mis": dict(rollout_rs="sequence", rollout_rs_threshold="0.6_1.5"),
        "geometric": dict(rollout_rs="geometric", rollout_rs_threshold="0.9_1.1"),
        "veto": dict(rollout_token_veto_threshold=0.5),
        "all of them": dict(
            rollout_rs="token,sequence,geometric",
            rollout_rs_threshold="0.85_1.2,0.6_1.5,0.9_1.1",
            rollout_token_veto_threshold=0.5,
        ),
    }
    judges: dict[str, Callable[[list[float], float], bool]] = {
        "icepop": lambda row, r: 0.85 <= r <= 1.2,
        "mis": lambda row, r: 0.6 <= math.prod(row) <= 1.5,
        "geometric": lambda row, r: 0.9 <= math.prod(row) ** (1 / len(row)) <= 1.1,
        "veto": lambda row, r: min(row) >= 0.5,
    }
    active = list(judges) if kind == "all of them" else [kind]
    stays = [[all(judges[name](row, r) for name in active) for r in row] for row in ratios]
    expected = padded([[float(x) for x in row] for row in stays], mask).bool()
    weighted = dict(rollout_is="token", rollout_is_threshold=1.05, rollout_is_batch_normalize=True)
    found = corrected(mask, columns, **settings[kind], **weighted)
    assert torch.equal(found.mask, expected)
    cut = [[min(r, 1.05) if s else 0.0 for r, s in zip(*pair, strict=True)] for pair in zip(ratios, stays, strict=True)]
    left = sum(map(sum, stays))
    mean = sum(map(sum, cut)) / left if left else 1.0
    weights = padded([[w / mean for w in row] for row in cut], mask)
    torch.testing.assert_close(found.weights, weights, atol=1e-12, rtol=0)
    total = sum(map(len, ratios))
    assert found.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - left / total)
    rows = [row for row in stays if row]
    gone = sum(not any(row) for row in rows) / len(rows)
    assert found.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(gone)
