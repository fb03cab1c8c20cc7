"""One long-lived store each, behind one interface (`base.Adapter`).

base          the interface, what an adapter says it can do, and its errors
registry      types by name, and their settings read strictly
kind          what the registry knows of a type
disk          our crash-safe region store
stripe        several of one kind as one tier
fs            one file an object
raw_block     slots on a block device or file
dax           slots in a mapped file or device
resp          Redis or Valkey
lmcache       an LMCache server
nixl_store    a pool of files or (nixl_objects) of objects, through NIXL
nixl_dynamic  one file an object, through NIXL
s3            any S3
hfbucket      Hugging Face buckets
mooncake      the memory of many hosts as one pool
mooncake_client  starting its client
mock          a tier of given speed and reliability, for tests
fault_inject  another adapter, made to fail
wrapper       what adapters around another have in common
envelope      identity, checksum and properties around a value, for stores that know none of them
objects       what tiers of objects in a bucket have in common
nixl          how NIXL moves bytes between memory and files
ledger        what a store holds and how much of it, for those that do not count themselves
damage        what is said in the log of damaged values, and how often
slots         fixed places of one size, and what is in them
"""
