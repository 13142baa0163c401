"""Notifications: webhooks hear of a run's end, its pauses, and of metrics that break a rule of the job's ``notify``.

    Redis: observed state, rows ─> Watch ─> notices, in Redis ─> Deliveries ─> signed POST ─> the webhook

A notice is stored in the same transaction as the state that it follows from, and removed once the webhook has answered
2xx. So each is sent at least once, whatever dies, and always under the same id. Under the service both sides run beside
the supervisor, so that a run whose driver was killed is reported too. `volley run` runs them in its own process.

rules   when a rule fires       watch       what happened to a run since the last look
notices what is sent, signing   deliveries  retries, and whom a server may call       local  both, for `volley run`
"""
