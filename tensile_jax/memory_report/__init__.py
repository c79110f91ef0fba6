"""Says how much device memory a function needs under plain `jax.jit`: what holds the peak, and from which line of the user's
code.

records.py        the records of a report
alike.py          lists the tensors at the peak for people, those that are alike in one row
report.py         the report, its JSON, and the text for people
lives.py          computes from a step's graph when each tensor is in memory, and what is there at the peak
donations.py      finds donations that would save memory, and arguments that nothing reads
calls.py          makes the calls of a function that a user names, also of a step on Flax NNX objects
memory.py         makes the report of a function: `tensile_jax.memory`
assert_peak.py    fails a test if a peak is too high: `tensile_jax.assert_peak`
out_of_memory.py  says what held the memory when a device had no room: `tensile_jax.explain_out_of_memory`
largest_batch.py  finds the largest batch that fits: `tensile_jax.max_batch`
"""
