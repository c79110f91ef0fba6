"""The command line of the package: the commands `tensile run`, `plan`, `compare`, `status`, `show`, `picture` and others.

Each command ends with one of these exit codes:

    0    the command has done what its user asked
    1    something failed: a job, the writing of a file, `tensile check`, or a check at the end of `tensile demo`
    2    an option, a file or a step is wrong; stderr names it in a line and says what to do
    3    no plan keeps the budget; stderr names the smallest budget that works, and what needs the memory
    130  ended by Ctrl-C; 143: ended by SIGTERM; 129: ended by SIGHUP

The installed script starts in `tensile_jax.cli.program`. Other code takes the commands from `tensile_jax.cli.main`. A command
imports the modules that need JAX only when it runs, so that `--help` and `tensile show` answer at once.
"""
