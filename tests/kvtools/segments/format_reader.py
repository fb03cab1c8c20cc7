"""A second reader of stats segments, written from FORMAT.md alone: it shares no code with the writer it checks."""

import json
import struct
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any]:
    """Header fields, schema and values of the segment at `path`, every rule of the page asserted on the way."""
    data = path.read_bytes()
    assert data[:8] == b"KVTSTAT1"
    header, schema_bytes, count, flags = struct.unpack_from("<4I", data, 8)
    pid, start, namespace, created, heartbeat, sequence = struct.unpack_from("<6Q", data, 24)
    assert header == 128
    assert data[72:128] == bytes(56)
    padded = -(-schema_bytes // 8) * 8
    assert data[128 + schema_bytes : 128 + padded] == bytes(padded - schema_bytes)
    assert len(data) == 128 + padded + 8 * count
    schema = json.loads(data[128 : 128 + schema_bytes].decode("utf-8"))
    assert len(schema) == count
    values = []
    for i, entry in enumerate(schema):
        assert entry["type"] in {"counter", "gauge", "bucket"}
        assert all(isinstance(entry[key], str) for key in ("name", "unit", "help"))
        assert all(isinstance(k, str) and isinstance(v, str) for k, v in entry["labels"].items())
        values += struct.unpack_from("<d" if entry["float"] else "<Q", data, 128 + padded + 8 * i)
    return {
        "pid": pid,
        "pid_start": start,
        "pid_namespace": namespace,
        "created": created,
        "heartbeat": heartbeat,
        "sequence": sequence,
        "superseded": bool(flags & 1),
        "schema": schema,
        "values": values,
    }
