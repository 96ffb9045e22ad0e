#!/usr/bin/env bash
# What a release consists of, made and tried: `make release-check`.
#
# Builds the source distribution and the wheel of this platform into dist/release; checks versions, metadata, licences
# and sizes; installs the wheel alone on each of PYTHONS and trains two steps; and asks the source distribution what it
# says where there is no Rust. An interpreter that is not installed is skipped with a line; with none the check fails.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
tools=$PWD/.venv/release
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
out=$PWD/dist/release
rm -rf "$out"

version=$("$python" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
crate=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
[ "$version" = "$crate" ] || { echo "error: pyproject.toml has version $version, Cargo.toml $crate" >&2; exit 1; }
grep -q "^## $version" CHANGELOG.md || { echo "error: CHANGELOG.md has no heading '## $version'" >&2; exit 1; }

"$python" -m maturin sdist --out "$out"
"$python" -m maturin build --release --locked --quiet --out "$out"
PYTHONPATH=$tools "$python" -m twine check --strict "$out"/*
for file in "$out"/*; do
  case $file in *.whl) names=$("$python" -m zipfile --list "$file");; *) names=$(tar -tzf "$file");; esac
  grep -q 'LICENSE' <<<"$names" || { echo "error: no LICENSE in $(basename "$file")" >&2; exit 1; }
  size=$(stat -c %s "$file")
  echo "$(basename "$file"): $((size / 1000)) kB"
  [ "$size" -le 3000000 ] || { echo "error: more than 3 MB" >&2; exit 1; }
done

tried=0
for name in ${PYTHONS:-python3.11 python3.14}; do
  if ! "$name" -c '' 2>/dev/null; then echo "skipped: there is no $name"; continue; fi
  "$name" -m venv "$folder/$name"
  "$folder/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$out"/*.whl
  mkdir "$folder/$name-elsewhere"
  (
    cd "$folder/$name-elsewhere"
    unset PYTHONPATH
    export PATH="$folder/$name/bin:$PATH" JAX_PLATFORMS=cpu JSPEED_CACHE="$folder/cache"
    jspeed --version | grep -F "$version"
    jspeed run --steps 2 --no-sample
  )
  tried=$((tried + 1))
done
[ "$tried" -gt 0 ] || { echo 'error: no interpreter to try the wheel on; name some by PYTHONS' >&2; exit 1; }

# Left alone, maturin fetches a Rust toolchain for the build and removes it again.
"$python" -m venv "$folder/bare"
if said=$(env -i PATH=/usr/bin:/bin HOME="$folder" MATURIN_NO_INSTALL_RUST=1 "$folder/bare/bin/python" -m pip install \
  --no-deps --disable-pip-version-check "$out"/*.tar.gz 2>&1); then
  echo 'skipped: /usr/bin has a Rust toolchain'
else
  grep -o 'Cargo, the Rust package manager, is not installed or is not on PATH' <<<"$said" ||
    { echo "$said" >&2; echo 'error: it does not say that Rust is missing' >&2; exit 1; }
fi
echo "release $version: all held"
