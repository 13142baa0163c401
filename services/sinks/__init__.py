"""Metric sinks: what a run writes to ``metrics.jsonl`` and ``evaluations.jsonl``, shown by tools people already have.

    run ─> Sinks ─> Feed: queue ─> one process for each sink ─> TensorBoard | Weights & Biases | MLflow

Each sink lives in a process of its own: what it imports does not stall the run's event loop, and one that crashes,
hangs or never lets go at exit is killed. The run waits for none of them; at its end they have `CLOSE_SECONDS`.

sinks   all sinks of a run          feed    one sink's process and the rows that wait for it
child   what runs in that process   base    what a sink is; tensorboard, wandb, mlflow: one module each
"""
