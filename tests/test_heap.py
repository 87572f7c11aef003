"""What later garbage collections pass over."""

from __future__ import annotations

import gc
import weakref

from unisono.cluster.heap import frozen_heap


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
