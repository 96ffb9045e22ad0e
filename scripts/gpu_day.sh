#!/usr/bin/env bash
# The first hour on a GPU, in parts of at most ten minutes (scripts/benches/gpu_day.py); without a network and without
# Rust. Every result is a line of JSON in runs/gpu_day/results.jsonl, and a part that was stopped goes on where it was.
#
#   scripts/gpu_day.sh pack     where jspeed is built: its wheel, and those of packages that a GPU image lacks, in dist/
#   scripts/gpu_day.sh PART     on the GPU: probe, stages, own or product; exit code 75: run it again for the rest
#   scripts/gpu_day.sh tests    tests/gpu, where pytest is installed
#   scripts/gpu_day.sh table    predicted beside measured, from the results so far
#   scripts/gpu_day.sh          all of these but pack
#
# The image needs Python 3.12, JAX for CUDA, and what else pyproject.toml names; dist/ is carried to it. Environment:
# PYTHON (default .venv/bin/python, else python3), DAY (the folder of results and of all else that is kept),
# OUT (a folder for copies of the results), PART_SECONDS (540), GPU_DAY=toy (tries the parts on a CPU, in minutes).
set -u
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=$(command -v python3)
if [ -z "$python" ]; then
  echo "error: there is no Python at ${PYTHON:-.venv/bin/python}, and no python3; set PYTHON" >&2
  exit 2
fi
day=${DAY:-runs/gpu_day}

pack() {
  rm -rf dist && mkdir -p dist
  "$python" -m maturin build --release --quiet --out dist
  "$python" -m pip download --quiet --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
    --platform manylinux2014_x86_64 --platform any --dest dist 'platformdirs>=4.0' && ls -s dist
}

# Installs what is in dist/ and not yet here into a folder of its own, so that nothing of the image changes.
prepare() {
  mkdir -p "$day" || exit 2
  day=$(cd "$day" && pwd)
  export PYTHONUNBUFFERED=1 JSPEED_CACHE=$day/cache
  export PYTHONPATH=$day/site:$PWD/scripts:$PWD
  if [ -d /usr/local/cuda/bin ]; then export PATH=$PATH:/usr/local/cuda/bin; fi
  for wheel in dist/*.whl; do
    name=$(basename "$wheel" | sed 's/-.*//')
    [ -e "$wheel" ] && ! "$python" -c "import importlib.metadata as m; m.version('$name')" 2>/dev/null &&
      "$python" -m pip install --quiet --no-index --no-deps --target "$day/site" "$wheel"
  done
  "$python" -c 'import jspeed._dataloader' 2>/dev/null || {
    echo "error: jspeed is not installed and dist/ has no wheel for this Python; run scripts/gpu_day.sh pack where Rust is" >&2
    exit 2
  }
}

part() {
  case $1 in
  tests)
    "$python" -c 'import pytest' 2>/dev/null || { echo 'tests: pytest is not installed, skipped'; return 0; }
    JSPEED_TEST_GPU=1 timeout "${PART_SECONDS:-540}" "$python" -m pytest -q tests/gpu
    ;;
  probe | stages | own | product | table)
    timeout 600 "$python" -m benches.gpu_day "$1" "$day" ${OUT:+"$OUT"}
    ;;
  *)
    echo "error: $1 is no part; scripts/gpu_day.sh takes pack, probe, stages, own, product, tests or table" >&2
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
for each in probe stages own product; do
  code=75
  while [ "$code" -eq 75 ]; do
    part "$each"
    code=$?
  done
done
part tests
part table
