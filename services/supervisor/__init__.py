"""Keeps submitted runs going: queues them, starts their drivers as Ray jobs and restarts these.

supervisor   the loop                             ray_jobs   Ray's job API
decisions    what to do about a run               queue      which run starts next, and which one stops for it
claims       what a run reserves                  places     where a run stands in the queue
silence      how long a driver reports nothing    fit        whether the nodes can hold a run
"""
