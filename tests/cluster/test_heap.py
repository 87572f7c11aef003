"""The heap: frozen objects are passed over by collections, and freed memory returns to the system."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from unisono.cluster.heap import frozen_heap

ROOT = Path(__file__).parents[2]


class Ring:
    def __init__(self) -> None:
        self.me = self


def test_garbage_goes_and_the_rest_is_passed_over_for_a_while() -> None:
    gc.disable()
    try:
        garbage, kept = weakref.ref(Ring()), Ring()
        with frozen_heap():
            assert garbage() is None
            assert gc.get_freeze_count() > 1000
            assert not any(known is kept for known in gc.get_objects()), "not looked at again"
        assert any(known is kept for known in gc.get_objects())
    finally:
        gc.enable()


TRIM = """
import re, threading, time
from unisono.cluster.heap import HeapTrimmer
from tokenizers import Tokenizer

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024

tokenizer = Tokenizer.from_file("unisono/bundled/tiny/tokenizer.json")
done, end_of_thread = threading.Event(), threading.Event()

def work():  # in a thread that stays, as those of a server do
    len(tokenizer.encode("a b " * (1 << 17)).ids)
    done.set()
    end_of_thread.wait()

before = resident()
threading.Thread(target=work, daemon=True).start()
done.wait()
time.sleep(1)
left = resident()
HeapTrimmer(0.01).request()
end = time.monotonic() + 60
while resident() > before + (left - before) // 4 and time.monotonic() < end:
    time.sleep(0.01)
print(left - before, resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps such memory and can return it")
def test_freed_memory_returns_to_the_system() -> None:
    """Tokenizing half a MiB leaves tens of MiB in the heap; a trim returns most of them."""
    done = subprocess.run([sys.executable, "-c", TRIM], cwd=ROOT, capture_output=True, text=True, check=True)
    left, after = map(int, done.stdout.split())
    assert left > 20, "the text is too short to leave memory behind"
    assert after < left / 2


@pytest.mark.skipif(not (sys.platform == "linux" and platform.libc_ver()[0] == "glibc"), reason="it tunes glibc")
def test_large_blocks_return_to_the_system() -> None:
    """Between small objects, too, and after larger ones have been freed, which raises glibc's own limit."""
    code = """if True:
        import sys
        from unisono.cluster.heap import return_freed_memory
        if sys.argv[1] == "tuned":
            return_freed_memory()
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
        before, kept = resident(), []
        block = b"x" * (30 << 20)
        del block
        for _ in range(8):
            blocks = []
            for _ in range(4):
                blocks.append(b"x" * (4 << 20))
                kept.append(b"y" * 100_000)
            del blocks
        print(resident() - before - (len(kept) * 100_000 >> 20))"""
    held = {
        how: int(subprocess.run([sys.executable, "-c", code, how], capture_output=True, check=True).stdout)
        for how in ("tuned", "plain")
    }
    assert held["tuned"] < 3 < held["plain"]
