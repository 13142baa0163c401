"""The local stack: Redis, Ray, the API, and the keeper that restarts them.

keeper     the process that keeps a stack up   control    `volley up` and `volley down`
folder     a stack's files                     processes  server processes that end with their parent
ray, redis the two servers                     ephemeral  a stack that lasts as long as one command
launcher   lets Ray workers be forked          preload    what the server imports that forks them
"""
