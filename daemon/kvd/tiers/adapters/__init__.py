"""One long-lived store each, behind one interface (`base.Adapter`).

base   the interface, what an adapter says it can do, and its errors
disk   our crash-safe region store
stripe several of one kind as one tier
"""
