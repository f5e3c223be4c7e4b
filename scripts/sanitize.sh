#!/usr/bin/env bash
# The native part under sanitizers: memory errors and undefined behaviour, then data races. Compiles it twice, which takes
# minutes each the first time; the tests run several times slower than usual.
#   bash scripts/sanitize.sh                           both, with the tests about threads, aliasing and faults
#   bash scripts/sanitize.sh address tests/aliasing    one of them: address, thread; what follows goes to pytest
#
# Python and PyTorch are not instrumented. So the runtimes of the sanitizers are preloaded (with the C++ library: they look
# for its functions when the process starts), leaks are not looked for, and what only these two do is ignored
# (scripts/sanitize/*.supp, with reasons).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
environment "[test,dev]"

which=both
case "${1:-}" in
  address | thread)
    which=$1
    shift
    ;;
esac
if [ $# -gt 0 ]; then
  tests=("$@")
else
  tests=(tests/aliasing tests/programs/test_threads_fork.py tests/runtime/test_faults.py tests/runtime/test_overlap.py
    tests/runtime/test_run_ahead.py)
  [ ! -d tests/faults ] || tests+=(tests/faults)
fi

library() { # library NAME: the compiler's own
  local path
  path=$("${CXX:-g++}" -print-file-name="lib$1.so")
  [ "$path" != "lib$1.so" ] || {
    echo "the compiler has no lib$1.so; on Debian: apt-get install libgcc-12-dev" >&2
    return 1
  }
  readlink -f "$path"
}

run() { # run "LIBRARY ..." COMPILER-FLAGS: builds without the runtimes, which would slow the compiler down, then tests
  local preload="" name
  for name in $1; do
    preload+="$(library "$name"):"
  done
  export TARRY_CXXFLAGS="-O1 -g1 -fno-omit-frame-pointer $2"
  "$python" -m tarry.native
  # Without the randomised address space: thread sanitizers of some years do not find their way in that of newer kernels.
  LD_PRELOAD="$preload$(library stdc++)" PYTHONMALLOC=malloc OMP_NUM_THREADS=1 \
    setarch "$(uname -m)" -R "$python" -m pytest -q -p no:cacheprovider -m "not slow" "${tests[@]}"
}

folder=$PWD/scripts/sanitize
if [ $which != thread ]; then
  echo "== address and undefined behaviour"
  # Leaks: Python and PyTorch keep much until the end. ODR: PyTorch's libraries define some things twice, alike.
  export ASAN_OPTIONS="detect_leaks=0:detect_odr_violation=0:alloc_dealloc_mismatch=0:abort_on_error=1"
  export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:suppressions=$folder/undefined.supp"
  # vptr: would need the type information that PyTorch's libraries do not export.
  run "asan ubsan" "-fsanitize=address,undefined -fno-sanitize=vptr"
fi
if [ $which != address ]; then
  echo "== data races"
  # Calls from code that is not instrumented are not looked at. A child of a fork may go on.
  export TSAN_OPTIONS="ignore_noninstrumented_modules=1:die_after_fork=0:report_signal_unsafe=0:halt_on_error=1:exitcode=66:suppressions=$folder/thread.supp"
  run "tsan" "-fsanitize=thread"
fi
