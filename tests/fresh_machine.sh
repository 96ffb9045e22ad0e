#!/usr/bin/env bash
# Run a command in a fresh clone of HEAD on a new Debian 13: `tests/fresh_machine.sh make test`.
#
# Its Python 3.13 gets pip's newest JAX, and its Rust 1.85 is the oldest that Cargo.toml allows. The machine is a folder
# of Debian's own packages and a chroot, so it needs root on a Debian, a network, and at first two minutes and 900 MB.
#
# SUITE=forky is Debian's next release. FRESH_ROOT is the folder (default /var/tmp/jspeed-SUITE); it stays, with what pip
# and cargo downloaded, but the clone is made anew. ../shared is there too, read-only, if it is here. With OPTIONAL=1 it
# is no failure that a machine cannot do this.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PATH:/usr/sbin:/sbin"
suite=${SUITE:-trixie}
root=${FRESH_ROOT:-/var/tmp/jspeed-$suite}
packages=python3,python3-venv,cargo,rustc,rustfmt,rust-clippy,make,gcc,libc6-dev,git,ca-certificates,procps

cannot() {
  echo "tests/fresh_machine.sh: skipped, this machine cannot be a new Debian: $1" >&2
  [ "${OPTIONAL:-0}" = 1 ] && exit 0 || exit 2
}

make_root() {
  local mirror script=()
  apt-get update >"$root.log" 2>&1 || true # a source of somebody else's that fails is no matter here
  command -v debootstrap >/dev/null || apt-get install --yes debootstrap >>"$root.log" 2>&1 || cannot 'apt has no debootstrap'
  # shellcheck disable=SC2016
  mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' | awk '$1 == "Debian" && !found++ {print $2}')
  [ -n "$mirror" ] || cannot "apt's sources name no mirror of Debian"
  [ -e "/usr/share/debootstrap/scripts/$suite" ] || script=(/usr/share/debootstrap/scripts/sid) # newer than debootstrap
  # An interrupted call leaves root.new, and no mounts, for they are in a namespace.
  rm -rf --one-file-system "$root.new"
  unshare --mount debootstrap --variant=minbase --include="$packages" "$suite" "$root.new" "$mirror" "${script[@]}" \
    >>"$root.log" 2>&1 || { tail -n 5 "$root.log" >&2; echo "error: debootstrap failed; see $root.log" >&2; exit 1; }
  mv "$root.new" "$root"
}

# This machine's network and certificates, and what pip and cargo are told here.
copy_settings() {
  local file
  for file in /etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt /etc/pip.conf; do
    [ ! -e "$file" ] || install -D --mode 644 "$file" "$root$file"
  done
  for file in .config/pip/pip.conf .cargo/config.toml; do
    [ ! -e "$HOME/$file" ] || install -D --mode 644 "$HOME/$file" "$root/home/$file"
  done
}

[ $# -gt 0 ] || { echo 'usage: tests/fresh_machine.sh COMMAND [ARGUMENT ...]' >&2; exit 2; }
[ "$(id -u)" = 0 ] || cannot 'that takes root'
command -v apt-get >/dev/null || cannot 'there is no apt-get'
unshare --mount true 2>/dev/null || cannot 'mounts of its own are not allowed'
exec 9>"$root.lock"
flock 9 # one at a time
[ -d "$root" ] || make_root
copy_settings
rm -rf --one-file-system "$root/srv"
git clone --quiet . "$root/srv/jspeed"
mkdir "$root/srv/shared"
mapfile -t passed < <(env | grep -iE '^((https?|all|no)_proxy|PIP_(INDEX_URL|EXTRA_INDEX_URL|DEFAULT_TIMEOUT))=')
# shellcheck disable=SC2016
unshare --mount bash -euc '
  root=$1 && shift
  mount -t proc proc "$root/proc"
  mount --rbind /dev "$root/dev"
  mount -t tmpfs tmpfs "$root/dev/shm"
  if [ -d ../shared ]; then mount --bind ../shared "$root/srv/shared" -o ro; else rmdir "$root/srv/shared"; fi
  exec chroot "$root" /usr/bin/env --ignore-environment --chdir=/srv/jspeed HOME=/home LANG=C.UTF-8 \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt PIP_CERT=/etc/ssl/certs/ca-certificates.crt "$@"' \
  fresh "$root" "${passed[@]}" "$@" 9>&-
