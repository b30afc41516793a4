#!/usr/bin/env bash
# Everything that one GPU can show, or a CPU where there is none, as one JSON that tests compare the simulator with:
#     validation/battery.sh [FILE.json] [more options of `python -m validation battery`]
# Needs torch and transformers, and what cdpsim needs; PYTHON names another python. Started again on the same day with
# --resume it goes on where it was ended.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
device=$("${PYTHON:-python}" -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")' 2>/dev/null || echo cpu)
file=${1:-validation/results/battery-$device-$(date -u +%Y-%m-%d).json}
mkdir -p "$(dirname "$file")"
exec "${PYTHON:-python}" -m validation battery --device "$device" -o "$file" "${@:2}"
