"""The sandbox runs untrusted programs and reports reliably what they did. This is its theory of operation.

The **judge**, outside, holds the expected outputs, compares, keeps time and gives verdicts. A program inside sees only
its own source and standard input: there is no answer to find, no grader to patch and no verdict to forge.

    worker (a Ray actor, or a thread of the reward server)
     └ judge.py: one program at a time, its tests in order, up to the first failure
         └ slot.py: its own account, a memory and pids cgroup, a socket that passes sealed files
             └ bubblewrap: own mount, pid, network, ipc, uts and user namespaces; /usr and the interpreter read-only
                 └ zygote.py: an interpreter with libraries imported and no secrets; never runs program code itself
                     └ per program: fork, own user, pid, mount, ipc and uts namespaces
                         └ per test: fork, new /proc, /tmp and /dev/shm, rlimits, Landlock, no capabilities, seccomp

Forking an interpreter that has already imported its libraries takes milliseconds, starting one takes tens of them. New
namespaces and a new /tmp keep a program, or a test, from passing anything to the next.

*Trust.* The zygote never runs model-written code: programs run in forked descendants, in other namespaces and without
the control socket. Every reply must carry the id of its request. A late, missing or malformed reply ends the whole
sandbox (SandboxFailure), and the program is judged again in a new one; a second failure is an ``infra_error``, which
never becomes a reward.

*Termination.* Killing the first process of a pid namespace kills all others, so not even a fork bomb survives. From
outside, killing bubblewrap ends its namespaces, and the cgroup lists any process that is left. Every wait is bounded:
a test by its wall time (3 x CPU limit + 1 s by default, plus at most twice that while it was runnable but got no
processor), a reply by another 5 s, and a program by its own total.

*Accuracy.* Timeouts depend on processor time, so that load on the host does not cause them. Memory limits are judged
by the kernel's out-of-memory counter. Output is read while the program runs and cut at its limit. Programs behave as
usual: real files as standard streams, threads, child processes, asyncio, exit codes and exit handlers all work.

*Interpreters.* ``interpreter.py`` keeps one test running, ``repl.py``, and feeds it code piece by piece: the tool
``python`` of an episode. Each piece has the limits of a test. What it forges concerns its own episode only.

*Tiers.* A has all layers; B lacks the cgroup; C has Landlock and a strict list of system calls, but no namespaces;
none has limits only and must be requested explicitly. ``health.py`` proves a tier by probe attacks before the first
program and every ten minutes afterwards, so a sandbox never weakens unnoticed. The whole policy is in ``policy.py``.
"""
