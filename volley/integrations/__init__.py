"""Volley's objectives in other trainers. Each module needs the library it is named after.

trl         `KSampleGRPOTrainer`: TRL's GRPO trainer with any objective of `volley.objectives`
verl        `register`: an objective as one of verl's advantage estimators
skyrl       `register`: the same for SkyRL
rllm        `register`: the same for rLLM, with answers and ranks
openrlhf    `install`: an objective in place of OpenRLHF's group baselines
groups      what they share: rows with ids of prompts become groups; token_level: with tensors, for verl and SkyRL

docs/integrations.md has examples.
"""
