#!/usr/bin/env bash
# The CPU suite on every supported Python found, with the oldest and the newest jax
# that it gets.  One wheel serves all jax versions of a Python, and one (abi3) wheel
# every Python from 3.12 on: each is built once and installed everywhere.
set -euo pipefail
cd "$(dirname "$0")/.."
oldest="jax==0.10.2 jaxlib==0.10.2"
newest="jax<0.13 jaxlib<0.13"
wheels=.venvs/wheels
rm -rf "$wheels"

find_python() { # version -> the first that runs, or nothing (a pyenv shim may not)
  local python
  for python in "$(command -v "python$1")" "$HOME"/.pyenv/versions/"$1".*/bin/python; do
    if "$python" -c "" 2>/dev/null; then
      echo "$python"
      return
    fi
  done
}

build_wheel() { # python, version
  "$1" -m venv ".venvs/build-$2"
  ".venvs/build-$2/bin/pip" wheel --quiet --no-deps -w "$wheels/$2" .
}

for version in 3.11 3.12 3.13; do
  python=$(find_python "$version") || true
  if [ -z "$python" ]; then
    echo "Python $version: not found, left out"
    continue
  fi
  # 3.13 uses the wheel that 3.12 built.
  built=$version
  [ "$version" = 3.13 ] && [ -d "$wheels/3.12" ] && built=3.12
  [ -d "$wheels/$built" ] || build_wheel "$python" "$built"
  tested=
  for jax in "$oldest" "$newest"; do
    venv=.venvs/test-$version
    rm -rf "$venv"
    "$python" -m venv "$venv"
    # shellcheck disable=SC2086
    "$venv/bin/pip" install --quiet $(printf '%s ' "$wheels/$built"/*.whl) $jax \
      "pytest>=8" "hypothesis>=6.100" "flatbuffers>=24" "matplotlib>=3.8" "tqdm>=4.66"
    found=$("$venv/bin/pip" list 2>/dev/null | grep -E '^jax ')
    [ "$found" != "$tested" ] || continue # this Python gets one version only
    tested=$found
    echo "== Python $version, $found"
    "$venv/bin/pytest" -q -m "not gpu"
  done
done
