"""The REST API: it takes desired state and returns observed state and streams.

    request ─> gate (host, origin, token, rate, size, time, JSON) ─> route (scope, typed) ─> Redis
    /metrics and samples are answered from memory, fed from the tail of their streams
    live views of one run share one reader

The API's only state is caches: any number of servers may share one Redis, and a restart loses nothing. The API does
not start runs; the supervisor does, from the desired state.
"""
