"""Collect: read a host into one `Facts` document. No judgement is made here.

source       the seam: files, commands, system calls; live, below a root, or from a capture
holdings     what a capture holds, and what of it went missing
reach        whether a path answers, asked by a child
tools        one external command with a deadline that holds
environment  container, privileges, virtual machine        gpu      PCI GPUs, links, KFD topology
kernel       options, symbols, IOMMU, ACS, log             driver   amdgpu: loaded, on disk, dkms, Secure Boot
rocm         ROCm, HIP, hipFile                            nvidia   GPUDirect Storage
storage      mounts, block stacks, journal, direct I/O     limits   shm, memlock, open files, cgroup memory
engines      vLLM, LMCache, kvd, console scripts           segments pool and stats segments in shared memory
host         `collect`: all of it, in order                pathprobe  system calls on a KV path, run as a child
capture_writer  a capture onto disk, run as a child
smi_library  amdsmi and NVML, asked in a child
proof_disk   real direct I/O, run as a child by --prove    proof_gpu  the same between GPU memory and a file
"""
