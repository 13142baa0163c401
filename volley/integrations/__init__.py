"""Volley's objectives in other trainers. Each module needs the library it is named after.

trl     `KSampleGRPOTrainer`: TRL's GRPO trainer with any objective of `volley.objectives`

docs/integrations.md has examples.
"""
