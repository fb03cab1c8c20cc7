"""Where a setting's value comes from, and what secrets may and may not do."""

from pathlib import Path

import pytest

from kvtools.config import Setting, read_secret, resolve
from kvtools.errors import UsageError
from kvtools.units import parse_size

SETTINGS = [
    Setting("size", parse_size, 5, ("KVX_SIZE", "OLD_SIZE")),
    Setting("token", secret=True, environment=("KVX_TOKEN",)),
    Setting("path"),
]


def test_flag_over_environment_over_file_over_default() -> None:
    both = {"KVX_SIZE": "2K", "OLD_SIZE": "3K"}
    resolved = resolve(SETTINGS, flags={"size": "1K"}, file={"size": "4K"}, file_name="f.yaml", environ=both)["size"]
    assert (resolved.value, resolved.origin) == (1024, "flag")
    resolved = resolve(SETTINGS, flags={"size": None}, file={"size": "4K"}, file_name="f.yaml", environ=both)["size"]
    assert (resolved.value, resolved.origin) == (2048, "env:KVX_SIZE")
    resolved = resolve(SETTINGS, flags={}, file={"size": "4K"}, file_name="f.yaml", environ={"OLD_SIZE": "3K"})["size"]
    assert (resolved.value, resolved.origin) == (3072, "env:OLD_SIZE")
    resolved = resolve(SETTINGS, flags={}, file={"size": 4096}, file_name="f.yaml", environ={})["size"]
    assert (resolved.value, resolved.origin) == (4096, "file:f.yaml")
    resolved = resolve(SETTINGS, flags={}, environ={})["size"]
    assert (resolved.value, resolved.origin) == (5, "default")


def test_errors_name_key_and_origin() -> None:
    with pytest.raises(UsageError, match=r"size \(env:KVX_SIZE\): not a size: 'x'"):
        resolve(SETTINGS, flags={}, environ={"KVX_SIZE": "x"})
    with pytest.raises(UsageError, match=r"unknown key 'sise' in f\.yaml") as caught:
        resolve(SETTINGS, flags={}, file={"sise": 1}, file_name="f.yaml", environ={})
    assert "size" in caught.value.hint


def test_secrets_are_not_shown() -> None:
    value = resolve(SETTINGS, flags={}, environ={"KVX_TOKEN": "hush"})["token"]
    assert (value.value, value.shown) == ("hush", "***")
    assert resolve(SETTINGS, flags={}, environ={})["token"].shown == "None"
    assert resolve(SETTINGS, flags={"path": "/x"}, environ={})["path"].shown == "/x"


def test_secrets_by_environment_and_file(tmp_path: Path) -> None:
    assert read_secret("env:T", {"T": "hush"}) == "hush"
    with pytest.raises(UsageError, match="variable T is not set"):
        read_secret("env:T", {})
    file = tmp_path / "token"
    file.write_text("hush\n")
    file.chmod(0o600)
    assert read_secret(f"file:{file}") == "hush"
    file.chmod(0o640)
    with pytest.raises(UsageError, match="readable by others"):
        read_secret(f"file:{file}")
    with pytest.raises(UsageError, match="No such file"):
        read_secret(f"file:{tmp_path / 'none'}")


def test_what_is_no_secret_says_so_and_gives_no_bad_advice(tmp_path: Path) -> None:
    """An empty one would mean "no password"; and nobody should be told to change the mode of a folder or a device."""
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe")
    for file in (empty, binary):
        file.chmod(0o600)
    for given, says in (
        (f"file:{empty}", "is empty"),
        (f"file:{binary}", "is no text"),
        (f"file:{tmp_path}", "is no file"),
        ("file:/dev/zero", "is no file"),
        ("env:T", "variable T is empty"),
    ):
        with pytest.raises(UsageError, match=says) as caught:
            read_secret(given, {"T": ""})
        assert "chmod" not in caught.value.hint
