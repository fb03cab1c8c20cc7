"""The disk tier: a crash-safe, log-structured store of region files (daemon/FORMAT.md has every byte).

adapter    DiskAdapter, the tier itself
format     the structures on disk
storage    the seam to the operating system, and the real one
geometry   how a budget is cut into regions
index      where every value lies, in RAM
catalog    all shared state and its rules
region     one region file and its index pages
writer     appending: lanes, and the way of a value into the catalog
extents    writing groups of extents
reader     loading and checking
lending    extents lent to engines that write and read them past the daemon (GPU-direct)
evict      making room
files      making and reusing region files
deletes    the log of what must stay dead
recency    last uses, kept over a clean restart
syncing    durability
housekeeping   what is done in the background
scan       reading back what a region holds
recovery   starting up
manifest   whose folder it is
presence   whether the folder is still there
check      the offline check behind `kvd verify`
buffers    aligned scratch memory
"""

from kvd.tiers.adapters.disk.adapter import DiskAdapter
from kvd.tiers.adapters.disk.check import Report, verify
from kvd.tiers.adapters.disk.storage import DirectIO, RealStorage, Storage

__all__ = ["DirectIO", "DiskAdapter", "RealStorage", "Report", "Storage", "verify"]
