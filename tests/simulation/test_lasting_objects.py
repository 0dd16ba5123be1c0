"""What a simulation makes at its beginning is not walked through by the garbage collector."""

from __future__ import annotations

import gc
import weakref

from simulation.lasting_objects import lasting_objects


class Circle:
    def __init__(self) -> None:
        self.own = self


def test_what_is_made_to_last_is_never_walked_through_and_what_is_made_after_it_is() -> None:
    gc.unfreeze()  # what the tests' process has made to last
    before = (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count())
    with lasting_objects() as made:
        assert not gc.isenabled()
        lasting = [Circle() for _ in range(1000)]
        made()
        assert gc.isenabled()
        assert gc.get_freeze_count() >= len(lasting)
        late = weakref.ref(Circle())
        gc.collect()
        assert late() is None
    assert (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()) == before
