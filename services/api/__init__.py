"""The REST API: desired state in, observed state and streams out.

    request ─> gate (host, origin, token, rate, size, time, JSON) ─> route (scope, typed) ─> Redis
    /metrics and samples are answered from memory, fed from the tail of their streams; live views share one reader a run

The API holds no state of its own but caches: any number of servers may stand before one Redis, and a restart loses
nothing. It starts no run: the supervisor looks at what is desired.
"""
