"""The sandbox: runs programs nobody trusts, and tells truly what they did. Theory of operation.

A **judge** outside alone owns expected outputs, comparison, clocks and verdicts. A program inside sees its own source
and its standard input, nothing else: there is no answer to find, no grader to patch, no verdict to forge.

    worker (a Ray actor, or a thread of the HTTP front)
     └ judge.py: one program at a time, its tests in order, up to the first failure
         └ slot.py: an account of its own, a memory and pids cgroup, a socket with sealed files attached
             └ bubblewrap: own mount, pid, network, ipc, uts and user namespaces; /usr and the interpreter read-only
                 └ zygote.py: an interpreter with its imports done, no secrets, never runs program code itself
                     └ per program: fork, user, pid, mount and ipc namespaces of its own, new /proc
                         └ per test: fork, new /tmp and /dev/shm, rlimits, Landlock, no capability, seccomp, run

Forking an interpreter that has imported its libraries costs milliseconds where starting one costs tens; namespaces
and a new /tmp are what keeps one program, and one test, from telling the next anything.

*Trust.* The zygote is forked from, never written to: model-written code runs in its grandchildren, as another
process in another namespace, without the control socket. Every request has an id and every reply must carry it;
a late, missing or malformed reply ends the whole sandbox (SandboxFailure), the program is judged once more in a new
one, and a second failure is ``infra_error``, which never becomes a reward.

*Ends.* Inside a pid namespace its first process kills everything (``kill(-1)`` holds the kernel's list of tasks, so a
fork bomb can not outrun it). Outside, killing bubblewrap ends the namespace, and the cgroup lists what might be left.
The judge bounds every wait: a test by wall time 3 x CPU + 1 s (plus at most twice that while it was ready to run and
got no processor), a reply by 5 s more, a program by its own total.

*Truth.* Processor time decides about time-outs, so that load on the host does not; memory is judged by the kernel's
own out-of-memory counter; output is read while the program runs and cut at its limit. Fidelity counts as much as
safety: real files as standard streams, threads, child processes, asyncio, exit codes and exit handlers all work.

*Tiers.* A has all layers; B lacks the cgroup; C has Landlock and a strict list of system calls, but no namespaces;
none has limits only and must be asked for. ``health.py`` proves a tier by attacks before the first program
and every ten minutes after; a tier is never silently weaker. The policy itself is ``policy.py``, all of it.
"""
