"""Decides how each loop and each conditional of a step is treated: kept whole, written out, or split."""
