# Sourced by demo.sh and test.sh: `environment EXTRAS` makes .venv ready and sets $python.
# Does nothing when .venv was made from the same pyproject.toml and constraints.txt before.

environment() {
  local extras=$1 stamp wanted
  python=$PWD/.venv/bin/python
  stamp=.venv/installed${extras//[^a-z]/-}
  if [ ! -x "$python" ]; then
    echo "== making .venv"
    "${PYTHON:-python3}" -m venv .venv || {
      echo "could not make a virtual environment; on Debian: apt-get install python3-venv" >&2
      return 1
    }
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
    printf '%s' "$wanted" >"$stamp"
}
