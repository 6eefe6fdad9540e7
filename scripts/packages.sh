# shellcheck shell=bash
# Sourced by scripts: installs what scripts/packages.txt lists and this machine lacks. Usage: fnx_install KIND...
fnx_install() {
  local here missing=() kind package
  here="$(dirname "${BASH_SOURCE[0]}")"
  while read -r kind package; do
    [[ " $* " == *" $kind "* ]] || continue
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done < <(grep -v '^#' "$here/packages.txt")
  [ ${#missing[@]} -eq 0 ] && return 0
  local sudo=""
  [ "$(id -u)" -eq 0 ] || sudo="sudo"
  echo "installing: ${missing[*]}" >&2
  $sudo apt-get update -qq >&2
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
}
