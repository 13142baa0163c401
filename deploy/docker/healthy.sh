#!/bin/sh
# Health check: the server at VOLLEY_HEALTH_URL, or else this node's Ray processes.
if [ -n "${VOLLEY_HEALTH_URL:-}" ]; then
    exec wget -q -T 5 -O /dev/null "$VOLLEY_HEALTH_URL"
fi
wget -q -T 5 -O - http://127.0.0.1:52365/api/local_raylet_healthz | grep -q success
