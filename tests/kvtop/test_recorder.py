"""What a recorder meets while it runs: text that no file can hold, a file that is taken away, an error nobody foresaw."""

import struct
import zlib
from contextlib import closing
from pathlib import Path

import pytest

from kvtools.errors import UsageError
from kvtools.segments import owner, pool, stats
from kvtop.record import KEY, RECORD, Recorder, Writer
from kvtop.recording import Recording
from kvtop.replay import Player
from kvtop.snapshot import Snapshot
from kvtop.source import Source
from tests.kvtop import scenes
from tests.support.processes import run_python


@pytest.mark.real("segments")
def test_half_a_character_that_somebody_wrote_is_recorded_and_shown(tmp_path: Path) -> None:
    """JSON can say what no file can hold: a sidecar and a label of a writer with a lone surrogate."""
    shm = tmp_path / "shm"
    shm.mkdir()
    pool.create_pool("chat", 1 << 30, root=shm)
    with owner.OwnerLock.acquire("chat", owner.OwnerInfo(engine="\ud800x"), root=shm):
        metrics = [stats.Metric("things", "gauge", "", "", labels={"of": "abcdef"})]
        with closing(stats.StatsWriter("tool", "one", metrics, root=shm)) as writer:
            text = writer.path.read_bytes().replace(b"abcdef", rb"\udfff")
            with writer.path.open("r+b") as file:
                file.write(text)
            snapshot = Source(root=shm).read()
    assert snapshot.segments[0].engine == "\ufffdx"
    recorder = Recorder(Writer(tmp_path / "r"))
    recorder(snapshot)
    recorder.close()
    assert recorder.verdict() is None
    assert Recording(tmp_path / "r").at(0).stats[0].schema[0].labels == (("of", "\ufffd"),)


def test_whatever_a_recorder_meets_is_told(tmp_path: Path) -> None:
    class Broken(Writer):
        def write(self, snapshot: Snapshot) -> None:
            raise ZeroDivisionError("nobody foresaw it")

    recorder = Recorder(Broken(tmp_path / "r"))
    recorder(scenes.host())
    assert "ZeroDivisionError: nobody foresaw it" in recorder.problem
    verdict = recorder.verdict()
    assert verdict is not None
    assert "not recorded" in verdict.message


@pytest.mark.parametrize(("how", "what", "lost"), [("rm", "removed", 3), ("mv", "moved away", 0), ("empty", "emptied", 3),
                                                   ("cut", "cut", 1), ("junk", "written into", 0)])  # fmt: skip
def test_a_file_that_is_taken_away_meanwhile_is_told_and_begun_anew(tmp_path: Path, how: str, what: str, lost: int) -> None:
    path = tmp_path / "r"
    recorder = Recorder(Writer(path))
    for tick in range(3):
        recorder(scenes.host(tick))
    assert not recorder.alerts()
    if how == "rm":
        path.unlink()
    elif how == "mv":
        path.rename(tmp_path / "older")
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 5)
    else:
        with path.open("ab") as file:
            file.write(b"K somebody was here")
    for tick in range(3, 6):
        recorder(scenes.host(tick))
    assert what in recorder.alerts()[0].text
    assert what in recorder.notes[0]
    recorder.close()
    verdict = recorder.verdict()
    assert (verdict is not None) == bool(lost)
    if verdict is not None:
        assert f"{lost} of 6 readings" in verdict.message
    assert Recording(path).times[-3:] == [scenes.host(tick).time_s for tick in range(3, 6)]
    if how == "mv":
        assert len(Recording(tmp_path / "older")) == 3


def _nonsense(time_s: float) -> bytes:
    payload = zlib.compress(b"\x93\x01\x02\x03")
    return RECORD.pack(len(payload), zlib.crc32(payload, zlib.crc32(struct.pack("<Bd", KEY, time_s))), KEY, time_s) + payload


def test_a_last_reading_that_is_nonsense_behind_its_checksum_hides_no_other(tmp_path: Path) -> None:
    with Writer(tmp_path / "r") as writer:
        for tick in range(3):
            writer.write(scenes.host(tick))
    with (tmp_path / "r").open("ab") as file:
        file.write(_nonsense(scenes.host(3).time_s))
    player = Player(tmp_path / "r")
    shown = player.seek(player.length - 1)
    assert [one.time_s for one in shown[:3]] == [scenes.host(tick).time_s for tick in range(3)]
    assert "what is there is no reading" in shown[-1].problems[-1].message
    assert [one.lost for one in player.damage] == [1]
    player.close()


def test_a_recording_that_is_cut_while_it_is_shown_is_told(tmp_path: Path) -> None:
    with Writer(tmp_path / "r") as writer:
        for tick in range(3):
            writer.write(scenes.host(tick))
    player = Player(tmp_path / "r")
    first = player.read()
    (tmp_path / "r").write_bytes(b"")
    after = player.read()
    assert after.segments == first.segments
    assert "was cut while it was shown" in after.problems[-1].message
    player.close()


def test_what_lies_beside_a_recording_by_chance_does_not_hide_it(tmp_path: Path) -> None:
    (tmp_path / "r.1").write_text("notes of somebody")
    with Writer(tmp_path / "r") as writer:
        writer.write(scenes.host(0))
    recording = Recording(tmp_path / "r")
    assert len(recording) == 1
    assert recording.at(0).host == scenes.host(0).host
    assert [one.path.name for one in recording.damage] == ["r.1"]
    recording.close()


@pytest.mark.parametrize("there", ["/dev/full", "/"])
def test_what_cannot_be_recorded_to_is_an_error_of_the_command_line(there: str) -> None:
    with pytest.raises(UsageError, match="is no file"):
        Writer(Path(there))


def test_files_of_a_screen_that_do_not_fit_leave_nothing(tmp_path: Path) -> None:
    code = (
        "import resource, signal, pathlib\n"
        "from kvtop.once import write_screen\nfrom tests.kvtop import scenes\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n"
        f"try:\n    write_screen(pathlib.Path({str(tmp_path)!r}), scenes.model(1), 'x' * 9999, 'y', 0.0)\n"
        "except OSError as error:\n    print(error.strerror)\n"
    )
    assert run_python(code, env={"PYTHONDONTWRITEBYTECODE": "1"}).stdout == "File too large\n"
    assert list(tmp_path.iterdir()) == []
