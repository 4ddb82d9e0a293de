#!/usr/bin/env bash
# GRPO on SmolLM2-135M-Instruct: sums of two numbers from reasoning-gym, scored by the task's own verifier.
# Usage: bash examples/smollm2_arithmetic/run.sh [overrides ...], from the repository's root.
set -euo pipefail
PYTHON=${PYTHON:-python}
MODEL=${MODEL:-models/smollm2}
TASK='reasoning_gym:basic_arithmetic?operators=+&min_terms=2&max_terms=2&max_digits=2&allow_parentheses=false&allow_negation=false&instruction=Answer in one short sentence.'

if [[ ! -f "$MODEL/config.json" ]]; then
  "$PYTHON" scripts/prepare_smollm2.py --out "$MODEL"
fi

exec "$PYTHON" -m hybridflow.main_ppo \
  actor_rollout_ref.model.path="$MODEL" \
  "data.train_files=['$TASK']" \
  "data.val_files=['$TASK']" \
  data.generated_size=4096 \
  data.generated_val_size=128 \
  data.train_batch_size=16 \
  data.max_prompt_length=64 \
  data.max_response_length=32 \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.actor.ppo_mini_batch_size=8 \
  actor_rollout_ref.actor.optim.lr=1e-5 \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=4096 \
  trainer.experiment_name=smollm2_arithmetic \
  trainer.total_training_steps=30 \
  trainer.test_freq=10 \
  trainer.log_val_generations=8 \
  "$@"
