#!/usr/bin/env bash
# hybridflow on the nodes of one Slurm job:
#   sbatch --nodes=2 --gpus-per-node=8 examples/cluster/slurm.sh trainer.n_gpus_per_node=8 [KEY=VALUE]...
#SBATCH --job-name=hybridflow
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=hybridflow-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?run me with sbatch, from the checkout}"
venv=${HYBRIDFLOW_VENV:-.venv}
port=${RAY_PORT:-6379}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname --ip-address | awk '{print $1}')

srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" bash scripts/ray_node.sh head "$port" \
  --node-ip-address="$first" &
if [ "${#nodes[@]}" -gt 1 ]; then
  others=$(IFS=,; echo "${nodes[*]:1}")
  srun --overlap --nodes=$((${#nodes[@]} - 1)) --nodelist="$others" bash scripts/ray_node.sh worker "$first:$port" &
fi

# The driver refuses slots that are not there: wait until every node has joined (five minutes at most).
for _ in $(seq 60); do
  joined=$("$venv/bin/python" -c "
import ray
ray.init(address='$first:$port', log_to_driver=False, logging_level='ERROR')
print(sum(node['Alive'] for node in ray.nodes()))" 2>/dev/null || echo 0)
  [ "$joined" -ge "${#nodes[@]}" ] && break
  sleep 5
done

# exec would end the Ray nodes with the script; so the driver runs behind us and gets the signal that we get.
"$venv/bin/python" -m hybridflow.main_ppo ray_kwargs.ray_init.address="$first:$port" \
  trainer.nnodes="${#nodes[@]}" trainer.save_freq=20 trainer.max_restarts=3 "$@" &
driver=$!
trap 'kill -TERM "$driver"' TERM
code=0
wait "$driver" || code=$?
while kill -0 "$driver" 2>/dev/null; do code=0; wait "$driver" || code=$?; done # a trap ends the first wait
# 143: saved after SIGTERM; 4: a loss that another start may overcome.
if [ "$code" -eq 143 ] || [ "$code" -eq 4 ]; then scontrol requeue "$SLURM_JOB_ID" || true; fi
kill $(jobs -p) 2>/dev/null || true
exit "$code"
