"""The README's picture is what kvtop shows, byte for byte."""

from tests.kvtop import picture


def test_the_picture_is_up_to_date() -> None:
    assert picture.PICTURE.read_text(encoding="utf-8") == picture.draw(), "python -m tests.kvtop.picture"
