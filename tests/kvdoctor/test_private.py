"""What leaves a host in a redacted capture: of each kind of file what a rule reads, and no secret that was hidden in it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdoctor import api
from kvdoctor.capture import Recording, entries, write_capture
from kvdoctor.collect.engines import filtered_environ
from kvdoctor.facts import Environment, Facts
from kvdoctor.parse import klog
from kvdoctor.parse.driver import as_modinfo, parse_modinfo
from kvdoctor.private import Keeper, boot_parameters, mount_points, without_serial
from kvdoctor.redact import Redactor

LaidOut = Callable[[str], tuple[Path, dict[str, Any]]]

SECRETS = (
    *("hunter2", "s3cr3t", "topsecret", "gpu-node-17", "corp.example", "filer03", "alice", "bob.smith", "ACME", "SN12345678"),
    "0xdeadbeef",
    *("10.20.30", "172.16.9", "10-20-30-44", "fd00:1:2", "fe80::", "3c:ec:ef", "01-3c-ec-ef", "9f1c2d3e", "iqn.1992-08.com.netapp"),
    *("nqn.2014-08.org", "sk-live", "kvcached_llama", "phi-private", "/srv/customers"),
)


def bury(case: Path) -> None:
    """Hide a secret in every kind of file that a capture holds."""
    root, cmd = case / "root", case / "cmd"

    def put(path: str, text: str | bytes) -> None:
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, bytes):
            place.write_bytes(text)
        else:
            place.write_text(text)

    put("proc/sys/kernel/hostname", "gpu-node-17.corp.example\n")
    put(
        "proc/cmdline",
        "BOOT_IMAGE=/vmlinuz root=UUID=9f1c2d3e-aaaa-4bbb-8ccc-0123456789ab cryptkey=rootfs:hunter2 rd.iscsi.password=s3cr3t "
        "netroot=iscsi:bob.smith:topsecret@10.20.30.9::::iqn.1992-08.com.netapp:sn.99 ifname=eth0:3c:ec:ef:01:02:03 "
        "BOOTIF=01-3c-ec-ef-01-02-03 ip=10.20.30.40::10.20.30.1:255.255.255.0:gpu-node-17:eth0:none rd.iscsi.username=alice "
        'systemd.setenv=TOKEN=sk-live-1 x="quoted hunter2 words" nameserver=fd00:1:2::53 iommu=pt amdgpu.ais_disabled=0 quiet '
        "hunter2:s3cr3t -- --password topsecret\n",
    )
    put(
        "proc/self/mountinfo",
        "27 1 259:5 /customers/ACME /nvme rw,relatime shared:1 - xfs /dev/nvme1n1p1 rw,attr2,usrquota,x=hunter2\n"
        "30 27 0:50 / /home/alice rw - nfs4 filer03.corp.example:/export/home/alice rw,hard,addr=fd00:1:2::7,clientaddr=fe80::1\n"
        "31 27 0:51 / /mnt/share rw - cifs //10.20.30.44/bob.smith rw,username=alice,password=hunter2,domain=ACME\n"
        "32 27 0:52 / /srv/customers/ACME rw - ext4 /dev/mapper/ACME--vg-customers rw\n"
        "33 27 0:53 / / rw - overlay overlay rw,lowerdir=/home/alice/layers,upperdir=/srv/customers/u,workdir=/w\n",
    )
    put("proc/self/cgroup", "0::/user.slice/user-1000.slice/user@alice.service/ACME.scope\n")
    put("proc/self/status", "Name:\talice-kvdoctor\nUid:\t0\t0\t0\t0\nGroups:\t4 1007\nCapEff:\t000001ffffffffff\n")
    put(
        "proc/mdstat", "Personalities : [raid0]\nmd0 : active raid0 nvme1n1[0]\n      bitmap: 0/1 pages, file: /home/alice/bitmap\n"
    )
    put("proc/modules", "nvidia_fs 1 0 - Live 0x0\nACME_secret_driver 1 0 - Live 0xdeadbeef\n")
    put("etc/os-release", 'PRETTY_NAME="Ubuntu 24.04"\nID=ubuntu\nVARIANT="ACME golden image"\nHOME_URL="https://corp.example"\n')
    put("etc/modprobe.d/ACME-nodes.conf", "# owner alice\noptions acme key=hunter2\n")
    put("etc/modprobe.d/amdgpu.conf", "# by alice for gpu-node-17\noptions amdgpu ais_disabled=0 # s3cr3t\n")
    put("sys/devices/virtual/block/dm-3/dm/uuid", "CRYPT-LUKS2-9f1c2d3eaaaa4bbb8ccc0123456789ab-ACME-customers\n")
    (cmd / "dmesg.out").write_text(
        "[    0.000000] Linux version 6.8.0 (builder@corp.example)\n"
        "[    1.0] amdgpu 0000:41:00.0: amdgpu: AIS: registered 196592MB device memory serial SN12345678\n"
        "[    2.0] amdgpu: Failed to read AIS file: -19 /home/alice/model-phi-private by gpu-node-17\n"
        "[    3.0] amdgpu: unrelated line of user bob.smith mac 3c:ec:ef:01:02:03 from 10.20.30.40\n"
        "[    4.0] audit: rejected login of alice password hunter2\n"
    )
    (cmd / "modinfo-amdgpu.out").write_text(
        "filename:       /lib/modules/6.8.0-60-generic/updates/dkms/amdgpu.ko.zst\nversion:        6.16.13\n"
        "author:         bob.smith@corp.example\nsigner:         gpu-node-17 Secure Boot Module Signature key\n"
        "vermagic:       6.8.0-60-generic SMP preempt mod_unload\nsig_key:        3C:EC:EF:01:02:03\n"
    )
    (cmd / "amd-smi.out").write_text(
        "| 0000:41:00.0 AMD Instinct MI300X | 0 % |\n| serial SN12345678 | alice python phi-private |\n"
    )
    (cmd / "engine.log").write_text("INFO vLLM version 0.32.0 model=/srv/customers/phi-private key=sk-live-2 user alice\n")
    (cmd / "make.log").write_text("gpu-node-17: bad exit status: 2 in /home/alice/build\n")
    (cmd / "lspci-vv.out").write_text(
        "41:00.0 Display controller: AMD\n\tLnkSta: Speed 32GT/s, Width x16\n\tSerial Number: SN12345678\n"
        "\tCapabilities: [140] Device Serial Number 3c-ec-ef-01-02-03\n"
    )
    (cmd / "somebody-elses.txt").write_text("hunter2")
    (cmd / "segments.json").write_text(json.dumps([
        {"name": "kvcached_llama_alice", "kind": "pool", "health": "ok", "detail": "held by alice on kvcached_llama_alice"},
        {"name": "kvtools.kvd.0123456789ab", "kind": "kvd", "health": "ok", "values": {"tier_io_errors_total{tier=ACME}": 0}},
    ]))  # fmt: skip
    (cmd / "processes.json").write_text(json.dumps({
        "engines": [{"pid": 1, "args": ["/home/alice/venv/bin/vllm", "serve", "--long-path", "/home/alice/kv"], "cgroup": "/ACME/x",
                     "environ": {"VLLM_HOST_IP": "10.20.30.40", "PYTHONHASHSEED": "0", "VIRTUAL_ENV": "/home/alice/venv",
                                 "LMCACHE_REMOTE_URL": "redis://bob.smith:hunter2@10.20.30.9"}}],
        "daemons": [{"pid": 2, "args": ["kvd", "serve", "--long-path=/home/alice/kv"], "cgroup": "/system.slice/ACME.service"}],
    }))  # fmt: skip


def everything(folder: Path) -> str:
    """Names, link targets and bytes of a capture."""
    told = []
    for place in sorted(folder.rglob("*")):
        told.append(str(place.relative_to(folder)))
        if place.is_symlink():
            told.append(str(place.readlink()))
        elif place.is_file():
            told.append(place.read_bytes().decode("latin-1"))
    return "\n".join(told)


@pytest.fixture
def buried(laid_out: LaidOut, tmp_path: Path) -> Path:
    case, _ = laid_out("00-base-amd-good")
    bury(case)
    told = json.loads((case / "case.json").read_text())
    told["case"] = "gpu-node-17.corp.example"
    told["env"] = {
        "KVD_NAMESPACE": "ACME",
        "KVD_SOCKET": "/home/alice/s",
        "PYTHONHASHSEED": "0",
        "HIPFILE_FORCE_COMPAT_MODE": "hunter2 x",
    }
    told["kv_paths"] = ["/nvme/kvd-long", "/nvme/alice/nfs_10.20.30.44_export"]
    (case / "case.json").write_text(json.dumps(told))
    return case


def copied(case: Path, home: Path, *, redact: bool) -> Path:
    recording = Recording()
    facts = api.collect_capture(case, recorder=recording)
    recording.files["/home/alice/of-no-kind"] = b"hunter2"
    facts.environment.hostname = "gpu-node-17.corp.example"
    from kvdoctor import capture

    names = capture._private_names
    try:
        capture._private_names = lambda facts: ({"gpu-node-17.corp.example"}, {"alice", "bob.smith"})  # type: ignore[assignment]
        write_capture(recording, facts, home, redact=redact)
    finally:
        capture._private_names = names  # type: ignore[assignment]
    return home


def test_no_buried_secret_leaves(buried: Path, tmp_path: Path) -> None:
    text = everything(copied(buried, tmp_path / "copy", redact=True))
    assert [secret for secret in SECRETS if secret.lower() in text.lower()] == []


def test_every_secret_was_really_there(buried: Path, tmp_path: Path) -> None:
    """The test above can fail: unredacted, what was buried in files that are read leaves with them."""
    text = everything(copied(buried, tmp_path / "copy", redact=False))
    there = [secret for secret in SECRETS if secret.lower() in text.lower()]
    assert len(there) >= len(SECRETS) - 6, set(SECRETS) - set(there)


def test_what_rules_read_is_all_there(buried: Path, tmp_path: Path) -> None:
    """Redaction changes no answer."""
    copy = copied(buried, tmp_path / "copy", redact=True)
    before, after = (api.judge(api.collect_capture(home)) for home in (buried, copy))
    assert [(item.id, item.status) for item in after.results] == [(item.id, item.status) for item in before.results]
    root = copy / "root"
    assert "iommu=pt amdgpu.ais_disabled=0 quiet" in (root / "proc/cmdline").read_text()
    assert "cryptkey=***" in (root / "proc/cmdline").read_text()
    assert "/dev/nvme1n1p1 rw" in (root / "proc/self/mountinfo").read_text()
    assert json.loads((copy / "case.json").read_text())["denied"] == {"/home/user1/of-no-kind": "REDACTED"}


def test_a_file_of_no_known_kind_stays_at_home() -> None:
    recording = Recording()
    recording.file("/etc/shadow", b"root:hunter2:1::")
    recording.file("/seen-only", b"")
    found = {path: data for path, _, data in entries(recording, Facts(), redact=True)}
    assert "root/etc/shadow" not in found
    assert found["root/seen-only"] == b""
    assert "/etc/shadow" in json.loads(found["case.json"])["denied"]


@pytest.mark.real("host")
def test_every_file_of_this_host_is_of_a_known_kind(tmp_path: Path) -> None:
    """A collector that reads a new file must say what of it may leave."""
    recording = Recording()
    facts = api.collect_host(paths=[str(tmp_path)], recorder=recording)
    keeper = Keeper(Redactor(), mount_points([], [str(tmp_path)]))
    unknown = [path for path, data in recording.files.items() if keeper.file(path, data) is None]
    unknown += [name for name, text in recording.commands.items() if keeper.command(name, text) is None]
    assert unknown == []
    assert facts.paths


def test_every_file_of_every_case_is_of_a_known_kind(case_name: str, laid_out: LaidOut) -> None:
    recording = Recording()
    api.collect_capture(laid_out(case_name)[0], recorder=recording)
    keeper = Keeper(Redactor())
    assert [path for path, data in recording.files.items() if keeper.file(path, data) is None] == []
    assert [name for name, text in recording.commands.items() if keeper.command(name, text) is None] == []


NAMED = st.tuples(st.from_regex(r"[a-z_.]{1,12}", fullmatch=True), st.from_regex(r"[!-~]{6,20}", fullmatch=True))


@given(st.lists(NAMED, max_size=8))
def test_no_value_of_an_unknown_boot_parameter_stays(words: list[tuple[str, str]]) -> None:
    line = " ".join(f"x{name}={value}" for name, value in words)
    kept = boot_parameters(Keeper(Redactor()), line).split()
    assert all(word.endswith("=***") or word == "***" for word in kept if "=" in word)


@given(st.text(max_size=300))
def test_the_essentials_of_a_log_parse_as_the_log_does(text: str) -> None:
    lines = [
        "[    0.000000] Linux version 6.8.0",
        f"[ 1.5] amdgpu 0000:41:00.0: amdgpu: AIS: registered 196592MB device memory {text}",
        f"[ 2.0] {text} amdgpu: Failed to read AIS file: -19",
        "[ 3.0] [drm] amdgpu version: 6.16.6",
        f"{text} Secure boot enabled",
        "[ 4.0] Loading of unsigned module is rejected",
    ]
    whole = klog.parse_kernel_log("\n".join(lines))
    kept = klog.parse_kernel_log("\n".join(klog.essentials("\n".join(lines))))
    assert (kept.registered, kept.driver_versions, kept.whole) == (whole.registered, whole.driver_versions, whole.whole)
    assert [failure.errno for failure in kept.failures] == [failure.errno for failure in whole.failures]
    assert (kept.secure_boot, bool(kept.key_rejected)) == (whole.secure_boot, bool(whole.key_rejected))


def test_configuration_space_without_its_serial() -> None:
    config = bytearray(4096)
    config[0x100:0x104] = (0x140 << 20 | 1 << 16 | 0x0003).to_bytes(4, "little")
    config[0x104:0x10C] = bytes.fromhex("030201feffefec3c")
    config[0x140:0x144] = (0x0 << 20 | 1 << 16 | 0x000D).to_bytes(4, "little")
    config[0x146] = 0x04
    kept = without_serial(bytes(config))
    assert bytes.fromhex("030201feffefec3c") not in kept
    assert kept[0x140:] == bytes(config[0x140:]), "what ACS is judged by stays"
    assert without_serial(b"\0" * 64) == b"\0" * 64


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/data/kv-10.1.2.3", "/data/kv-192.0.2.1"),
        ("/data/ip-10-1-2-3/x", "/data/ip-192-0-2-1/x"),
        ("/mnt/10.1.2.3:_export", "/mnt/192.0.2.1:_export"),
        ("/mnt/fd00:1:2::7", "/mnt/2001:db8::1"),
        ("/Users/alice/kv", "/Users/user1/kv"),
        ("/nfs/home/carol/kv", "/nfs/home/user1/kv"),
        ("/lib/modules/6.8.0-10.20.30.40/x", "/lib/modules/6.8.0-10.20.30.40/x"),
        ("/sys/bus/pci/devices/0000:41:00.0", "/sys/bus/pci/devices/0000:41:00.0"),
        ("/nvme/kvd-2026-11-29", "/nvme/kvd-2026-11-29"),
    ],
)
def test_addresses_and_people_in_paths(path: str, shown: str) -> None:
    redactor = Redactor()
    assert redactor.path(path) == shown
    assert redactor.path(path) == shown


@given(st.ip_addresses(v=6))
def test_every_written_form_of_an_ipv6_address_goes(address: Any) -> None:
    for form in (str(address), address.exploded, address.compressed.upper()):
        for around in ("addr={}", "[{}]:/vol", "({})", "{},rw", "{}%eth0"):
            shown = Redactor().free(around.format(form))
            if not (address.is_unspecified or address.is_loopback or form.lower().startswith("2001:db8:")):
                assert form not in shown or re.fullmatch(r"[0-9a-f]{0,4}::?[0-9a-f]{0,4}", form), (form, shown)


def test_a_module_file_becomes_its_listing() -> None:
    module = parse_modinfo(
        "filename: /lib/modules/6.8.0/amdgpu.ko\nversion: 6.16.13\nsrcversion: ABC\nvermagic: 6.8.0 SMP\nintree: Y\n"
    )
    assert module is not None
    assert parse_modinfo(as_modinfo(module)) == module


def test_passwords_in_addresses_never_leave_the_environment() -> None:
    kept = filtered_environ({"LMCACHE_REMOTE_URL": "redis://bob:hunter2@10.0.0.9:6379/0", "KVD_API_KEY": "x", "HOME": "/root"})
    assert kept == {"LMCACHE_REMOTE_URL": "redis://***@10.0.0.9:6379/0", "KVD_API_KEY": "***"}


def test_names_of_accounts_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    from kvdoctor.capture import _private_names

    person = pwd.struct_passwd(("carol", "x", 1001, 1001, "", "/home/carol", "/bin/sh"))
    system = pwd.struct_passwd(("sshd", "x", 105, 105, "", "/", "/bin/false"))
    monkeypatch.setattr(pwd, "getpwall", lambda: [person, system])
    hosts, users = _private_names(Facts(environment=Environment(hostname="node9")))
    assert "node9" in hosts
    assert "carol" in users
    assert "sshd" not in users


def test_another_path_than_the_captured_ones_is_not_judged_by_their_mounts(buried: Path, tmp_path: Path) -> None:
    """The mount table of a redacted capture holds their lines only: every other path would seem to lie on /."""
    copy = copied(buried, tmp_path / "copy", redact=True)
    report = api.judge(api.collect_capture(copy, ["/somewhere/else"]), only=["storage.fs", "storage.backing"])
    assert {(item.status, item.observed) for item in report.results} == {("unknown", "the mount table is not in this capture")}
    assert api.judge(api.collect_capture(copy), only=["storage.fs"]).results[0].status == "pass"
