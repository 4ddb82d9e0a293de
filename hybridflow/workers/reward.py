"""The reward worker: decodes responses where they are and scores them, by function or with a reward model's scores."""

from __future__ import annotations

import torch

from hybridflow.batch.batch import Batch
from hybridflow.config.root import PPOConfig
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.dispatch.group import RankContext
from hybridflow.dispatch.register import register
from hybridflow.rewards.result import Result, with_model
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

    @register(dispatch="DP_COMPUTE", reads=READS, writes=("score", "reward_info", "response_text", "valid"))
    def compute_reward(self, batch: Batch, *, total_rows: int | None = None) -> Batch:
        """score ``[b]`` float64, reward_info, response_text, and valid without the samples whose scoring failed.

        With a reward model the score is its own, plus that of a custom function where there is one.

        A failed sample has score NaN, never 0: nothing downstream may read it. ``total_rows``: of all ranks together,
        of which ``reward.max_failed_share`` is taken; None: this rank's.
        """
        valid = batch["valid"].clone()
        positions = valid.nonzero().squeeze(1).tolist()
        ids, lengths = batch["response_ids"].tolist(), batch["response_length"].tolist()
        texts = self._tokenizer.decode_responses([row[:length] for row, length in zip(ids, lengths, strict=True)])
        results = [Result(score=0.0)] * len(positions)
        if self._by_function:
            results = self._runner.score(_samples(batch, positions, texts), of=total_rows)
        if self._by_model:
            scores = batch["model_score"][positions].tolist()
            results = [with_model(result, score) for result, score in zip(results, scores, strict=True)]
        score = torch.full((len(batch),), float("nan"), dtype=torch.float64)
        info: list[dict[str, object]] = [{} for _ in range(len(batch))]
        for position, result in zip(positions, results, strict=True):
            info[position] = dict(result.info)
            if result.valid:
                score[position] = result.score
            else:
                valid[position] = False
                info[position] = {"failure": result.cause}
        return Batch({"score": score, "reward_info": info, "response_text": texts, "valid": valid})


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
