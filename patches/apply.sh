#!/usr/bin/env bash
# Apply a series to a vLLM checkout or to site-packages: all of it or nothing.
# Usage: patches/apply.sh DIRECTORY [SERIES]   DIRECTORY holds vllm/
set -euo pipefail
series=$(realpath "${2:-$(dirname "$0")/vllm-0.32}")
cd "$1"
# Do not look for a repository above: git would take paths to be relative to it.
export GIT_CEILING_DIRECTORIES=${PWD%/*}
tried=()
for patch in "$series"/*.patch; do
    tried+=("$patch")
    if ! git apply --check "${tried[@]}"; then
        echo "apply.sh: ${patch##*/} does not apply to $PWD; nothing was changed" >&2
        exit 1
    fi
done
git apply "${tried[@]}"
echo "apply.sh: applied ${#tried[@]} patches"
