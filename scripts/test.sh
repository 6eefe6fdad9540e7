#!/usr/bin/env bash
# Builds a preset and runs every test. Usage: scripts/test.sh [PRESET]   (default: host-only without nvcc, else release)
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh
fnx_install build test
preset="${1:-host-only}"
cmake --preset "$preset"
cmake --build --preset "$preset" -j "$(nproc)"
scripts/check.sh
ctest --preset "$preset" -j "$(nproc)"
