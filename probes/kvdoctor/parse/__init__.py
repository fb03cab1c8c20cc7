"""Text of the outside world -> facts: one function per format, pure, and never an exception.

versions    version numbers and their traps          mounts   mountinfo, mdstat, df
aischeck    the vendor's checker                     klog     kernel log lines about AIS
driver      dkms status, modinfo, a module's ELF     pci      lspci output, link words, configuration space
kfd         topology properties, amd-smi             gds      gdscheck, cufile.json, cufile.log
shape       JSON that may be anything

In doubt a parser says None, an empty string or an empty list, which a rule turns into "unknown": a format nobody has seen
must not become a wrong verdict.
"""
