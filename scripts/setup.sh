#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/setup.sh [--build | --test] [--check]
#
# Installs what is missing to build, test and lint kvferry on Debian 12 and Ubuntu 24.04, as root or
# through sudo. Says nothing and changes nothing when all is there. A CUDA toolkit is used when it
# is present; it is never installed here and never required.
#
#   --build   only what building and running need
#   --test    that, and what the tests need (no format, lint, shell or model checkers)
#   --check   install nothing; list what is missing and fail if there is something
#   --help    this text
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

scope=all
check_only=false
for argument in "$@"; do
  case $argument in
    --build | --test) scope=${argument#--} ;;
    --check) check_only=true ;;
    --help | -h) print_help && exit ;;
    *) die "unknown option '$argument'; see --help" ;;
  esac
done

packages=(
  g++ cmake ninja-build ccache pkg-config git ca-certificates
  libboost-dev libzmq3-dev cppzmq-dev libspdlog-dev libfmt-dev libcli11-dev nlohmann-json3-dev
  libmsgpack-cxx-dev libtomlplusplus-dev libxxhash-dev libsodium-dev libgtest-dev libgmock-dev
)

command -v apt-get > /dev/null ||
  die "this script knows Debian and Ubuntu; install by hand: ${packages[*]}"

is_installed() {
  [[ $(dpkg-query -W -f='${db:Status-Status}' "$1" 2> /dev/null) == installed ]]
}

# The sources are formatted and linted with clang 14; where a system has none, its newest is used.
clang_package() {
  if is_installed "$1-14" || [[ -n $(apt-cache search --names-only "^$1-14\$" 2> /dev/null) ]]; then
    echo "$1-14"
  else
    echo "$1"
  fi
}

# The fuzz targets take the system's own clang (14 on Debian 12, 18 on Ubuntu 24.04), which gets along
# with its standard library; their runtime is in a package that is named after clang's version.
clang_runtime_package() {
  local version
  version=$(apt-cache depends clang 2> /dev/null |
    sed -n 's/^ *Depends: clang-\([0-9]*\)$/\1/p' | head -n 1)
  echo "libclang-rt-${version:-14}-dev"
}

if [[ $scope != build ]]; then
  packages+=(python3)
fi
if [[ $scope == all ]]; then
  packages+=(shellcheck spin strace "$(clang_package clang-format)" "$(clang_package clang-tidy)")
  packages+=(clang "$(clang_runtime_package)" lld)
fi

missing=()
for package in "${packages[@]}"; do
  is_installed "$package" || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  exit 0
fi
if $check_only; then
  die "missing packages: ${missing[*]}"
fi

privileged=()
if [[ $EUID -ne 0 ]]; then
  command -v sudo > /dev/null || die "not root and no sudo; install by hand: ${missing[*]}"
  privileged=(sudo)
fi
echo "setup: installing ${missing[*]}"
"${privileged[@]}" apt-get update -qq
"${privileged[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
echo "setup: done"
