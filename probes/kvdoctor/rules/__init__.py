"""Judge: pure functions over `Facts`, one or more `Result` each. No file is read and no clock asked here.

base         the registry, and words that several rules share      environment  container, privileges, VM, scripts
gpu          presence, VF, APU, BAR, link, NUMA, tools             driver       loaded, version, match, dkms, Secure Boot
ais          symbol, parameter, registration, refusals, ais-check  kernel       P2PDMA, topology, ACS, IOMMU, huge pages
rocm         ROCm, HIP, hipFile                                    nvidia       GPUDirect Storage
storage      path, space, file system, journal, NFS                backing      md, LVM, crypt, multipath, links, NUMA
directio     O_DIRECT and its alignment                            proof        what --prove found out
limits       shm, memory, memlock, open files                      config       hash seed, hipFile's variables, engine flags
health       kvd and its segments

A check's id is an interface: scripts, cases and `kvdoctor explain` use it.
"""
