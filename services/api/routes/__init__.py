"""The routes, by what they are about. Each router's scope is in its dependencies."""
