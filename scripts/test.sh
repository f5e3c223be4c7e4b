#!/usr/bin/env bash
# Installs tarry with its test tools into .venv and runs every check. Arguments replace the list of checks:
#   bash scripts/test.sh                 all of them
#   bash scripts/test.sh lint types      some of: lint types native fast slow
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
environment "[test,dev]"

# Two test processes with one thread each: more threads only compete for the cores.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

tests() { # tests MARKER-EXPRESSION; a tier without tests is not a failure
  "$python" -m pytest -n 2 --dist worksteal -q -m "$1" || { local code=$?; [ $code -eq 5 ] || return $code; }
}

generated() ( # fails if the generated files of the example are stale
  cd docs/examples/numpy_device
  "$python" -m tarry.codegen --source-yaml device.yaml --output-dir generated --impl-path numpy_kernels.py \
    --backend-name numpy --check
)

for check in "${@:-lint types native fast slow}"; do
  for name in $check; do
    echo "== $name"
    case $name in
      lint) "$python" -m ruff check . && generated ;;
      types) "$python" -m mypy ;;
      native) "$python" -m tarry.native ;;
      fast) tests "not slow" ;;
      slow) tests "slow" ;;
      *)
        echo "unknown check '$name'; the checks are: lint types native fast slow" >&2
        exit 2
        ;;
    esac
  done
done
