#!/usr/bin/env bash
# Installs tarry with its test tools into .venv and runs every check. Arguments replace the list of checks:
#   bash scripts/test.sh                 all of them
#   bash scripts/test.sh lint types      some of: lint format types native quick fast slow
# `quick` is the part of `fast` to run while working: less than a minute. `all of them` leaves it out.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
environment "[test,dev,frameworks]"

# Two test processes with one thread each: more threads only compete for the cores.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

tests() { # tests MARKER-EXPRESSION; a tier without tests is not a failure
  "$python" -m pytest -n 2 --dist worksteal -q -m "$1" || { local code=$?; [ $code -eq 5 ] || return $code; }
}

# The page of a report is tested in a real browser. Without one, those tests are skipped, and say why.
browser() {
  if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; then
    return
  fi
  if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "== installing chromium"
    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends chromium && return
  fi
  echo "there is no chromium: tests of the report page are skipped. Install your system's package of it." >&2
}

generated() ( # fails if the generated files of the example are stale
  cd docs/examples/numpy_device
  "$python" -m tarry.codegen --source-yaml device.yaml --output-dir generated --impl-path numpy_kernels.py \
    --backend-name numpy --check
)

# Recording, views, graphs and passes on the reference path: nothing here waits for a compiler or another process.
quick() {
  "$python" -m pytest -n 2 --dist worksteal -q -m "not slow and not process" tests/ir tests/passes tests/recorder tests/aliasing tests/programs \
    tests/test_layers.py tests/test_state.py tests/test_style.py tests/native/test_stub.py
}

formatted() { # fails if ruff format or clang-format would change a file
  "$python" -m ruff format --check .
  find tarry/csrc -name '*.cpp' -o -name '*.h' | xargs .venv/bin/clang-format --dry-run --Werror
}

for check in "${@:-lint format types native fast slow}"; do
  for name in $check; do
    echo "== $name"
    case $name in
      lint)
        "$python" -m ruff check .
        generated
        ;;
      format) formatted ;;
      types) "$python" -m mypy ;;
      native) "$python" -m tarry.native ;;
      quick) quick ;;
      fast) browser && tests "not slow" ;;
      slow) browser && tests "slow" ;;
      *)
        echo "unknown check '$name'; the checks are: lint format types native quick fast slow" >&2
        exit 2
        ;;
    esac
  done
done
