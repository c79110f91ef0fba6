"""The experiments of the TENSILE paper (section V) on the paper's five models, simulated; `python -m benchmarks.paper simulate`.

    1  phases        TENSILE as a whole, at its cold start, and after its plan was updated (table I)
    2  first         the first iteration, beside Capuchin's passive mode (table II)
    3  single        one workload under every policy (table III)
    4  scalability   one to four equal jobs (figure 6)
    5  mixed         the five models as five jobs that come one after another (table IV)
    6  batch         batch sizes 4 to 64 (figure 7)
    7  overhead      what Capuchin's time is spent on, with one to four jobs (figure 2)
    8  curve         the whole curve of memory and time; and `largest`, the largest batch under a given memory

Peaks and times are predicted for the device profile of an H200, or for that of the paper's RTX A6000. Several jobs share a
simulated device under the real controller (`../device_simulation.py`). The results are JSON files in `benchmarks/results/paper/`;
`published.py` has the paper's own figures. Everything is relative to plain `jax.jit`; `unplanned` is policy `none`, the step in
segments without a schedule, which is nearer to the paper's framework, whose operators run one by one.

    MSR = (vanilla peak - peak) / vanilla peak      EOR = time / vanilla time      CBR = MSR / EOR
"""
