"""Environments for other libraries as programs. Each file runs under an interpreter that has its library."""
