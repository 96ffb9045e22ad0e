#!/usr/bin/env bash
# Rehearse scripts/gpu_day.sh at toy size in an environment like a GPU image's:
#
#   tests/gpu_image.sh FOLDER [KILLS]
#
# Python 3.12 (PYTHON, default python3.12), JAX 0.11.2, packages that such an image has, no platformdirs,
# no tyro; of programs those below, hence no git and no Rust; the tree of HEAD without .git, its wheels
# packed here. Not alike: there is no GPU, CUDA, cuDNN or PyTorch. Before the rehearsal KILLS (default 0)
# calls are ended by kill -9 at random moments, and no result that one of them told may be lost. FOLDER
# keeps all of it, with rehearsal.log.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { sed -n '2,5p' "$0" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
kills=${2:-0}
programs="basename bash cat dirname env ls mkdir nvidia-smi python3 rm sed sh sha256sum timeout uname"
image="jax==0.11.2 numpy optax orbax-checkpoint scipy tiktoken rich matplotlib jinja2 huggingface_hub safetensors tqdm"

if [ ! -e "$folder/python/whole" ]; then
  "${PYTHON:-python3.12}" -m venv "$folder/python"
  # shellcheck disable=SC2086
  "$folder/python/bin/python3" -m pip install --quiet --disable-pip-version-check $image
  touch "$folder/python/whole"
fi
for absent in platformdirs tyro jspeed; do
  "$folder/python/bin/python3" -m pip uninstall --quiet --yes "$absent" 2>/dev/null || true
done
rm -rf "$folder/tree" "$folder/bin"
mkdir -p "$folder/tree" "$folder/bin" "$folder/day"
git archive HEAD | tar -x -C "$folder/tree"
DIST=$folder/tree/dist PYTHON=${PACK_PYTHON:-.venv/bin/python} scripts/gpu_day.sh pack
for program in $programs; do
  path=$(command -v "$program") && ln -s "$(readlink -f "$path")" "$folder/bin/$program"
done
ln -sf "$folder/python/bin/python3" "$folder/bin/python3"
there=$(PATH=$folder/bin bash -c 'command -v git cargo rustc maturin' || true)
[ -z "$there" ] || { echo "error: $there" >&2; exit 2; }

# In a session of its own, so that kill reaches all of its processes.
call=(setsid --wait env -i PATH="$folder/bin" HOME="$folder" PYTHON="$folder/python/bin/python3"
  GPU_DAY=toy JAX_PLATFORMS=cpu DAY="$folder/day" OUT="$folder/out" PART_SECONDS="${PART_SECONDS:-300}"
  bash "$folder/tree/scripts/gpu_day.sh")

log=$folder/rehearsal.log
results=$folder/day/results.jsonl
touch "$results"
for ((n = 1; n <= kills; n++)); do
  seconds=$((10 + RANDOM % 90))
  "${call[@]}" quarter >"$folder/killed.log" 2>&1 &
  script=$!
  for ((s = 0; s < seconds; s++)); do
    sleep 1
    cp "$results" "$folder/before.jsonl"
  done
  kill -9 -- "-$script" || true
  wait || true
  "$folder/python/bin/python3" - "$folder/before.jsonl" "$results" "$n" "$seconds" <<'PY' | tee -a "$log"
import json, sys

def told(path):
    found = {}
    for line in open(path):
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if "seconds" in one and not one.get("failed"):
            found[one["name"]] = line
    return found

before, after = told(sys.argv[1]), told(sys.argv[2])
lost = [name for name in before if name not in after]
print(f"kill -9 {sys.argv[3]} after {sys.argv[4]} s: {len(after)} results, {len(lost)} lost {lost}", flush=True)
sys.exit(bool(lost))
PY
done
code=75
while [ "$code" -eq 75 ]; do
  began=$SECONDS
  code=0
  "${call[@]}" quarter >"$folder/call.log" 2>&1 || code=$?
  echo "call: $((SECONDS - began)) s, exit code $code, $(wc -l <"$results") lines of results" | tee -a "$log"
done
"${call[@]}" table >"$folder/table.md"
"${call[@]}" plan >"$folder/plan.md"
sed -n 3p "$folder/table.md" | tee -a "$log"
grep '^- ' "$folder/table.md" | tee -a "$log" || true
grep '^\*\*stage' "$folder/table.md" | tee -a "$log"
exit "$code"
