"""What lies below the arena: does I/O, decides nothing about RAM.

tiering    the ordered list of tiers: what goes down, what comes up
policies   which values go where, leave the arena and come up to stay: built in, or a user's
fetch      what one request wants of the tiers, and room for it
turns      whose loads come next at a tier
tier       one adapter at work: its queue, its threads, its breaker
forgetting deletes on their way through the tiers, and those that are not carried out
serde      what is done to values on their way to an adapter: quantize, compress, encrypt
adapters   one module or package a store: base (the interface), disk (our region store), ...
"""
