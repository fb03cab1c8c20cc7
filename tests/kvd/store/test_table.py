"""Names of rows: as a dict would have them, whatever is put and taken away, and wherever the hashes fall."""

import random
from collections.abc import Callable

import pytest

from kvd.store.table import LEAST, Table

SPREAD = Table._hash


def at_the_end(table: Table, identity: bytes) -> int:
    """Hashes that all want the last places of a table of any size, so that probing goes on at its beginning."""
    return 0xFFFFFFFF - SPREAD(table, identity) % 3


def in_one_place(table: Table, identity: bytes) -> int:
    return 7


@pytest.mark.parametrize("hashed", [SPREAD, at_the_end, in_one_place], ids=["spread", "at the end", "in one place"])
def test_it_finds_what_a_dict_finds(monkeypatch: pytest.MonkeyPatch, hashed: Callable[[Table, bytes], int]) -> None:
    monkeypatch.setattr(Table, "_hash", hashed)
    table, model, chance = Table(), {}, random.Random(5)
    rows = 400 if hashed is not SPREAD else 4 * LEAST
    table.grow(rows + 1)
    free = list(range(1, rows + 1))
    names = [chance.randbytes(64) for _ in range(2 * rows)]
    for step in range(6 * rows):
        identity = chance.choice(names)
        if identity in model:
            assert table.pop(identity) == model[identity]
            free.append(model.pop(identity))
        elif free and (step < 3 * rows or chance.random() < 0.5):
            table.put(identity, free[-1])
            model[identity] = free.pop()
        else:
            assert table.pop(identity) == 0
        assert len(table) == len(model)
        if step % 97 == 0 or step == 6 * rows - 1:
            assert [table.find(one) for one in names] == [model.get(one, 0) for one in names]
    assert all(table.name(row) == identity for identity, row in model.items())


def test_two_tables_do_not_share_their_hashes() -> None:
    one, other = Table(), Table()
    names = [bytes([number]) * 64 for number in range(32)]
    assert [one._hash(name) for name in names] != [other._hash(name) for name in names]


@pytest.mark.parametrize("hashed", [at_the_end, in_one_place], ids=["at the end", "in one place"])
def test_a_table_laid_out_anew_past_its_end(monkeypatch: pytest.MonkeyPatch, hashed: Callable[[Table, bytes], int]) -> None:
    monkeypatch.setattr(Table, "_hash", hashed)
    table = Table()
    table.grow(LEAST)
    names = [number.to_bytes(64, "big") for number in range(1, LEAST)]
    for row, identity in enumerate(names, 1):  # grows at half of it
        table.put(identity, row)
    assert [table.find(identity) for identity in names] == list(range(1, LEAST))
    for identity in names[::2]:
        table.pop(identity)
    assert [table.find(identity) for identity in names[1::2]] == list(range(2, LEAST, 2))
