#!/bin/sh
# Makes the virtual environment VENV (first argument) with Unisono and its development tools in it.
# Without an NVIDIA GPU torch is pinned to a version that has a CPU build; with one, pip takes the newest.
# TORCH_INDEX: a package index with CPU builds of torch, which are a tenth as large; default: pip's index.
set -eu
venv=${1:-.venv}
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Unisono needs Python 3.11 or newer; $python is $("$python" --version). Set PYTHON=/path/to/python3.11." >&2
    exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check install --quiet"
if ! nvidia-smi >/dev/null 2>&1; then
    echo "setup: no NVIDIA GPU here, installing torch 2.13.0 (1/2, may take minutes)"
    $pip ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
fi
echo "setup: installing Unisono and what it needs into $venv (2/2, may take minutes)"
$pip --editable '.[dev]'
touch "$venv/.ready"
echo "setup: done. Next: $venv/bin/unisono serve tiny"
