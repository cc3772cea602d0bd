"""What all of the package shares: letters among others, volumes, and what is loaded when it is called."""

from __future__ import annotations

import pytest

from sparsetc.support import among, later, outside, required, volume


def test_things_are_among_others_or_outside_of_them_in_their_own_order() -> None:
    for others in ("ki", ["k", "i"], {"k", "i"}, {"k": 1, "i": 2}):
        assert among("ijk", others) == ("i", "k")
        assert outside("ijki", others) == ("j",)
    assert (among("", "a"), outside(range(3), ())) == ((), (0, 1, 2))


def test_a_volume_is_of_the_axes_named_and_1_of_none() -> None:
    assert volume({"i": 2, "j": 3, "k": 5}, "jk") == 15
    assert volume((2, 3, 5), (0, 2)) == 10
    assert volume((2, 3), ()) == 1


def test_a_function_is_found_when_it_is_called() -> None:
    assert later("support", "volume")((2, 3), axes=(1,)) == 3
    absent = later("support", "nothing")
    with pytest.raises(AttributeError):
        absent()


def test_a_library_that_is_absent_is_named() -> None:
    assert required("math", "")
    with pytest.raises(ImportError, match="pip install it"):
        required("sparsetc_lacks_this", "pip install it")
