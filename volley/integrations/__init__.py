"""Volley's objectives in other people's trainers. Each module needs the library it is named after.

trl     `KSampleGRPOTrainer`: TRL's GRPO trainer with any objective of `volley.objectives`

docs/integrations.md shows how.
"""
