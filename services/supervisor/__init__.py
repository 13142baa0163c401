"""Keeps submitted runs going: starts their drivers as Ray jobs and restarts them.

supervisor   decides what to do about each run    ray_jobs   Ray's job API
"""
