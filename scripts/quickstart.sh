#!/usr/bin/env bash
# Builds the tools and asks the small checkpoint of the fixtures. Usage: scripts/quickstart.sh [QUESTION]
# stdout holds the answer alone; the receipt lies in the current folder, or in FNX_RECEIPT_DIR.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
bash "$root/scripts/build_tools.sh"
receipt="${FNX_RECEIPT_DIR:-.}/fnx-generate.receipt.json"
code=0
"$root/build/host-only/bin/fnx-generate" --model "$root/fixtures/flashnext-tiny" --chat --thinking off \
  --prompt="${1:-What is the capital of Paraguay?}" --receipt "$receipt" || code=$?
[ ! -f "$receipt" ] || echo "receipt: $receipt" >&2
exit "$code"
