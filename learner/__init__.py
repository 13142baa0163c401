"""Update: the ZeRO-3 learner."""
