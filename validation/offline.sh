#!/usr/bin/env bash
# Equip a machine that has torch, but no network and perhaps another Python, in two halves:
#     validation/offline.sh fetch [--python 3.12] [--machine x86_64] [--folder wheels] [NAME...]   here
#     validation/offline.sh install [--folder wheels]                                              there
# The first fetches the wheels of what cdpsim needs, in the versions of constraints.txt, but for what comes with torch or
# is large: numpy, networkx and matplotlib, unless they are among the NAMEs. The second installs what that machine lacks
# of them and imports all of it. Both need a checkout of the project, and change nothing if they run again. PYTHON names
# another python.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
present=(matplotlib networkx numpy)

refuse() { echo "offline.sh: $*" >&2; exit 2; }

# cdpsim's dependencies, one a line, as pyproject.toml has them.
dependencies() {
    "$python" - "$root/pyproject.toml" <<'EOF'
import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"], sep="\n")
EOF
}

check_python() {
    command -v "$python" >/dev/null || refuse "$python: there is no such program; set PYTHON"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || refuse "$python: is older than 3.11; set PYTHON"
    "$python" -m pip --version >/dev/null 2>&1 || refuse "$python: has no pip; install it, or set PYTHON"
}

# Runs pip, which says little; if it fails, one line says for want of what. $1: what to do about it.
pip_or_refuse() {
    local remedy=$1 said wanted
    shift
    said=$("$python" -m pip --disable-pip-version-check "$@" 2>&1) && return
    wanted=$(sed -n 's/^ERROR: No matching distribution found for //p' <<<"$said" | head -n 1)
    [[ -z $wanted ]] || refuse "${wanted%% *}: $remedy"
    refuse "pip: $(grep -m 1 '^ERROR' <<<"$said" || tail -n 1 <<<"$said"); mend that, and try again"
}

fetch() {
    local names=("$@") tags=() line name
    while read -r line; do
        name=${line%%[^A-Za-z0-9._-]*}
        [[ " ${present[*]} " == *" $name "* ]] || names+=("$line")
    done < <(dependencies)
    for tag in manylinux2014 manylinux_2_17 manylinux_2_27 manylinux_2_28; do tags+=(--platform "${tag}_$machine"); done
    mkdir -p "$folder" 2>/dev/null || refuse "$folder: cannot be made; give another --folder"
    pip_or_refuse "no wheel of it could be fetched for Python $version on $machine; try another --python or --machine" \
        download --quiet --no-deps --only-binary=:all: --python-version "$version" --implementation cp "${tags[@]}" \
        --constraint "$root/constraints.txt" --dest "$folder" "${names[@]}"
    echo "$(find "$folder" -name '*.whl' | wc -l) wheels in $folder, $(du -ch "$folder"/*.whl | tail -n 1 | cut -f 1)"
}

install() {
    local here
    [[ -d $folder ]] || refuse "$folder: there is no such folder; make it with validation/offline.sh fetch"
    here=$("$python" -c 'import platform; print(platform.python_version().rpartition(".")[0])')
    mapfile -t needed < <(dependencies)
    pip_or_refuse "is not here, nor a wheel of it for Python $here in $folder; fetch it with --python $here and its name" \
        install --quiet --no-index --find-links "$folder" "${needed[@]}"
    cd "$root"
    "$python" - "${needed[@]}" <<'EOF' || exit 2
import sys
from importlib import import_module
from importlib.metadata import version
from re import match

for requirement in sys.argv[1:]:
    name = match(r"[\w.-]+", requirement)[0]
    try:
        import_module(name.replace("-", "_"))
    except Exception as error:
        sys.exit(f"offline.sh: {name}: cannot be imported ({' '.join(str(error).split())}); install one that fits")
    print(name, version(name))
from cdpsim.errors import RequestError
from validation.training.modules import FIRST, require

for name in FIRST:
    try:
        print(name, require(name).__version__)
    except RequestError as error:
        print(f"offline.sh: {error}", file=sys.stderr)
EOF
}

half=${1:-}
[[ $half == fetch || $half == install ]] || refuse "${half:-no command}: give fetch or install, as the head of the file says"
shift
folder=$root/wheels version=3.12 machine=$(uname -m) names=()
while (($#)); do
    case $1 in
        --folder | --python | --machine)
            [[ -n ${2:-} ]] || refuse "$1: needs a value"
            [[ $half == fetch || $1 == --folder ]] || refuse "$1: is for fetch"
            case $1 in --folder) folder=$2 ;; --python) version=$2 ;; --machine) machine=$2 ;; esac
            shift 2
            ;;
        -*) refuse "$1: unknown option; known are --folder, --python, --machine" ;;
        *)
            [[ $half == fetch ]] || refuse "$1: install takes no names; it installs what is lacking"
            names+=("$1")
            shift
            ;;
    esac
done
[[ $version =~ ^3\.[0-9]+$ ]] || refuse "--python: $version is no version of Python; give one such as 3.12"
check_python
"$half" "${names[@]}"
