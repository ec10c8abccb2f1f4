#!/bin/sh
# Renews the locks cpu.txt and gpu.txt from ../pyproject.toml:
#
#   requirements/lock.sh                 after a change of pyproject.toml; pins that still fit stay
#   requirements/lock.sh -P openai       and takes the newest openai that fits
#   requirements/lock.sh --upgrade       and takes the newest of everything
#
# uv resolves, for Linux x86-64 and Python 3.11, whatever machine asks. torch's CPU build comes
# from PyTorch's CPU index, or from the folder or page that TORCH_FIND_LINKS names.
set -eu
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install -qq uv

compile() {  # compile PINS OPTION… : resolves into the file PINS; pins in it that fit stay
    pins=$1; shift
    "$work/bin/uv" pip compile pyproject.toml --quiet --no-config --no-header --no-annotate \
        --python-version 3.11 --python-platform x86_64-unknown-linux-gnu \
        --output-file "$pins" "$@" > /dev/null
}

lock() {  # lock NAME OPTION… < HEADER : the extra NAME without, then with, the development tools
    name=$1; shift
    lock=requirements/$name.txt
    [ -f "$lock" ] || : > "$lock"
    cp "$lock" "$work/run.txt"
    compile "$work/run.txt" --extra "$name" "$@"
    cat "$work/run.txt" "$lock" > "$work/all.txt"
    compile "$work/all.txt" --extra "$name" --group dev "$@"
    {
        cat -
        cat "$work/run.txt"
        printf '\n# Development tools\n'
        grep -vxFf "$work/run.txt" "$work/all.txt"
    } | sed -E 's/^torch==([0-9.]+)$/torch===\1/' > "$work/lock.txt"  # == would take 2.13.0+cpu too
    cmp -s "$work/lock.txt" "$lock" || cp "$work/lock.txt" "$lock"   # unchanged: .venv stays ready
}

if [ -n "${TORCH_FIND_LINKS-}" ]; then
    torch="--find-links $TORCH_FIND_LINKS"
else
    torch="--torch-backend cpu"
fi
# shellcheck disable=SC2086
lock cpu $torch "$@" \
    --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec <<'HEADER'
# Everything that .venv holds on a machine without a GPU: Linux x86-64, Python 3.11.
# Made by `requirements/lock.sh` from pyproject.toml; renewed by it too (see CONTRIBUTING.md).
#
# Complete, so installed with --no-deps. torchvision, torchaudio and torchcodec are left out on
# purpose: vLLM and speculators ask for them, nothing here uses them, and PyPI's builds fail at
# import beside torch's CPU build, which breaks transformers too.

HEADER

lock gpu "$@" <<'HEADER'
# Everything that .venv holds on a machine with an NVIDIA GPU: Linux x86-64, Python 3.11, CUDA 13.
# Made by `requirements/lock.sh` from pyproject.toml; renewed by it too (see CONTRIBUTING.md).
# Resolved, not yet installed: no machine with a GPU was at hand.
#
# Complete, so installed with --no-deps.

HEADER
