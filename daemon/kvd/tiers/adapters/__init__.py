"""One long-lived store each, behind one interface (`base.Adapter`).

base   the interface, what an adapter says it can do, and its errors
registry      types by name, and their settings read strictly
kind          what the registry knows of a type
disk          our crash-safe region store
stripe        several of one kind as one tier
fs            one file an object
raw_block     slots on a block device or file
dax           slots in a mapped file or device
resp          Redis or Valkey
s3            any S3
mock          a tier of given speed and reliability, for tests
fault_inject  another adapter, made to fail
envelope      identity, checksum and properties around a value, for stores that know none of them
ledger        what a store holds and how much of it, for those that do not count themselves
slots         fixed places of one size, and what is in them
"""
