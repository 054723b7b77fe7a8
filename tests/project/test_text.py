"""Names of files and classes as one line that a terminal prints as it is."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.text import as_name


def test_no_name_has_an_effect_on_a_terminal() -> None:
    """They come from folders, and from runs of others."""
    name = "cat\x1b]0;title\x07\x1b[31m\n\t\x85\u2028\x7f ü \udce9"
    assert as_name(name) == r"cat\x1b]0;title\x07\x1b[31m\n\t\x85\u2028\x7f ü \udce9"


@given(st.text())
def test_a_name_is_one_printable_line_and_stays_as_it_is(text: str) -> None:
    name = as_name(text)
    assert name.splitlines() in ([], [name]) and as_name(name) == name
    assert not any(ord(each) < 32 or 127 <= ord(each) < 160 for each in name)
