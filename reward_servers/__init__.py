"""Score: scorers, the sandbox, and the workers that run them."""
