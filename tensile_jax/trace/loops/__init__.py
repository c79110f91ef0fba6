"""Decides how each loop and each conditional of a step is treated: kept whole, opened, or split.

A whole loop or conditional stays one operator. An opened one is replaced by its iterations or branches. A split loop becomes
several shorter loops.
"""
