"""What is done to a value on its way to one adapter, and undone on its way back: quantize, compress, encrypt.

stage        one step of a chain: the interface, and what a step may raise
fp8          half the bytes, lossy: FP8 E4M3 with a power-of-two scale for every 128 elements
compression  zstd and lz4, without loss
aesgcm       AES-256-GCM, bound to the value's identity, with keys that can be changed
frame        the 32 bytes in front of an encoded value
chain        the steps of one adapter: read from its `serde` field, run forwards and backwards
buffers      memory for the steps, within a budget
adapter      an adapter whose values pass a chain
"""
