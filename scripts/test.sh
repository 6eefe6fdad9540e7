#!/usr/bin/env bash
# Builds a preset, checks the source and runs every test. Usage: scripts/test.sh [PRESET]   (default: host-only)
# The last lines are ctest's summary, which also lists the tests that skipped themselves.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh
fnx_install build test
preset="${1:-host-only}"
cmake --preset "$preset" -DFNX_TESTS=ON
cmake --build --preset "$preset" -j "$(nproc)"
scripts/check.sh
case "$preset" in
  release) ;;
  *) echo "test.sh: not run: the cuda backend, which preset $preset leaves out" ;;
esac
echo "test.sh: not run: scripts/fuzz.sh (readers of foreign bytes) and scripts/bench_cpu.sh (speed)"
ctest --preset "$preset" -j "$(nproc)"
