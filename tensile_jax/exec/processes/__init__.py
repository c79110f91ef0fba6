"""Lets several processes run one step on their devices together: they agree on what they launch."""
