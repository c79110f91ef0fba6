"""The command line of the package: `tensile run`, `plan`, `compare`, `status`, `show`, `picture`, ... Its exit codes:

    0    done
    1    it failed: a job did, a file could not be written, or the demo did not reach what it promises
    2    a bad option, file or step; one line on stderr says which, and what to do
    3    no plan keeps the budget; the line names the smallest budget that works
    130  ended by Ctrl-C; 143 by SIGTERM, 129 by SIGHUP

Modules that import JAX are imported inside the commands, so that help and `tensile show` answer at once.
"""

from tensile_jax.cli.signals import listening

with listening():  # before anything else, so that Ctrl-C while modules are imported ends without a traceback
    from tensile_jax.cli.main import main

__all__ = ["main"]
