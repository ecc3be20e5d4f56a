#!/usr/bin/env bash
# Creates a virtual environment with Holdfast, or updates an existing one. Usage: make_venv.sh FOLDER [EXTRA]
# Without an extra, it contains what serving needs. `dev` adds the tools of tests and checks, and both `dev` and `bench` add the
# benchmarks, a separate distribution; `bench` also adds its charts. `vision` and `otel` are for users.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: make_venv.sh FOLDER [EXTRA]}
wanted=${2:-}
extras=$wanted
bench=()
if [[ $wanted == dev ]]; then
    bench=(-e ./bench)
elif [[ $wanted == bench ]]; then
    extras=
    bench=(-e "./bench[charts]")
fi

say() { echo "make: $*" >&2; }

size_of() { du -sm "$1" 2>/dev/null | cut -f1; }

# Whether this is an x86_64 Python on Apple silicon. It runs under Rosetta, for which MLX has no wheel; pip would not say why.
runs_under_rosetta() {
    [[ $(uname -s) == Darwin && $(sysctl -n hw.optional.arm64 2>/dev/null) == 1 ]] &&
        "$1" -c 'import platform, sys; sys.exit(platform.machine() != "x86_64")' 2>/dev/null
}

recent_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local name
    for name in "${PYTHON:-}" python3.11 python3.12 python3.13 python3.14 python3 python; do
        if [[ -n $name ]] && recent_enough "$name"; then
            if runs_under_rosetta "$name"; then
                say "$(command -v "$name") is built for Intel; MLX needs one for Apple silicon: skipped"
                continue
            fi
            command -v "$name"
            return
        fi
    done
    return 1
}

if [[ ! -x $venv/bin/holdfast ]]; then
    say "creating a Python environment in $venv with packages from PyPI; this takes a minute or two"
fi
if ! { [[ -x $venv/bin/python ]] && recent_enough "$venv/bin/python"; }; then
    if python=$(find_python); then
        # The Python of some systems has no ensurepip, which uv does not need.
        if command -v uv >/dev/null; then
            uv venv --quiet --python "$python" "$venv"
        elif ! "$python" -m venv "$venv"; then
            say "'$python -m venv' failed; on Debian: apt-get install python3-venv (or install uv)"
            exit 1
        fi
    elif command -v uv >/dev/null; then
        uv venv --quiet --python 3.11 "$venv" # downloads Python
    else
        say "no Python 3.11 or newer found for this machine; set PYTHON=… or install uv (macOS: brew install uv)"
        exit 1
    fi
fi

# Run a silent command and print the elapsed time and the size of the environment every few seconds.
with_progress() {
    "$@" &
    local command=$! began=$SECONDS waited=0
    trap 'kill "$command" 2>/dev/null; exit 130' INT TERM
    while kill -0 "$command" 2>/dev/null; do
        sleep 0.2
        waited=$((waited + 1))
        if ((waited % 20 == 0)); then
            say "  … $((SECONDS - began)) s, $(size_of "$venv") MB in $venv"
        fi
    done
    trap - INT TERM
    wait "$command"
}

install() {
    if command -v uv >/dev/null; then
        uv pip install --python "$venv/bin/python" -c constraints.txt "$@" # shows progress on a terminal
    else
        with_progress "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@"
    fi
}

if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    extras=${extras:+$extras,}cuda
fi
say "installing Holdfast${extras:+ [$extras]} into $venv"
install -e ".${extras:+[$extras]}" ${bench[@]+"${bench[@]}"}
if [[ $extras == *cuda* ]] && ! "$venv/bin/python" -c 'import mlx.core as mx, sys; sys.exit(not mx.cuda.is_available())' 2>/dev/null; then
    # mlx-cpu and mlx-cuda-13 contain the same file, mlx/lib/libmlx.so; that of CUDA must be installed last.
    install --force-reinstall --no-deps mlx-cuda-13
fi
say "ready: $(size_of "$venv") MB in $venv"
