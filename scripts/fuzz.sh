#!/usr/bin/env bash
# Fuzzes the readers of foreign bytes under AddressSanitizer and UBSan. Usage: scripts/fuzz.sh [SECONDS=60] [SEED=1]
# A finding is saved in build/asan/findings and the exit code is 1; build/asan/tests/fnx-fuzz-format FILE reruns it.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh
fnx_install build test
seconds="${1:-60}" seed="${2:-1}"
cmake --preset asan
cmake --build --preset asan --target fnx-fuzz-format -j "$(nproc)"
mkdir -p build/asan/findings
current="build/asan/findings/current"
export ASAN_OPTIONS="hard_rss_limit_mb=3000:max_allocation_size_mb=1000${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
export UBSAN_OPTIONS="print_stacktrace=1${UBSAN_OPTIONS:+:$UBSAN_OPTIONS}"
if build/asan/tests/fnx-fuzz-format "$seconds" "$seed" fixtures "$current"; then
  rm -f "$current"
  exit 0
fi
# The shared file holds the input's length in 8 bytes, then the input.
length="$(od -An -tu8 -N8 "$current" | tr -d ' ')"
saved="build/asan/findings/$(date +%s)-$seed"
head -c "$((8 + length))" "$current" | tail -c +9 > "$saved"
rm -f "$current"
echo "finding saved as $saved" >&2
exit 1
