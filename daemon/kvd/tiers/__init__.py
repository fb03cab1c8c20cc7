"""What lies below the arena: does I/O, decides nothing about RAM.

tiering    the ordered list of adapters: stores, look-ups, promotion, breakers
adapters   one module or package a store: base (the interface), disk (our region store), ...
"""
