"""Programs that run under an interpreter of their own, with packages that need not fit Volley's."""
