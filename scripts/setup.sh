#!/usr/bin/env bash
# Makes .venv with the locked CPU stack. Safe to run again: it does nothing when the lock hasn't changed.
#   PYTHON=python3.12 make setup     another interpreter (3.11 or newer)
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
LOCK=requirements/cpu.lock
STAMP=.venv/.installed
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

if [ -f "$STAMP" ] && cmp -s "$STAMP" "$LOCK"; then exit 0; fi

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: rlhf needs Python 3.11 or newer, $PYTHON is $("$PYTHON" --version); set PYTHON=python3.11" >&2; exit 1; }
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || {
  echo "error: $PYTHON has no venv module; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
command -v cc >/dev/null || {
  echo "error: a C compiler is needed for one small dependency; on Debian or Ubuntu: apt-get install gcc python3-dev" >&2
  exit 1; }

[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
PIP=".venv/bin/pip --quiet --quiet --disable-pip-version-check install"
TORCH=$(grep '^torch==' "$LOCK")
echo "installing $TORCH and $(grep -c '==' "$LOCK") packages into .venv, about two minutes"
# Where pip is configured with a folder or index that has this build of torch, it is taken from there; for everyone else
# it comes from PyTorch's own CPU index. It is not on PyPI.
$PIP --no-deps "$TORCH" 2>/dev/null || $PIP --no-deps "$TORCH" --index-url "$TORCH_CPU_INDEX"
# --no-deps: the lock is complete, and leaves out on purpose what some packages ask for (requirements/overrides.txt).
$PIP --no-deps --requirement "$LOCK"
$PIP --no-deps --editable .
cp "$LOCK" "$STAMP"
echo "ready: .venv"
