#!/usr/bin/env bash
# Tables of how equal, how fast and how large the modes are, beside what ships with torch.
#
#     ./bench.sh --help       all commands, how long they take, and options
#     ./bench.sh modes        one of them
#
# bench/__main__.py does it, and bench/commands.py says what a command is.
set -euo pipefail
cd "$(dirname "$0")"
exec python -m bench "$@"
