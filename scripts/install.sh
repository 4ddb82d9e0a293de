#!/usr/bin/env bash
# Makes .venv beside this repository and installs hybridflow into it. A second run with nothing new takes no time.
#
#   bash scripts/install.sh [--extra NAME]... [--wheel-index URL] [--python PATH] [--force]
#
#   --extra NAME       a further extra of pyproject.toml (dev, docs ...); cpu or gpu is picked by itself,
#                      unless one of the two is named
#   --wheel-index URL  a further package index, for the CPU build of torch (also: HYBRIDFLOW_WHEEL_INDEX)
#   --python PATH      the Python that .venv is made with (also: PYTHON); 3.11 or 3.12
#   --force            install even if the stamp says that nothing is new
#
# HYBRIDFLOW_VENV names another folder for the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${HYBRIDFLOW_VENV:-.venv}
index=${HYBRIDFLOW_WHEEL_INDEX:-}
python=${PYTHON:-}
force=
extras=()

fail() { echo "install: $*" >&2; exit 1; }
usable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' >/dev/null 2>&1; }

while [ $# -gt 0 ]; do
  case "$1" in
    --extra) [ $# -ge 2 ] || fail "--extra needs a name"; extras+=("$2"); shift 2 ;;
    --wheel-index) [ $# -ge 2 ] || fail "--wheel-index needs a URL"; index=$2; shift 2 ;;
    --python) [ $# -ge 2 ] || fail "--python needs a path"; python=$2; shift 2 ;;
    --force) force=1; shift ;;
    -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *) fail "unknown option $1 (see --help)" ;;
  esac
done

case " ${extras[*]:-} " in
  *" cpu "* | *" gpu "*) ;;
  *) if nvidia-smi -L 2>/dev/null | grep -q GPU; then extras+=(gpu); else extras+=(cpu); fi ;;
esac

for extra in "${extras[@]}"; do # pip would only warn
  grep -q "^$extra = \[" pyproject.toml || fail "no extra '$extra' in pyproject.toml"
done

# The stamp: what was installed (a hash of the files that decide it), then one extra a line.
wanted=$({ pwd; sed '/^\[tool\.ruff\]/,$d' pyproject.toml; cat setup.py hybridflow/__init__.py; } | cksum | tr ' ' '-')
stamp=$venv/.hybridflow-stamp
if [ -z "$force" ] && [ -x "$venv/bin/python" ] && [ "$(head -n 1 "$stamp" 2>/dev/null)" = "$wanted" ]; then
  missing=
  for extra in "${extras[@]}"; do grep -qx "$extra" "$stamp" || missing=1; done
  [ -n "$missing" ] || exit 0
  # shellcheck disable=SC2013
  for extra in $(tail -n +2 "$stamp"); do extras+=("$extra"); done
fi

if [ ! -x "$venv/bin/python" ]; then
  if [ -z "$python" ]; then
    for candidate in python3 python3.12 python3.11 python; do
      if usable "$candidate"; then python=$candidate; break; fi
    done
    [ -n "$python" ] || fail "no Python 3.11 or 3.12 found: install one, or name it with --python PATH"
  fi
  usable "$python" || fail "$python is not Python 3.11 or 3.12"
  echo "install: making $venv with $("$python" --version)"
  rm -rf "$venv"
  if ! "$python" -m venv "$venv"; then
    rm -rf "$venv" # half of one would be taken for a whole one next time
    fail "'$python -m venv' failed: on Debian and Ubuntu, apt-get install python3-venv"
  fi
fi
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null 2>&1 ||
  fail "$venv has no pip (its making was interrupted?): remove that folder and run this again"

list=$(printf '%s\n' "${extras[@]}" | sort -u | paste -sd, -)
echo "install: hybridflow[$list] into $venv (the first time takes minutes: torch and vLLM are large)"
rm -f "$stamp"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input install)
[ -z "$index" ] || pip+=(--extra-index-url "$index")

run_pip() { # on a terminal: pip's current line in place of hundreds; elsewhere: errors only
  if [ -t 1 ]; then
    "${pip[@]}" --progress-bar off "$@" |
      while IFS= read -r line; do printf '\r\033[K  %.100s' "$line"; done
    local code=${PIPESTATUS[0]}
    printf '\r\033[K'
    return "$code"
  fi
  "${pip[@]}" --quiet --quiet "$@"
}

if ! run_pip --editable ".[$list]"; then
  echo "install: pip failed (its message is above)." >&2
  case ",$list," in
    *,cpu,*)
      echo "install: if it found no torch with '+cpu' in its version: give PyTorch's CPU wheel index (its 'Get Started'" >&2
      echo "install: page shows the address) with --wheel-index URL or HYBRIDFLOW_WHEEL_INDEX=URL." >&2 ;;
  esac
  exit 1
fi

# vLLM drags these in. Nothing here uses them, and one that is built for another torch breaks transformers.
for package in torchvision torchaudio torchcodec; do
  if "$venv/bin/python" -c "import importlib.metadata as m; m.version('$package')" 2>/dev/null &&
    ! "$venv/bin/python" -c "import $package" >/dev/null 2>&1; then
    echo "install: removing $package, which does not import beside this torch"
    "$venv/bin/python" -m pip --disable-pip-version-check uninstall --quiet --yes "$package"
  fi
done

{ echo "$wanted"; printf '%s\n' "${extras[@]}" | sort -u; } >"$stamp"
echo "install: done"
