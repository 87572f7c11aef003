"""Imports of transformers from several threads."""

from __future__ import annotations

import subprocess
import sys

THREADS = """
import sys, threading
sys.setswitchinterval(1e-5)
from unisono.config.transformers_names import from_transformers
start, found = threading.Barrier(4), []
def run():
    start.wait()
    found.append(from_transformers("AutoTokenizer").__name__)
threads = [threading.Thread(target=run) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(found)
"""


def test_threads_import_transformers_at_once() -> None:
    """``from transformers import AutoTokenizer`` fails here in the threads that wait for the first one's import."""
    run = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=300)
    assert run.stdout.strip() == str(["AutoTokenizer"] * 4), run.stderr[-2000:]
