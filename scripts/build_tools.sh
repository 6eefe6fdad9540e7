#!/usr/bin/env bash
# Installs what the build needs and builds the tools, without tests, into build/host-only/bin. Usage: scripts/build_tools.sh
# Everything it says goes to stderr, so that callers keep stdout for results.
set -euo pipefail
cd "$(dirname "$0")/.."
exec >&2
. scripts/packages.sh
fnx_install build
echo "building the tools in build/host-only; the first time takes minutes"
cmake --preset host-only >/dev/null
tools=()
for app in apps/fnx_*.cpp; do
  tool="$(basename "$app" .cpp)"
  tools+=("${tool//_/-}")
done
# Ninja's one-line progress is for a terminal; in a log it is a line a file.
quiet=()
[ -t 2 ] || quiet=(-- --quiet)
cmake --build --preset host-only -j "$(nproc)" --target "${tools[@]}" "${quiet[@]}"
