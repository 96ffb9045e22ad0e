#!/usr/bin/env bash
# A first quarter of an hour on a GPU, and the hours after it, in calls of at most ten minutes
# (scripts/benches/gpu_day.py); without a network, git or Rust. Every result is a line of JSON in
# runs/gpu_day/results.jsonl, and a call that was stopped goes on where it was.
#
#   scripts/gpu_day.sh pack     where jspeed is built: its wheel, those that a GPU image lacks, programs, in dist/
#   scripts/gpu_day.sh quarter  on the GPU: rates, then r92's and jspeed3's steps, then tuned ones
#   scripts/gpu_day.sh more     other kernels and recipes beside each other
#   scripts/gpu_day.sh product  runs as a user makes them
#   scripts/gpu_day.sh tests    tests/gpu, where pytest is installed
#   scripts/gpu_day.sh table    predicted beside measured, from the results so far
#   scripts/gpu_day.sh plan     the same by the measured rates, which jspeed plan takes from then on
#   scripts/gpu_day.sh          all of these but pack
#
# Exit code 75: make the call again for the rest. The image needs Python 3.12, JAX for CUDA, and what
# else pyproject.toml names; dist/ is carried to it. Environment: PYTHON (default .venv/bin/python,
# else python3), DAY (the folder of results and of all else that is kept), OUT (a folder for copies:
# results, and compiled programs in pieces below 16 MB), BACK (dist/back: what an earlier call left
# in its OUT, for the next machine), PART_SECONDS (520), GPU_DAY=toy (tries it on a CPU).
set -u
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=$(command -v python3)
if [ -z "$python" ]; then
  echo "error: there is no Python at ${PYTHON:-.venv/bin/python}, and no python3; set PYTHON" >&2
  exit 2
fi
day=${DAY:-runs/gpu_day}
dist=${DIST:-dist}

pack() {
  rm -rf "$dist" && mkdir -p "$dist"
  "$python" -m maturin build --release --quiet --out "$dist"
  "$python" -m pip download --quiet --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
    --platform manylinux2014_x86_64 --platform any --dest "$dist" 'platformdirs>=4.0' || return
  # Programs for a GPU that is not here; the quarter sees whether one loads them.
  PYTHONPATH=.venv/aot:scripts TF_CPP_MIN_LOG_LEVEL=3 "$python" -m benches.elsewhere "$dist"
  ls -s "$dist"
}

# Installs jspeed's wheel, and others that are not there, into a folder of its own, so that nothing
# of the image changes; a wheel that has changed replaces what it installed before.
prepare() {
  mkdir -p "$day/site" || exit 2
  day=$(cd "$day" && pwd)
  export PYTHONUNBUFFERED=1 DAY=$day DIST=$dist JSPEED_CACHE=$day/cache BACK=${BACK:-$dist/back}
  # Several processes share the device's memory.
  export XLA_PYTHON_CLIENT_PREALLOCATE=false
  export PYTHONPATH=$day/site:$PWD/scripts:$PWD
  if [ -d /usr/local/cuda/bin ]; then export PATH=$PATH:/usr/local/cuda/bin; fi
  for wheel in "$dist"/*.whl; do
    [ -e "$wheel" ] || continue
    name=$(basename "$wheel" | sed 's/-.*//')
    stamp=$day/site/.$name.sha256
    is=$(sha256sum <"$wheel")
    if [ -e "$stamp" ]; then
      [ "$is" = "$(cat "$stamp")" ] && continue
    elif [ "$name" != jspeed ] &&
      "$python" -c "import importlib.metadata as m; m.version('$name')" 2>/dev/null; then
      continue
    fi
    "$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$day/site" "$wheel" &&
      echo "$is" >"$stamp"
  done
  "$python" -c 'import jspeed._dataloader' 2>/dev/null || {
    echo "error: jspeed is not installed and $dist/ has no wheel for this Python; run scripts/gpu_day.sh pack where Rust is" >&2
    exit 2
  }
}

part() {
  case $1 in
  tests)
    "$python" -c 'import pytest' 2>/dev/null || { echo 'tests: pytest is not installed, skipped'; return 0; }
    JSPEED_TEST_GPU=1 timeout "${PART_SECONDS:-520}" "$python" -m pytest -q tests/gpu
    ;;
  quarter | more | product | table | plan)
    timeout --foreground --kill-after=5 590 "$python" -m benches.gpu_day "$1" "$day" ${OUT:+"$OUT"}
    ;;
  *)
    echo "error: $1 is no part; scripts/gpu_day.sh takes pack, quarter, more, product, tests, table or plan" >&2
    exit 2
    ;;
  esac
}

if [ "${1:-}" = pack ]; then
  pack
  exit
fi
prepare
if [ $# -gt 0 ]; then
  part "$1"
  exit
fi
for each in quarter more product; do
  code=75
  while [ "$code" -eq 75 ]; do
    part "$each"
    code=$?
  done
done
part tests
part table
part plan
