#!/usr/bin/env bash
# Creates or refreshes .venv: the pinned packages of requirements/cpu.lock, the metadata-only
# `vllm` package, and this project (editable). Does nothing when .venv is already current.
#
# Usage: scripts/setup.sh            PYTHON=/path/to/python3.11 chooses the interpreter of a new .venv
#
# Bash and pip are enough: it runs before anything is installed, and offline once it has succeeded.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$(pwd -P)

lock=requirements/cpu.lock
metadata=requirements/vllm-metadata
venv_python=.venv/bin/python
stamp=.venv/.setup-stamp
log=.venv/setup.log

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

sha256() { if command -v sha256sum >/dev/null; then sha256sum "$@"; else shasum -a 256 "$@"; fi; }

# Everything that decides what .venv must hold. The path counts: scripts in .venv name it.
fingerprint() {
  { printf '%s\n' "$root"
    cat "$lock" pyproject.toml "$metadata/pyproject.toml" scripts/setup.sh
  } | sha256 | cut -d' ' -f1
}

is_current() { [ -x "$venv_python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; }

# ensurepip is asked for because Debian's python3 lacks it without the package python3-venv.
python_works() {
  "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    python_works "$PYTHON" && { echo "$PYTHON"; return; }
    fail "PYTHON=$PYTHON is not a Python 3.11 or newer with the venv module; point PYTHON at one that is."
  fi
  # 3.11 first: the lock was made with it, and CPU wheels of torch are built per Python version.
  for candidate in python3.11 python3 python3.12 python3.13 python3.14; do
    python_works "$candidate" && { echo "$candidate"; return; }
  done
  fail "no Python 3.11 or newer with the venv module was found; install Python 3.11, or set PYTHON to its path."
}

# Why an existing .venv cannot be refreshed in place; empty when it can.
venv_defect() {
  [ -x "$venv_python" ] || { echo "it has no working Python"; return; }
  "$venv_python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 ||
    { echo "its Python is older than 3.11 or has no pip"; return; }
  grep -qF "$root/.venv" .venv/bin/activate || echo "it was made for another directory"
}

ensure_venv() {
  local defect python version
  if [ -d .venv ]; then
    defect=$(venv_defect)
    [ -n "$defect" ] || return 0
    say "replacing .venv: $defect"
    rm -rf .venv
  fi
  python=$(find_python)
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  say "creating .venv with $python (Python $version)"
  [ "$version" = 3.11 ] ||
    say "note: $lock was made with Python 3.11; if a package is missing for $version, set PYTHON to a Python 3.11"
  "$python" -m venv "$root/.venv"
}

# pip's own chatter goes to the log; a failure is told in one place.
pip_install() {
  "$venv_python" -m pip install --disable-pip-version-check --no-input "$@" >>"$log" 2>&1 || pip_failed
}

pip_failed() {
  local details="log: $log"
  if grep -qF "No matching distribution found for $torch" "$log"; then
    ! grep -qF 'Retrying (' "$log" || details="pip also met network errors, $details"
    fail "the CPU build of torch ($torch) was not found: add PyTorch's CPU wheel index to pip, for example through PIP_EXTRA_INDEX_URL, and run this again ($details)."
  fi
  { echo "setup: pip failed; the end of its log ($log):"
    grep -vE '^WARNING: (Location|Skipping)' "$log" | tail -n 15 | sed 's/^/    /'
  } >&2
  exit 1
}

install_everything() {
  : >"$log"
  say "installing $(grep -c '==' "$lock") pinned packages from $lock (2 to 5 minutes and 4 GB when .venv is new, seconds when it is not)"
  # torch alone first: the one package that needs an extra index should fail before 180 downloads.
  pip_install --no-deps "$torch"
  pip_install --no-deps -r "$lock"
  say "installing the metadata-only vllm package and this project (seconds)"
  pip_install --no-deps --no-build-isolation "./$metadata"
  rm -rf "$metadata/build" "$metadata"/*.egg-info
  pip_install --no-deps --no-build-isolation -e .
}

torch=$(grep '^torch==' "$lock") || fail "$lock pins no torch, which everything here needs; restore it, or run scripts/lock.py."
wanted=$(fingerprint)
is_current && exit 0
started=$SECONDS
ensure_venv
rm -f "$stamp"
install_everything
printf '%s\n' "$wanted" >"$stamp"
say ".venv is ready ($((SECONDS - started)) s)"
