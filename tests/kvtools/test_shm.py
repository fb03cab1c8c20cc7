"""KVTOOLS_SHM: one folder of segments for every command, daemon and engine, read in one place."""

import json
from pathlib import Path

import pytest

from kvtools.segments import pool
from tests.support.daemon import MakeDaemon
from tests.support.processes import SHARED_MEMORY, run_cli, run_python

GIB = 1 << 30


@pytest.mark.real("kvd", "segments")
def test_a_daemon_and_every_command_meet_in_another_folder(tmp_path: Path, kvd_daemon: MakeDaemon) -> None:
    env = {"KVTOOLS_SHM": str(tmp_path)}
    pool.create_pool("engine-a", GIB, used_bytes=GIB // 2, root=tmp_path)
    daemon = kvd_daemon(env=env)
    published = tmp_path / daemon.segment.name
    assert published.exists()
    assert not (SHARED_MEMORY / published.name).exists()

    listed = run_cli("kvctl", "list", "--json", env=env).json()
    assert [one["ipc"] for one in listed["segments"]] == ["engine-a"]
    shown = run_cli("kvtop", "--json", env=env).json()
    assert [one["ipc"] for one in shown["segments"]] == ["engine-a"]
    assert [one["name"] for one in shown["daemons"]] == [published.name.removeprefix("kvtools.")]
    stats = run_cli("kvd", "stats", "--json", env={**env, "KVD_SOCKET": str(daemon.socket)})
    assert stats.rc == 0, stats.stderr
    seen = run_cli("kvdoctor", "--only", "kvd.segments", "--json", env=env).json()
    scopes = {result["scope"]: result for result in seen["results"]}
    assert {"engine-a", published.name} <= set(scopes)
    assert f"{tmp_path}/engine-a" in json.dumps(scopes["engine-a"]["evidence"])
    checked = run_cli("kvtop", "--once", "--view", "doctor", "--filter", "engine-a", env={**env, "COLUMNS": "200"})
    assert "engine-a" in checked.stdout

    # An option wins over the environment; without either it is /dev/shm.
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run_cli("kvctl", "--shm", empty, "list", "--json", env=env).json()["segments"] == []
    assert run_cli("kvtop", "--shm", empty, "--json", env=env).json()["segments"] == []
    doctor = run_cli("kvtop", "--shm", empty, "--once", "--view", "doctor", env={**env, "COLUMNS": "200"})
    assert "engine-a" not in doctor.stdout, "the doctor looks where kvtop looks"
    config = {
        row["variables"][0]: row for row in run_cli("kvtools", "config", "--json", env=env).json()["settings"] if row["variables"]
    }
    assert (config["KVTOOLS_SHM"]["value"], config["KVTOOLS_SHM"]["origin"]) == (str(tmp_path), "env:KVTOOLS_SHM")


@pytest.mark.parametrize(("value", "folder"), [("", "/dev/shm"), ("/somewhere", "/somewhere")])
def test_every_package_takes_it_from_one_place(value: str, folder: str) -> None:
    """Engines, connectors and the gate publish where the commands look: their default is the same object."""
    ran = run_python(
        "import inspect; from kvtools.segments import files, pool, stats\n"
        "from kvtools.elastic import figures, tracker; from kvd.connector import segment; from kvd.service import daemon\n"
        "from kvgate import publish, room; from kvtop import source\n"
        "made = [pool.list_pools, stats.find_stats, figures.Figures, tracker.MemInfoTracker, segment.engines, publish.Publisher,\n"
        "        room.Room, source.Source]\n"
        "roots = {inspect.signature(one).parameters['root'].default for one in made}\n"
        "assert roots == {files.SHM}, roots; print(files.SHM)",
        env={"KVTOOLS_SHM": value},
    )
    assert ran.stdout.strip() == folder, ran.stderr


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    env = {"KVTOOLS_SHM": str(tmp_path / "none"), "COLUMNS": "120"}
    ran = run_cli("kvctl", "list", env=env)
    assert (ran.rc, ran.stderr.splitlines()[0]) == (4, f"kvctl: error: cannot read {tmp_path}/none: No such file or directory")
    once = run_cli("kvtop", "--once", env=env)
    assert f"cannot read {tmp_path}/none: No such file or directory" in once.stdout
    assert "no daemon" not in once.stdout
    assert "no segments in" not in once.stdout
