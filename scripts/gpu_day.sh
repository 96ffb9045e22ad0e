#!/usr/bin/env bash
# Run everything that needs a GPU: tests, step benchmarks, kernel benchmarks, attention backends, a training run.
# A part that fails does not stop the others; the end says which did.
#
#   scripts/gpu_day.sh [TOKEN_FOLDER]
#
# Without TOKEN_FOLDER (FineWeb-format GPT-2 shards) steps run on synthetic tokens and nothing is trained.
# Environment: PYTHON (default .venv/bin/python), OUT (the folder of results, default runs/gpu-TIME), RECIPES,
# RECIPE (the one to train, default r29), SECONDS_TO_TRAIN (600), PART_SECONDS (3600: a part that takes longer fails).
# The environment needs: maturin develop --release --extras cuda12,dev  (or cuda13; fa4 as pyproject.toml says).
set -u

tokens=
if [ $# -gt 0 ]; then
  if ! tokens=$(cd -- "$1" 2>/dev/null && pwd) || ! ls "$tokens"/*.bin >/dev/null 2>&1; then
    echo "error: TOKEN_FOLDER $1 should be a folder of .bin token shards but is not; make one with" \
      '`python scripts/prepare.py fineweb --out DIR`, or give none for synthetic tokens' >&2
    exit 2
  fi
fi
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-.venv/bin/python}
out=${OUT:-runs/gpu-$(date -u +%Y%m%dT%H%M%SZ)}
recipe=${RECIPE:-r29}
read -r -a recipes <<<"${RECIPES:-llmc track3 r21 r29 r62 r89}"
minutes=$(awk -v s="${SECONDS_TO_TRAIN:-600}" 'BEGIN { print s / 60 }')
data=(${tokens:+--data "$tokens"})
passed=()
failed=()
export PYTHONUNBUFFERED=1

# part NAME COMMAND...: run a command, note how it ended, return its exit code
part() {
  local name=$1 began=$SECONDS code
  shift
  printf '\n=== %s: %s\n' "$name" "$*"
  timeout "${PART_SECONDS:-3600}" "$@"
  code=$?
  printf '=== %s: exit code %s after %s s\n' "$name" "$code" $((SECONDS - began))
  if [ "$code" -eq 0 ]; then passed+=("$name"); else failed+=("$name ($code)"); fi
  return "$code"
}

main() {
  local each
  part nvidia-smi nvidia-smi
  part devices "$python" -c '
import sys, jax
print("jax", jax.__version__, *jax.devices(), sep="\n")
sys.exit(0 if jax.default_backend() == "gpu" else "error: JAX finds no GPU; the rest would run on the CPU for days")' || return
  if [ -n "$tokens" ]; then part tokens "$python" -m jspeed.data "$tokens"; fi

  part tests env JSPEED_TEST_GPU=1 "$python" -m pytest tests/gpu

  # One process for each recipe: what one leaves behind, memory above all, is not the next one's.
  for each in "${recipes[@]}"; do
    part "gpu-$each" "$python" scripts/bench.py gpu --recipe "$each" "${data[@]}" --json "$out/gpu-$each.json"
  done

  # What one of eight GPUs would do in a step, communication apart: beside the 31.5, 56.8 and 82.6 ms of record 89.
  for each in r62 r89; do
    part "lane-$each" env CUDA_VISIBLE_DEVICES=0 "$python" scripts/bench.py gpu --recipe "$each" --set LANES=1 \
      --json "$out/lane-$each.json"
  done

  for each in off on; do
    part "jspeed2-own-$each" env CUDA_VISIBLE_DEVICES=0 "$python" scripts/bench.py gpu --recipe jspeed2 \
      --set LANES=1 OWN_KERNELS=$each --json "$out/jspeed2-own-$each.json"
  done
  part fused "$python" scripts/bench.py fused

  for each in cudnn triton fa4; do
    if [ "$each" = fa4 ] && ! "$python" -c 'import fa4_jax' 2>/dev/null; then
      printf '\n=== attention-fa4: fa4-jax is not installed, skipped\n'
      continue
    fi
    part "attention-$each" "$python" scripts/bench.py gpu --recipe r29 --attention "$each" "${data[@]}" \
      --json "$out/attention-$each.json"
  done

  if [ -n "$tokens" ]; then
    # A run that ends above its target has exit code 1; more is a refusal or a crash, and no record of today.
    printf '\n=== training\n'
    timeout "${PART_SECONDS:-3600}" "$python" scripts/speedrun.py "$recipe" --data "$tokens" --max-minutes "$minutes" \
      --run-dir "$out/$recipe" --no-progress
    code=$?
    part training "$python" -c '
import json, sys
if int(sys.argv[2]) > 1:
    sys.exit("speedrun.py ended with exit code " + sys.argv[2])
run = json.load(open(sys.argv[1]))
print(run["status"], "after", run["steps"], "steps; loss curve:", sys.argv[1].replace("run.json", "loss.svg"))
sys.exit(run["status"] not in ("finished", "stopped"))' "$out/$recipe/run.json" "$code"
  else
    printf '\n=== training: no TOKEN_FOLDER given, skipped\n'
  fi
}

finish() {
  printf '\npassed: %s\n' "${passed[*]:-nothing}"
  printf 'failed: %s\n' "${failed[*]:-nothing}"
  printf 'results: %s\n' "$out"
  [ ${#failed[@]} -eq 0 ]
}

if ! command -v "$python" >/dev/null; then
  echo "error: there is no Python at $python; run \`make speedrun\`, which makes one, or set PYTHON" >&2
  exit 2
fi
if ! mkdir -p "$out" 2>/dev/null; then
  echo "error: the folder of results $out cannot be made; set OUT to one that can" >&2
  exit 2
fi
{ main; finish; } 2>&1 | tee "$out/log.txt"
exit "${PIPESTATUS[0]}"
