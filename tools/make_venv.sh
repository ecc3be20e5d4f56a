#!/usr/bin/env bash
# Makes a virtual environment with Holdfast and its tools in it, or brings an existing one up to date. Usage: make_venv.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: make_venv.sh FOLDER}

recent_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local name
    for name in "${PYTHON:-}" python3.11 python3.12 python3.13 python3 python; do
        if [[ -n $name ]] && recent_enough "$name"; then
            command -v "$name"
            return
        fi
    done
    return 1
}

if ! { [[ -x $venv/bin/python ]] && recent_enough "$venv/bin/python"; }; then
    if python=$(find_python); then
        # Some systems' Python comes without ensurepip: uv does not need it.
        if command -v uv >/dev/null; then
            uv venv --quiet --python "$python" "$venv"
        elif ! "$python" -m venv "$venv"; then
            echo "make: '$python -m venv' failed; on Debian: apt-get install python3-venv (or install uv)" >&2
            exit 1
        fi
    elif command -v uv >/dev/null; then
        uv venv --quiet --python 3.11 "$venv" # fetches one
    else
        echo "make: no Python 3.11 or newer found; set PYTHON=… or install uv (https://docs.astral.sh/uv/)" >&2
        exit 1
    fi
fi

install() {
    if command -v uv >/dev/null; then
        uv pip install --quiet --python "$venv/bin/python" -c constraints.txt "$@"
    else
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@"
    fi
}

extras=dev
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    extras=dev,cuda
fi
echo "make: installing Holdfast [$extras] into $venv" >&2
install -e ".[$extras]" -e ./bench
if [[ $extras == *cuda* ]] && ! "$venv/bin/python" -c 'import mlx.core as mx, sys; sys.exit(not mx.cuda.is_available())' 2>/dev/null; then
    # mlx-cpu and mlx-cuda-13 bring the same file, mlx/lib/libmlx.so: the one for CUDA has to be written last.
    install --force-reinstall --no-deps mlx-cuda-13
fi
