"""Environments: run the programs whose calls of the model become samples, in processes that can be killed."""
