#!/usr/bin/env bash
# One node of a Ray cluster, in the foreground: it ends with its daemons, and its daemons end with it.
#
#   bash scripts/ray_node.sh head PORT [RAY ARGUMENT]...           # on the first node
#   bash scripts/ray_node.sh worker HOST:PORT [RAY ARGUMENT]...    # on every other node
#
# Then, on the first node: python -m hybridflow.main_ppo ray_kwargs.ray_init.address=HOST:PORT trainer.nnodes=N ...
# HYBRIDFLOW_VENV names the virtual environment (default: .venv of the checkout).
#
# A dead node is noticed within 10 seconds with the health checks below; Ray's own defaults take about a minute when a
# node is cut off rather than killed. They must be set where the head starts; each is left alone when it is set already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ray=${HYBRIDFLOW_VENV:-.venv}/bin/ray
kind=${1:?head or worker}
where=${2:?head: PORT; worker: HOST:PORT of the head}
shift 2

export RAY_health_check_initial_delay_ms=${RAY_health_check_initial_delay_ms:-1000}
export RAY_health_check_period_ms=${RAY_health_check_period_ms:-1000}
export RAY_health_check_timeout_ms=${RAY_health_check_timeout_ms:-1500}
export RAY_health_check_failure_threshold=${RAY_health_check_failure_threshold:-3}
export RAY_USAGE_STATS_ENABLED=${RAY_USAGE_STATS_ENABLED:-0}
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
export RAY_prestart_worker_first_driver=0 # idle workers that no group would use
# Where a token lies, a head asks for it by itself and a worker (Ray 2.60) forgets to show it.
if [ -z "${RAY_AUTH_MODE:-}" ] && [ -f "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ]; then
  export RAY_AUTH_MODE=token
fi
# Ray's workers import hybridflow and a user's reward from here, as the driver does.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

case $kind in
  head) exec "$ray" start --block --head --port="$where" "$@" ;;
  worker) exec "$ray" start --block --address="$where" "$@" ;;
  *) echo "head or worker, not $kind" >&2; exit 2 ;;
esac
