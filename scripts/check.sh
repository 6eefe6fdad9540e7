#!/usr/bin/env bash
# Checks the source's rules: format, includes, file length, allocations, local paths, shell syntax. Usage: scripts/check.sh
# Prints each violation as file:line: what; exit code 1 when there is one.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
  list() { git ls-files --cached --others --exclude-standard -- "$@" | while read -r f; do [ -f "$f" ] && echo "$f"; done; }
else
  list() { local p; for p in "$@"; do find . -path ./build -prune -o -name "$p" -type f -print | sed 's|^\./||'; done; }
fi
mapfile -t code < <(list '*.h' '*.cpp' '*.cu' '*.cuh' | sort)
mapfile -t scripts < <(list '*.sh' | sort)
mapfile -t text < <(list '*.h' '*.cpp' '*.cu' '*.cuh' '*.sh' '*.py' '*.cmake' '*.txt' '*.md' '*.json' | grep -v '^fixtures/' | sort)

found=$(mktemp)
trap 'rm -f "$found"' EXIT
report() { cat >>"$found"; }

# Format: version 14 alone, because others break lines elsewhere.
formatter=""
for candidate in clang-format-14 clang-format; do
  if command -v "$candidate" >/dev/null && "$candidate" --version | grep -q 'version 14\.'; then
    formatter="$candidate"
    break
  fi
done
if [ -n "$formatter" ]; then
  printf '%s\0' "${code[@]}" | xargs -0 "$formatter" --dry-run 2>&1 | grep 'warning:' |
    sed -E 's/^([^:]+:[0-9]+):[0-9]+: warning: .*/\1: not formatted, run '"$formatter"' -i/' | sort -u | report
else
  echo "check.sh: format not checked: no clang-format 14" >&2
fi

# Includes: apps -> libcore -> kernels/*.h, nothing upwards; foreign headers only where they belong.
awk '
  FNR == 1 { folder = FILENAME; sub(/\/.*/, "", folder) }
  function bad(what) { printf "%s:%d: %s: %s\n", FILENAME, FNR, what, path }
  /^[ \t]*#[ \t]*include/ {
    path = $0; gsub(/^[^"<]*["<]|[">].*$/, "", path)
    gpu = FILENAME ~ /^(kernels\/cuda|libcore\/dist|tests\/kernel)\//
    if (folder == "kernels" && path ~ /^(libcore|apps|tests)\//) bad("kernels include upwards")
    if (folder == "libcore" && path ~ /^(apps|tests)\//) bad("libcore includes upwards")
    if (folder == "libcore" && !gpu && path ~ /^kernels\/[^\/]+\//) bad("libcore includes the inside of a backend")
    if (folder == "apps" && path ~ /^(apps|tests)\//) bad("an app includes sideways")
    if (folder == "apps" && path ~ /^kernels\/[^\/]+\// && path !~ /^kernels\/contract\//) bad("an app includes the inside of a backend")
    if (folder == "kernels" && path ~ /^(nlohmann|CLI|fmt|doctest)\//) bad("kernels include no JSON, CLI11, fmt or doctest")
    if (!gpu && path ~ /^(cuda|nccl|cublas|curand|nvml|nvtx3|cooperative_groups|mma\.h)/) bad("CUDA headers stay in kernels/cuda and libcore/dist")
  }' "${code[@]}" | report

# Length and columns.
awk 'FNR == 601 { printf "%s:601: file is longer than 600 lines\n", FILENAME }' "${text[@]}" | report

# Memory is owned by RAII types: raw allocations stand only where an owner is made, listed as FILE COUNT.
declare -A allowed=()
while read -r file count; do [ -n "$file" ] && allowed[$file]=$count; done <<'OWNERS'
kernels/cpu/backend.cpp 1
kernels/cuda/device_memory.cu 2
kernels/cuda/harness.cu 1
kernels/cuda/kernel_bench.cu 1
OWNERS
while IFS= read -r file; do
  hits=$(grep -nE '\b(cuda(Malloc|HostAlloc)[A-Za-z]*|malloc|calloc|realloc|aligned_alloc|posix_memalign) *\(|\bnew +[A-Za-z_:]+[A-Za-z0-9_:<>]* *\[' "$file" |
    grep -vE '^[0-9]+: *//')
  [ "$(grep -c . <<<"$hits")" -le "${allowed[$file]:-0}" ] && continue
  sed -E "s|^([0-9]+):.*|$file:\1: raw allocation outside an owner|" <<<"$hits" | report
done < <(printf '%s\n' "${code[@]}" | grep -v '^tests/')

# Paths of one machine.
if [ ${#text[@]} -gt 0 ]; then
  grep -nE '/(work|home|Users)/[A-Za-z]|/tmp/bash|/root/' "${text[@]}" | grep -v '^scripts/check.sh:' |
    sed -E 's/^([^:]+:[0-9]+):.*/\1: path of one machine/' | report
fi

for script in "${scripts[@]}"; do
  bash -n "$script" 2>&1 | sed -E 's/^([^:]+): line ([0-9]+):/\1:\2:/' | report
done

if [ -s "$found" ]; then
  cat "$found"
  echo "check.sh: $(wc -l <"$found") violations" >&2
  exit 1
fi
echo "check.sh: ${#code[@]} source files are clean"
