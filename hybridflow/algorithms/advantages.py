"""Advantage estimators: from token rewards to what the policy gradient multiplies.

Every function takes ``token_rewards`` and ``mask`` (trainable tokens) of all rows of a step, the ``group_id`` of each
row, the configuration and all further columns by name; it returns ``(advantages, returns)``, 0 at masked positions, in
the dtype of ``token_rewards``. Common rules:

- A row without a trainable token (failed, rejected) is in no statistic.
- Rows of a group may stand anywhere; permuting rows permutes results.
- *Singleton rule*: where the baseline is made from the group, a row without a surviving sibling has advantage 0.
- A group whose scores are all equal has advantage exactly 0 (before whitening over the batch, where there is one).
- Masked positions are transparent: a row's result is that of the row with these positions cut out.
- Statistics are float64; standard deviations are unbiased (n - 1).

A user's own function (``adv_estimator=package.module:function``) has this signature; the columns that it reads beyond
those of every step stand in its attribute ``needs``, and only those travel to it. Without the attribute all do. What it
returns is looked at (``estimate``): another shape would be broadcast in silence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hybridflow.algorithms.masking import Groups, keep, masked_whiten
from hybridflow.algorithms.returns import Credit, generalized_advantages, outcome, rewards_to_go, spread_over_tokens
from hybridflow.algorithms.rewards import reward_components
from hybridflow.algorithms.token_baseline import optimal_token_baseline, tir_optimal_token_baseline
from hybridflow.config.algorithm import AlgorithmConfig
from hybridflow.utils.errors import ConfigError
from hybridflow.utils.optional import load

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing."""


@runtime_checkable
class Estimator(Protocol):
    """(advantages, returns)."""

    def __call__(
        self,
        *,
        token_rewards: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        group_id: Int[Tensor, " B"],
        config: AlgorithmConfig,
        **columns: Any,
    ) -> Credit:
        """See the module docstring."""
        ...


def gae(
    *,
    token_rewards: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    group_id: Int[Tensor, " B"],
    config: AlgorithmConfig,
    values: Float[Tensor, "B T"],
    **columns: Any,
) -> Credit:
    """Generalised advantages, whitened over all trainable tokens of the step; returns are left as they are.

    Source: arXiv:1506.02438; whitening as in arXiv:1909.08593's training code. Needs ``values``.
    """
    advantages, returns = generalized_advantages(
        token_rewards=token_rewards, values=values, mask=mask, gamma=config.gamma, lam=config.lam
    )
    return masked_whiten(advantages, mask), returns


def grpo(
    *,
    token_rewards: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    group_id: Int[Tensor, " B"],
    config: AlgorithmConfig,
    **columns: Any,
) -> Credit:
    """Outcome minus the group's mean, over the group's standard deviation + 1e-6.

    Sources: GRPO arXiv:2402.03300; with ``norm_adv_by_std_in_grpo=False`` Dr. GRPO arXiv:2503.20783 (not divided).
    """
    groups = Groups.of(group_id, mask.any(dim=1))
    scores = outcome(token_rewards, mask)
    return _over_tokens(_by_std(groups.centred(scores), groups, scores, config), mask, token_rewards)


def grpo_passk(
    *,
    token_rewards: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    group_id: Int[Tensor, " B"],
    config: AlgorithmConfig,
    **columns: Any,
) -> Credit:
    """What a row adds to the best of k samples, averaged over all sets of k of its group that hold it.

    ``A_i = mean over S (|S| = k, i in S) of max(S) - max(S without i)``, the leave-one-out gradient of max@k
    (arXiv:2503.19595), over the group's standard deviation + 1e-6 where ``norm_adv_by_std_in_grpo``. With ``passk``
    equal to the group size only the best row has an advantage, best minus second best (a tie: none). A group with
    fewer survivors than ``passk`` uses their number. The constant factor k of the gradient is left out.
    """
    groups = Groups.of(group_id, mask.any(dim=1))
    scores = outcome(token_rewards, mask)
    gains = torch.zeros_like(scores)
    for group, size in enumerate(groups.size.tolist()):
        members = ((groups.index == group) & groups.present).nonzero().squeeze(1)
        if size > 1:
            gains[members] = _best_of_k_gain(scores[members], min(config.passk, size))
    return _over_tokens(_by_std(gains, groups, scores, config), mask, token_rewards)


def _best_of_k_gain(scores: Float[Tensor, " n"], k: int) -> Float[Tensor, " n"]:
    """``E relu(score_i - max of k - 1 others)``; that maximum is the others' j-th smallest with hypergeometric odds."""
    if k < 2:
        return torch.zeros_like(scores)
    n = len(scores)
    ordered, order = scores.sort()
    ways = math.comb(n - 1, k - 1)
    odds = scores.new_tensor([math.comb(j, k - 2) / ways for j in range(n - 1)])
    gains = torch.zeros_like(scores)
    for rank in range(n):
        others = torch.cat([ordered[:rank], ordered[rank + 1 :]])
        gains[order[rank]] = (odds * (ordered[rank] - others).clamp(min=0)).sum()
    return gains


def rloo(
    *,
    token_rewards: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    group_id: Int[Tensor, " B"],
    config: AlgorithmConfig,
    **columns: Any,
) -> Credit:
    """Outcome minus the mean of the *other* rows of the group (leave-one-out), not scaled (arXiv:2402.14740)."""
    groups = Groups.of(group_id, mask.any(dim=1))
    # score - mean of others = n / (n - 1) * (score - mean of all)
    factor = groups.size.double() / (groups.size - 1).clamp(min=1)
    return _over_tokens(groups.centred(outcome(token_rewards, mask)) * factor[groups.index], mask, token_rewards)


def reinforce_plus_plus(
    *,
    token_rewards: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    group_id: Int[Tensor, " B"],
    config: AlgorithmConfig,
    **columns: Any,
) -> Credit:
    """Discounted rewards to go, whitened over all trainable tokens of the step (arXiv:2501.03262).

    There is no group baseline; the paper's KL term is the KL in the reward.
    """
    returns = rewards_to_go(token_rewards=token_rewards, mask=mask, gamma=config.gamma)
    return masked_whiten(returns, mask), returns


def reinforce_plus_plus_baseline(
    *,
    token_rewards: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    group_id: Int[Tensor, " B"],
    config: AlgorithmConfig,
    **columns: Any,
) -> Credit:
    """Outcome minus the group's mean, then whitened over the trainable tokens of the step (arXiv:2501.03262).

    Rows without a surviving sibling have advantage 0 and are left out of the whitening.
    """
    groups = Groups.of(group_id, mask.any(dim=1))
    compared = mask & (groups.size > 1)[groups.index][:, None]
    centred = spread_over_tokens(groups.centred(outcome(token_rewards, mask)), mask, token_rewards)
    return masked_whiten(centred, compared), centred


def remax(
    *,
    token_rewards: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    group_id: Int[Tensor, " B"],
    config: AlgorithmConfig,
    baseline_score: Float[Tensor, " B"],
    **columns: Any,
) -> Credit:
    """Rewards to go minus the score of the prompt's greedy response (arXiv:2310.10505).

    Needs ``baseline_score``, one number per row, shaped as scores are: a greedy pass per prompt, handed to its samples
    by group. A row whose baseline is not finite (its greedy response failed) has advantage 0.
    """
    returns = rewards_to_go(token_rewards=token_rewards, mask=mask, gamma=config.gamma)
    usable = mask & baseline_score.isfinite()[:, None]
    return keep(returns - baseline_score.to(returns.dtype)[:, None], usable), returns


def opo(
    *,
    token_rewards: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    group_id: Int[Tensor, " B"],
    config: AlgorithmConfig,
    **columns: Any,
) -> Credit:
    """Outcome minus the group's length-weighted mean ``sum l r / sum l``, not scaled (arXiv:2505.23585).

    The length l is the number of trainable tokens.
    """
    groups = Groups.of(group_id, mask.any(dim=1))
    scores, length = outcome(token_rewards, mask), mask.sum(dim=1).double()
    baseline = groups.sum(scores * length) / groups.sum(length).clamp(min=1)
    return _over_tokens(groups.centred(scores, baseline), mask, token_rewards)


def gpg(
    *,
    token_rewards: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    group_id: Int[Tensor, " B"],
    config: AlgorithmConfig,
    **columns: Any,
) -> Credit:
    """Outcome minus the group's mean, times ``B / (B - M)`` (arXiv:2504.02546).

    M counts the rows of groups without spread, which give no gradient: the factor makes up for their share of the
    batch. (Some implementations count rows with score 0 in its place; the paper's M is used here.)
    """
    groups = Groups.of(group_id, mask.any(dim=1))
    scores = outcome(token_rewards, mask)
    telling = groups.present & groups.has_spread(scores)[groups.index]
    factor = groups.present.sum().double() / telling.sum().clamp(min=1)
    return _over_tokens(groups.centred(scores) * factor, mask, token_rewards)


def gdpo(
    *,
    token_rewards: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    group_id: Int[Tensor, " B"],
    config: AlgorithmConfig,
    reward_info: Sequence[Mapping[str, Any]],
    **columns: Any,
) -> Credit:
    """Weighted sum of per-component GRPO advantages, whitened over the rows of the step (arXiv:2601.05242).

    Reads the components ``gdpo_reward_keys`` (weights ``gdpo_reward_weights``) from ``reward_info``, not
    ``token_rewards``: shaping and the KL in the reward do not reach it. A row that lacks a component, or has no
    surviving sibling, has advantage 0 and is in no statistic.

    Raises:
        ConfigError: no components, or not one weight per component, are configured.
    """
    keys, weights = config.gdpo_reward_keys, config.gdpo_reward_weights or (1.0,) * len(config.gdpo_reward_keys)
    if not keys or len(keys) != len(weights):
        raise ConfigError(
            f"gdpo needs algorithm.gdpo_reward_keys and as many gdpo_reward_weights (or none), got {keys} and {weights}"
        )
    present = mask.any(dim=1)
    components = reward_components(reward_info=reward_info, keys=keys, scored=present).to(token_rewards.device)
    groups = Groups.of(group_id, present & components.isfinite().all(dim=1))
    total = torch.zeros(len(components), dtype=torch.float64, device=components.device)
    for column, weight in enumerate(weights):
        values = components[:, column]
        total += weight * _by_std(groups.centred(values), groups, values, config)
    compared = groups.present & (groups.size > 1)[groups.index]
    return _over_tokens(masked_whiten(total, compared), mask, token_rewards)


def _by_std(advantages: Tensor, groups: Groups, scores: Tensor, config: AlgorithmConfig) -> Tensor:
    if not config.norm_adv_by_std_in_grpo:
        return advantages
    return advantages / (groups.std(scores) + STD_EPSILON)[groups.index]


def _over_tokens(row_advantages: Tensor, mask: Tensor, like: Tensor) -> Credit:
    result = spread_over_tokens(row_advantages, mask, like)
    return result, result


ADVANTAGES: dict[str, Estimator] = {
    "gae": gae,
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "gdpo": gdpo,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": tir_optimal_token_baseline,
}
NEEDS: dict[str, frozenset[str]] = {name: frozenset() for name in ADVANTAGES} | {
    "gae": frozenset({"values"}),
    "remax": frozenset({"baseline_score", "baseline_length"}),
    "gdpo": frozenset({"reward_info"}),
    "optimal_token_baseline": frozenset({"old_log_probs", "old_sum_pi_squared"}),
    "tir_optimal_token_baseline": frozenset({"old_log_probs", "old_sum_pi_squared"}),
}
"""Columns that an estimator reads beyond those of every step; ``name?``: where it is there."""


def resolve(name: str) -> Estimator:
    """The registered estimator ``name`` or the user's own by dotted path.

    Raises:
        ConfigError: neither exists.
    """
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    if "." in name or ":" in name:
        return load(name)
    raise ConfigError(
        f"advantage estimator {name!r} is unknown: use one of {', '.join(ADVANTAGES)} or package.module:function"
    )


def estimate(
    name: str,
    *,
    token_rewards: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    group_id: Int[Tensor, " B"],
    config: AlgorithmConfig,
    columns: Mapping[str, Any],
) -> Credit:
    """What estimator ``name`` makes of a step; a user's own result in the dtype of ``token_rewards``, 0 where masked.

    Raises:
        ConfigError: there is no such estimator, or a user's own did not return two tensors of the mask's shape.
    """
    estimator = resolve(name)
    found = estimator(token_rewards=token_rewards, mask=mask, group_id=group_id, config=config, **columns)
    if name in ADVANTAGES:
        return found
    shapes = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in _parts(found)]
    if shapes != [tuple(mask.shape)] * 2:
        raise ConfigError(
            f"algorithm.adv_estimator={name} must return (advantages, returns), each of shape {tuple(mask.shape)} "
            f"(rows, tokens) as its argument mask: it returned {shapes}"
        )
    advantages, returns = (keep(part.to(token_rewards.dtype), mask) for part in found)
    return advantages, returns


def _parts(found: object) -> tuple[object, ...]:
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def needs_of(name: str) -> frozenset[str] | None:
    """Columns that estimator ``name`` reads beyond those of every step; None: it does not say (a user's function)."""
    if name in NEEDS:
        return NEEDS[name]
    needs = vars(resolve(name)).get("needs")
    return None if needs is None else frozenset(needs)
