"""What a recorder meets while it runs: text that no file can hold, a file that is taken away, an error nobody foresaw."""

from contextlib import closing
from pathlib import Path

import pytest

from kvtools.segments import owner, pool, stats
from kvtop.record import Recorder, Writer
from kvtop.recording import Recording
from kvtop.snapshot import Snapshot
from kvtop.source import Source
from tests.kvtop import scenes


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
