"""GPUs by PCI, from sysfs alone: what cannot hang and needs no privilege.

Only attributes of the PCI core and mem_info_* are read. hwmon, pp_* and gpu_metrics may take the driver's firmware lock
and block for seconds on a wedged card, so they are left alone.
"""

import re

from kvdoctor.collect.source import LOST, NOT_UNDERSTOOD, Source
from kvdoctor.facts import Gpu, KfdNode, Link
from kvdoctor.parse import kfd, pci
from kvdoctor.parse.versions import decimal

DEVICES = "/sys/bus/pci/devices"
VENDORS = {"1002": "AMD", "10de": "NVIDIA"}


def is_gpu_class(pci_class: int) -> bool:
    """VGA, 3D, other display, and processing accelerators (Instinct cards are 0x1200); not their audio functions."""
    return pci_class >> 8 in (0x0300, 0x0302, 0x0380, 0x1200)


def pci_listed(source: Source) -> bool:
    """Whether the PCI tree can be told: it is there, or the kernel plainly has no PCI bus (others are listed)."""
    if source.is_folder(DEVICES):
        source.names(DEVICES)
        return DEVICES not in source.denied
    return source.whole and not source.is_folder("/sys/bus/pci") and bool(source.names("/sys/bus"))


def collect_gpus(source: Source, unread: list[str] | None = None) -> list[Gpu]:
    """Every AMD and NVIDIA GPU function, in PCI order. Functions that would not say what they are go to `unread`."""
    gpus = []
    silent = [] if unread is None else unread
    for bdf in source.names(DEVICES):
        folder = f"{DEVICES}/{bdf}"
        pci_class = decimal(source.word(f"{folder}/class") or "")
        if pci_class is not None and not is_gpu_class(pci_class):
            continue
        vendor = (source.word(f"{folder}/vendor") or "").removeprefix("0x")
        if pci_class is None or not vendor:
            # A hand-made tree may hold functions in part; one that shows nothing at all is not in part.
            if source.whole or vendor in VENDORS or pci_class is not None or source.is_bare(folder):
                silent.append(bdf)
        elif vendor in VENDORS:
            gpus.append(_gpu(source, bdf, folder, vendor, pci_class))
    return gpus


def _gpu(source: Source, bdf: str, folder: str, vendor: str, pci_class: int) -> Gpu:
    where = source.real(folder)
    chain = pci.chain(where)
    iommu = source.real(f"{folder}/iommu_group")
    return Gpu(
        bdf=bdf,
        vendor=vendor,
        device=(source.word(f"{folder}/device") or "").removeprefix("0x"),
        pci_class=f"{pci_class:06x}",
        driver=_driver(source, folder),
        chain=chain if chain and chain[0].startswith("pci") else [],
        numa=_numa(source, folder),
        link=_card_link(source, folder, chain),
        vram=source.number(f"{folder}/mem_info_vram_total"),
        vram_visible=source.number(f"{folder}/mem_info_vis_vram_total"),
        p2pmem=_p2pmem(source, folder),
        virtual_function=source.exists(f"{folder}/physfn"),
        bar0=pci.parse_resource(source.read(f"{folder}/resource", 8192) or ""),
        iommu=source.word(f"{iommu}/type") or "" if iommu != f"{where}/iommu_group" else "",
    )


def _driver(source: Source, folder: str) -> str | None:
    link = source.real(f"{folder}/driver")
    if "/drivers/" in link:
        return link.rsplit("/", 1)[1]
    uevent = source.read(f"{folder}/uevent", 4096)
    if uevent is None:
        return None
    lines = uevent.splitlines()
    if not any(re.match(r"[A-Z_]+=", line) for line in lines):
        source.denied[f"{folder}/uevent"] = NOT_UNDERSTOOD
        return None
    return next((line[7:] for line in lines if line.startswith("DRIVER=")), "")


def _numa(source: Source, folder: str) -> int | None:
    node = source.number(f"{folder}/numa_node")
    return None if node is None or node < 0 else node


def _p2pmem(source: Source, folder: str) -> int | None:
    if not source.is_folder(f"{folder}/p2pmem"):
        return None
    size = source.number(f"{folder}/p2pmem/size")
    # A size that is no number leaves the question open; one that is not there is the driver's own "nothing was set up".
    return size if size is not None else None if f"{folder}/p2pmem/size" in source.denied else 0


def read_link(source: Source, folder: str) -> Link:
    """A PCI function's own link."""
    width, max_width = source.number(f"{folder}/current_link_width"), source.number(f"{folder}/max_link_width")
    return Link(
        speed=pci.speed(source.word(f"{folder}/current_link_speed")),
        # 0 and 255 are what the PCI core prints when it does not know.
        width=width if width and width < 255 else None,
        max_speed=pci.speed(source.word(f"{folder}/max_link_speed")),
        max_width=max_width if max_width and max_width < 255 else None,
    )


def _card_link(source: Source, folder: str, chain: list[str]) -> Link:
    """The narrowest link of the card: a Navi or Instinct board carries a switch, and the function's own link is inside it."""
    links = [read_link(source, folder)]
    for bridge in chain[2:-1]:
        if source.word(f"{DEVICES}/{bridge}/vendor") == "0x1002":
            links.append(read_link(source, f"{DEVICES}/{bridge}"))
    return max(links, key=_lost)


def _lost(link: Link) -> tuple[float, float]:
    width = link.max_width / link.width if link.width and link.max_width else 0.0
    speed = link.max_speed / link.speed if link.speed and link.max_speed else 0.0
    return width, speed


def collect_kfd(source: Source) -> tuple[list[KfdNode] | None, list[str]]:
    """The KFD topology's nodes with SIMDs or cores, and those this process may not read (a container not given that GPU)."""
    folder = "/sys/class/kfd/kfd/topology/nodes"
    names = [name for name in source.names(folder, r"\d+") if name.isdecimal()]
    if not names:
        return None, []
    nodes, refused = [], []
    for name in sorted(names, key=lambda name: (len(name), name)):
        path = f"{folder}/{name}/properties"
        node = kfd.parse_properties(source.read(path, 16384) or "", decimal(name) or 0)
        if node:
            nodes.append(node)
        elif source.denied.get(path, LOST) != LOST:
            refused.append(name)
    return nodes, refused
