"""Episodes in which the model calls tools: the loop, and the tools that a job may name.

base       what the loop needs of a tool
functions  a user's function: its signature becomes a JSON schema
python     the model's code, run in the sandbox
loop       one episode
"""
