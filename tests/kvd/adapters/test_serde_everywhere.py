"""Every adapter behind a serde chain: the note that a chain needs comes back, also after a restart, and so do the values."""

from kvd.store.retention import Retention
from kvd.tiers.adapters.base import Item, Loaded, Want
from kvd.tiers.serde.adapter import SerdeAdapter
from kvd.tiers.serde.aesgcm import AesGcm
from kvd.tiers.serde.chain import Chain
from kvd.tiers.serde.compression import Zstd
from tests.kvd.adapters.subjects import Subject
from tests.kvd.adapters.test_conformance import body, everybody, ident, subject  # noqa: F401 - the fixture

NOTE = (1 << 32) - 2


@everybody
def test_a_note_comes_back(subject: Subject) -> None:  # noqa: F811
    with subject.opened() as adapter:
        item = Item(ident(1), memoryview(body(1)).toreadonly(), Retention.LONG, 0, None, NOTE)
        assert adapter.store([item])[0].ok
        (hit,) = adapter.lookup([ident(1)])
        assert hit is not None
        assert (hit.length, hit.note) == (5000, NOTE)
    if not subject.make().capabilities.durable:
        return
    with subject.opened() as adapter:
        (hit,) = adapter.lookup([ident(1)])
        assert hit is not None
        assert (hit.length, hit.note) == (5000, NOTE)


@everybody
def test_values_pass_a_chain(subject: Subject) -> None:  # noqa: F811
    chain = Chain([Zstd(), AesGcm(bytes(range(32)))])
    plain = {number: b"compressible " * number for number in (1, 50, 3000)}
    adapter = SerdeAdapter(subject.make(), chain)
    adapter.open()
    try:
        items = [Item(ident(number), memoryview(data), Retention.LONG) for number, data in plain.items()]
        assert all(stored.ok for stored in adapter.store(items))
        hits = adapter.lookup([ident(number) for number in plain])
        assert [hit and hit.length for hit in hits] == [len(data) for data in plain.values()]
        buffers = [bytearray(len(data)) for data in plain.values()]
        wants = [
            Want(ident(number), memoryview(buffer), None, hit.note)
            for number, buffer, hit in zip(plain, buffers, hits, strict=True)
            if hit is not None
        ]
        assert adapter.load(wants) == [Loaded.OK] * 3
        assert [bytes(buffer) for buffer in buffers] == list(plain.values())
        assert adapter.delete([ident(1)]) == 1
        assert adapter.lookup([ident(1)]) == [None]
    finally:
        adapter.close(1.0)
