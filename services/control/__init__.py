"""Changes to a live run: its desired state, its observed state, and autoscaling.

steering   applies the desired state    heartbeat   reports the observed state    autoscale   picks the number of actors
"""
