#!/usr/bin/env bash
# Measures the tools on the cpu against their limits. Usage: scripts/bench_cpu.sh [BIN_DIR]   (default: build and use host-only)
# Prints one line a figure; exit code 1 when a limit is missed. Wants an idle machine and, meanwhile, 1.5 GiB in TMPDIR.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
bin="${1:-$root/build/host-only/bin}"
[ $# -gt 0 ] || bash "$root/scripts/build_tools.sh"
exec python3 -B "$root/scripts/bench_cpu.py" "$bin"
