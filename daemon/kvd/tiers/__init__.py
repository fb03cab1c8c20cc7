"""What lies below the arena: does I/O, decides nothing about RAM.

tiering    the ordered list of tiers: what goes down, what comes up
tier       one adapter at work: its queue, its threads, its breaker
serde      what is done to values on their way to an adapter: quantize, compress, encrypt
adapters   one module or package a store: base (the interface), disk (our region store), ...
"""
