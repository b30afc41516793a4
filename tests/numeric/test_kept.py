"""Values are kept while they fit; those that were not asked for longest go first."""

from cdpsim.numeric.columns import Kept


def test_what_was_not_asked_for_longest_goes() -> None:
    kept: Kept[str] = Kept(most=10)
    for key in "abc":
        kept.keep(key, key.upper(), 4)
    assert [*kept] == ["B", "C"]
    assert kept["b"] == "B"
    kept.keep("d", "D", 4)
    assert "c" not in kept and "b" in kept
    kept.forget()
    assert not [*kept]
    kept.keep("e", "E", 9)
    assert "e" in kept


def test_so_many_are_kept_however_large_they_are() -> None:
    for least in (1, 3):
        kept: Kept[int] = Kept(most=10, least=least)
        for number in range(5):
            kept.keep(number, number, 100)
        assert [*kept] == [*range(5)][-least:]
