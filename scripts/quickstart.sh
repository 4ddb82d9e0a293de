#!/usr/bin/env bash
# From a fresh clone to a model that has visibly got better: installs into .venv (once), then runs the main job.
# Every argument is an override of the job: bash scripts/quickstart.sh trainer.total_training_steps=10
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/install.sh
exec "${HYBRIDFLOW_VENV:-.venv}/bin/python" -m hybridflow.main_ppo "$@"
