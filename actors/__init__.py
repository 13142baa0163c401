"""Generate: the actors that own vLLM engines."""
