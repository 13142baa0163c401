"""Job files, and the checks of a job before anything starts.

job_file   parses YAML to a checked job     needs        the CPUs, GPUs and memory that the job needs
adapters   checks its LoRA target modules   runtime_env  the code that the job brings
"""
