"""Elastic KV memory: address space for the whole cache, physical pages only where blocks live, a limit that holds at any time.

memory      the interface VirtualMemory, its errors, and the view of it as a tensor (dlpack)
cpu         memfd pages over a reserved range: what tests and CPU engines use
driver      NVIDIA's and AMD's virtual memory calls by ctypes, once; cuda and hip name the libraries and functions
geometry    which bytes a page of blocks means in a KV layout, and PageMemory, which maps and unmaps such pages
pages       the page allocator: reserve, watermarks, the background filler, shrink and regrow
manager     KVCacheManager: blocks over pages, best fit, draining towards a limit
tracker     MemInfoTracker: the pool's segment and sidecar, and what the device has left
figures     a pool's stats segment, fragmentation included
pool        Pool: a manager that follows its segment's limit, with the thread that does it
settings    every setting, and kvcached's names for them
vllm_plugin the entry point `vllm.general_plugins`; vllm_engine, vllm_blocks and vllm_worker are what it puts in

The value's way: vllm_blocks -> manager -> pages -> (vllm_engine -> vllm_worker ->) geometry -> memory. Only the standard
library at import; torch and vLLM are imported where they are used, inside an engine.
"""
