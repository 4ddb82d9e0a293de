#!/usr/bin/env bash
# The whole suite, from a fresh clone: installs into .venv (once), checks the floors, then runs the tests.
#
#   bash scripts/test.sh [PYTEST ARGUMENT]...
#
# Tests marked slow (full products of layouts, long chaos) run by hand: pytest -m slow.
#
# vLLM and Ray change the process that they run in (thread counts, the torch.distributed world, signal handlers), so
# their tests run in processes of their own. tests/conftest.py sets the environment variables that both want. Most other
# tests compute in one thread: two processes share them. Faults watch the clock: one at a time.
# Exit code: 0 only if every part passed and at least one test ran. The ten slowest tests of all parts close the output.
# HYBRIDFLOW_VENV names another environment; HYBRIDFLOW_SKIP_INSTALL=1 takes it as it is.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ -n "${HYBRIDFLOW_SKIP_INSTALL:-}" ] || bash scripts/install.sh --extra dev || exit 1
venv=${HYBRIDFLOW_VENV:-.venv}
python=$venv/bin/python
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
status=0

part() { # part NAME MARKERS SECONDS ARGUMENT...: one pytest process; a part without tests is fine
  local name=$1 markers=$2 seconds=$3
  shift 3
  echo "== $name"
  timeout --kill-after=30 "$seconds" "$python" -m pytest -q -m "$markers" --junitxml="$reports/$name.xml" "$@" </dev/null
  local code=$?
  case $code in
    0 | 5) ;;
    124 | 137) echo "== $name: not done after $seconds s" >&2; status=1 ;;
    *) status=1 ;;
  esac
}

echo "== lint"
"$venv/bin/ruff" check . || status=1
"$venv/bin/ruff" format --check --quiet . || { echo "ruff format would change files (make format)"; status=1; }
"$venv/bin/lint-imports" || status=1

plain="not vllm and not ray and not slow and not real_model"
part unit "$plain" 2000 -n 2 --dist loadfile --ignore=tests/faults "$@"
part faults "$plain" 1000 --ignore=tests/unit --ignore=tests/invariants --ignore=tests/integration "$@"
part vllm "vllm and not ray and not slow and not real_model" 1000 "$@"
part ray "ray and not slow and not real_model" 1500 "$@"

"$python" scripts/slowest_tests.py "$reports" || status=1
exit $status
