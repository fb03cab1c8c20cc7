#!/usr/bin/env bash
# Makes the environments that the Makefile uses, from nothing but a Python >= 3.11.
#
#   setup.sh base     .venv        this project, editable, with what the tests, the demo and the linters need
#   setup.sh engine   .venv-vllm   a real vLLM for CPUs and this project, editable
#
# Each leaves a stamp (.ready) that make compares with the files the environment is built from; running again is cheap.
# PYTHON=/path/to/python3.12 chooses the interpreter. Errors are one line and a hint; pip's own errors are not hidden.
set -euo pipefail
cd "$(dirname "$0")/../.."

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { printf 'setup: error: %s\n' "$1" >&2; [ -z "${2:-}" ] || printf 'hint: %s\n' "$2" >&2; exit 1; }

# The first interpreter that runs, is new enough and can make a virtual environment. A name on PATH proves nothing: a
# version manager's shim may stand there without the version, and Debian's python3 comes without ensurepip.
find_python() {
  local candidate old="" bare=""
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3 python3.14 /usr/bin/python3 python}; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    "$candidate" -c '' >/dev/null 2>&1 || continue
    if ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then old=$candidate; continue; fi
    if ! "$candidate" -c 'import venv, ensurepip' >/dev/null 2>&1; then bare=$candidate; continue; fi
    printf '%s\n' "$candidate"
    return
  done
  if [ -n "$bare" ]; then
    local version
    version=$("$bare" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    fail "$bare cannot make a virtual environment: its venv module (ensurepip) is missing" \
         "apt-get install python$version-venv, or PYTHON=/path/to/another/python3 make ..."
  fi
  [ -z "$old" ] || fail "$("$old" --version 2>&1) is too old: Python 3.11 or newer is needed" "PYTHON=/path/to/python3.11 make ..."
  fail "no ${PYTHON:-python3.11 or newer} found" "install Python 3.11 or newer, or PYTHON=/path/to/python3 make ..."
}

# pip speaks only when something fails: its whole output is kept and shown then.
quietly() {
  local log
  log=$(mktemp)
  if ! "$@" >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    fail "this command failed: $*"
  fi
  rm -f "$log"
}

new_environment() {
  local folder=$1 python
  python=$(find_python)
  if [ ! -x "$folder/bin/python" ] || ! "$folder/bin/python" -c 'import pip' >/dev/null 2>&1; then
    say "making $folder with $("$python" --version 2>&1)"
    rm -rf "$folder"
    quietly "$python" -m venv "$folder"
  fi
  # --group (PEP 735) came with pip 25.1.
  if ! "$folder/bin/python" -c 'import pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (25, 1))'; then
    quietly "$folder/bin/python" -m pip install --upgrade 'pip>=25.1'
  fi
}

base() {
  new_environment .venv
  say "installing kvtools and its tests into .venv"
  quietly .venv/bin/python -m pip install --editable '.[gate,redis,s3,hf,serde]' --group dev
  # Without what it asks for: a torch for CUDA and a second build of itself. It loads and moves bytes without either.
  quietly .venv/bin/python -m pip install --no-deps 'nixl==1.5.2' 'nixl-cu12==1.5.1'
  touch .venv/.ready
}

engine() {
  new_environment .venv-vllm
  say "installing a real vLLM (CPU, about 3.4 GB) into .venv-vllm"
  # torch first and by itself: the CPU build must be there before anything asks for "torch" and gets a CUDA one.
  quietly .venv-vllm/bin/python -m pip install 'torch==2.13.0'
  quietly .venv-vllm/bin/python -m pip install --requirement tests/vllm-requirements.txt --editable . --group test
  # LMCache's server for the tier of that name: it needs torch, and nothing else that is not here already. In a folder of its
  # own, so that the engine does not see it.
  quietly .venv-vllm/bin/python -m pip install --no-deps --upgrade --target .venv-vllm/lmcache 'lmcache==0.5.6'
  # The engine's metadata pulls these in; built for another torch, they fail to import and take transformers with them.
  # Nothing that works on text misses them.
  quietly .venv-vllm/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
  touch .venv-vllm/.ready
}

case "${1:-}" in
  base) base ;;
  engine) engine ;;
  *) fail "usage: setup.sh base | engine" ;;
esac
