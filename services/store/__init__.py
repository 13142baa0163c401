"""The state that outlives processes: Redis and the run folder.

state    desired and observed state, run records    desired  changes to the desired state
redis    the store                                  outbox   a driver's writes, queued while Redis is away
folder   the run folder
"""
