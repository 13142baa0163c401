"""What a run leaves behind, and what it reports while it runs.

recorder   metrics, events, samples      progress     counts over the whole run
timeline   who worked when               plots        pictures of a finished run
display    the terminal                  disk_space   pauses the run while the disk is full
sinks      TensorBoard, Weights & Biases, MLflow
"""
