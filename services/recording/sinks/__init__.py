"""Metric sinks: other tools get what a run writes to ``metrics.jsonl`` and ``evaluations.jsonl``.

    run ─> Sinks ─> SinkProcess: queue ─> one process per sink ─> TensorBoard | Weights & Biases | MLflow

Each sink lives in its own process: its imports do not stall the run's event loop, and a sink that crashes, hangs or
does not exit is killed. The run never waits for a sink; at its end, the sinks have `CLOSE_SECONDS` to finish.

sinks   all sinks of a run          process   one sink's process, and the rows that wait for it
child   what that process runs      base      what a sink is; tensorboard, wandb and mlflow have a module each
"""
