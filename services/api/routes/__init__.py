"""The routes, by topic. Each router names the scope it requires in its dependencies."""
