"""The state that outlives processes: Redis and the run folder.

desired  changes to the desired state    redis     the store
folder   the run folder                  outbox    a driver's writes, queued while Redis is away
logs     the end of a run's logs         readable  what other releases may have written
"""
