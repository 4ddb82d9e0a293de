"""ReMax (arXiv:2310.10505): PPO's dataflow with one more pass, a greedy response per prompt as its baseline."""

from __future__ import annotations

import torch

from hybridflow.batch.batch import Batch
from hybridflow.trainer.ppo import PPOTrainer


class ReMaxTrainer(PPOTrainer):
    """Adds ``baseline_score`` and ``baseline_length`` to what is generated."""

    def sample(self, step: int) -> Batch:
        """Responses of the next prompts, with score and length of their prompt's greedy response."""
        prompts = self.run.next_prompts(self.config.actor_rollout_ref.rollout.n)
        once = prompts.rows(prompts["sample_index"] == 0)
        sampled = self.roles.rollout.generate_sequences(prompts, step=step)
        greedy = self.roles.rollout.generate_sequences(once, step=step, mode="greedy")
        responses = self.wait("gen", sampled)
        baseline = self.judge(once.merge(self.wait("gen", greedy)))
        ids = prompts["group_id"], once["group_id"]
        return prompts.merge(responses).with_columns(
            baseline_score=by_group(*ids, baseline["score"]),
            baseline_length=by_group(*ids, baseline["response_length"]),
        )


def by_group(group_id: torch.Tensor, known_id: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The value of each row's group, ``[B]``; ``known_id`` names every group once, in any order."""
    place = {group: i for i, group in enumerate(known_id.tolist())}
    return values[torch.tensor([place[group] for group in group_id.tolist()], dtype=torch.long)]
