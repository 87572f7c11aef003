"""What later garbage collections pass over."""

from __future__ import annotations

import gc
import weakref

from unisono.server.heap import settle_heap


class Ring:
    def __init__(self) -> None:
        self.me = self


def test_garbage_goes_and_the_rest_is_passed_over() -> None:
    gc.disable()
    try:
        garbage, kept = weakref.ref(Ring()), Ring()
        settle_heap()
        assert garbage() is None
        assert gc.get_freeze_count() > 1000
        assert not any(known is kept for known in gc.get_objects()), "not looked at again"
    finally:
        gc.unfreeze()
        gc.enable()
