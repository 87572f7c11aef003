"""What later garbage collections pass over."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import weakref

import pytest

from unisono.heap import frozen_heap


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


@pytest.mark.skipif(not (sys.platform == "linux" and platform.libc_ver()[0] == "glibc"), reason="it tunes glibc")
def test_large_blocks_are_given_back() -> None:
    """Between small objects, too, and after larger ones have been freed, which raises glibc's own limit."""
    code = """if True:
        import sys
        from unisono.heap import return_freed_memory
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
