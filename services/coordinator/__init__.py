"""The loop of one run: prompts in, trained steps out.

loop               admit, generate, score, train, broadcast      admission          which group may start next
buffer             slots, and the bound on staleness             ledger             every group ends exactly once
roles              what the loop needs of the other roles        records            what steps pass on to others
turns              how one group is made, turn by turn           schedule           when to evaluate and to save
episodes           how one group is made by programs
pinned_evaluation  evaluation while training continues           watchdog           who waits for whom, and how long
scoring_health     pauses a run whose scoring fails              dead_batches       ends a run that has no signal
solve_rates        pass rates per prompt                         clipped_steps      warns if most steps are clipped
selection          which prompts are worth their samples         refill             replaces groups without a gradient
devices            whose turn it is, where they are shared       saving             stores checkpoints meanwhile
served             whether actors serve what was trained
"""
