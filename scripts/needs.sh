# Sourced by the scripts beside it: says what a machine lacks and why it is
# wanted, installs that where it may, and names it where it may not.
# shellcheck shell=bash

# Rust's installer leaves its programs where a new shell only later looks.
export PATH="$HOME/.cargo/bin:$PATH"

say() { printf '%s\n' "$*" >&2; }
stop() {
  say "${0##*/}: $*"
  exit 1
}

missing_packages=()

# need PACKAGE 'REASON' COMMAND...: a Debian package whose presence COMMAND shows.
need() {
  local package=$1 reason=$2
  shift 2
  "$@" >/dev/null 2>&1 && return
  say "missing: $package, $reason"
  missing_packages+=("$package")
}

# Installs what `need` found missing, as root or through a sudo that asks nothing.
install_missing() {
  [[ ${#missing_packages[@]} -eq 0 ]] && return
  local as_root=() names="${missing_packages[*]}"
  command -v apt-get >/dev/null || stop "please install the counterparts of these Debian packages: $names"
  if [[ $(id -u) -ne 0 ]]; then
    sudo -n true 2>/dev/null || stop "not root, and sudo would ask for a password; please run: sudo apt-get install $names"
    as_root=(sudo -n)
  fi
  say "installing $names"
  "${as_root[@]}" apt-get update -qq >&2
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing_packages[@]}" >&2
  missing_packages=()
}

# What the Rust build stands on. The pinned toolchain is rustup's to fetch.
need_rust() {
  command -v cargo >/dev/null || stop "Rust is missing: install the version that rust-toolchain.toml names (https://rustup.rs)"
  need build-essential "a C compiler for SQLite, zstd and the TLS library" cc --version
}

# need_node 'REASON'
need_node() {
  node -e 'const [a, b] = process.versions.node.split("."); process.exit(a > 20 || (a == 20 && b >= 19) ? 0 : 1)' 2>/dev/null ||
    stop "Node 20.19 or newer is missing, $1 (https://nodejs.org)"
}
