"""One run, from a checked job to its results.

run          prepares a job of any kind and runs it     context              what every run works with
rl           reinforcement learning                     weight_groups        keeps learner and actors in one group
eval, rft    pass@k; rejection sampling                 sampling             the sampling part of both
sft          supervised fine-tuning                     supervised           the training part of sft and rft
driver       the process of a run of the service        role_configs         the configuration of each role
checkpoints  writes, finds and removes them             checkpointed_groups  the groups in a checkpoint
export       a checkpoint as a Hugging Face model       serve                a finished model behind OpenAI's API
"""
