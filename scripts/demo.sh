#!/usr/bin/env bash
# Installs tarry into .venv and runs `tarry demo`; arguments are passed on (try: bash scripts/demo.sh --help).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
environment ""
exec .venv/bin/tarry demo "$@"
