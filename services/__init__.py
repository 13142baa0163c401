"""Compose and operate: from a job file to its results. One folder for each question a newcomer asks, in reading order.

coordinator   How does one run train?          The loop from prompts to published weights; start here.
runs          What is one run, start to end?   One module for each kind of job, checkpoints, the driver process.
sweeps        How do settings compare?         Sweep files: several settings and seeds, made as runs, with intervals.
control       How does a live run change?      Desired state in, observed state out, autoscaling.
evaluation    How is pass@k measured?          Sampling, scoring, estimates.
recording     What does a run leave?           Metrics, events, samples, plots, metric sinks.
jobs          What does a job file become?     A checked job and the resources it needs.
data          Where do prompts come from?      Readers, recipes, mixtures, tokens.
models        Where do models come from?     GGUF files, packages.
store         What outlives a process?         Redis and the run folder.
stack         What runs on my machine?         Redis, Ray and the API, and the process that keeps them up.
supervisor    Who starts a run again?          Drivers as Ray jobs.
notifications Who hears of it?                Webhooks: rules on metrics, signed deliveries, retries.
api           What do clients talk to?         REST, live streams; `dashboard` holds the page it serves.
cli           What do I type?                  The commands; they use `volley.client`.

`tasks` (asyncio tasks that always end) and `signals` (Ctrl-C in order) serve all of them.
"""
