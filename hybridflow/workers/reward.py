"""The reward worker: decodes responses where they are and scores them, by function or with a reward model's scores."""

from __future__ import annotations

from bisect import bisect_left

import torch

from hybridflow.batch.batch import Batch
from hybridflow.config.root import PPOConfig
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.dispatch.group import RankContext
from hybridflow.dispatch.register import register
from hybridflow.rewards.result import STEP_REWARDS, Result, RewardError, weighed, with_model, with_own_score
from hybridflow.rewards.runner import RewardRunner

READS = (
    "response_ids",
    "response_length",
    "valid",
    "data_source",
    "ground_truth",
    "extra_info",
    "model_score?",
)


class RewardWorker:
    """One rank of the scorer.

    Args:
        context: where this rank runs.
        config: the whole configuration.
        tokenizer_path: folder of the tokenizer that decodes.
    """

    def __init__(self, context: RankContext, *, config: PPOConfig, tokenizer_path: str) -> None:
        model = config.actor_rollout_ref.model
        self._tokenizer = load_tokenizer(tokenizer_path, trust_remote_code=model.trust_remote_code)
        self._runner = RewardRunner(config.reward)
        self._by_model = config.reward.reward_model.enable
        self._by_function = not self._by_model or config.reward.custom_reward_function.path is not None
        self._weights = config.reward.component_weights
        self._places_steps = config.reward.step_rewards

    @register(
        dispatch="DP_COMPUTE", reads=READS, writes=("score", "reward_info", "response_text", "valid", "token_scores?")
    )
    def compute_reward(self, batch: Batch, *, total_rows: int | None = None) -> Batch:
        """score ``[b]`` float64, reward_info, response_text, and valid without the samples whose scoring failed.

        With a reward model the score is its own, plus that of a custom function where there is one; with
        ``reward.component_weights`` it is the weighted sum of those components. token_scores ``[b, T]`` float32, with
        ``reward.step_rewards``, holds the function's rewards of parts of a response at the token that ends each.

        A failed sample has score NaN, never 0: nothing downstream may read it. ``total_rows``: of all ranks together,
        of which ``reward.max_failed_share`` is taken; None: this rank's.

        Raises:
            RewardError: a function returned step rewards that nobody asked for.
        """
        valid = batch["valid"].clone()
        positions = valid.nonzero().squeeze(1).tolist()
        ids, lengths = batch["response_ids"].tolist(), batch["response_length"].tolist()
        texts = self._tokenizer.decode_responses([row[:length] for row, length in zip(ids, lengths, strict=True)])
        results = [Result(score=0.0)] * len(positions)
        if self._by_function:
            results = self._runner.score(_samples(batch, positions, texts), of=total_rows)
            results = [with_own_score(result) for result in results] if self._weights else results
        if self._by_model:
            scores = batch["model_score"][positions].tolist()
            results = [with_model(result, score) for result, score in zip(results, scores, strict=True)]
        results = [weighed(result, self._weights) for result in results] if self._weights else results
        score = torch.full((len(batch),), float("nan"), dtype=torch.float64)
        info: list[dict[str, object]] = [{} for _ in range(len(batch))]
        for position, result in zip(positions, results, strict=True):
            info[position] = dict(result.info)
            if result.valid:
                score[position] = result.score
            else:
                valid[position] = False
                info[position] = {"failure": result.cause}
        added = {"score": score, "reward_info": info, "response_text": texts, "valid": valid}
        return Batch({**added, **self._token_scores(batch, results, positions)})

    def _token_scores(self, batch: Batch, results: list[Result], positions: list[int]) -> dict[str, torch.Tensor]:
        if not self._places_steps:
            if any(STEP_REWARDS in result.info for result in results):
                raise RewardError(
                    f"the reward function returned {STEP_REWARDS}: set reward.step_rewards=True to use it"
                )
            return {}
        scores = torch.zeros(batch["response_ids"].shape, dtype=torch.float32)
        for position, result in zip(positions, results, strict=True):
            ids = batch["response_ids"][position, : int(batch["response_length"][position])].tolist()
            for characters, reward in result.info.get(STEP_REWARDS, ()):
                scores[position, self._token_that_ends(ids, characters)] += reward
        return {"token_scores": scores}

    def _token_that_ends(self, ids: list[int], characters: int) -> int:
        """Position of the first token with which the decoded response has ``characters`` characters, or of the last."""

        def decoded(count: int) -> int:
            return len(self._tokenizer.decode_responses([ids[:count]])[0])

        return min(bisect_left(range(1, len(ids) + 1), characters, key=decoded), len(ids) - 1)


def _samples(batch: Batch, positions: list[int], texts: list[str]) -> list[dict[str, object]]:
    return [
        {
            "data_source": batch.objects("data_source")[i],
            "solution_str": texts[i],
            "ground_truth": batch.objects("ground_truth")[i],
            "extra_info": batch.objects("extra_info")[i],
        }
        for i in positions
    ]
