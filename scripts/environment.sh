# Sourced by demo.sh and test.sh: `environment EXTRAS` makes .venv ready and sets $python.
# Does nothing when .venv was made from the same pyproject.toml and constraints.txt before.

# What a build needs and pip cannot bring: g++, Python's headers, the module venv. Installs what is missing where it can
# (root on Debian and its kin), else prints the line that does. Returns 1 if something is still missing.
system_packages() {
  local base=${PYTHON:-python3} missing=() version
  version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || {
    echo "there is no $base; install Python 3.11 or newer, or set PYTHON to one" >&2
    return 1
  }
  if ! command -v "${CXX:-g++}" >/dev/null && ! command -v c++ >/dev/null && ! command -v clang++ >/dev/null; then
    missing+=(g++)
  fi
  "$base" -c 'import os, sysconfig; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
    missing+=("python$version-dev")
  "$base" -c 'import ensurepip, venv' 2>/dev/null || missing+=("python$version-venv")
  if [ ${#missing[@]} -eq 0 ]; then
    return 0
  fi
  if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "== installing ${missing[*]}"
    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q "${missing[@]}" && return 0
  fi
  if command -v apt-get >/dev/null; then
    echo "missing: ${missing[*]}. Run this, then try again:  sudo apt-get install -y ${missing[*]}" >&2
  elif command -v dnf >/dev/null; then
    echo "missing: ${missing[*]}. Run this, then try again:  sudo dnf install -y gcc-c++ python3-devel" >&2
  else
    echo "missing: ${missing[*]}, as Debian calls them; install your system's packages of them, then try again" >&2
  fi
  return 1
}

environment() {
  local extras=$1 stamp wanted
  python=$PWD/.venv/bin/python
  stamp=.venv/installed${extras//[^a-z]/-}
  system_packages || return 1
  if [ ! -x "$python" ]; then
    echo "== making .venv"
    "${PYTHON:-python3}" -m venv .venv || return 1
  fi
  wanted=$(cat pyproject.toml constraints.txt | cksum; "$python" -V)
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    return 0
  fi
  echo "== installing tarry$extras into .venv (a few minutes the first time)"
  # setuptools first: tarry is installed without build isolation. torch by itself: exactly the pinned version.
  "$python" -m pip install -q --disable-pip-version-check -c constraints.txt setuptools &&
    "$python" -m pip install -q --disable-pip-version-check -c constraints.txt torch &&
    "$python" -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".$extras" &&
    { [[ $extras != *frameworks* ]] || # apart: see tests/frameworks/timm_without_torchvision.py
      "$python" -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps --upgrade --target .venv/timm timm pillow; } &&
    printf '%s' "$wanted" >"$stamp"
}
