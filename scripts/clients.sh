#!/bin/sh
# Makes .venv-clients with the clients that tests/http/test_clients.py talks with, Python's and Node.js's.
set -eu
venv=.venv-clients
python=${PYTHON:-python3}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check install --quiet"
$pip --upgrade pip
nvidia-smi >/dev/null 2>&1 || $pip torch==2.13.0
$pip --editable '.[dev,clients]'
if command -v npm >/dev/null; then
    mkdir -p "$venv/node"
    (cd "$venv/node" && npm install --silent --no-fund --no-audit openai ai @ai-sdk/openai @ai-sdk/openai-compatible zod)
fi
touch "$venv/.ready"
