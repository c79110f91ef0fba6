"""Lists all *rewrites*, changes to a step's program so that its plans need less memory, in the order in which they are tried.

A new rewrite is added to `REWRITES` here.
"""

from tensile_jax.trace.rewrites.outer_products import OUTER_PRODUCTS_IN_PLACE
from tensile_jax.trace.rewrites.rewrite import Rewrite
from tensile_jax.trace.rewrites.row_chunks import ROWS_IN_CHUNKS
from tensile_jax.trace.rewrites.split_loops import SPLIT_LOOPS

REWRITES: tuple[Rewrite, ...] = (
    OUTER_PRODUCTS_IN_PLACE,
    SPLIT_LOOPS,
    *ROWS_IN_CHUNKS,
)
